"""The step times of the package: loaded once, and never beside one's own of a workload."""

from dataclasses import replace

import pandas as pd
import pytest

from models.domain.transformer import transformer_facts
from models.domain.workload import Goal
from tasks.data_files.imports import (
    forget_import,
    import_measurements,
    load_public,
    load_public_if_needed,
)
from tasks.data_files.public import (
    FACTS,
    MEASUREMENTS,
    ORIGIN,
    PUBLIC_IMPORT,
    public_workloads,
    with_public_workloads,
)
from tasks.recommendation.answer import Question, answer
from tasks.recommendation.known_workloads import known_workloads
from tests.installed import DescribedMachines, install
from tests.warehouse.builders import NOON, write
from warehouse.append import note_workloads
from warehouse.reads import measured_workloads

NAME = "resnet50-imagenet"


@pytest.fixture
def here(tmp_path):
    return install(tmp_path, "conv", provider=DescribedMachines(name="ec2"))


def import_id_of(here, text):
    file = here.home / "own.csv"
    file.write_text(text)
    return import_measurements(here.warehouse, NOON, measurements=file).import_id


ROW = f"workload,cluster,batch_per_device,step_s\n{NAME},1xg4dn.xlarge,64,0.6\n"


def counted(here):
    """Imported and public rows of one public workload."""
    known = {
        workload["workload"]: workload
        for workload in known_workloads(here.warehouse, here.settings)
    }
    return known[NAME]["imported_rows"], known[NAME]["public_rows"]


def test_they_are_known_before_and_after_they_are_loaded_once(here):
    assert not len(here.warehouse.select("stg_import_files", {"import_id": PUBLIC_IMPORT}))
    assert load_public(here) == 5084 and load_public(here) == 0
    known = {workload["workload"] for workload in known_workloads(here.warehouse, here.settings)}
    assert known >= public_workloads().keys() and counted(here) == (0, 992)


@pytest.mark.slow
def test_a_fresh_home_answers_from_them(tmp_path, no_credentials, monkeypatch):
    rows = pd.read_parquet(MEASUREMENTS)
    few = pd.concat([rows.query("workload == @NAME").iloc[::25], rows.query("precision == 'bf16'")])
    few.to_parquet(tmp_path / "few.parquet")
    monkeypatch.setattr("tasks.data_files.imports.MEASUREMENTS", tmp_path / "few.parquet")
    (tmp_path / "srift.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SRIFT_HOME", f"{tmp_path}/state")
    question = Question(workload=NAME, goal=Goal(goal="cheapest_within_deadline", hours=24.0))
    first = answer("ec2", question, top=1)[0]
    assert first["cluster"] and ORIGIN in first["reason"] and first["model_version"] == "1"
    shape = transformer_facts({"layers": 32, "hidden": 4096, "sequence": 2048, "parameters": 7e9})
    question = replace(question, workload="net", transformer=shape, tokens=1e9)
    question = replace(question, filters=[("instance_type", "p5.48xlarge")])
    first = answer("ec2", question, top=1)[0]
    assert 0.2 < first["mfu"] < 0.6 and first["step_high_s"] < 1.5 * first["step_s"]
    assert first["memory_gib"] < first["memory_available_gib"]


def test_forgotten_they_stay_forgotten_until_they_are_imported(here):
    load_public(here)
    forgotten = forget_import(here.warehouse, PUBLIC_IMPORT, NOON)
    assert (forgotten["rows"], forgotten["facts"]) == (5084, 50)
    assert load_public(here) == 0 and measured_workloads(here.warehouse, "ec2") == {}
    load_public_if_needed(here, NAME)
    assert NAME not in with_public_workloads(here).settings.workloads
    import_measurements(here.warehouse, NOON, measurements=MEASUREMENTS, workloads=FACTS)
    load_public_if_needed(here, NAME)
    assert NAME in with_public_workloads(here).settings.workloads


def test_ones_own_rows_or_code_take_their_place(here):
    load_public(here)
    mine = import_id_of(here, ROW)
    assert counted(here) == (1, 0)
    assert measured_workloads(here.warehouse, "ec2")["bert-base-squad"] == 620
    forget_import(here.warehouse, mine, NOON)
    assert counted(here) == (0, 992)
    code = [{"workload": NAME, "digest": "abc"}]
    write(here.warehouse, note_workloads, code, provider="ec2", noted_at=NOON)
    assert NAME not in measured_workloads(here.warehouse, "ec2")
    assert here.warehouse.select("workloads", {"workload": NAME})["parameters"].isna().all()


def test_an_import_of_the_same_rows_counts_none_twice(here):
    load_public(here)
    rows = pd.read_parquet(MEASUREMENTS).query("workload == @NAME")
    import_id_of(here, rows.to_csv(index=False))
    assert counted(here) == (992, 0)
    import_id_of(here, ROW)
    forget_import(here.warehouse, PUBLIC_IMPORT, NOON)
    assert counted(here) == (993, 0)
