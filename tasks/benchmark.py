"""A job on acquired machines: hand the nodes a plan, watch until every run has a record, try again without a culprit.

What comes back lies in the mailbox; loading it is `tasks.load`'s. Nothing here knows where machines come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.cloud import Cluster

from .machines import MachineLog
from .mailbox import Mailbox, benchmark_seconds, silent_nodes
from .node.record import Item, Plan, WorkloadFile, write_json
from .outcomes import Ended, blame, full_mailbox, item_row, launch_row
from .providers.base import RunningCluster

POLL_S = 0.1
MOST_ATTEMPTS = 3
READY_WITHIN_S = 60.0
ARMED_WITHIN_S = 90.0
HEARD_WITHIN_S = 5.0  # of the first node that failed, so that the one that was hit is heard and not only its peers

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
class Clock:
    """Where the seconds come from, so that a test need not wait for them."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


Watch = Callable[[str, int, float | None], None]
"""Called with the run under way, how many runs have a record, and the dollars of this launch so far."""


class Stopwatch:
    """Adds the seconds since the last lap to a named phase."""

    def __init__(self, seconds: dict[str, float], clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last = clock.monotonic()

    def lap(self, phase: str) -> None:
        """The time since the last one went to `phase`."""
        now = self._clock.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Service:
    """One acquired cluster at work on one job."""

    def __init__(
        self,
        running: RunningCluster,
        job: Job,
        served: Served,
        *,
        stop_at: float,
        watch: Watch,
        clock: Clock,
        laps: Stopwatch,
    ) -> None:
        self.running, self.job, self.served = running, job, served
        self.stop_at, self.watch, self.clock, self.laps = stop_at, watch, clock, laps
        self.mailbox = Mailbox(path=running.mailbox, nodes=len(job.cluster.members))
        self.machines, self.began = MachineLog(self.mailbox, running.cluster), clock.monotonic()
        self.remaining = list(job.items)
        self.attempt = 0

    def prepare(self) -> None:
        """Write down what a collector needs to know, should this process die; hand out the workloads."""
        write_json(self.mailbox.path / "controller" / "envelopes.json", dict(self.job.envelopes))
        self.machines.write()
        self.mailbox.put_workloads(self.job.files)
        self.laps.lap("start hosts")

    def serve(self) -> None:
        """Attempt after attempt, each without the run that ended the last, until nothing is left to gain."""
        ready = self._wait(READY_WITHIN_S, lambda: self.mailbox.ready() == self.mailbox.nodes, "report itself")
        self.laps.lap("start hosts")
        if ready is not None:
            return self.lose(ready)
        while True:
            self.attempt += 1
            ended = self._try()
            recorded = self.mailbox.recorded()
            self.served.outcome = str(ended)
            if ended.how == "finished":
                return None
            out_of_tries = self.attempt == MOST_ATTEMPTS
            if ended.how in ("lost", "time") or (out_of_tries and not ended.culprit):
                return self.lose(ended)
            if ended.culprit and ended.culprit not in recorded:
                self._note(ended.culprit, ended)
            self.remaining = [item for item in self.remaining if item.run_id not in recorded | {ended.culprit}]
            if out_of_tries or not self.remaining:
                return None
            self.running.unsettle()

    def lose(self, ended: Ended) -> None:
        """It is over: the run under way gets a row with the reason, or the launch where none was."""
        self.served.outcome = str(ended)
        if ended.how == "time":
            return
        culprit = ended.culprit or self._under_way()
        if culprit and culprit not in self.mailbox.recorded():
            self._note(culprit, ended)
        else:
            name, envelopes = self.job.cluster.name, self.job.envelopes
            self._keep(launch_row(self.job.lease_id, name, envelopes, ended.status, ended.reason))

    def finish(self) -> None:
        """Let the agents leave, and sum up what there is."""
        with suppress(OSError):  # a full disk: they are ended with their machines
            self.mailbox.done()
        self.served.usd = self.running.usd_so_far()
        self.served.recorded = self.mailbox.recorded()
        self._split_measuring(benchmark_seconds(self.mailbox.path))

    def _try(self) -> Ended:
        """One torchrun over the whole cluster, from plan to the last record."""
        mailbox, attempt = self.mailbox, self.attempt
        mailbox.put_plan(
            Plan(
                lease_id=self.job.lease_id,
                attempt=attempt,
                addresses=list(self.running.addresses),
                workloads=[spec for spec, _ in self.job.files],
                items=list(self.remaining),
            )
        )

        def armed() -> bool:
            return mailbox.armed(attempt) == mailbox.nodes

        ended = self._wait(ARMED_WITHIN_S, lambda: armed() or bool(mailbox.finished(attempt)), "start torchrun")
        self.laps.lap("launch torchrun")
        if ended is not None:
            return ended
        if armed():
            if attempt == 1:
                self.machines.at_work(self.served.seconds)
            self.running.settle()
            mailbox.go(attempt)
            ended = self._until_finished()
            self.laps.lap("measure")
            return ended
        self._wait(HEARD_WITHIN_S, lambda: len(mailbox.finished(attempt)) == mailbox.nodes, "speak")
        return blame(mailbox.finished(attempt), "", set())  # before any run began, none is to blame

    def _until_finished(self) -> Ended:
        planned = {item.run_id for item in self.remaining}
        heard_at = float("inf")
        while True:
            under_way = (self._missing() or [self.remaining[-1].run_id])[0]
            self.watch(under_way, len(self.mailbox.recorded()), self.running.usd_so_far())
            finished = self.mailbox.finished(self.attempt)
            lost = self._lost()
            if lost is not None:
                return lost
            if any(node.get("exit_code") != 0 for node in finished):
                heard_at = min(heard_at, self.clock.monotonic())
                if len(finished) == self.mailbox.nodes or self.clock.monotonic() > heard_at + HEARD_WITHIN_S:
                    return blame(finished, under_way, planned)
            elif len(finished) == self.mailbox.nodes:
                left = self._missing()
                if left:
                    return Ended(how="failed", culprit=left[0], reason="the nodes finished without a record of it")
                return Ended(how="finished")
            if self.clock.monotonic() > self.stop_at:
                return Ended(how="time", reason="the campaign's time is up")
            self.clock.sleep(POLL_S)

    def _wait(self, within_s: float, until: Callable[[], bool], what: str) -> Ended | None:
        """None once `until` holds, else how it ended."""
        give_up = self.clock.monotonic() + within_s
        while not until():
            lost = self._lost()
            if lost is not None:
                return lost
            if self.clock.monotonic() > self.stop_at:
                return Ended(how="time", reason="the campaign's time is up")
            if self.clock.monotonic() > give_up:
                return Ended(how="lost", reason=f"a node did not {what} within {within_s:.0f} s")
            self.clock.sleep(POLL_S)
        return None

    def _lost(self) -> Ended | None:
        """Whether a machine is gone or has fallen silent. A run under way then was interrupted, not slow."""
        for node, state in enumerate(self.running.nodes()):
            if not state.alive:
                if state.interrupted:
                    self.machines.lost(node, self.clock.monotonic() - self.began)
                why = state.reason if state.interrupted else self._with_disk(state.reason)
                return Ended(how="lost", reason=f"node {node}: {why}", interrupted=state.interrupted)
        silent = silent_nodes(self.mailbox, self.running.now_unix())
        if silent:
            return Ended(how="lost", reason=self._with_disk(f"node {silent[0]} fell silent"))
        return None

    def _with_disk(self, reason: str) -> str:
        """An agent that cannot write falls silent or dies of it: say so, for it is what can be put right."""
        full = self.mailbox.refuses()
        return f"{reason}: {full_mailbox(full, self.mailbox.path)}" if full else reason

    def _under_way(self) -> str:
        """What the nodes say they are at, else the first run of this attempt without a record; "" before any began."""
        if not self.mailbox.gone(self.attempt):
            return ""
        return self.mailbox.under_way(self.attempt) or (self._missing() or [""])[0]

    def _missing(self) -> list[str]:
        """Runs of this attempt that have no record yet, in order."""
        recorded = self.mailbox.recorded()
        return [item.run_id for item in self.remaining if item.run_id not in recorded]

    def _note(self, run_id: str, ended: Ended) -> None:
        item = next(item for item in self.job.items if item.run_id == run_id)
        self._keep(item_row(self.job.lease_id, item, self.job.envelopes, ended))

    def _keep(self, row: dict[str, Any]) -> None:
        """On disk at once: a controller that is killed later has told it."""
        self.served.rows.append(row)
        write_rows(self.served)

    def _split_measuring(self, steps_s: float) -> None:
        """Tell the seconds of steps, profiles and probes from what lies between: building, warming up, agreeing."""
        seconds = self.served.seconds
        measuring_s = seconds.pop("measure", 0.0)
        seconds["benchmark"] = min(steps_s, measuring_s)
        seconds["between runs"] = max(0.0, measuring_s - steps_s)


def write_rows(served: Served) -> None:
    """Put the rows that are not there yet into the mailbox. One that a full disk refuses stays in `served`."""
    if served.mailbox is None or not served.mailbox.is_dir():
        return
    for row in served.rows:
        file = served.mailbox / "controller" / "rows" / f"{row['run_id']}.json"
        if not file.exists():
            with suppress(OSError):
                write_json(file, row)
