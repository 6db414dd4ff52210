"""The ledger and the drift table: what may have to be judged, one row a promise and a group, and old warehouses."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tests.warehouse.builders import (
    DEFINED,
    NOON,
    TYPES,
    body,
    judgement,
    offered,
    recommendation,
    setup,
    sql_of,
    stamp,
)
from warehouse.append import (
    append,
    append_offers,
    append_records,
    note_instance_types,
    note_workloads,
)
from warehouse.database import Warehouse
from warehouse.export import export, read_published
from warehouse.publication import publish
from warehouse.reads import drifting, mart, training_frames

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
NOTED: dict[str, Any] = {"provider": "local", "refresh_id": "r", "judged_at": NOON}


def measure(warehouse: Warehouse, run_id: str, at: Any, **of: Any) -> None:
    with warehouse.transact() as connection:
        note_workloads(connection, DEFINED, provider="local", noted_at=NOON)
        note_instance_types(connection, TYPES, noted_at=NOON)
        record = body(run_id, of=setup(**of), ended_unix=at.timestamp())
        append_records(connection, [record], refresh_id="r", loaded_at=at)


def judge(warehouse: Warehouse, *rows: dict[str, Any]) -> int:
    with warehouse.transact() as connection:
        return append(connection, "raw_ledger", rows, refresh_id="r", judged_at=NOON + DAY)


def drift(warehouse: Warehouse, refresh_id: str, **changes: Any) -> None:
    row = {
        "scope": "type",
        "instance_type": "small",
        "zone": "here",
        "drifting": True,
        "direction": "slower",
        "runs": 9,
    }
    row |= {
        "outside": 6,
        "median_ratio": 1.2,
        "chance": 1e-5,
        "since": NOON,
        "newest_measured_at": NOON,
    }
    row |= {"model_version": "1", "provider": "local", "refresh_id": refresh_id}
    at = NOON + (DAY if refresh_id == "r2" else HOUR)
    with warehouse.transact() as connection:
        append(connection, "raw_drift", [row | changes], judged_at=at)


def test_only_questions_whose_choice_was_measured_since_are_to_be_judged_with_all_their_ranks(
    warehouse: Warehouse,
) -> None:
    rival = recommendation(
        rank=2, cluster="1xsmall", batch_per_device="16", cluster_offers=[offered("small", 1, 0.01)]
    )
    other = recommendation(goal="fastest", cluster="1xsmall", batch_per_device="16")
    # Two machines at 0.01 an hour, and 0.004 an hour of volumes and addresses over two hours.
    billed = recommendation(
        hours=2.0, usd=0.048, usd_machines=0.04, usd_storage=0.006, usd_other=0.002
    )
    publish(warehouse, [billed, rival, other], stamp(0))
    measure(warehouse, "before", NOON - HOUR)
    assert mart(warehouse, "promises").empty
    measure(warehouse, "after", NOON + HOUR)
    found = mart(warehouse, "promises")
    assert found[["goal", "rank", "cluster"]].values.tolist() == [
        ["cheapest", 1, "2xsmall"],
        ["cheapest", 2, "1xsmall"],
    ]
    assert found["usd_per_hour"][0] == pytest.approx(0.024), (
        "what was promised beside the machines is judged too"
    )


def test_of_a_promise_repeated_night_after_night_only_the_last_before_the_run_is_to_be_judged(
    warehouse: Warehouse,
) -> None:
    for night in range(4):
        dearer = offered(
            "small", 2, 0.01 * (night + 1)
        )  # the price changes, the promise is still of one setup
        publish(warehouse, [recommendation(cluster_offers=[dearer])], stamp(night))
    measure(warehouse, "a run", NOON + 1.5 * DAY)
    found = mart(warehouse, "promises")
    assert found["publication_id"].tolist() == ["local-1"]
    assert found["promised_again_at"].tolist() == [pd.Timestamp(NOON + 2 * DAY).tz_localize(None)]
    assert found["usd_per_hour"].tolist() == [0.04]


def test_a_cluster_is_interrupted_as_its_spot_machines_were_when_it_was_published(
    warehouse: Warehouse,
) -> None:
    offer = {
        "provider": "local",
        "instance_type": "small",
        "zone": "here",
        "region": "here",
        "usd_per_hour": 0.01,
    }
    for snapshot, often, at in (
        ("old", 9.0, NOON - DAY),
        ("then", 0.2, NOON - HOUR),
        ("later", 9.0, NOON + HOUR),
    ):
        markets = [
            offer | {"market": market, "interruptions_per_hour": often, "price_as_of": at}
            for market in ("spot", "on-demand")
        ]
        with warehouse.transact() as connection:
            append_offers(connection, markets, snapshot_id=snapshot, as_of=at)
    safe = recommendation(
        rank=2, cluster_offers=[offered("small", 2, 0.01) | {"market": "on-demand"}]
    )
    publish(warehouse, [recommendation(), safe], stamp(0))
    measure(warehouse, "a run", NOON + 2 * HOUR)
    found = mart(warehouse, "promises")
    assert found["interruptions_per_hour"].tolist() == [0.4, 0.0]
    assert found["market"].tolist() == ["spot", "on-demand"]


def test_the_same_evidence_is_stored_once_and_more_of_it_replaces_less(
    warehouse: Warehouse,
) -> None:
    assert judge(warehouse, judgement(regret=0.1)) == 1
    assert judge(warehouse, judgement(regret=0.1)) == 0
    assert judge(warehouse, judgement(evidence="e2", evidence_runs=5, regret=0.2)) == 1
    assert (
        judge(warehouse, judgement(evidence="e3", evidence_runs=1, regret=0.9)) == 1
    )  # a type was changed since
    assert judge(warehouse, judgement("p2")) == 1
    assert sorted(mart(warehouse, "regret_ledger")["regret"]) == [0.1, 0.2]


def test_the_ledger_and_the_drift_are_published_with_the_table(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    publish(warehouse, [recommendation()], stamp(0))
    judge(warehouse, judgement())
    drift(warehouse, "r1")
    paths = {path.name: path for path in export(warehouse, tmp_path / "published")}
    inside = read_published(tmp_path / "published", "regret_ledger")
    for frame in (
        pd.read_parquet(paths["regret_ledger.parquet"]),
        pd.read_csv(paths["regret_ledger.csv"]),
        inside,
    ):
        assert list(frame.columns) == list(mart(warehouse, "regret_ledger").columns)
        assert frame["regret"].tolist() == [0.1]
    assert read_published(tmp_path / "published", "drift", {"drifting": True})[
        "instance_type"
    ].tolist() == ["small"]


def test_the_newest_judgement_of_a_group_says_whether_it_drifts(warehouse: Warehouse) -> None:
    assert drifting(warehouse, "local").empty
    drift(warehouse, "r1")
    drift(warehouse, "r1", instance_type="large", zone="")
    assert sorted(drifting(warehouse, "local")["instance_type"]) == ["large", "small"]
    assert drifting(warehouse, "ec2").empty
    drift(warehouse, "r2", drifting=False)
    assert drifting(warehouse, "local")["instance_type"].tolist() == ["large"]


def test_an_old_warehouse_migrates_and_until_then_nothing_drifts(tmp_path: Path) -> None:
    later = ("018_*", "027_*", "reco*.sql", "pareto.sql")  # with columns that came after
    old = sql_of(tmp_path, "002_*", "promises.sql", "regret_ledger.sql", "drift.sql", *later)
    path = tmp_path / "warehouse.duckdb"
    Warehouse(path, sql_folder=old).migrate()
    assert drifting(Warehouse(path), "local").empty
    assert drifting(Warehouse(tmp_path / "none.duckdb"), "local").empty
    assert Warehouse(path).migrate() == [
        "002_ledger_and_drift",
        "018_switches",
        "027_parts_of_a_step",
    ]
    assert mart(Warehouse(path), "regret_ledger").empty


def test_alarms_that_were_noted_before_hosts_could_be_named_are_kept(tmp_path: Path) -> None:
    old = sql_of(tmp_path, "005_*", "017_*")
    path = tmp_path / "warehouse.duckdb"
    before = Warehouse(path, sql_folder=old)
    before.migrate()
    row = {"model_version": "1", "workload": "conv", "cluster": "2xa", "zone": "z", "instance_type": "", "detail": "d",
           "measured_s": 2.0, "predicted_s": 1.0, "high_s": 1.1, "measured_at": NOON}  # fmt: skip
    with before.transact() as connection:
        append(connection, "raw_alarms", [row | {"run_id": "r1", "cause": "link"}], **NOTED)
    with pytest.raises(duckdb.ConstraintException), before.transact() as connection:
        append(connection, "raw_alarms", [row | {"run_id": "r2", "cause": "host"}], **NOTED)
    after = Warehouse(path)
    assert after.migrate() == ["005_host_alarms", "017_speed_alarms"]
    with after.transact() as connection:
        assert (
            append(connection, "raw_alarms", [row | {"run_id": "r1", "cause": "host"}], **NOTED)
            == 0
        ), "judged before"
        append(connection, "raw_alarms", [row | {"run_id": "r2", "cause": "host"}], **NOTED)
        kept = connection.execute(
            "select run_id, cause, measured_s from raw_alarms order by run_id"
        ).fetchall()
    assert kept == [("r1", "link", 2.0), ("r2", "host", 2.0)]


def test_alarms_from_before_speeds_were_known_are_kept_and_a_run_of_then_has_none(
    tmp_path: Path,
) -> None:
    old = sql_of(tmp_path, "017_*")
    path = tmp_path / "warehouse.duckdb"
    before = Warehouse(path, sql_folder=old)
    before.migrate()
    row = {"model_version": "1", "workload": "conv", "cluster": "2xa", "zone": "z", "instance_type": "", "detail": "d",
           "measured_s": 2.0, "predicted_s": 1.0, "high_s": 1.1, "measured_at": NOON}  # fmt: skip
    with before.transact() as connection:
        append(connection, "raw_alarms", [row | {"run_id": "r1", "cause": "host"}], **NOTED)
        append_records(connection, [body("r1")], refresh_id="r", loaded_at=NOON)
        note_workloads(connection, DEFINED, provider="local", noted_at=NOON)
        note_instance_types(connection, TYPES, noted_at=NOON)
    after = Warehouse(path)
    assert after.migrate() == ["017_speed_alarms"]
    with after.transact() as connection:
        append(connection, "raw_alarms", [row | {"run_id": "r2", "cause": "speed"}], **NOTED)
        kept = connection.execute("select run_id, cause from raw_alarms order by run_id").fetchall()
    assert kept == [("r1", "host"), ("r2", "speed")]
    (run,) = training_frames(after, "local")["runs"].to_dict("records")
    assert (
        run["step_s"] == 0.5 and run["reference_s"] is None and mart(after, "machine_speeds").empty
    )
