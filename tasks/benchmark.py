"""Serve one launch: acquire a cluster, hand its nodes a plan, watch until every run has a record, release it.

What comes back lies in the mailbox; loading it is `tasks.load`'s. Nothing here knows where machines come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.cloud import Cluster

from .mailbox import Mailbox, benchmark_seconds, silent_nodes
from .node.record import Item, Plan, WorkloadFile, write_json
from .providers.base import NoCapacity, Provider, RunningCluster

POLL_S = 0.1
MOST_ATTEMPTS = 3
READY_WITHIN_S = 60.0
ARMED_WITHIN_S = 90.0

Files = Sequence[tuple[WorkloadFile, Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch as the nodes will see it. `envelopes` tells for each run_id what the controller knows of its setup."""

    lease_id: str
    cluster: Cluster
    items: tuple[Item, ...]
    envelopes: Mapping[str, Mapping[str, Any]]
    files: Files
    seed: int
    deadline_s: float  # from acquisition; the machines end themselves then


@dataclass(slots=True, kw_only=True)
class Served:
    """What became of a launch. `rows` are the controller's: runs that have no record and why. `usd` None: unknown."""

    lease_id: str
    mailbox: Path | None = None
    outcome: str = ""
    recorded: set[str] = field(default_factory=set)
    usd: float | None = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How one attempt ended: "finished", "failed" (try again without `culprit`), "lost" (machines), or "time"."""

    how: str
    culprit: str = ""
    reason: str = ""
    interrupted: bool = False


Watch = Callable[[str, int, float | None], None]
"""Called with the run under way, how many runs have a record, and the dollars of this launch so far."""


def serve(provider: Provider, job: Job, *, stop_at: float, watch: Watch) -> Served:
    """Run `job` until all is recorded or `stop_at` (on `time.monotonic`). Refusals and losses come back as rows.

    Raises ProviderError where the request can never be served. Machines are released however this ends; the mailbox
    stays on disk until it has been loaded.
    """
    served = Served(lease_id=job.lease_id)
    clock = _Stopwatch(served.seconds)
    try:
        with provider.acquire(job.cluster, lease_id=job.lease_id, deadline_s=job.deadline_s, seed=job.seed) as running:
            served.mailbox = running.mailbox
            mailbox = Mailbox(path=running.mailbox, nodes=len(job.cluster.members))
            write_json(running.mailbox / "controller" / "envelopes.json", dict(job.envelopes))
            mailbox.put_workloads(job.files)
            clock.lap("start hosts")
            try:
                _attempts(running, mailbox, job, served, stop_at, watch, clock)
            finally:
                mailbox.done()
                served.usd = running.usd_so_far()
                served.recorded = mailbox.recorded()
                _split_measuring(served, benchmark_seconds(running.mailbox))
                for row in served.rows:
                    write_json(running.mailbox / "controller" / "rows" / f"{row['run_id']}.json", row)
    except NoCapacity as refusal:
        served.outcome = f"refused: {refusal}"
        served.rows.append(refused_row(job, str(refusal)))
    clock.lap("release hosts")
    return served


def _split_measuring(served: Served, steps_s: float) -> None:
    """Tell the seconds of steps, profiles and probes from what lies between them: building, warming up, agreeing."""
    measuring_s = served.seconds.pop("measure", 0.0)
    served.seconds["benchmark"] = min(steps_s, measuring_s)
    served.seconds["between runs"] = max(0.0, measuring_s - steps_s)


def refused_row(job: Job, reason: str) -> dict[str, Any]:
    """The row of a launch that got no machines: one a refusal, whatever it was to measure."""
    setup = dict(next(iter(job.envelopes.values()))) | {"workload": None, "cluster": job.cluster.name}
    setup |= {"layout": None, "batch_per_device": None, "workload_digest": None}
    return {
        "run_id": f"{job.lease_id}-refused",
        "lease_id": job.lease_id,
        "kind": "launch",
        "status": "refused",
        "reason": reason,
        "setup": setup,
    }


def _attempts(
    running: RunningCluster,
    mailbox: Mailbox,
    job: Job,
    served: Served,
    stop_at: float,
    watch: Watch,
    clock: _Stopwatch,
) -> None:
    ended = _wait(running, mailbox, READY_WITHIN_S, stop_at, lambda: mailbox.ready() == mailbox.nodes, "report itself")
    clock.lap("start hosts")
    remaining = list(job.items)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        if ended is None:
            ended = _attempt(running, mailbox, job, remaining, attempt, stop_at, watch, clock)
        recorded = mailbox.recorded()
        if ended.culprit and ended.culprit not in recorded:
            status = "interrupted" if ended.interrupted else "failed"
            served.rows.append(_row(job, ended.culprit, status, ended.reason))
        remaining = [item for item in remaining if item.run_id not in recorded | {ended.culprit}]
        served.outcome = f"{ended.how}: {ended.reason}" if ended.reason else ended.how
        if ended.how != "failed" or not remaining:
            return
        ended = None
        running.unsettle()


def _attempt(
    running: RunningCluster,
    mailbox: Mailbox,
    job: Job,
    items: Sequence[Item],
    attempt: int,
    stop_at: float,
    watch: Watch,
    clock: _Stopwatch,
) -> _Ended:
    """One torchrun over the whole cluster, from plan to the last record."""
    mailbox.put_plan(
        Plan(
            lease_id=job.lease_id,
            attempt=attempt,
            addresses=list(running.addresses),
            workloads=[spec for spec, _ in job.files],
            items=list(items),
        )
    )
    ended = _wait(
        running,
        mailbox,
        ARMED_WITHIN_S,
        stop_at,
        lambda: mailbox.armed(attempt) == mailbox.nodes or bool(mailbox.finished(attempt)),
        "start torchrun",
    )
    clock.lap("launch torchrun")
    if ended is not None:
        return ended
    running.settle()
    mailbox.go(attempt)
    ended = _until_finished(running, mailbox, items, attempt, stop_at, watch)
    clock.lap("measure")
    return ended


def _until_finished(
    running: RunningCluster, mailbox: Mailbox, items: Sequence[Item], attempt: int, stop_at: float, watch: Watch
) -> _Ended:
    under_way = items[0].run_id
    while True:
        recorded = mailbox.recorded()
        under_way = next((item.run_id for item in items if item.run_id not in recorded), under_way)
        watch(under_way, len(recorded), running.usd_so_far())
        finished = mailbox.finished(attempt)
        wrong = [node for node in finished if node["exit_code"] != 0]
        lost = _lost(running, mailbox, under_way)
        if lost is not None:
            return lost
        if wrong:
            tail = str(wrong[0].get("log_tail", "")).strip().splitlines()
            reason = f"torchrun ended with {wrong[0]['exit_code']} on node {wrong[0]['node']}"
            return _Ended(how="failed", culprit=under_way, reason=": ".join([reason, *tail[-1:]]))
        if len(finished) == mailbox.nodes:
            missing = [item.run_id for item in items if item.run_id not in mailbox.recorded()]
            if missing:
                return _Ended(how="failed", culprit=missing[0], reason="the nodes finished without a record of it")
            return _Ended(how="finished")
        if time.monotonic() > stop_at:
            return _Ended(how="time", reason="the campaign's time is up")
        time.sleep(POLL_S)


def _wait(
    running: RunningCluster,
    mailbox: Mailbox,
    within_s: float,
    stop_at: float,
    until: Callable[[], bool],
    what: str,
) -> _Ended | None:
    """None once `until` holds, else how it ended."""
    give_up = time.monotonic() + within_s
    while not until():
        lost = _lost(running, mailbox, "")
        if lost is not None:
            return lost
        if time.monotonic() > stop_at:
            return _Ended(how="time", reason="the campaign's time is up")
        if time.monotonic() > give_up:
            return _Ended(how="lost", reason=f"a node did not {what} within {within_s:.0f} s")
        time.sleep(POLL_S)
    return None


def _lost(running: RunningCluster, mailbox: Mailbox, under_way: str) -> _Ended | None:
    """Whether a machine is gone or has fallen silent. A run under way then was interrupted, not slow."""
    for node, state in enumerate(running.nodes()):
        if not state.alive:
            reason = f"node {node}: {state.reason}"
            return _Ended(how="lost", culprit=under_way, reason=reason, interrupted=state.interrupted)
    silent = silent_nodes(mailbox, running.now_unix())
    if silent:
        return _Ended(how="lost", culprit=under_way, reason=f"node {silent[0]} fell silent")
    return None


def _row(job: Job, run_id: str, status: str, reason: str) -> dict[str, Any]:
    kind = next(item.kind for item in job.items if item.run_id == run_id)
    return {
        "run_id": run_id,
        "lease_id": job.lease_id,
        "kind": kind,
        "status": status,
        "reason": reason,
        "setup": dict(job.envelopes[run_id]),
    }


class _Stopwatch:
    """Adds the seconds since the last lap to a named phase."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now
