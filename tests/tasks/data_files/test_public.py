"""The step times of the package: loaded once, and never beside one's own of a workload."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from models.domain.workload import Goal
from tasks.data_files.imports import (
    ImportFiles,
    asked_of_public,
    forget_import,
    import_measurements,
    load_public,
)
from tasks.data_files.public import (
    FACTS,
    FOLDER,
    MEASUREMENTS,
    ORIGIN,
    PUBLIC_IMPORT,
    public_workloads,
)
from tasks.recommendation.ask import Question, answer
from tasks.recommendation.known_workloads import known_workloads, provider_that_knows
from tasks.workspace.settings import SettingsError, WorkloadSettings
from tasks.workspace.workspace import Workspace
from tests.installed import DescribedMachines, install
from warehouse.append import note_workloads
from warehouse.database import HomeReadOnly
from warehouse.reads import knows_import, mart, measured_workloads, training_frames

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
NAME = "resnet50-imagenet"


@pytest.fixture
def here(tmp_path: Path) -> Workspace:
    return install(tmp_path, "conv", provider=DescribedMachines(name="ec2"))


def own(here: Workspace, folder: Path, text: str) -> None:
    file = folder / "own.csv"
    file.write_text("workload,cluster,batch_per_device,step_s\n" + text)
    import_measurements(here.warehouse, ImportFiles(measurements=file), NOON)


def counted(here: Workspace) -> tuple[int, int, int]:
    """Rows of one public workload: measured, imported, public."""
    (one,) = [one for one in known_workloads(here.warehouse, here.settings) if one.workload == NAME]
    return one.measured_rows, one.imported_rows, one.public_rows


def test_they_are_known_before_they_are_loaded_and_the_same_once_they_are(here: Workspace) -> None:
    before = {one.workload: one for one in known_workloads(here.warehouse, here.settings)}
    assert provider_that_knows(here.warehouse, here.settings, NAME)[0] == "ec2"
    assert not knows_import(here.warehouse, PUBLIC_IMPORT)
    assert load_public(here, NOON) == 4853 and load_public(here, NOON) == 0
    after = {one.workload: one for one in known_workloads(here.warehouse, here.settings)}
    assert before.keys() == after.keys() >= public_workloads().keys()
    for name in public_workloads():
        assert replace(before[name], newest_measured_at=None) == replace(
            after[name], newest_measured_at=None
        )
    assert counted(here) == (0, 0, 992)


def test_a_fresh_home_answers_from_them(
    tmp_path: Path, no_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = pd.read_parquet(MEASUREMENTS).query("workload == @NAME").iloc[::25]
    few.to_parquet(tmp_path / "few.parquet")
    monkeypatch.setattr("tasks.data_files.imports.MEASUREMENTS", tmp_path / "few.parquet")
    (tmp_path / "srift.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    question = Question(workload=NAME, goal=Goal(goal="cheapest_within_deadline", hours=24.0))
    with pytest.raises(SettingsError):
        answer("local", question, top=1)
    first, again = (answer("ec2", question, top=1)[0] for _ in range(2))
    assert first["cluster"] and ORIGIN in first["reason"] and first["model_version"] == "1"
    assert (again["cluster"], again["hours"]) == (first["cluster"], first["hours"])


def test_forgotten_they_stay_forgotten_until_they_are_imported(here: Workspace) -> None:
    load_public(here, NOON)
    forgotten = forget_import(here.warehouse, PUBLIC_IMPORT, NOON)
    assert (forgotten.rows, forgotten.facts) == (4853, 4)
    assert load_public(here, NOON) == 0 and measured_workloads(here.warehouse, "ec2") == {}
    assert NAME not in asked_of_public(here, NAME, NOON).settings.workloads
    with pytest.raises(SettingsError):
        provider_that_knows(here.warehouse, here.settings, NAME)
    import_measurements(
        here.warehouse, ImportFiles(measurements=MEASUREMENTS, workloads=FACTS), NOON
    )
    assert (
        counted(here) == (0, 0, 992)
        and NAME in asked_of_public(here, NAME, NOON).settings.workloads
    )


def test_an_import_of_the_same_rows_counts_none_twice(here: Workspace, tmp_path: Path) -> None:
    load_public(here, NOON)
    before = training_frames(here.warehouse, "ec2")["runs"].drop(columns="source")
    file = tmp_path / "mine.csv"
    pd.read_parquet(MEASUREMENTS).to_csv(file, index=False)
    mine = import_measurements(
        here.warehouse, ImportFiles(measurements=file, workloads=FACTS), NOON
    )
    assert (mine.rows, mine.new, mine.import_id == PUBLIC_IMPORT) == (4853, 0, False)
    after = training_frames(here.warehouse, "ec2")["runs"].drop(columns="source")
    pd.testing.assert_frame_equal(after, before)
    assert counted(here) == (0, 992, 0)
    own(here, tmp_path, f"{NAME},1xg4dn.xlarge,64,0.6\n")
    assert counted(here) == (0, 993, 0), "another row of one's own takes none of those away"
    forget_import(here.warehouse, PUBLIC_IMPORT, NOON)
    assert counted(here) == (0, 993, 0)


def test_rows_of_ones_own_take_the_place_of_a_workloads_public_ones(
    here: Workspace, tmp_path: Path
) -> None:
    load_public(here, NOON)
    own(here, tmp_path, f"{NAME},1xg4dn.xlarge,64,0.6\n")
    assert counted(here) == (0, 1, 0)
    assert measured_workloads(here.warehouse, "ec2")["bert-base-squad"] == 620
    assert NAME not in asked_of_public(here, NAME, NOON).settings.workloads
    (mine,) = [
        row
        for row in mart(here.warehouse, "imports").to_dict("records")
        if row["import_id"] != PUBLIC_IMPORT
    ]
    forget_import(here.warehouse, mine["import_id"], NOON)
    assert counted(here) == (0, 0, 992)


def test_a_workload_that_has_code_here_is_another_than_the_public_one(here: Workspace) -> None:
    load_public(here, NOON)
    with here.warehouse.transact() as connection:
        note_workloads(
            connection, [{"workload": NAME, "digest": "abc"}], provider="ec2", noted_at=NOON
        )
    assert NAME not in measured_workloads(here.warehouse, "ec2")
    facts = mart(here.warehouse, "workloads", provider="ec2", workload=NAME)
    assert facts["digest"].tolist() == ["abc"] and facts["parameters"].isna().all()


def test_where_ones_own_rows_tell_nothing_is_loaded(
    here: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise HomeReadOnly("the home cannot be written")

    monkeypatch.setattr("tasks.data_files.imports.load_public", refused)
    with pytest.raises(HomeReadOnly):
        asked_of_public(here, NAME, NOON)
    own(here, tmp_path, f"{NAME},1xg4dn.xlarge,64,0.6\n")
    asked_of_public(here, NAME, NOON)
    code = WorkloadSettings(entrypoint="mine.py:build", samples=1, global_batch=1)
    named = here.settings.model_copy(update={"workloads": {"bert-base-squad": code}})
    asked_of_public(replace(here, settings=named), "bert-base-squad", NOON)


def test_facts_of_ones_own_come_before_theirs_whichever_came_first(
    here: Workspace, tmp_path: Path
) -> None:
    file = tmp_path / "facts.csv"
    file.write_text(
        f"workload,parameters,gradient_bytes,flops_per_sample\n{NAME},25557032,102228128,24.5e9\n"
    )
    import_measurements(here.warehouse, ImportFiles(workloads=file), NOON)
    load_public(here, NOON)
    (facts,) = mart(here.warehouse, "workloads", provider="ec2", workload=NAME).to_dict("records")
    assert (facts["parameters"], facts["flops_per_sample"]) == (25557032, 24.5e9) and counted(
        here
    ) == (0, 0, 992)


def test_their_origin_and_licence_are_named_beside_them() -> None:
    text = (FOLDER / "README.md").read_text()
    assert "Apache License" in text and "AdaptDL" in text
    assert public_workloads().keys() == set(pd.read_csv(FACTS)["workload"])
    assert all(one.goals for one in public_workloads().values())
