"""Drift, slow runs and broken promises are stored once, and reach status, table and campaign."""

from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache

import pandas as pd
import pytest

from models.step_time.model import fit
from tasks.market.offers import snapshot_offers
from tasks.monitoring.checks import (
    drifting_types,
    judge_promises,
    ledger_sentence,
    note_alarms,
    note_drift,
)
from tasks.recommendation.publication import export_copies, store_publication
from tasks.recommendation.table import recommend_all
from tasks.training.registry import Champion
from tests.installed import NOON, champion, digests, measured
from tests.warehouse.builders import load, record, setup, write
from warehouse import reads
from warehouse.append import append, note_instance_types, note_workloads
from warehouse.export import ledger_summary

DAY = timedelta(days=1)
LATER = pd.Timestamp(NOON).tz_localize(None) + DAY


@cache
def half_fitted():
    """A champion that has not seen the runs of the next day."""
    runs = measured().runs
    model = fit(replace(measured(), runs=runs[runs.index % 2 == 0]), seed=1)
    return Champion(version=3, model=model)


def frames(slow="nothing"):
    """Every second run was measured the next day; those on type `slow` took 1.4 times as long."""
    runs = measured().runs
    fresh = runs.index % 2 == 1
    touched = fresh & runs["cluster"].str.contains(slow, regex=False)
    step = runs["step_s"].where(~touched, 1.4 * runs["step_s"])
    at = runs["measured_at"].where(~fresh, LATER + pd.to_timedelta(runs.index, unit="min"))
    data = replace(measured(), runs=runs.assign(step_s=step, measured_at=at, zone="a"))
    return {name: getattr(data, name) for name in reads.TRAINING_FRAMES}


def test_a_slow_type_drifts_until_new_runs_are_as_predicted(here):
    assert note_drift(here, frames("n.medium"), None, "r0", NOON) == []
    slow = frames("n.medium")
    [sentence] = note_drift(here, slow, half_fitted(), "r1", NOON)
    assert "n.medium" in sentence and drifting_types(here)["n.medium"] > LATER
    assert note_drift(here, slow, half_fitted(), "r1", NOON) == [sentence]
    nothing_new = slow | {"runs": slow["runs"].query("measured_at < @LATER")}
    assert note_drift(here, nothing_new, half_fitted(), "r2", NOON) == [sentence]
    assert note_drift(here, frames(), half_fitted(), "r3", NOON) == []
    assert drifting_types(here) == {} and set(here.warehouse.select("drift")["model_version"]) == {
        "3"
    }


@pytest.fixture
def defined(here):
    types = [asdict(kind) | {"digest": kind.digest} for kind in here.provider.instance_types()]
    workloads = [{"workload": "conv", "digest": "w1"}]
    write(here.warehouse, note_workloads, workloads, provider="local", noted_at=NOON)
    write(here.warehouse, note_instance_types, types, noted_at=NOON)
    return here


def ran(here, run_id, step_s, *, hours=0.0, **values):
    """A run of two small machines."""
    body = record(run_id, ended_unix=(NOON + timedelta(hours=hours)).timestamp(), lease_id=run_id)
    body["setup"] = setup(
        workload="conv",
        cluster="2xs.small",
        zone="a",
        instance_types=["s.small"] * 2,
        instance_digests=[digests()["s.small"]] * 2,
    )
    body["item"] = {"nodes": [0, 1]}
    body["values"] |= {"step_s": step_s, "sync_s": 0.01, "rank_compute_s": [0.1, 0.1]} | values
    load(here.warehouse, body, refresh_id="r1")


def note(here, refresh_id="r1"):
    return note_alarms(here, champion(), refresh_id, NOON)


def test_a_slow_run_is_stored_once(defined):
    ran(defined, "usual", 0.0001)
    assert note(defined) == []
    ran(defined, "slow", 60.0, hours=1, rank_compute_s=[30.0, 60.0])
    [sentence] = note(defined)
    assert "s.small" in sentence and note(defined, "r2") == [sentence]
    assert defined.warehouse.select("alarms")["refresh_id"].tolist() == ["r1"]
    ran(defined, "usual-again", 0.0001, hours=2)
    assert defined.warehouse.select("alarms").empty
    assert note_alarms(defined, None, "r1", NOON) == []


def test_a_slow_machine_is_the_cause_of_its_slow_run(defined):
    for at in range(8):
        ran(defined, f"usual-{at}", 0.0001, hours=at, reference_s=[0.1, 0.1])
    ran(defined, "slow", 60.0, hours=9, reference_s=[0.15, 0.2])
    run, *machines = note(defined)
    assert "slow" in run and note_alarms(defined, None, "r1", NOON) == machines != []
    assert defined.warehouse.select("alarms")["cause"].tolist() == ["speed"]


@pytest.fixture
def published(here):
    snapshot_offers(here, "refresh-1", NOON)
    rows = recommend_all(here, champion(), here.provider.offers(NOON), measured().runs)
    store_publication(here, rows, champion(), "refresh-1", NOON)
    return here


def measure(here, times):
    """The named setups of conv took so many times what was promised, the next day."""
    table = here.warehouse.select("recommendations", {"workload": "conv"}).query("cluster.notna()")
    names = ["cluster", "layout", "batch_per_device", "accumulation_steps", "strategy"]
    names += ["workload", "precision", "switches"]
    rows = [
        {name: row[name] for name in names}
        | {"accumulation_steps": int(row["accumulation_steps"]), "step_s": times * row["step_s"]}
        | {"row_digest": str(number), "row_number": number, "measured_at": NOON + DAY}
        for number, row in enumerate(table.drop_duplicates(names).to_dict("records"))
    ]
    stamp = {"file_digest": "d", "import_id": "d", "provider": "local"}
    write(here.warehouse, append, "raw_imports", rows, loaded_at=NOON + DAY, **stamp)
    return reads.training_frames(here.warehouse, "local")


@pytest.mark.parametrize("times, failures", [(1.0, 0), (100.0, 2)])
def test_promises_are_judged_once_by_runs_measured_since(published, times, failures):
    nothing = reads.training_frames(published.warehouse, "local")
    assert judge_promises(published, nothing, "refresh-2", NOON + DAY) == 0
    since = measure(published, times)
    assert judge_promises(published, since, "refresh-2", NOON + DAY) == 4
    assert judge_promises(published, since, "refresh-3", NOON + 2 * DAY) == 0
    ledger = published.warehouse.select("regret_ledger")
    assert (ledger["verdict"] == "missed_constraint").sum() == failures
    ratio = ledger["measured_step_s"] / ledger["promised_step_s"]
    assert ratio.tolist() == pytest.approx([times] * 4) and not ledger["regret"].gt(0.01).any()
    export_copies(published)
    sentence = ledger_sentence(ledger_summary(published.published, "local"))
    assert f"{failures} missed" in sentence and ledger_sentence({}) == ""
