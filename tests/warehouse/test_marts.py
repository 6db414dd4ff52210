"""What enters the frames that models are fitted on, and what stays history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.warehouse.builders import DEFINED, NOON, PROFILE, TYPES, body, setup, sql_of
from warehouse.append import (
    append,
    append_offers,
    append_records,
    append_scores,
    note_instance_types,
    note_workloads,
)
from warehouse.database import Warehouse
from warehouse.reads import (
    MOST_REPEATS,
    MOST_SETUPS,
    counted_runs,
    drifting,
    launched,
    mart,
    measured_setups,
    offers,
    snapshot,
    torch_lines,
    training_digest,
    training_frames,
)

PROBE = {"rows": [{"bytes": 1024, "seconds": 0.01, "spread": 0.0, "repeats": 9}]}
COLUMNS = {  # of each frame, as the contract has them
    "runs": "run_id provider workload cluster layout batch_per_device accumulation_steps strategy precision switches"
    " step_s sync_s step_spread parameters gradient_bytes flops_per_sample input_s loader_workers market zone"
    " measured_at source"
    " reference_s usual_reference_s reference_spread reference_blocks",
    "profiles": "provider workload precision switches instance_type batch forward_s backward_s optimizer_s input_s"
    " peak_bytes reference_s usual_reference_s loader_workers load_s load_wait_s sample_bytes",
    "buckets": "provider workload precision switches bucket bytes ready_fraction",
    "probes": "run_id provider cluster bytes seconds",
    "workloads": "provider workload digest parameters gradient_bytes flops_per_sample samples checkpoint_bytes"
    " divided_weights divided_inputs divided_pairs",
    "instance_types": "provider name devices device cores memory_gib device_memory_gib bandwidth_gbps"
    " device_tflops digest",
}


def define(warehouse: Warehouse, digest: str = "w1", type_digest: str = "s1") -> tuple[int, int]:
    with warehouse.transact() as connection:
        workloads = [dict(DEFINED[0]) | {"digest": digest}]
        types = [dict(TYPES[0]) | {"digest": type_digest}]
        return (
            note_workloads(connection, workloads, provider="local", noted_at=NOON),
            note_instance_types(connection, types, noted_at=NOON),
        )


def load(warehouse: Warehouse, *bodies: dict[str, Any]) -> int:
    with warehouse.transact() as connection:
        return append_records(connection, bodies, refresh_id="r", loaded_at=NOON)


def everything() -> list[dict[str, Any]]:
    one = setup(cluster="1xsmall", instance_types=["small"], instance_digests=["s1"])
    return [
        body("train"),
        body("profile", of=one, kind="profile", values=PROFILE),
        body(
            "probe",
            of=setup(workload=None, workload_digest=None),
            kind="probe",
            workload_digest="",
            values=PROBE,
        ),
    ]


def imported(warehouse: Warehouse, query: str) -> pd.DataFrame:
    """The runs that a model learns from, where `query` gives workload, batch and measured_at of imported rows."""
    with warehouse.transact() as connection:
        connection.execute(f"""
            insert into raw_imports by name
            select 'row-' || row_number() over () as row_digest, 'one' as import_id,
                'd' as file_digest, 1 as row_number, 'ec2' as provider, workload, '1xg5.xlarge' as cluster,
                batch as batch_per_device, 1 as accumulation_steps, 'ddp' as strategy, 'fp32' as precision,
                'none' as switches, 0.5 as step_s, measured_at, timestamp '2026-01-01' as loaded_at
            from ({query})
        """)
    return training_frames(warehouse, "ec2")["runs"]


def test_of_very_many_repeats_the_newest_are_learned_from(warehouse: Warehouse) -> None:
    days = f"range({MOST_REPEATS + 5}) as days(day)"
    taken = imported(
        warehouse,
        f"select 'a' as workload, '8' as batch, timestamp '2026-01-01' + to_days(day::int) as measured_at from {days}",
    )
    assert sorted(taken.measured_at)[0] == pd.Timestamp("2026-01-06") and len(taken) == MOST_REPEATS
    assert counted_runs(warehouse, "ec2") == MOST_REPEATS + 5


def test_of_very_many_setups_each_workload_keeps_as_many(warehouse: Warehouse) -> None:
    names = "case when number < 100 then 'small' else 'large' end"
    taken = imported(
        warehouse,
        f"select {names} as workload, number::varchar as batch, null::timestamp as measured_at"
        f" from range({MOST_SETUPS + 1000}) as numbers(number)",
    )
    assert taken.groupby("workload").size().to_dict() == {"small": 100, "large": MOST_SETUPS - 100}


def test_a_measured_run_has_the_columns_of_the_contract_for_its_provider_alone(
    warehouse: Warehouse,
) -> None:
    define(warehouse)
    load(warehouse, *everything())
    frames = training_frames(warehouse, "local")
    assert {name: " ".join(frame.columns) for name, frame in frames.items()} == COLUMNS
    run = frames["runs"].iloc[0]
    assert (run.cluster, run.batch_per_device, run.step_s, run.parameters) == (
        "2xsmall",
        "8",
        0.5,
        10,
    )
    assert run.measured_at == NOON.replace(tzinfo=None, second=10)
    assert run.flops_per_sample == 3.0  # the profile knows what the run did not
    assert frames["profiles"][["instance_type", "batch", "backward_s"]].values.tolist() == [
        ["small", 8, 0.2]
    ]
    assert math.isnan(frames["profiles"].peak_bytes[0])
    assert frames["buckets"][["bucket", "bytes", "ready_fraction"]].values.tolist() == [
        [0, 30, 0.4],
        [1, 10, 1.0],
    ]
    assert frames["probes"][["cluster", "bytes", "seconds"]].values.tolist() == [
        ["2xsmall", 1024, 0.01]
    ]
    assert frames["workloads"].samples.tolist() == [1000]
    assert all(frame.empty for frame in training_frames(warehouse, "ec2").values()), (
        "another provider sees it"
    )


def timed(run_id: str, *seconds: float, **changes: Any) -> dict[str, Any]:
    """A run on as many machines as there are seconds of fixed work, on the last nodes of its launch."""
    whole = {"instance_types": ["small"] * len(seconds), "instance_digests": ["s1"] * len(seconds)}
    of = setup(cluster=f"{len(seconds)}xsmall", zone="z", **whole)
    values = {
        "step_s": 0.5,
        "reference_s": list(seconds),
        "reference_spread": 0.1,
        "reference_blocks": 3,
    }
    item = {"nodes": [one + 1 for one in range(len(seconds))]}
    return body(run_id, of=of, **({"values": values, "item": item} | changes))


def test_fixed_work_beside_a_run_is_given_by_machine_beside_what_is_usual_of_its_type(
    warehouse: Warehouse,
) -> None:
    define(warehouse)
    one = setup(cluster="1xsmall", instance_types=["small"], instance_digests=["s1"])
    values = PROFILE | {"reference_s": [0.04], "reference_spread": 0.0}
    load(warehouse, timed("a", 0.01, 0.02), timed("b", 0.03), body("old", of=setup()))
    load(warehouse, body("p", of=one, kind="profile", values=values))
    runs = training_frames(warehouse, "local")["runs"].set_index("run_id")
    assert list(runs.reference_s["a"]) == [0.01, 0.02] and list(runs.usual_reference_s["a"]) == [
        0.025,
        0.025,
    ]
    assert (runs.reference_spread["a"], runs.reference_blocks["a"]) == (0.1, 3)
    assert runs.step_s["a"] == 0.5, "what was measured stays as it was"
    assert runs.loc["old", ["reference_s", "usual_reference_s", "reference_spread"]].isna().all()
    profile = training_frames(warehouse, "local")["profiles"].iloc[0]
    assert (profile.reference_s, profile.usual_reference_s) == (0.04, 0.025)
    speeds = mart(warehouse, "machine_speeds")
    assert speeds[["run_id", "place", "node"]].values.tolist() == [
        ["a", 1, 1],
        ["a", 2, 2],
        ["b", 1, 1],
        ["p", 1, 0],
    ]
    quartiles = math.log(0.0325 / 0.0175) / 1.349
    assert speeds.usual_spread.tolist() == pytest.approx([quartiles] * 4, rel=0.15)
    details = mart(warehouse, "run_details").set_index("run_id")
    assert list(details.usual_reference_s["b"]) == [0.025] and not isinstance(
        details.reference_s["old"], list
    )


def test_what_a_loader_costs_and_how_long_runs_wait_for_it_is_recorded_and_nothing_where_there_is_none(
    warehouse: Warehouse,
) -> None:
    define(warehouse)
    one = setup(cluster="1xsmall", instance_types=["small"], instance_digests=["s1"])
    loading = {"loader_workers": 2, "load_s": 0.004, "load_wait_s": 0.0, "sample_bytes": 5e4}
    load(warehouse, body("p", of=one, kind="profile", values=PROFILE | loading))
    load(
        warehouse,
        body("a", of=one, values={"step_s": 0.5, "input_s": 0.2, "loader_workers": 0}),
        body("old", of=one),
    )
    frames = training_frames(warehouse, "local")
    assert frames["profiles"][list(loading)].iloc[0].to_dict() == loading
    for name in ("runs", "run_details"):
        runs = mart(warehouse, name).set_index("run_id")
        assert runs.loc["a", ["input_s", "loader_workers"]].tolist() == [0.2, 0]
        assert runs.loc["old", ["input_s", "loader_workers"]].isna().all()


def test_a_checkpoint_is_recorded_of_its_writer_and_its_bytes_of_its_workload(
    warehouse: Warehouse,
) -> None:
    define(warehouse)
    values = {"step_s": 0.5, "checkpoint_bytes": 1200}
    load(
        warehouse,
        timed("a", 0.01, 0.02, values=values | {"checkpoint_s": 0.25}),
        body("old", of=setup()),
    )
    load(warehouse, timed("large", 0.01, values=values))
    written = launched(warehouse, "local")[2]
    columns = ["run_id", "workload", "instance_type", "bytes", "seconds"]
    assert written[columns].values.tolist() == [["a", "tiny", "small", 1200, 0.25]]
    assert mart(warehouse, "workloads").checkpoint_bytes.tolist() == [1200]


def elastic(
    run_id: str, *starts: tuple[int, float, int], losses: Sequence[float] = (), **of: Any
) -> dict[str, Any]:
    """A run whose workers started on so many machines, so many seconds after noon, having lost so many steps."""
    noon = NOON.timestamp()
    told = [
        {
            "nodes": list(range(machines)),
            "step": 4 * at,
            "lost_steps": lost,
            "last_unix": noon + after - 9 if at else None,
        }
        | {
            "began_unix": noon + after,
            "restore_s": 0.5 if at else None,
            "restore_bytes": 1200 if at else None,
        }
        for at, (machines, after, lost) in enumerate(starts)
    ]
    written = {
        "step": 20,
        "bytes": 1200,
        "seconds": 0.25,
        "ended_unix": noon + 99,
        "steps": 4,
        "steps_s": 2.0,
    }
    values = {
        "steps": 20,
        "first_loss": 2.0,
        "last_loss": 1.0,
        "starts": told,
        "checkpoints": [written],
    }
    known = setup(
        kind="elastic", losses=[{"node": 1, "lost_unix": noon + one} for one in losses], **of
    )
    return body(run_id, of=known, kind="elastic", values=values, item={"checkpoint_every": 4})


def test_restarts_of_elastic_runs_are_told_by_what_went_before(warehouse: Warehouse) -> None:
    define(warehouse)
    lost = elastic("a", (2, 0, 0), (1, 30, 3), (2, 50, 1), (2, 80, 2), losses=[20, 60])
    load(
        warehouse,
        lost,
        elastic("old", (2, 0, 0), (1, 30, 3), losses=[20], instance_digests=["s0", "s0"]),
    )
    restarts = launched(warehouse, "local")[4]
    columns = [
        "run_id",
        "workload",
        "instance_type",
        "outcome",
        "machines",
        "seconds",
        "restore_s",
        "lost_steps",
    ]
    assert restarts[columns].values.tolist() == [
        ["a", "tiny", "small", "fewer", 1, 9.5, 0.5, 3],
        ["a", "tiny", "small", "grown", 2, 8.5, 0.5, 1],  # from its last step on
        ["a", "tiny", "small", "replaced", 2, 19.5, 0.5, 2],
    ]
    written = launched(warehouse, "local")[2]
    assert written[["run_id", "instance_type", "bytes", "seconds"]].values.tolist() == [
        ["a", "small", 1200, 0.25]
    ]
    (run, _) = mart(warehouse, "elastic_runs").to_dict("records")
    assert (run["starts"], run["lost_machines"], run["lost_steps"], run["checkpoint_every"]) == (
        4,
        2,
        6,
        4,
    )
    assert run["seconds"] == 99 and training_frames(warehouse, "local")["runs"].empty


def test_seconds_of_compiling_are_recorded_of_runs_that_compiled(warehouse: Warehouse) -> None:
    define(warehouse)
    values = {"step_s": 0.5, "build_s": 30.0, "warmup_s": 12.0}
    modes = {"a": "compile", "b": "checkpointing+compile", "plain": "none"}
    load(
        warehouse,
        *(body(name, of=setup(switches=one), values=values) for name, one in modes.items()),
    )
    load(warehouse, body("old", of=setup(switches="compile"), values={"step_s": 0.5}))
    compiled = launched(warehouse, "local")[3]
    assert compiled[["run_id", "workload", "strategy", "switches", "seconds"]].values.tolist() == [
        ["a", "tiny", "ddp", "compile", 42.0],
        ["b", "tiny", "ddp", "checkpointing+compile", 42.0],
    ]


def test_fixed_work_that_is_not_one_figure_a_machine_is_no_speed(warehouse: Warehouse) -> None:
    define(warehouse)
    load(warehouse, timed("few", 0.01, 0.02) | {"values": {"step_s": 0.5, "reference_s": [0.01]}})
    assert (
        mart(warehouse, "machine_speeds").empty
        and len(training_frames(warehouse, "local")["runs"]) == 1
    )


def test_fixed_work_of_another_machine_is_not_usual_of_todays(warehouse: Warehouse) -> None:
    define(warehouse)
    load(
        warehouse,
        timed("before", 0.5, fingerprint="old", ended_unix=NOON.timestamp() - 99.0),
        timed("now", 0.01),
    )
    assert mart(warehouse, "machine_speeds")[["run_id", "usual_s"]].values.tolist() == [
        ["now", 0.01]
    ]


def test_loading_twice_changes_nothing(warehouse: Warehouse) -> None:
    define(warehouse)
    assert load(warehouse, *everything()) == 3
    before = training_digest(training_frames(warehouse, "local"))
    assert load(warehouse, *everything(), body("train", values={"step_s": 9.0})) == 0
    assert define(warehouse) == (0, 0)
    assert training_digest(training_frames(warehouse, "local")) == before


def test_a_workload_whose_file_changed_is_measured_anew_never_pooled(warehouse: Warehouse) -> None:
    define(warehouse)
    load(warehouse, *everything())
    assert define(warehouse, digest="w2")[0] == 1
    frames = training_frames(warehouse, "local")
    assert [len(frames[name]) for name in ("runs", "profiles", "buckets", "probes")] == [0, 0, 0, 1]
    assert math.isnan(
        frames["workloads"].parameters[0]
    )  # the old file's size says nothing of the new one
    outdated = mart(warehouse, "outdated_runs", provider="local")
    assert set(outdated.run_id) == {"train", "profile"}
    assert set(outdated.reason) == {"the workload was changed"}
    load(
        warehouse,
        body("anew", of=setup(workload_digest="w2"), workload_digest="w2", values={"step_s": 0.7}),
    )
    assert training_frames(warehouse, "local")["runs"].step_s.tolist() == [0.7]
    define(warehouse, digest="w1")  # put back as it was: what was measured then counts again
    assert training_frames(warehouse, "local")["runs"].step_s.tolist() == [0.5]


def test_an_instance_type_redefined_or_never_described_makes_its_runs_history(
    warehouse: Warehouse,
) -> None:
    define(warehouse)
    others = (
        body("short", of=setup(instance_digests=["s1"])),
        body("none", of=setup(instance_digests=[])),
    )
    load(warehouse, *everything(), *others)
    assert training_frames(warehouse, "local")["runs"].run_id.tolist() == ["train"], (
        "of a type that nobody described"
    )
    define(warehouse, type_digest="s2")
    frames = training_frames(warehouse, "local")
    assert [len(frames[name]) for name in ("runs", "profiles", "buckets", "probes")] == [0, 0, 0, 0]
    reasons = mart(warehouse, "outdated_runs").set_index("run_id").reason
    assert set(reasons.drop(["short", "none"])) == {"an instance type was changed"}


@pytest.mark.parametrize("change", [{"torch_version": "3"}, {"fingerprint": "another"}])
def test_another_torch_or_machine_is_not_pooled(
    warehouse: Warehouse, change: dict[str, str]
) -> None:
    define(warehouse)
    load(warehouse, body("old"), body("new", ended_unix=NOON.timestamp() + 99, **change))
    assert training_frames(warehouse, "local")["runs"].run_id.tolist() == ["new"]
    assert mart(warehouse, "outdated_runs").run_id.tolist() == ["old"]


@pytest.mark.parametrize("newer", ["2.13.1+cu130", "2.13.0+cu131", "2.13.0"])
def test_a_patch_or_another_build_of_torch_makes_no_history(
    warehouse: Warehouse, newer: str
) -> None:
    define(warehouse)
    later = {"ended_unix": NOON.timestamp() + 99}
    load(
        warehouse,
        body("old", torch_version="2.13.0+cu130"),
        body("new", torch_version=newer, **later),
    )
    assert training_frames(warehouse, "local")["runs"].run_id.tolist() == ["new", "old"]
    exact = mart(warehouse, "run_details").set_index("run_id").torch_version
    assert exact.to_dict() == {"old": "2.13.0+cu130", "new": newer}
    assert torch_lines(warehouse, "local") == {"2.13": 2}
    load(warehouse, body("newest", torch_version="2.14.0", ended_unix=NOON.timestamp() + 999))
    assert training_frames(warehouse, "local")["runs"].run_id.tolist() == ["newest"]
    assert set(mart(warehouse, "outdated_runs").reason) == {
        "another torch or another machine measured since"
    }


def test_a_run_on_the_wrong_device_is_history_and_decides_nothing_for_the_others(
    warehouse: Warehouse,
) -> None:
    define(warehouse)
    wrong = body("wrong", torch_version="3", ended_unix=NOON.timestamp() + 99) | {
        "wrong_device": "it ran on cpu"
    }
    load(warehouse, body("right"), wrong)
    assert training_frames(warehouse, "local")["runs"].run_id.tolist() == ["right"]
    outdated = mart(warehouse, "outdated_runs").iloc[0]
    assert outdated.reason == "it ran on cpu and another torch or another machine measured since"
    assert torch_lines(warehouse, "local") == {"2": 1}


def test_what_a_run_stood_on_can_be_asked_for_and_is_explained(warehouse: Warehouse) -> None:
    define(warehouse)
    devices = [
        {"name": "NVIDIA L4", "count": 4, "threads": 1},
        {"name": "cpu", "count": 1, "threads": 8},
    ]
    load(warehouse, body("run", devices=devices, of=setup(image_id="ami-1")), body("before"))
    details = mart(warehouse, "run_details").set_index("run_id")
    assert details.image_id["run"] == "ami-1" and pd.isna(details.image_id["before"])
    assert list(details.device_names["run"]) == ["NVIDIA L4", "cpu"] and list(
        details.device_threads["run"]
    ) == [1, 8]
    query = "select column_name from duckdb_columns() where table_name = 'run_details' and comment is not null"
    explained = set(warehouse.select(query).column_name)
    assert {"torch_version", "image_id", "device_names", "device_threads"} <= explained


def test_runs_without_a_measurement_are_rows_with_their_reason(warehouse: Warehouse) -> None:
    define(warehouse)
    load(
        warehouse,
        body("a", status="interrupted", reason="node 1 was revoked", values={}),
        body("b", status="refused", kind="launch", reason="no cores left", values={}),
        body("c", status="failed", reason="out of memory", values={}),
    )
    failed = mart(warehouse, "failed_runs").set_index("run_id")
    assert failed.reason.to_dict() == {
        "a": "node 1 was revoked",
        "b": "no cores left",
        "c": "out of memory",
    }
    assert training_frames(warehouse, "local")["runs"].empty


def test_offers_are_those_of_the_newest_snapshot_and_an_unknown_price_is_not_zero(
    warehouse: Warehouse,
) -> None:
    offer: dict[str, Any] = {
        "provider": "local",
        "instance_type": "small",
        "market": "spot",
        "zone": "here",
    }
    offer |= {
        "region": "here",
        "usd_per_hour": 0.01,
        "interruptions_per_hour": 0.1,
        "price_as_of": NOON,
    }
    with warehouse.transact() as connection:
        assert append_offers(connection, [offer], snapshot_id="one", as_of=NOON) == 1
        assert append_offers(connection, [offer], snapshot_id="one", as_of=NOON) == 0
        unknown = offer | {"usd_per_hour": float("nan")}
        assert (
            append_offers(connection, [unknown], snapshot_id="two", as_of=NOON.replace(hour=13))
            == 1
        )
    assert len(offers(warehouse, "local")) == 1
    assert math.isnan(offers(warehouse, "local").usd_per_hour[0])


def test_spend_adds_up_and_an_unknown_price_is_not_a_small_sum(
    warehouse: Warehouse,
) -> None:
    lease = {"provider": "local", "cluster": "2xsmall", "market": "spot", "outcome": "finished"}
    lease |= {"started_at": NOON, "ended_at": NOON}
    with warehouse.transact() as connection:
        known = [lease | {"lease_id": f"{n}", "usd": 0.25, "refresh_id": "r"} for n in range(2)]
        append(connection, "raw_leases", known)
        append(connection, "raw_leases", known)
        append(
            connection,
            "raw_leases",
            [lease | {"lease_id": "x", "usd": None, "refresh_id": "s"}, known[0]],
        )
    spend = mart(warehouse, "spend").set_index("refresh_id").usd
    assert spend["r"] == 0.5 and math.isnan(spend["s"])
    with (
        warehouse.transact() as connection,
        pytest.raises(ValueError, match="raw_leases has no column colour"),
    ):
        append(connection, "raw_leases", [{"colour": "red"}])


def test_models_scores_and_timings_are_kept(warehouse: Warehouse) -> None:
    model = {
        "provider": "local",
        "version": "3",
        "trained_at": NOON,
        "training_digest": "d",
        "promoted": False,
    }
    model |= {"reason": "the median error rose", "code_commit": "abc", "refresh_id": "r"}
    score = {
        "split": "workload",
        "group": "all",
        "rows": 9,
        "mean_error": 0.1,
        "median_error": 0.08,
    }
    score |= {"p90_error": 0.2, "coverage_90": 0.9, "median_width": 0.3}
    with warehouse.transact() as connection:
        for new in (1, 0):
            assert append(connection, "raw_models", [model]) == new
            assert (
                append_scores(connection, [score], provider="local", version="3", refresh_id="r")
                == new
            )
            assert (
                append(
                    connection, "raw_timings", [{"phase": "plan", "seconds": 1.5}], refresh_id="r"
                )
                == new
            )
    version = mart(warehouse, "model_versions", provider="local").iloc[0]
    assert (version.reason, version.median_error, bool(version.promoted)) == (
        "the median error rose",
        0.08,
        False,
    )
    assert mart(warehouse, "scores").group.tolist() == ["all"]
    assert mart(warehouse, "timings", refresh_id="r").seconds.tolist() == [1.5]


def test_a_version_that_a_new_registry_counts_again_is_stored_beside_the_old_one(
    warehouse: Warehouse,
) -> None:
    made = {"training_digest": "d", "promoted": True, "reason": "", "code_commit": "abc"}
    score = {"split": "workload", "group": "all", "rows": 9}
    for refresh_id, error in (("old", 0.5), ("new", 0.1)):
        of = {"provider": "local", "version": "1", "refresh_id": refresh_id}
        with warehouse.transact() as connection:
            assert append(connection, "raw_models", [made | of | {"trained_at": NOON}]) == 1
            assert append_scores(connection, [score | {"mean_error": error}], **of) == 1
    versions = mart(warehouse, "model_versions").set_index("refresh_id")
    assert versions.mean_error.to_dict() == {"old": 0.5, "new": 0.1} and set(versions.version) == {
        "1"
    }
    assert mart(warehouse, "scores", refresh_id="new").mean_error.tolist() == [0.1]


def test_models_of_an_older_home_keep_their_scores(tmp_path: Path) -> None:
    older = sql_of(tmp_path, "016_*", "model_versions.sql", "scores.sql")
    path = tmp_path / "warehouse.duckdb"
    before = Warehouse(path, sql_folder=older)
    before.migrate()
    with before.transact() as connection:
        connection.execute(
            "insert into raw_models values ('local', '1', now(), 'd', true, 'why', 'abc', 'r')"
        )
        connection.execute(
            "insert into raw_scores values ('local', '1', 'workload', 'all', 9, 0.5, 0, 0, 0, 0)"
        )
        connection.execute(
            "insert into raw_scores values ('local', '2', 'workload', 'all', 9, 0.7, 0, 0, 0, 0)"
        )
    assert Warehouse(path).migrate() == ["016_model_identity"]
    [version] = mart(Warehouse(path), "model_versions").to_dict("records")
    assert (version["refresh_id"], version["reason"], version["mean_error"]) == ("r", "why", 0.5)
    assert mart(Warehouse(path), "scores")[["version", "refresh_id"]].values.tolist() == [
        ["1", "r"],
        ["2", ""],
    ]


def test_a_snapshot_answers_as_the_warehouse_did_when_it_was_taken(warehouse: Warehouse) -> None:
    define(warehouse)
    load(warehouse, *everything())
    taken = snapshot(warehouse, "local", "tiny")
    (before,) = measured_setups(taken, "local", "tiny").to_dict("records")
    assert (before["cluster"], before["batch_per_device"], before["runs"]) == ("2xsmall", "8", 1)
    load(warehouse, body("again"))
    assert measured_setups(taken, "local", "tiny")["runs"].tolist() == [1]
    later = measured_setups(snapshot(warehouse, "local", "tiny"), "local", "tiny")
    assert later["runs"].tolist() == [2] and (later["measured_at"] >= before["measured_at"]).all()
    types = taken.select("instance_types", {"provider": "local", "name": "small"})
    assert (
        types["name"].tolist() == ["small"]
        and len(taken.select("runs", {"provider": "local"})) == 2
    )
    assert taken.select("workloads", {"provider": "ec2"}).empty, (
        "of another provider nothing was taken"
    )
    assert (
        snapshot(Warehouse(warehouse.path.with_name("none")), "local", "tiny").path.name == "none"
    )


def test_what_a_file_of_an_older_version_lacks_is_empty(warehouse: Warehouse) -> None:
    with warehouse.transact() as connection:
        connection.execute("drop view machines; drop view refusals; drop view drift")
    for one in (warehouse, snapshot(warehouse, "local", "tiny")):
        assert [len(frame) for frame in launched(one, "local")] == [0, 0, 0, 0, 0]
    assert drifting(warehouse, "local").empty
