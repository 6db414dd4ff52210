"""Whatever ends a launch: what was reported stays, the rest says why there is none, and the
machines are let go.

Machines that are taken away cost the run under way; the rest goes on with fewer or with other
machines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve
from tasks.execution.job import Job, Served
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import Item, WorkloadFile
from tasks.providers.base import NodeState
from tasks.workspace.sources import digest_of, file_source
from tests.fakes import (
    FakeCluster,
    FakeProvider,
    Step,
    armed,
    fails,
    fast,
    finished,
    job_of,
    offer,
    ready,
    reported,
)

KILLED = {"exit_code": 1, "worker_exit_code": -9, "reason": "the worker ended with exit code -9"}
LOST_PEER = {"exit_code": 1, "worker_exit_code": 4, "reason": "its peer is gone"}
FAULT = {"exit_code": 1, "worker_exit_code": 3, "reason": "ValueError: row 17 is not a number"}
NO_MODULE = {"exit_code": 1, "worker_exit_code": 1, "reason": "no module named torch"}
REFUSED = {
    "exit_code": 1,
    "worker_exit_code": 5,
    "reason": "could not write b.json: No space left; free some space",
}
NO_DEVICE = {"exit_code": EXIT_NO_DEVICE, "worker_exit_code": EXIT_NO_DEVICE, "reason": "no GPU"}
TAKEN = NodeState(alive=False, interrupted=True, reason="taken by the market")


def job(runs: str = "abc", **changes: Any) -> Job:
    """Runs of one letter each: s and t on the first of two machines, the others on both."""

    def item(run_id: str) -> Item:
        nodes = [0] if run_id in "st" else [0, 1]
        return Item(
            run_id=run_id, kind="train", nodes=nodes, workload="tiny", batches=[8] * len(nodes)
        )

    return job_of([item(one) for one in runs], **changes)


def serving(provider: FakeProvider, of: Job, stop_at: float = 1000.0) -> Served:
    return serve(provider, of, stop_at=stop_at, watch=lambda *_: None, clock=fast())


def served(
    home: Path, of: Job, *script: Step, stop_at: float = 1000.0
) -> tuple[Served, FakeCluster]:
    provider = FakeProvider(home, script)
    seen = serving(provider, of, stop_at)
    assert provider.held == [] and [lease.outcome for lease in provider.over] == ["released"]
    return seen, provider.clusters[0]


def rows(seen: Served) -> list[tuple[str, str, str]]:
    """The controller's rows as they lie on disk, which must be all that it knows."""
    assert seen.mailbox is not None
    bodies = [
        json.loads(file.read_text()) for file in sorted(seen.mailbox.glob("controller/rows/*.json"))
    ]
    assert {row["run_id"] for row in bodies} == {row["run_id"] for row in seen.rows}
    return [(row["run_id"], row["status"], row["reason"]) for row in bodies]


def plan(seen: Served) -> dict[str, Any]:
    assert seen.mailbox is not None
    return dict(json.loads((seen.mailbox / "plan.json").read_text()))


def planned(seen: Served) -> str:
    return "".join(item["run_id"] for item in plan(seen)["items"])


def becomes(node: int, state: NodeState) -> Step:
    def step(cluster: FakeCluster) -> None:
        cluster.states = [state if n == node else one for n, one in enumerate(cluster.states)]

    return step


def noticed(leaving_s: float, notice: str = "interruption") -> Step:
    return becomes(1, NodeState(alive=True, leaving_s=leaving_s, notice=notice))


def sells(count: int) -> Step:
    return lambda cluster: setattr(cluster, "for_sale", count)


def at(run_id: str, attempt: int = 1) -> Step:
    return lambda cluster: cluster.everyone(
        "progress.json", attempt=attempt, run_id=run_id, index=1
    )


def only(node: int, name: str) -> Step:
    return lambda cluster: cluster.say(name, node)


def new(node: int) -> Step:
    return lambda cluster: cluster.say("ready.json", node, address=cluster.addresses[node])


def waits(polls: int) -> list[Step]:
    """So many polls (a tenth of a second each) in which nothing happens."""
    return [lambda _: None] * polls


GIVEN_UP = (
    f"node 1: {TAKEN.reason}; all runs that are left need it, and no other machine is to be had"
)
TAKEN_ROW = ("interrupted", f"node 1: {TAKEN.reason}")
LAST, GOES = (armed(2), reported("c"), finished(2)), (ready, armed(1))
HIT = (finished(1, 0, run_id="b", **LOST_PEER), finished(1, 1, run_id="b", **KILLED))
NEVER_BORN = [finished(attempt, **NO_MODULE) for attempt in (1, 2, 3)]


def own_account(cluster: FakeCluster) -> None:
    """A peer tells of the loss itself before the provider does."""
    at("a")(cluster)
    cluster.report("a", status="failed", reason="odd error")
    becomes(1, TAKEN)(cluster)


@pytest.mark.parametrize(
    ("runs", "script", "recorded", "unrecorded", "last"),
    [
        pytest.param(
            "abc", (*GOES, reported(*"abc"), finished(1)), "abc", [], "abc", id="all goes well"
        ),
        pytest.param(
            "a",
            (ready, finished(1), finished(2), armed(3), reported("a"), finished(3)),
            "a",
            [],
            "a",
            id="a launch that ends well before it began is tried again",
        ),
        pytest.param(
            "a",
            (ready, finished(1), finished(2), finished(3)),
            "",
            [("r-00-launch", "failed", "torchrun ended on node 0, 1 before it had measured")],
            "a",
            id="and recorded, when it never does",
        ),
        pytest.param(
            "abc",
            (*GOES, reported("a"), *HIT, *LAST),
            "ac",
            [
                (
                    "b",
                    "failed",
                    "node 1: its rank was killed (SIGKILL): out of memory, or killed by a user",
                )
            ],
            "c",
            id="a killed rank costs the run that it was at",
        ),
        pytest.param(
            "abc",
            (
                *GOES,
                finished(1, 0, run_id="b", **FAULT),
                *waits(60),
                armed(2),
                reported(*"ac"),
                finished(2),
            ),
            "ac",
            [("b", "failed", f"node 0: {FAULT['reason']}")],
            "ac",
            id="the nodes say which run it was, and one that never speaks is not waited for",
        ),
        pytest.param(
            "abc",
            (*GOES, reported(*"ab"), finished(1, run_id="b", **KILLED), *LAST),
            "abc",
            [],
            "c",
            id="a run that was recorded before its rank died is neither lost nor repeated",
        ),
        pytest.param(
            "abc",
            (ready, *NEVER_BORN),
            "",
            [("r-00-launch", "failed", "node 0: no module named torch")],
            "abc",
            id="a launch that dies before any run blames none and is a row of its own",
        ),
        pytest.param(
            "abc",
            (*GOES, reported("a"), finished(1, 0, run_id="b", **REFUSED)),
            "a",
            [("b", "failed", f"node 0: {REFUSED['reason']}")],
            "abc",
            id="a record that the disk refused ends the launch",
        ),
        pytest.param(
            "abc",
            (*GOES, reported("a"), becomes(1, TAKEN)),
            "a",
            [("b", "interrupted", GIVEN_UP)],
            "abc",
            id="a machine that is taken away interrupts the run under way and nothing else",
        ),
        pytest.param(
            "abc",
            (ready, becomes(1, TAKEN)),
            "",
            [("r-00-launch", "interrupted", GIVEN_UP)],
            "abc",
            id="taken away while it starts it interrupts the launch",
        ),
        pytest.param(
            "abc",
            (*GOES, own_account),
            "a",
            [("r-00-launch", "interrupted", GIVEN_UP)],
            "abc",
            id="a peer's own account of a loss leaves the next run unblamed",
        ),
        pytest.param(
            "b",
            (*GOES, finished(1, 0, run_id="b", **LOST_PEER), *waits(300), becomes(1, TAKEN)),
            "",
            [("b", "interrupted", GIVEN_UP)],
            "b",
            id="peers of a lost machine are not blamed before its provider has spoken",
        ),
        pytest.param(
            "sb",
            (
                only(0, "ready.json"),
                *waits(610),
                only(0, "armed-1.json"),
                reported("s"),
                finished(1, 0),
            ),
            "s",
            [("r-00-launch", "failed", "node 1 did not report itself within 60 s")],
            "s",
            id="a machine that never boots costs only what needs it",
        ),
        pytest.param(
            "st",
            (*GOES, reported("s"), becomes(1, TAKEN), reported("t")),
            "st",
            [("r-00-launch", *TAKEN_ROW)],
            "st",
            id="a loss that nobody minds leaves the attempt alone",
        ),
        pytest.param(
            "bdt",
            (
                *GOES,
                at("b"),
                noticed(100.0),
                reported("b"),
                at("d"),
                noticed(8.0),
                only(0, "armed-2.json"),
                reported("t"),
                finished(2, 0),
            ),
            "bt",
            [("d", "interrupted", "node 1: it goes in 8 s, says its interruption notice")],
            "t",
            id="a notice lets a short run end, and then acts before the machine is gone",
        ),
        pytest.param(
            "b",
            (*GOES, noticed(0.0, "rebalance"), reported("b"), finished(1)),
            "b",
            [],
            "b",
            id="a rebalance recommendation ends nothing",
        ),
    ],
)
def test_what_ends_an_attempt_costs_what_it_hit_and_no_more(
    tmp_path: Path,
    runs: str,
    script: Sequence[Step],
    recorded: str,
    unrecorded: list[tuple[str, ...]],
    last: str,
) -> None:
    seen, _ = served(tmp_path, job(runs), *script)
    assert (seen.recorded, rows(seen), planned(seen)) == (set(recorded), unrecorded, last)
    if not unrecorded:
        assert seen.outcome == "finished"


def test_shares_are_in_force_while_it_measures_and_every_run_tells_its_image(
    tmp_path: Path,
) -> None:
    script = (*GOES, reported("a"), finished(1, run_id="b", **KILLED), *LAST)
    seen, cluster = served(tmp_path, job(), *script)
    assert cluster.settled == [True, False, True] and seen.mailbox is not None
    run_setups = json.loads((seen.mailbox / "controller" / "envelopes.json").read_text())
    assert {one["image_id"] for one in run_setups.values()} == {"ami-1"}


@pytest.mark.parametrize("script", [(), (*GOES, reported("a"))])
def test_when_the_time_is_up_what_is_left_is_simply_no_row(
    tmp_path: Path, script: tuple[Step, ...]
) -> None:
    seen, _ = served(tmp_path, job(), *script, stop_at=30.0)
    assert rows(seen) == [] and seen.outcome.startswith("time: ")


def test_ctrl_c_leaves_a_row_of_the_run_under_way_and_lets_the_machines_go(tmp_path: Path) -> None:
    provider = FakeProvider(tmp_path, [*GOES, reported("a"), fails(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        serving(provider, job())
    [lease] = provider.over
    assert provider.held == [] and (lease.mailbox / "done.json").exists()
    row = json.loads((lease.mailbox / "controller" / "rows" / "b.json").read_text())
    assert row["status"] == "interrupted" and "Ctrl-C" in row["reason"]


def full(_: Path, __: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_refusal_is_one_row_and_no_failure(tmp_path: Path) -> None:
    seen = serving(FakeProvider(tmp_path, refusal="others hold the cores"), job())
    assert seen.mailbox is None and seen.outcome.startswith("refused: ")
    assert [(row["run_id"], row["status"]) for row in seen.rows] == [("r-00-refused", "refused")]


def test_another_machine_takes_its_place_and_the_interrupted_run_is_tried_again_beside_its_row(
    tmp_path: Path,
) -> None:
    script = (
        sells(1),
        *GOES,
        at("b"),
        becomes(1, TAKEN),
        new(1),
        armed(3),
        reported("b-again-2"),
        finished(3),
    )
    seen, cluster = served(tmp_path, job("b"), *script)
    assert (rows(seen), seen.recorded, cluster.replaced) == (
        [("b", *TAKEN_ROW)],
        {"b-again-2"},
        [1],
    )
    assert plan(seen)["addresses"][1] == "10.0.1.1" and plan(seen)["ranks"] == []
    assert seen.mailbox is not None
    run_setups = json.loads((seen.mailbox / "controller" / "envelopes.json").read_text())
    assert set(run_setups) == {"b", "b-again-2"}
    assert not (seen.mailbox / "node-1" / "progress.json").exists()


def test_a_machine_without_its_devices_fails_its_runs_and_the_others_measure_theirs(
    tmp_path: Path,
) -> None:
    lacking = (finished(1, 1, **NO_DEVICE), finished(1, 0, **LOST_PEER))

    def failed(cluster: FakeCluster) -> None:
        cluster.report("b", status="failed", reason="node 1: no GPU")

    others = (only(0, "armed-2.json"), reported("s", "t"), finished(2, 0))
    seen, _ = served(tmp_path, job("bst"), ready, failed, *lacking, *others)
    assert (plan(seen)["attempt"], plan(seen)["ranks"], planned(seen)) == (2, [0], "st")
    assert (seen.recorded, seen.outcome, rows(seen)) == (
        {"s", "b", "t"},
        "finished",
        [],
    ) and seen.lacked_devices
    alone, _ = served(tmp_path / "alone", job("bd"), ready, *lacking)
    assert alone.outcome.endswith("no GPU") and plan(alone)["attempt"] == 1


@pytest.mark.parametrize(("got_usd", "measured"), [(3.6, 1), (36.0, 0)])
def test_on_dearer_machines_than_asked_for_the_money_ends_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, got_usd: float, measured: int
) -> None:
    made = FakeCluster.__init__

    def dearer(self: FakeCluster, lease_id: str, cluster: Cluster, *rest: Any) -> None:
        made(self, lease_id, Cluster.of((2, offer(got_usd))), *rest)

    monkeypatch.setattr(FakeCluster, "__init__", dearer)
    seen, _ = served(
        tmp_path, job("b"), *GOES, *waits(200), reported("b"), finished(1), stop_at=100.0
    )
    assert len(seen.recorded) == measured
    assert seen.mailbox is not None
    run_setup = json.loads((seen.mailbox / "controller" / "envelopes.json").read_text())["b"]
    assert run_setup["usd_per_hour"] == pytest.approx(2 * got_usd)


ADDRESS = "s3://mine-1/cats/"
DENIED = f"the data of {ADDRESS} could not be fetched: the machines' role may not list or read them"


def with_data(runs: str, source: Path) -> Job:
    """Each run's workload has data that machines fetch."""
    source.write_text("def build(data): ...\n")
    digest = digest_of(source.read_bytes(), "build", {}, data="aabb")
    spec = WorkloadFile(
        name="tiny",
        digest=digest,
        file="workloads/w.py",
        function="build",
        data=ADDRESS,
        data_digest="aabb",
    )
    return replace(job(runs), files=((spec, file_source(source, Path(), "")),))


def has(state: str, *nodes: int, **more: Any) -> Step:
    states = {"aabb": {"state": state} | more}
    return lambda cluster: [
        cluster.say("data.json", node, **states) for node in nodes or range(len(cluster.states))
    ]


def test_there_is_no_plan_before_all_have_their_data_however_long_it_takes(tmp_path: Path) -> None:
    slow = [
        ready,
        *waits(2000),
        has("ready", 0),
        has("fetching", 1, bytes=1),
        *waits(2000),
    ]
    script = (*slow, has("ready", 1), armed(1), reported("a"), finished(1))
    seen, _ = served(tmp_path, with_data("a", tmp_path / "w.py"), *script)
    assert (seen.recorded, seen.rows, seen.lacked_data) == ({"a"}, [], {})
    assert seen.seconds["start hosts"] > 400.0
    assert plan(seen)["workloads"][0]["data"] == ADDRESS


def test_data_that_cannot_be_had_hold_nobody_up_and_their_workload_is_named(tmp_path: Path) -> None:
    script = (
        ready,
        has("ready", 0),
        has("failed", 1, reason=DENIED),
        armed(1),
        reported("a"),
        finished(1),
    )
    seen, _ = served(tmp_path, with_data("a", tmp_path / "w.py"), *script)
    assert seen.recorded == {"a"} and seen.lacked_data == {"tiny": DENIED}


def elastic() -> Job:
    item = Item(
        run_id="e",
        kind="elastic",
        nodes=[0, 1],
        workload="tiny",
        batches=[8, 8],
        checkpoint_every=2,
    )
    return job_of([item])


def keeps(cluster: FakeCluster) -> None:
    cluster.checkpoints = cluster.mailbox.parent / "checkpoints"
    ready(cluster)


def losses(seen: Served) -> list[int]:
    assert seen.mailbox is not None
    setups = json.loads((seen.mailbox / "controller" / "envelopes.json").read_text())
    return [one["node"] for one in setups["e"].get("losses", ())]


def test_an_elastic_run_goes_on_without_a_machine_that_is_lost(tmp_path: Path) -> None:
    script = (keeps, armed(1), *waits(3), becomes(1, TAKEN), *waits(50), reported("e"))
    seen, cluster = served(tmp_path, elastic(), *script)
    assert seen.outcome == "finished" and rows(seen) == [] and losses(seen) == [1]
    assert plan(seen)["attempt"] == 1 and cluster.replaced == []
    assert plan(seen)["checkpoints"].endswith("checkpoints/e")


def test_an_elastic_run_that_loses_its_first_machine_goes_on_in_another_attempt_or_is_given_up(
    tmp_path: Path,
) -> None:
    script = (keeps, armed(1), *waits(3), becomes(0, TAKEN))
    seen, _ = served(tmp_path / "none", elastic(), *script)
    assert [(run, status) for run, status, _ in rows(seen)] == [("e", "interrupted")]
    again = (keeps, sells(1), *script[1:], *waits(3), new(0), armed(2), reported("e-again-2"))
    seen, _ = served(tmp_path / "another", elastic(), *again)
    assert seen.outcome.startswith("finished") and "e-again-2" in seen.recorded
    assert plan(seen)["checkpoints"].endswith("checkpoints/e")
