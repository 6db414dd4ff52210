"""What enters the frames that models are fitted on, and what stays history."""

import math
from datetime import timedelta

import pandas as pd
import pytest

from tests.warehouse.builders import (
    NOON,
    PROFILE,
    ROWS,
    body,
    define,
    lease,
    load,
    refused,
    setup,
    write,
)
from warehouse.append import append, note_workloads
from warehouse.reads import (
    MOST_REPEATS,
    MOST_SETUPS,
    measured_workloads,
    training_digest,
    training_frames,
)

SINGLE = setup(cluster="1xsmall", instance_types=["small"], instance_digests=["s1"])
PROBE = {"rows": [{"bytes": 1024, "seconds": 0.01, "spread": 0.0, "repeats": 9}]}
NO_WORKLOAD = setup(workload=None, workload_digest=None)
EVERYTHING = [
    body("train"),
    body("profile", of=SINGLE, kind="profile", values=PROFILE),
    body("probe", of=NO_WORKLOAD, kind="probe", workload_digest="", values=PROBE),
]
DAY = timedelta(days=1)
LATER = {"ended_unix": NOON.timestamp() + 99}


@pytest.fixture
def defined(warehouse):
    define(warehouse)
    return warehouse


def counts(warehouse):
    frames = training_frames(warehouse, "local")
    return [len(frames[name]) for name in ("runs", "profiles", "buckets", "probes")]


def test_records_become_typed_rows_and_loading_twice_changes_nothing(defined):
    assert load(defined, *EVERYTHING) == 3
    frames = training_frames(defined, "local")
    run, profile = frames["runs"].iloc[0], frames["profiles"].iloc[0]
    assert (run.cluster, run.batch_per_device, run.step_s, run.parameters) == (
        "2xsmall",
        "8",
        0.5,
        10,
    )
    assert run.measured_at == NOON.replace(tzinfo=None, second=10)
    assert run.flops_per_sample == 3.0  # from the profile
    assert (profile.instance_type, profile.batch, profile.backward_s) == ("small", 8, 0.2)
    assert math.isnan(profile.peak_bytes)
    buckets = frames["buckets"][["bucket", "bytes", "ready_fraction"]]
    assert buckets.values.tolist() == [[0, 30, 0.4], [1, 10, 1.0]]
    assert frames["probes"][["bytes", "seconds"]].values.tolist() == [[1024, 0.01]]
    digest = training_digest(frames)
    assert load(defined, *EVERYTHING, body("train", values={"step_s": 9.0})) == 0
    assert define(defined) == (0, 0)
    assert training_digest(training_frames(defined, "local")) == digest
    assert all(frame.empty for frame in training_frames(defined, "ec2").values())


def test_values_of_another_type_are_unknown_and_stop_no_load(defined):
    odd = {"step_s": 0.5, "rank_order": "up", "build_s": {}, "loader_workers": "x", "rows": 3}
    assert load(defined, body("a", values=odd, item={"nodes": "all"})) == 1
    [row] = defined.select("runs").to_dict("records")
    assert row["step_s"] == 0.5 and math.isnan(row["loader_workers"])


def imported(warehouse, query):
    """The runs that a model learns from, with imported rows of `query`."""
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


def test_of_many_repeats_the_newest_are_learned_from(warehouse):
    days = f"timestamp '2026-01-01' + to_days(day::int) as measured_at from range({MOST_REPEATS + 5}) d(day)"
    taken = imported(warehouse, f"select 'a' as workload, '8' as batch, {days}")
    assert min(taken.measured_at) == pd.Timestamp("2026-01-06") and len(taken) == MOST_REPEATS
    assert measured_workloads(warehouse, "ec2") == {"a": MOST_REPEATS + 5}


def test_of_many_setups_each_workload_keeps_as_many(warehouse):
    names = (
        "case when number < 100 then 'small' else 'large' end as workload, number::varchar as batch"
    )
    numbers = f"range({MOST_SETUPS + 1000}) as numbers(number)"
    taken = imported(warehouse, f"select {names}, null::timestamp as measured_at from {numbers}")
    assert taken.groupby("workload").size().to_dict() == {"small": 100, "large": MOST_SETUPS - 100}


def timed(run_id, *seconds, **changes):
    """A run on as many machines as there are seconds of fixed work, on its launch's last nodes."""
    whole = {"instance_types": ["small"] * len(seconds), "instance_digests": ["s1"] * len(seconds)}
    values = {"step_s": 0.5, "reference_s": list(seconds), "reference_blocks": 3}
    item = {"nodes": [node + 1 for node in range(len(seconds))]}
    of = setup(cluster=f"{len(seconds)}xsmall", zone="z", **whole)
    return body(run_id, of=of, **{"values": values, "item": item} | changes)


def test_fixed_work_stands_beside_the_usual_of_its_type(defined):
    old = timed("old", 0.5, fingerprint="old", ended_unix=NOON.timestamp() - 99.0)
    few = timed("few", 0.01, 0.02) | {"values": {"step_s": 0.5, "reference_s": [0.01]}}
    load(defined, old, timed("a", 0.01, 0.03), timed("b", 0.02), few)
    speeds = defined.select("machine_speeds")
    assert speeds[["run_id", "node", "reference_s", "usual_s"]].values.tolist() == [
        ["a", 1, 0.01, 0.02],
        ["a", 2, 0.03, 0.02],
        ["b", 1, 0.02, 0.02],
    ]
    runs = defined.select("runs").set_index("run_id")
    assert list(runs.reference_s["a"]) == [0.01, 0.03] and runs.reference_blocks["a"] == 3


def test_a_loader_a_checkpoint_and_a_compilation_are_recorded(defined):
    loading = {"loader_workers": 2, "load_s": 0.004, "load_wait_s": 0.0}
    written = {"step_s": 0.5, "checkpoint_bytes": 1200, "checkpoint_s": 0.25, "input_s": 0.2}
    compiled = {"step_s": 0.5, "build_s": 30.0, "warmup_s": 12.0}
    load(
        defined,
        body("p", of=SINGLE, kind="profile", values=PROFILE | loading),
        body("w", values=written),
        body("c", of=setup(switches="checkpointing+compile"), values=compiled),
        body("plain", values=compiled),
    )
    assert training_frames(defined, "local")["profiles"][list(loading)].iloc[0].to_dict() == loading
    assert defined.select("run_details").set_index("run_id").input_s["w"] == 0.2
    checkpoints, compilations = defined.select("checkpoints"), defined.select("compilations")
    assert checkpoints[["run_id", "bytes", "seconds"]].values.tolist() == [["w", 1200, 0.25]]
    assert compilations[["run_id", "seconds"]].values.tolist() == [["c", 42.0]]
    assert defined.select("workloads").checkpoint_bytes.tolist() == [1200]


def test_restarts_of_elastic_runs_are_told_apart(defined):
    lost = setup(losses=ROWS["losses"])
    old = lost | {"instance_digests": ["s0", "s0"]}
    load(defined, body("a", of=lost, **ROWS["elastic"]), body("old", of=old, **ROWS["elastic"]))
    written, restarts = defined.select("checkpoints"), defined.select("restarts")
    columns = ["run_id", "outcome", "machines", "seconds", "restore_s", "lost_steps"]
    assert restarts[columns].values.tolist() == [
        ["a", "fewer", 1, 9.5, 0.5, 3],
        ["a", "grown", 2, 8.5, 0.5, 1],
        ["a", "replaced", 2, 19.5, 0.5, 2],
    ]
    assert written[["run_id", "bytes", "seconds"]].values.tolist() == [["a", 1200, 0.25]]
    run = defined.select("elastic_runs").iloc[0]
    assert [run.starts, run.lost_machines, run.lost_steps, run.checkpoint_every] == [4, 2, 6, 4]
    assert run.seconds == 99 and counts(defined) == [0, 0, 0, 0]


def test_a_changed_workload_is_measured_anew(defined):
    load(defined, *EVERYTHING)
    define(defined, digest="w2")
    assert counts(defined) == [0, 0, 0, 1]
    assert math.isnan(defined.select("workloads").parameters[0])
    assert set(defined.select("outdated_runs").run_id) == {"train", "profile"}
    anew = {"workload_digest": "w2", "values": {"step_s": 0.7}}
    load(defined, body("anew", of=setup(workload_digest="w2"), **anew))
    assert defined.select("runs").step_s.tolist() == [0.7]
    define(defined, digest="w1")  # put back: the first run counts again
    assert defined.select("runs").step_s.tolist() == [0.5]


def test_facts_of_a_definition_count_on_every_provider(defined):
    load(defined, *EVERYTHING)
    facts = [{"workload": "tiny", "digest": digest, "samples": 1000} for digest in ("w1", "w2")]
    for definition, known in zip(facts, (True, False), strict=True):
        write(defined, note_workloads, [definition], provider="ec2", noted_at=NOON)
        [parameters] = defined.select("workloads", {"provider": "ec2"}).parameters
        assert (parameters == parameters) is known


def test_a_changed_or_unknown_instance_type_makes_its_runs_history(defined):
    load(defined, *EVERYTHING, body("none", of=setup(instance_digests=[])))
    assert defined.select("runs").run_id.tolist() == ["train"]
    define(defined, type_digest="s2")
    assert counts(defined) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "counts, history, change",
    [
        ("new", "old", {"torch_version": "3"}),
        ("new", "old", {"fingerprint": "another"}),
        ("old", "new", {"torch_version": "3", "wrong_device": "it ran on cpu"}),
    ],
)
def test_another_torch_or_machine_or_the_wrong_device_is_not_pooled(
    defined, counts, history, change
):
    load(defined, body("old"), body("new", **LATER, **change))
    assert defined.select("runs").run_id.tolist() == [counts]
    assert defined.select("outdated_runs").run_id.tolist() == [history]


@pytest.mark.parametrize("newer", ["2.13.1+cu130", "2.13.0+cu131"])
def test_a_patch_or_another_build_of_torch_is_pooled(defined, newer):
    load(
        defined,
        body("old", torch_version="2.13.0+cu130"),
        body("new", torch_version=newer, **LATER),
    )
    assert defined.select("torch_lines")[["torch_line", "runs"]].values.tolist() == [["2.13", 2]]
    assert defined.select("run_details").set_index("run_id").torch_version["new"] == newer


def test_runs_without_a_measurement_keep_reason_and_reporter(defined):
    load(defined, body("a", status="failed", reason="out of memory", values={}), refused())
    failed = defined.select("failed_runs").set_index("run_id")
    assert failed[["reason", "told_by"]].values.tolist() == [
        ["out of memory", "node"],
        ["no capacity", "controller"],
    ]
    assert defined.select("refusals").lease_id.tolist() == ["lease"]
    assert counts(defined) == [0, 0, 0, 0]


def test_offers_are_of_the_newest_snapshot_and_an_unknown_price_is_not_zero(warehouse):
    offer = ROWS["offer"] | {"price_as_of": NOON}
    unknown = offer | {"usd_per_hour": None}
    for new in (1, 0):
        assert write(warehouse, append, "raw_offers", [offer], snapshot_id="1", as_of=NOON) == new
    write(warehouse, append, "raw_offers", [unknown], snapshot_id="2", as_of=NOON + DAY)
    found = warehouse.select("offers")
    assert len(found) == 1 and math.isnan(found.usd_per_hour[0])
    assert found.price_as_of[0] == NOON.replace(tzinfo=None)


def test_spend_adds_up_by_refresh_and_by_workload(warehouse):
    known = [lease(lease_id=name) for name in ("x", "y")]
    for new in (2, 0):
        assert write(warehouse, append, "raw_leases", known) == new
    unknown = lease(lease_id="z", usd=None, refresh_id="s")
    write(warehouse, append, "raw_leases", [unknown])
    load(
        warehouse,
        body("a", lease_id="x"),
        body("b", lease_id="x", of=setup(workload="other")),
        body("c", lease_id="x", kind="learn"),
        body("d", lease_id="x", kind="elastic"),
    )
    spend = warehouse.select("spend").set_index("refresh_id").usd
    assert spend["r"] == 0.5 and math.isnan(spend["s"])
    by_workload = warehouse.select("lease_spend").set_index(["lease_id", "workload"]).usd
    assert by_workload["x", "tiny"] == 0.1875 and by_workload["x", "other"] == 0.0625
    assert by_workload["y", ""] == 0.25
