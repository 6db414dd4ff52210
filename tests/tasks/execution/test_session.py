"""Machines that are taken away: the run under way has its row, the rest goes on with fewer or with other machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve
from tasks.execution.job import Job, Served
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import Item
from tasks.providers.base import NodeState
from tests.fakes import FakeCluster, FakeProvider, Step, armed, fast, finished, job_of, offer, ready, reported
from tests.tasks.execution.test_attempt import LOST_PEER, rows

TAKEN = NodeState(alive=False, interrupted=True, reason="taken by the market")
NODES = {"a": [0], "b": [0, 1], "c": [0], "d": [0, 1]}


def job(runs: str, count: int = 2, **changes: Any) -> Job:
    items = tuple(
        Item(run_id=run_id, kind="train", nodes=NODES[run_id], workload="tiny", batches=[8] * len(NODES[run_id]))
        for run_id in runs
    )
    return job_of(items, count, **changes)


def served(home: Path, of: Job, *script: Step, stop_at: float = 1000.0) -> tuple[Served, FakeCluster]:
    provider = FakeProvider(home, script)
    seen = serve(provider, of, stop_at=stop_at, watch=lambda *_: None, clock=fast())
    return seen, provider.clusters[0]


def plan(seen: Served) -> dict[str, Any]:
    assert seen.mailbox is not None
    return dict(json.loads((seen.mailbox / "plan.json").read_text()))


def becomes(node: int, state: NodeState) -> Step:
    def step(cluster: FakeCluster) -> None:
        cluster.states = [state if n == node else one for n, one in enumerate(cluster.states)]

    return step


def sells(count: int) -> Step:
    return lambda cluster: setattr(cluster, "for_sale", count)


def at(run_id: str, attempt: int = 1) -> Step:
    return lambda cluster: cluster.everyone("progress.json", attempt=attempt, run_id=run_id, index=1)


def only(node: int, name: str) -> Step:
    return lambda cluster: cluster.say(name, node)


def new(node: int) -> Step:
    return lambda cluster: cluster.say("ready.json", node, address=cluster.addresses[node])


def test_the_rest_is_finished_with_fewer_machines(tmp_path: Path) -> None:
    script = (ready, armed(1), reported("a"), at("b"), becomes(1, TAKEN))
    again = (only(0, "armed-2.json"), reported("c"), finished(2, node=0))
    seen, _ = served(tmp_path, job("abcd"), *script, *again)
    assert rows(seen) == [("b", "interrupted", "node 1: taken by the market")]
    assert seen.recorded == {"a", "c"}
    assert ([one["run_id"] for one in plan(seen)["items"]], plan(seen)["ranks"]) == (["c"], [0])
    assert plan(seen)["patience_s"] == 0.0
    assert seen.outcome == "finished; node 1: taken by the market: 2 runs left out, the others go on"


def test_another_machine_takes_its_place_and_the_interrupted_run_is_tried_again_beside_its_row(tmp_path: Path) -> None:
    script = (sells(1), ready, armed(1), at("b"), becomes(1, TAKEN))
    again = (new(1), armed(3), reported("b-again-2"), finished(3))
    seen, cluster = served(tmp_path, job("b"), *script, *again)
    assert rows(seen) == [("b", "interrupted", "node 1: taken by the market")]
    assert cluster.replaced == [1] and seen.recorded == {"b-again-2"}
    assert plan(seen)["addresses"][1] == "10.0.1.1" and plan(seen)["ranks"] == []
    assert seen.mailbox is not None
    envelopes = json.loads((seen.mailbox / "controller" / "envelopes.json").read_text())
    assert set(envelopes) == {"b", "b-again-2"}
    assert not (seen.mailbox / "node-1" / "progress.json").exists(), "what the machine before it said"


def test_while_the_new_machine_starts_the_others_measure_what_they_can(tmp_path: Path) -> None:
    script = (sells(1), ready, armed(1), at("b"), becomes(1, TAKEN))
    meanwhile = (only(0, "armed-2.json"), reported("c"), finished(2, node=0), lambda _: None)
    after = (new(1), armed(4), reported("b-again-2", "d"), finished(4))
    seen, _ = served(tmp_path, job("bcd"), *script, *meanwhile, *after)
    assert seen.recorded == {"c", "b-again-2", "d"} and len(rows(seen)) == 1


def test_a_place_is_filled_three_times_at_most_and_then_a_row_says_so(tmp_path: Path) -> None:
    script: list[Step] = [sells(9), ready]
    run_id = "b"
    for attempt in (1, 3, 5, 7):
        script += [armed(attempt), at(run_id, attempt), becomes(1, TAKEN), new(1)]
        run_id = f"b-again-{attempt // 2 + 2}"
    seen, cluster = served(tmp_path, job("b"), *script)
    assert cluster.replaced == [1, 1, 1]
    assert {row[:2] for row in rows(seen)} == {
        (run_id, "interrupted") for run_id in ("b", "b-again-2", "b-again-3", "b-again-4")
    }
    assert seen.rows[-1]["reason"].endswith("all runs that are left need it, and 3 machines were replaced already")


def test_a_machine_that_never_boots_costs_only_what_needs_it(tmp_path: Path) -> None:
    script = [only(0, "ready.json")] + [lambda _: None] * 610
    seen, _ = served(tmp_path, job("ab"), *script, only(0, "armed-1.json"), reported("a"), finished(1, node=0))
    assert seen.recorded == {"a"}
    assert rows(seen) == [("r-00-launch", "failed", "node 1 did not report itself within 60 s")]


def test_a_machine_without_its_devices_fails_its_runs_and_the_others_measure_theirs(tmp_path: Path) -> None:
    no_device = {"exit_code": EXIT_NO_DEVICE, "worker_exit_code": EXIT_NO_DEVICE, "reason": "no GPU"}
    failed = [lambda cluster: cluster.report("b", status="failed", reason="node 1: no GPU")]
    script = (ready, *failed, finished(1, node=1, **no_device), finished(1, node=0, **LOST_PEER))
    others = (only(0, "armed-2.json"), reported("a", "c"), finished(2, node=0))
    seen, _ = served(tmp_path, job("bac"), *script, *others)
    assert plan(seen)["attempt"] == 2 and plan(seen)["ranks"] == [0]
    assert [item["run_id"] for item in plan(seen)["items"]] == ["a", "c"]
    assert seen.recorded == {"a", "b", "c"} and seen.outcome == "finished" and rows(seen) == []
    assert seen.lacked_devices
    alone, _ = served(
        tmp_path / "alone", job("bd"), ready, finished(1, node=1, **no_device), finished(1, node=0, **LOST_PEER)
    )
    assert alone.outcome == "failed: node 1: no GPU" and plan(alone)["attempt"] == 1, "nothing is left to try"


def test_a_loss_that_nobody_minds_leaves_the_attempt_alone(tmp_path: Path) -> None:
    seen, cluster = served(tmp_path, job("ac"), ready, armed(1), reported("a"), becomes(1, TAKEN), reported("c"))
    assert seen.recorded == {"a", "c"} and seen.outcome.startswith("finished")
    assert rows(seen) == [("r-00-launch", "interrupted", "node 1: taken by the market")]
    assert cluster.settled == [True], "no second attempt"


def test_the_loss_of_the_machine_where_all_meet_is_not_waited_out(tmp_path: Path) -> None:
    items = (Item(run_id="s", kind="train", nodes=[1], batches=[8]), Item(run_id="t", kind="train", nodes=[1]))
    of = job_of(items)
    script = (ready, armed(1), at("s"), becomes(0, TAKEN), only(1, "armed-2.json"), reported("s-again-2", "t"))
    seen, _ = served(tmp_path, of, *script, finished(2, node=1))
    assert seen.recorded == {"s-again-2", "t"} and plan(seen)["ranks"] == [1]


def test_a_notice_lets_a_short_run_end_and_then_acts_before_the_machine_is_gone(tmp_path: Path) -> None:
    warned = NodeState(alive=True, leaving_s=100.0, notice="interruption")
    nearly = NodeState(alive=True, leaving_s=8.0, notice="interruption")
    script = (ready, armed(1), at("b"), becomes(1, warned), reported("b"), at("d"), becomes(1, nearly))
    seen, _ = served(tmp_path, job("bdc"), *script, only(0, "armed-2.json"), reported("c"), finished(2, node=0))
    assert seen.recorded == {"b", "c"}
    assert rows(seen) == [("d", "interrupted", "node 1: it goes in 8 s, says its interruption notice")]


def test_a_run_that_is_late_may_be_measured_again_and_does_not_end_before_the_machine_goes(tmp_path: Path) -> None:
    soon, nearly = (NodeState(alive=True, leaving_s=left_s, notice="interruption") for left_s in (100.0, 8.0))
    late: list[Step] = [lambda _: None] * 400  # looks: more seconds than such a run takes
    noticed = (becomes(1, soon), *late, becomes(1, nearly), lambda _: None)
    for patience_s, lost in ((0.0, []), (1e6, ["b"])):
        home = tmp_path / f"{patience_s:g}"
        of = replace(job("b"), patience_s=patience_s)
        seen, _ = served(home, of, ready, armed(1), at("b"), *noticed, reported("b"), finished(1))
        assert [row[0] for row in rows(seen) if "notice" in row[2]] == lost
        assert plan(seen)["patience_s"] == patience_s


def test_a_rebalance_recommendation_ends_nothing(tmp_path: Path) -> None:
    risky = NodeState(alive=True, leaving_s=0.0, notice="rebalance")
    seen, _ = served(tmp_path, job("b"), ready, armed(1), becomes(1, risky), reported("b"), finished(1))
    assert rows(seen) == [] and seen.outcome == "finished"


def test_peers_of_a_lost_machine_are_not_blamed_before_its_provider_has_spoken(tmp_path: Path) -> None:
    script = (ready, armed(1), finished(1, node=0, run_id="b", **LOST_PEER), *[lambda _: None] * 300)
    seen, _ = served(tmp_path, job("b"), *script, becomes(1, TAKEN))
    assert [row[:2] for row in rows(seen)] == [("b", "interrupted")]


@pytest.mark.parametrize(("got_usd", "measured"), [(3.6, 1), (36.0, 0)])
def test_on_dearer_machines_than_asked_for_the_money_ends_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, got_usd: float, measured: int
) -> None:
    made = FakeCluster.__init__

    def dearer(self: FakeCluster, lease_id: str, cluster: Cluster, *rest: Any) -> None:
        made(self, lease_id, Cluster.of((2, offer(got_usd))), *rest)

    monkeypatch.setattr(FakeCluster, "__init__", dearer)
    script = (ready, armed(1), *[lambda _: None] * 200, reported("b"), finished(1))
    seen, _ = served(tmp_path, job("b"), *script, stop_at=100.0)
    assert len(seen.recorded) == measured
    assert seen.mailbox is not None
    envelope = json.loads((seen.mailbox / "controller" / "envelopes.json").read_text())["b"]
    assert envelope["usd_per_hour"] == pytest.approx(2 * got_usd), "as it was got, not as it was asked for"
