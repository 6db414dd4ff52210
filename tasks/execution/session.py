"""An acquired cluster at work on one job: attempt after attempt, without a run at fault, with fewer
or other machines.

What comes back lies in the mailbox; `collect` loads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from models.domain.workload import Mode

from ..node.data import FAILED
from ..node.record import ELASTIC, Item, Plan, RankLayout, WorkloadFile, write_json
from ..node.requirements import INSTALL_S
from ..providers.base import ProviderError, RunningCluster
from .job import POLL_S, Job, Served, Stopwatch, Watch, with_acquired, write_rows
from .liveness import MOST_REPLACEMENTS, Decision, Machines, RemainingWork, decide, expected_s
from .mailbox import MachineLog, Mailbox, benchmark_seconds
from .outcomes import AttemptEnd, all_lost_a_peer, blame, item_row, launch_row, planned_id, retry_id
from .rank_order import links_matter, sending_order

COMPILE_S = 600.0  # more for a collective, where ranks that compile wait for each other
MOST_ATTEMPTS = 3  # that end by a fault of what is measured; losses of machines are counted apart
ARMED_WITHIN_S = 90.0
PEERS_REPORT_WITHIN_S = 5.0  # after the first node that failed: the one that was hit must be heard
MOST_ELASTIC_REPLACEMENTS = 20  # of one launch
LOSS_KNOWN_WITHIN_S = 45.0  # for the provider or a missed heartbeat to name the lost node


class Session:
    """One acquired cluster at work on one job, until all is recorded or `stop_at` (on the clock of
    `laps`).
    """

    def __init__(
        self,
        running: RunningCluster,
        job: Job,
        served: Served,
        *,
        stop_at: float,
        watch: Watch,
        laps: Stopwatch,
    ) -> None:
        self.running, self.job, self.served = running, job, served
        self.watch, self.clock, self.laps = watch, laps.clock, laps
        self.stop_at = _sooner_if_dearer(stop_at, self.clock.monotonic(), job, running)
        self.mailbox = Mailbox(path=running.mailbox, nodes=len(job.cluster.members))
        self.machines = Machines(
            running, self.mailbox, stop_at=self.stop_at, clock=self.clock, data=job.fetched
        )
        self.log = MachineLog(self.mailbox, running.cluster)
        self.joining: set[int] = set()  # replacements that are not at work yet
        self.items = {item.run_id: item for item in job.items}
        self.run_setups = with_acquired(
            job.run_setups, job.items, running.cluster, image_id=running.image_id
        )
        self.remaining = list(job.items)
        self.attempt: _Attempt | None = None
        self.attempts = self.replaced = 0
        self.faults: Counter[Any] = Counter()  # by process key
        self.no_replacement = ""
        self.start_up_s = running.ready_within_s / 2  # until this launch's is known

    def prepare(self) -> None:
        """Write what a collector needs should this process die; have data fetched; hand out
        workloads.
        """
        self._write_run_setups()
        self.mailbox.put_data(self.job.fetched)
        self.log.write()
        self.mailbox.put_workloads(self.job.files)
        self.laps.lap("start hosts")

    def serve(self) -> None:
        """Run attempt after attempt, until nothing is left to gain."""
        losses: list[str] = []
        while True:
            ended = self._wait_for_machines() or self._run_attempt()
            self.remaining = self._without(self.mailbox.recorded())
            if ended.how == "time" or (ended.how == "lost" and not ended.nodes):
                return self.lose(ended)
            if ended.how == "lost":
                decision = self.handle_loss(ended)
                if decision.how == "give up":
                    return self.lose(replace(ended, reason=f"{ended.reason}; {decision.reason}"))
                losses.append(f"{ended.reason}: {decision.reason}")
                ended = AttemptEnd(how="finished")
            elif ended.how == "failed":
                self._handle_fault(ended)
            self.served.outcome = "; ".join([str(ended), *losses])
            if not self.remaining:
                return None
            self.running.unsettle()

    def lose(self, ended: AttemptEnd) -> None:
        """End the launch: the run under way, or the launch if there is none, gets a row with the
        reason.
        """
        self.served.outcome = str(ended)
        if ended.how != "time":
            self._add_end_row(ended)

    def finish(self) -> None:
        """Let the agents leave, and sum up the launch."""
        with suppress(OSError):  # a full disk: they are ended with their machines
            self.mailbox.done()
        served, specs = self.served, [spec for spec, _ in self.job.files]
        served.usd = self.running.usd_so_far()
        served.recorded = self.mailbox.recorded()
        not_fetched = {
            digest: str(state.get("reason"))
            for node in range(self.mailbox.nodes)
            for digest, state in self.mailbox.data_of(node).items()
            if state.get("state") == FAILED
        }
        not_installed = self.mailbox.not_installed()
        for spec in specs:
            why = not_installed.get(spec.digest) or not_fetched.get(spec.data_digest)
            if why:
                served.lacked_data[spec.name] = why
        measuring_s = served.seconds.pop("measure", 0.0)
        steps_s = min(benchmark_seconds(self.mailbox.path), measuring_s)
        served.seconds["benchmark"] = steps_s
        served.seconds["between runs"] = measuring_s - steps_s

    def plan(
        self, items: Sequence[Item], workloads: Sequence[WorkloadFile] = (), **more: Any
    ) -> Plan:
        """Write the plan of the attempt that `attempts` counts; `more` are fields of the plan."""
        compiled = any(Mode(switches=item.switches).compiled for item in items)
        plan = Plan(
            lease_id=self.job.lease_id,
            attempt=self.attempts,
            addresses=list(self.running.addresses),
            expected=list(self.job.expected),
            workloads=list(workloads),
            items=list(items),
            timeout_s=Plan.timeout_s + COMPILE_S * compiled,
            **more,
        )
        self.mailbox.put_plan(plan)
        return plan

    def remaining_work(
        self, items: Sequence[Item], under_way_s: float = 0.0, host: int | None = None
    ) -> RemainingWork:
        """What is left: `items`, the one under way first, then those of later attempts."""
        spent = f"{MOST_REPLACEMENTS} machines were replaced already"
        later = self._without({item.run_id for item in items} | self.mailbox.recorded())
        return RemainingWork(
            items=[*items, *later],
            under_way_s=under_way_s,
            host=host,
            seconds=self.stop_at - self.clock.monotonic(),
            start_up_s=self.start_up_s,
            no_replacement=self.no_replacement
            or (spent if self.replaced >= MOST_REPLACEMENTS else ""),
        )

    def handle_loss(self, ended: AttemptEnd, *, meanwhile: bool = False) -> Decision:
        """Decide what follows the loss of `ended.nodes`, and see to rows, other machines, and what
        is left to do.

        `meanwhile`: the attempt under way goes on without them.
        """
        lost = frozenset(ended.nodes)
        self._forget(lost)
        self.remaining = self._without(self.mailbox.recorded())
        under_way = "" if meanwhile or self.attempt is None else self.attempt.under_way()
        decision = decide(lost, self.remaining_work(self.remaining))
        if decision.how == "replace":
            needed = {node for item in self.remaining for node in item.needs}
            if not all(self._replace(node) for node in sorted(lost & needed)):
                decision = decide(lost, self.remaining_work(self.remaining))
        if meanwhile:
            self._add_launch_row(ended)
        elif decision.how != "give up":
            self._retry(self._add_end_row(replace(ended, culprit=ended.culprit or under_way)))
        if meanwhile or decision.how != "give up":
            self.remaining = self._possible(self.remaining)
        return decision

    def lose_meanwhile(self, run_id: str, ended: AttemptEnd) -> None:
        """Note the loss of machines of an elastic run, which goes on, and request replacements."""
        now_unix = self.running.now_unix()
        losses = list(self.run_setups[run_id].get("losses", ()))
        losses += [{"node": node, "lost_unix": now_unix} for node in ended.nodes]
        self.run_setups[run_id] = {**self.run_setups[run_id], "losses": losses}
        self._write_run_setups()
        self._forget(frozenset(ended.nodes))
        for node in ended.nodes:
            if self.replaced < MOST_ELASTIC_REPLACEMENTS:
                self._replace(node)

    def at_work(self, node: int, waited_s: float = 0.0) -> None:
        """Note that a replacement is at work, after it waited so long for other machines."""
        self.joining.discard(node)
        self.log.replaced(node, self._since_began_s() - waited_s)

    def _handle_fault(self, ended: AttemptEnd) -> None:
        """Go on without the run at fault, and without its kind of process after MOST_ATTEMPTS
        faults.
        """
        key = self._process_key(self.attempt.items[0]) if self.attempt is not None else ()
        self.faults[key] += 1
        if ended.culprit and ended.culprit not in self.mailbox.recorded():
            self._add_run_row(ended.culprit, ended)
        self.machines.gone |= set(ended.nodes)  # they lack the devices that they were bought for
        self.served.lacked_devices |= bool(ended.nodes)
        self.remaining = self._possible(self._without({ended.culprit}))
        if self.faults[key] == MOST_ATTEMPTS:
            if not ended.culprit:
                self._add_end_row(ended)
            self.remaining = [one for one in self.remaining if self._process_key(one) != key]

    def _forget(self, lost: frozenset[int]) -> None:
        self.machines.awaited -= lost
        self.machines.gone |= lost
        self.joining -= lost
        for node in lost:
            interrupted = self.machines.was_interrupted(node)
            if interrupted or self.machines.dead(node):
                self.log.lost(node, self._since_began_s(), interrupted=interrupted)

    def _wait_for_machines(self) -> AttemptEnd | None:
        """Wait for machines on their way, unless those that are here can measure meanwhile."""
        if self.machines.all_here() or (self.attempt is not None and self._runnable()):
            return None
        if self.attempt is not None:  # a new machine must not meet an attempt that lost another
            self.attempts += 1
            self.plan([])
        ended = self.machines.wait_for_all()
        self.laps.lap("start hosts")
        if self.attempt is None:
            self.start_up_s = self.served.seconds["start hosts"]
        return ended

    def _run_attempt(self) -> AttemptEnd:
        self.attempts += 1
        for node in self.joining & set(self.machines.here):
            waited_s = self.running.now_unix() - self.mailbox.ready_of(node)
            self.at_work(node, max(0.0, waited_s))
        items = self._runnable()
        keys = [self._process_key(item) for item in items]
        key = () if () in keys else keys[0]  # plain workloads first
        together = [item for item in items if self._process_key(item) == key]
        elastic = together[0].kind == ELASTIC
        self.attempt = (_ElasticAttempt if elastic else _Attempt)(self, together)
        return self.attempt.run()

    def _process_key(self, item: Item) -> tuple[Any, ...]:
        """Items of the same key can share one torchrun."""
        if item.kind == ELASTIC:
            return (planned_id(item.run_id),)
        specs = (spec for spec, _ in self.job.files if spec.name == item.workload)
        return next((spec.process_key for spec in specs), ())

    def _runnable(self) -> list[Item]:
        here = set(self.machines.here)
        return [item for item in self.remaining if here.issuperset(item.needs)]

    def _possible(self, items: Sequence[Item]) -> list[Item]:
        return [item for item in items if self.machines.gone.isdisjoint(item.needs)]

    def _without(self, run_ids: set[str]) -> list[Item]:
        return [item for item in self.remaining if item.run_id not in run_ids]

    def _replace(self, node: int) -> bool:
        """Request another machine in the place of `node`; whether it is on the way."""
        requested_s = self._since_began_s()
        try:
            if not self.running.replace(node):
                self.no_replacement = "no other machine is to be had"
                return False
        except ProviderError as error:
            self.no_replacement = f"none could be requested: {error}"
            return False
        self.mailbox.forget(node)
        self.replaced += 1
        self.machines.gone.discard(node)
        self.machines.awaited.add(node)
        self.joining.add(node)
        self.log.ordered(node, self.running.cluster.members[node], requested_s)
        self.run_setups = with_acquired(self.run_setups, self.remaining, self.running.cluster)
        self._write_run_setups()
        return True

    def _retry(self, run_id: str) -> None:
        """Let the interrupted run be tried under another id: its row reports the interruption."""
        for place, item in enumerate(self.remaining):
            if item.run_id == run_id:
                again = replace(item, run_id=retry_id(run_id))
                self.remaining[place] = self.items[again.run_id] = again
                self.run_setups[again.run_id] = self.run_setups[run_id]
                self._write_run_setups()

    def _add_end_row(self, ended: AttemptEnd) -> str:
        """Add a row for the run under way, whose id is returned, or for the launch if there is
        none.
        """
        run_id = ended.culprit or (self.attempt.under_way() if self.attempt is not None else "")
        if run_id and run_id not in self.mailbox.recorded():
            self._add_run_row(run_id, ended)
            return run_id
        self._add_launch_row(ended)
        return ""

    def _add_launch_row(self, ended: AttemptEnd) -> None:
        name = self.job.cluster.name
        row = launch_row(self.job.lease_id, name, self.run_setups, ended.status, ended.reason)
        count = sum(one["kind"] == "launch" for one in self.served.rows)
        row["run_id"] += f"-{count + 1}" if count else ""
        self._store_row(row)

    def _add_run_row(self, run_id: str, ended: AttemptEnd) -> None:
        self._store_row(item_row(self.job.lease_id, self.items[run_id], self.run_setups, ended))

    def _store_row(self, row: dict[str, Any]) -> None:
        """Write to disk at once: the row outlives a controller that is killed later."""
        self.served.rows.append(row)
        write_rows(self.served)

    def _since_began_s(self) -> float:
        return self.clock.monotonic() - self.laps.began_s  # as the lease: before the request

    def _write_run_setups(self) -> None:
        write_json(self.mailbox.path / "controller" / "envelopes.json", dict(self.run_setups))


class _Attempt:
    """One torchrun over the machines that are here, at work on `items`, which need no other
    machine.
    """

    def __init__(self, session: Session, items: Sequence[Item]) -> None:
        self.session, self.number, self.items = session, session.attempts, list(items)
        self.machines, self.running = session.machines, session.running
        self.mailbox, self.clock = session.mailbox, session.clock
        self.nodes = self.machines.here
        self._at, self._since = "", 0.0

    def run(self) -> AttemptEnd:
        """Run it to the last record, or to what ended it before."""
        session = self.session
        named = {item.workload for item in self.items}
        workloads = [spec for spec, _ in session.job.files if spec.name in named]
        installs = any(one.requirements and not one.environment for one in workloads)
        plan = session.plan(
            self.items,
            workloads,
            prepare_s=INSTALL_S * installs,
            join_s=max(60.0, self.running.ready_within_s / 2),
            patience_s=session.job.patience_s if self.number == 1 else 0.0,  # it may be spent
            ranks=self.nodes if len(self.nodes) < self.mailbox.nodes else [],
            pairs=links_matter(self.items, self.running.addresses),
            checkpoints=self._checkpoints(),
        )
        self.host = RankLayout.of(plan).host
        within_s = max(ARMED_WITHIN_S, plan.meet_s + 30.0)
        started = lambda: self._armed() or bool(self._finished())  # noqa: E731
        ended = self.machines.wait(within_s, started, "start torchrun", self.nodes)
        session.laps.lap("launch torchrun")
        if ended is not None:
            return ended
        if not self._armed():
            reported = lambda: len(self._finished()) == len(self.nodes)  # noqa: E731
            ended = self.machines.wait(PEERS_REPORT_WITHIN_S, reported, "speak", self.nodes)
            interrupted = ended is not None and ended.interrupted
            return ended if ended and interrupted else blame(self._finished(), "", set())
        if self.number == 1:
            session.log.at_work(session.served.seconds)
        self.running.settle()
        order: tuple[Sequence[int], str] = ((), "")
        if plan.pairs:
            pairs = self.mailbox.pairs(self.number, self.host)
            order = sending_order(pairs, self.nodes, self.items)
        self.mailbox.go(self.number, *order)
        ended = self._until_finished()
        session.laps.lap("measure")
        return ended

    def under_way(self) -> str:
        """The run that the nodes say they are at, else the first without a record; "" before any
        began.
        """
        if not self.mailbox.gone(self.number):
            return ""
        missing = [item.run_id for item in self._missing()]
        return self.mailbox.under_way(self.number) or next(iter(missing), "")

    def _checkpoints(self) -> str:
        return ""

    def _missing(self) -> list[Item]:
        """Items that have no record yet, in order."""
        recorded = self.mailbox.recorded()
        return [item for item in self.items if item.run_id not in recorded]

    def _armed(self) -> bool:
        return len(self.mailbox.armed(self.number)) == len(self.nodes)

    def _finished(self) -> list[dict[str, Any]]:
        return self.mailbox.finished(self.number)

    def _here(self) -> list[int]:
        return [node for node in self.nodes if node not in self.machines.gone]

    def _report(self, run_id: str) -> None:
        session = self.session
        session.watch(run_id, len(self.mailbox.recorded()), self.running.usd_so_far())

    def _until_finished(self) -> AttemptEnd:
        planned = {item.run_id for item in self.items}
        failed_at = math.inf
        while True:
            missing = self._missing()
            under_way = (missing or self.items[-1:])[0].run_id
            self._report(under_way)
            finished = self._finished()
            ended = self._loss(missing)
            if ended is not None:
                return ended
            here = self._here()
            if len(here) < len(self.nodes) and not missing:
                return AttemptEnd(how="finished")  # the others may wait long for a lost machine
            now = self.clock.monotonic()
            if any(node.get("exit_code") != 0 for node in finished):
                failed_at = min(failed_at, now)
                lost_peers = all_lost_a_peer(finished)
                patience_s = LOSS_KNOWN_WITHIN_S if lost_peers else PEERS_REPORT_WITHIN_S
                if len(finished) >= len(here) or now > failed_at + patience_s:
                    return blame(finished, under_way, planned)
            elif len(finished) >= len(here):
                left = self._missing()
                if not left:
                    return AttemptEnd(how="finished")
                reason = "the nodes finished without a record of it"
                return AttemptEnd(how="failed", culprit=left[0].run_id, reason=reason)
            ended = self.machines.out_of_time()
            if ended is not None:
                return ended
            self.clock.sleep(POLL_S)

    def _loss(self, missing: Sequence[Item]) -> AttemptEnd | None:
        """Machines that are lost, or about to be, if that ends this attempt."""
        lost = self.machines.lost()
        if lost is not None:
            needed = {self.host, *(node for item in missing for node in item.needs)}
            if not lost.nodes or (missing and not needed.isdisjoint(lost.nodes)):
                return lost
            self.session.handle_loss(lost, meanwhile=True)
        going, leaving_s = self.machines.leaving()
        if not going or not missing:
            return None
        left = self.session.remaining_work(missing, self._needs_s(missing[0]), self.host)
        if decide(going, left, leaving_s).how == "go on":
            return None
        reason = f"node {min(going)}: it goes in {leaving_s:.0f} s, says its interruption notice"
        return AttemptEnd(how="lost", reason=reason, interrupted=True, nodes=tuple(sorted(going)))

    def _needs_s(self, item: Item) -> float:
        """Seconds that the run under way still needs; a late one may be measured again while
        patience lasts.
        """
        now = self.clock.monotonic()
        if item.run_id != self._at:
            self._at, self._since = item.run_id, now
        late_s = now - self._since - expected_s(item)
        if late_s < 0:
            return -late_s
        return max(0.0, min(expected_s(item), self.session.job.patience_s - late_s))


class _ElasticAttempt(_Attempt):
    """A torchrun that goes on with fewer machines, and with replacements of lost ones."""

    def __init__(self, session: Session, items: Sequence[Item]) -> None:
        super().__init__(session, items)
        self.nodes = [node for node in self.nodes if node in self.items[0].nodes]

    def _checkpoints(self) -> str:
        """The folder, named by the planned id: a retry resumes from it."""
        assert self.running.checkpoints is not None  # job_of refuses an elastic run elsewhere
        return str(self.running.checkpoints / planned_id(self.items[0].run_id))

    def _armed(self) -> bool:
        return self.mailbox.armed(self.number) >= set(self._here())

    def _until_finished(self) -> AttemptEnd:
        """As long as the first machine is there, losses of others end nothing."""
        run_id = self.items[0].run_id
        lose_at = self.clock.monotonic() + self.session.job.lose_after_s.get(run_id, math.inf)
        while True:
            self._report(run_id)
            if self.clock.monotonic() > lose_at:
                lose_at = math.inf
                self.running.revoke(self.nodes[-1])
            if not self._missing():
                return AttemptEnd(how="finished")
            lost = self.machines.lost()
            if lost is not None:
                if not lost.nodes or self.host in lost.nodes:
                    return lost
                self.session.lose_meanwhile(run_id, lost)
            self._welcome()
            finished = [one for one in self._finished() if one["node"] == self.host]
            if finished and self._missing():
                failed = blame(finished, run_id, {run_id})
                # a node lost while the others meet may end their torchrun: another resumes
                return replace(failed, culprit="") if all_lost_a_peer(finished) else failed
            ended = self.machines.out_of_time()
            if ended is not None:
                return ended
            self.clock.sleep(POLL_S)

    def _welcome(self) -> None:
        """Put the CPU shares of machines that joined in force."""
        self.machines.all_here()
        joined = self.session.joining & self.mailbox.armed(self.number)
        for node in joined:
            self.session.at_work(node)
        if joined:
            self.running.settle()


def _sooner_if_dearer(stop_at: float, now: float, job: Job, running: RunningCluster) -> float:
    """When to stop on machines that cost more than those requested: with the same dollars."""
    planned, got = job.cluster.total_usd_per_hour, running.cluster.total_usd_per_hour
    return now + (stop_at - now) * planned / got if planned and got and got > planned else stop_at
