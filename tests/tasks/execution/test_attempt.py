"""Whatever ends a launch: what was reported stays, the rest says why there is none, and the machines are let go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.campaign import campaign as serve
from tasks.campaign.campaign import serve as serve_job
from tasks.execution import job as job_module
from tasks.execution import mailbox
from tasks.execution.job import Job, Served
from tasks.node.record import Devices, Item, WorkloadFile, write_json
from tasks.providers.base import NodeState
from tasks.workspace.settings import digest_of
from tests.fakes import FakeCluster, FakeProvider, Step, armed, fails, fast, finished, job_of, ready, reported

KILLED = {"exit_code": 1, "worker_exit_code": -9, "reason": "the worker ended with exit code -9"}
LOST_PEER = {"exit_code": 1, "worker_exit_code": 4, "reason": "its peer is gone"}


def job(runs: str = "abc", **changes: Any) -> Job:
    items = tuple(Item(run_id=run_id, kind="train", nodes=[0, 1], workload="tiny", batches=[8, 8]) for run_id in runs)
    return job_of(items, **changes)


def served(home: Path, *script: Step, of: Job | None = None, stop_at: float = 100.0) -> tuple[Served, FakeProvider]:
    provider = FakeProvider(home, script)
    seen = serve_job(provider, of or job(), stop_at=stop_at, watch=lambda *_: None, clock=fast())
    assert provider.held == [] and [lease.outcome for lease in provider.over] == ["released"]
    return seen, provider


def rows(seen: Served) -> list[tuple[str, str, str]]:
    """The controller's rows as they lie on disk, which must be all that it knows."""
    assert seen.mailbox is not None
    told = [json.loads(file.read_text()) for file in sorted(seen.mailbox.glob("controller/rows/*.json"))]
    assert {row["run_id"] for row in told} == {row["run_id"] for row in seen.rows}
    return [(row["run_id"], row["status"], row["reason"]) for row in told]


def planned(seen: Served) -> list[str]:
    assert seen.mailbox is not None
    return [item["run_id"] for item in json.loads((seen.mailbox / "plan.json").read_text())["items"]]


def test_a_job_that_goes_well_has_a_record_of_every_run_and_no_row(tmp_path: Path) -> None:
    seen, provider = served(tmp_path, ready, armed(1), reported("a", "b", "c"), finished(1))
    assert (seen.outcome, seen.recorded, rows(seen)) == ("finished", {"a", "b", "c"}, [])
    assert provider.clusters[0].settled == [True]
    envelopes = json.loads((provider.clusters[0].mailbox / "controller" / "envelopes.json").read_text())
    assert {one["image_id"] for one in envelopes.values()} == {"ami-1"}


def test_a_launch_that_ends_well_before_it_began_is_tried_again_and_told(tmp_path: Path) -> None:
    seen, _ = served(tmp_path, ready, finished(1), finished(2), armed(3), reported("a"), finished(3), of=job("a"))
    assert (seen.outcome, seen.recorded, rows(seen)) == ("finished", {"a"}, [])
    never, _ = served(tmp_path / "never", ready, finished(1), finished(2), finished(3), of=job("a"))
    [(_, status, reason)] = rows(never)
    assert status == "failed" and reason == "torchrun ended on node 0, 1 before it had measured"


@pytest.mark.parametrize(("device", "after_s"), [("cpu", 90), ("H100", 150)])
def test_machines_that_look_for_their_devices_may_take_longer_to_start(
    tmp_path: Path, device: str, after_s: int
) -> None:
    of = job("a", expected=(Devices(name=device, count=1),) * 2)
    seen, _ = served(tmp_path, ready, of=of, stop_at=1000.0)
    assert f"did not start torchrun within {after_s} s" in seen.rows[0]["reason"]


def test_a_killed_rank_costs_the_run_that_it_was_at_and_the_others_are_measured_in_another_attempt(
    tmp_path: Path,
) -> None:
    seen, _ = served(
        tmp_path,
        *(ready, armed(1), reported("a")),
        *(finished(1, node=0, run_id="b", **LOST_PEER), finished(1, node=1, run_id="b", **KILLED)),
        *(armed(2), reported("c"), finished(2)),
    )
    assert rows(seen) == [("b", "failed", "node 1: its rank was killed (SIGKILL): out of memory, or by somebody")]
    assert planned(seen) == ["c"] and seen.recorded == {"a", "c"} and seen.outcome == "finished"


def test_the_nodes_say_which_run_it_was_and_one_that_never_speaks_is_not_waited_for(tmp_path: Path) -> None:
    fault = {"exit_code": 1, "worker_exit_code": 3, "reason": "ValueError: row 17 is not a number"}
    seen, _ = served(
        tmp_path, ready, armed(1), finished(1, node=0, run_id="b", **fault), *[lambda _: None] * 60, armed(2)
    )
    assert rows(seen)[0] == ("b", "failed", "node 0: ValueError: row 17 is not a number")
    assert planned(seen) == ["a", "c"]


def test_a_run_that_was_recorded_before_its_rank_died_is_neither_lost_nor_repeated(tmp_path: Path) -> None:
    script = (
        ready,
        armed(1),
        reported("a", "b"),
        finished(1, run_id="b", **KILLED),
        armed(2),
        reported("c"),
        finished(2),
    )
    seen, _ = served(tmp_path, *script)
    assert rows(seen) == [] and planned(seen) == ["c"]


def test_a_launch_that_dies_before_any_run_blames_none_and_is_a_row_of_its_own(tmp_path: Path) -> None:
    unborn = {"exit_code": 1, "worker_exit_code": 1, "reason": "no module named torch"}
    seen, _ = served(tmp_path, ready, *[finished(attempt, **unborn) for attempt in (1, 2, 3)])
    assert rows(seen) == [("r-00-launch", "failed", "node 0: no module named torch")]
    assert planned(seen) == ["a", "b", "c"]


GIVEN_UP = "node 1: revoked by the market; all runs that are left need it, and no other machine is to be had"


def revoked(cluster: FakeCluster) -> None:
    cluster.states = [NodeState(alive=True), NodeState(alive=False, interrupted=True, reason="revoked by the market")]


def test_a_revoked_host_interrupts_the_run_under_way_and_nothing_else(tmp_path: Path) -> None:
    seen, _ = served(tmp_path, ready, armed(1), reported("a"), revoked)
    assert rows(seen) == [("b", "interrupted", GIVEN_UP)]
    assert seen.recorded == {"a"} and seen.outcome == f"lost: {GIVEN_UP}"


def test_a_host_revoked_while_it_starts_interrupts_the_launch(tmp_path: Path) -> None:
    seen, _ = served(tmp_path, ready, revoked)
    assert rows(seen) == [("r-00-launch", "interrupted", GIVEN_UP)]


def test_a_peers_own_account_of_a_revocation_leaves_the_next_run_unblamed(tmp_path: Path) -> None:
    def failed_with_it(cluster: FakeCluster) -> None:
        cluster.everyone("progress.json", attempt=1, run_id="a", index=0)
        cluster.report("a", status="failed", reason="odd error")
        revoked(cluster)

    seen, _ = served(tmp_path, ready, armed(1), failed_with_it)
    assert [row[:2] for row in rows(seen)] == [("r-00-launch", "interrupted")]


@pytest.mark.parametrize("script", [(), (ready, armed(1), reported("a"))])
def test_when_the_time_is_up_what_is_left_is_simply_no_row(tmp_path: Path, script: tuple[Step, ...]) -> None:
    seen, _ = served(tmp_path, *script, stop_at=30.0)
    assert rows(seen) == [] and seen.outcome == "time: the campaign's time is up"


def test_ctrl_c_leaves_a_row_of_the_run_under_way_and_lets_the_machines_go(tmp_path: Path) -> None:
    provider = FakeProvider(tmp_path, [ready, armed(1), reported("a"), fails(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        serve_job(provider, job(), stop_at=100.0, watch=lambda *_: None, clock=fast())
    [lease] = provider.over
    assert provider.held == [] and (lease.mailbox / "done.json").exists()
    row = json.loads((lease.mailbox / "controller" / "rows" / "b.json").read_text())
    assert (row["status"], row["reason"]) == ("interrupted", "the controller was stopped by hand (Ctrl-C)")


def full(_: Path, __: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_mailbox_ends_the_launch_with_a_sentence_and_the_row_is_written_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(cluster: FakeCluster) -> None:
        cluster.report("a")
        for module in (job_module, mailbox):
            monkeypatch.setattr(module, "write_json", full)
        cluster.everyone("finished-1.json", exit_code=1, worker_exit_code=-9, run_id="b")

    released = FakeProvider.end

    def end(self: FakeProvider, *arguments: Any) -> None:
        monkeypatch.setattr(job_module, "write_json", write_json)
        released(self, *arguments)

    monkeypatch.setattr(FakeProvider, "end", end)
    seen, _ = served(tmp_path, ready, armed(1), fills)
    assert seen.outcome.startswith("lost: the mailbox is full (No space left on device): free some space at ")
    assert seen.recorded == {"a"}
    assert ("b", "failed") in [row[:2] for row in rows(seen)]


def test_a_record_that_the_disk_refused_ends_the_launch_and_the_node_says_so(tmp_path: Path) -> None:
    said = {"exit_code": 1, "worker_exit_code": 5, "reason": "could not write b.json: No space left; free some space"}
    seen, _ = served(tmp_path, ready, armed(1), reported("a"), finished(1, node=0, run_id="b", **said))
    assert rows(seen) == [("b", "failed", f"node 0: {said['reason']}")]
    assert planned(seen) == ["a", "b", "c"], "another attempt would have met the same disk"


def test_a_silent_node_on_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def falls_silent(cluster: FakeCluster) -> None:
        cluster.everyone("heartbeat.json")
        monkeypatch.setattr(FakeCluster, "now_unix", lambda _: 1e12)
        monkeypatch.setattr(mailbox, "write_json", full)

    seen, _ = served(tmp_path, ready, armed(1), falls_silent)
    [(run_id, status, reason)] = rows(seen)
    assert (run_id, status) == ("a", "failed")
    assert reason.startswith("node 0 fell silent: the mailbox is full")


def test_a_workload_whose_file_changes_before_it_travels_is_not_measured_under_its_old_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text("def build(): ...\n")
    spec = WorkloadFile(
        name="tiny", digest=digest_of(file.read_bytes(), "build", {}), file="workloads/tiny.py", function="build"
    )
    file.write_text("def build(): ... # another\n")
    seen, _ = served(tmp_path, ready, armed(1), of=job(files=((spec, file),)))
    [(run_id, status, reason)] = rows(seen)
    assert (run_id, status) == ("r-00-launch", "failed") and "was just changed: refresh again" in reason


def test_a_refusal_is_one_row_and_no_failure(tmp_path: Path) -> None:
    provider = FakeProvider(tmp_path, refusal="others hold the cores")
    seen = serve.serve(provider, job(), stop_at=100.0, watch=lambda *_: None, clock=fast())
    assert seen.mailbox is None and seen.outcome == "refused: others hold the cores"
    assert [(row["run_id"], row["status"]) for row in seen.rows] == [("r-00-refused", "refused")]


def test_what_nodes_write_is_counted_only_where_it_is_a_number(tmp_path: Path) -> None:
    records = tmp_path / "node-0" / "records"
    values: list[Any] = [[1], {"steps_s": "long"}, {"steps_s": 2.0, "warmup_s": 1.0}]
    for number, one in enumerate(values):
        write_json(records / f"{number}.json", {"kind": "train", "values": one})
    (records / "torn.json").write_text('{"kind": "tra')
    assert mailbox.benchmark_seconds(tmp_path) == 3.0
    write_json(tmp_path / "node-1" / "records" / "2.json", {"kind": "train", "values": values[2]})
    assert mailbox.benchmark_seconds(tmp_path) == 3.0, "a run counts once, however many nodes tell of it"
