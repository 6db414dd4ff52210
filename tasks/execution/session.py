"""An acquired cluster at work on one job: attempt after attempt, without a culprit, with fewer or with other machines.

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
from ..providers.base import NotSupported, ProviderError, RunningCluster
from .job import POLL_S, Job, Served, Stopwatch, Watch, with_acquired, write_rows
from .liveness import (
    MOST_REPLACEMENTS,
    Decision,
    MachineLoss,
    Machines,
    RemainingWork,
    decide,
    expected_s,
)
from .mailbox import MachineLog, Mailbox, benchmark_seconds
from .outcomes import AttemptEnd, all_lost_a_peer, blame, item_row, launch_row, planned_id, retry_id
from .rank_order import links_matter, sending_order

COMPILE_S = 600.0  # more for a collective, where ranks that compile wait for each other
MOST_ATTEMPTS = 3  # that end by a fault of what is measured; losses of machines are counted apart
ARMED_WITHIN_S = 90.0
PEERS_REPORT_WITHIN_S = (
    5.0  # of the first node that failed: the one that was hit is to be heard, not only its peers
)
MOST_ELASTIC_REPLACEMENTS = (
    20  # of one launch: a machine that ends before it joins would be replaced for ever
)
LOSS_KNOWN_WITHIN_S = (
    45.0  # where all who speak just lost a peer: the provider, or silence, tells which
)


class Session:
    """One acquired cluster at work on one job, until all is recorded or `stop_at` (on the clock of `laps`)."""

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
        self.asked_s: dict[
            int, float
        ] = {}  # since the launch began, for machines that are on their way
        self.items = {item.run_id: item for item in job.items}  # those tried once more are added
        self.run_setups = with_acquired(
            job.run_setups, job.items, running.cluster, image_id=running.image_id
        )
        self.remaining = list(job.items)
        self.attempt: _Attempt | None = None
        self.attempts = self.replaced = 0
        self.faults: Counter[Any] = Counter()  # by what shares a process
        self.no_replacement = ""
        self.start_up_s = running.ready_within_s / 2  # until this launch's own is known

    def prepare(self) -> None:
        """Write down what a collector needs to know, should this process die; have data fetched; hand out workloads."""
        self._write_run_setups()
        self.mailbox.put_data(self.job.fetched)
        self.log.write()
        self.mailbox.put_workloads(self.job.files)
        self.laps.lap("start hosts")

    def serve(self) -> None:
        """Attempt after attempt, until nothing is left to gain."""
        losses: list[str] = []
        while True:
            ended = self._wait_for_machines() or self._run_attempt()
            self.served.outcome = "; ".join([str(ended), *losses])
            self.remaining = self._without(self.mailbox.recorded())
            if ended.how == "time" or (ended.how == "lost" and not ended.nodes):
                return self.lose(ended)
            if ended.how == "lost":
                decision = self.handle_loss(ended)
                if decision.how == "give up":
                    return self.lose(replace(ended, reason=f"{ended.reason}; {decision.reason}"))
                losses.append(f"{ended.reason}: {decision.reason}")
            elif ended.how == "failed":
                shared = (
                    self._process_key(self.attempt.items[0]) if self.attempt is not None else ()
                )
                self.faults[shared] += 1
                out_of_tries = self.faults[shared] == MOST_ATTEMPTS
                if ended.culprit and ended.culprit not in self.mailbox.recorded():
                    self._add_run_row(ended.culprit, ended)
                self.machines.gone |= set(
                    ended.nodes
                )  # without the devices that they were bought for
                self.served.lacked_devices |= bool(ended.nodes)
                self.remaining = self._possible(self._without({ended.culprit}))
                if out_of_tries:
                    if not ended.culprit:
                        self._add_end_row(ended)
                    self.remaining = [
                        item for item in self.remaining if self._process_key(item) != shared
                    ]
            if not self.remaining:
                self.served.outcome = "; ".join(
                    [str(ended) if ended.how != "lost" else "finished", *losses]
                )
                return None
            self.running.unsettle()

    def lose(self, ended: AttemptEnd) -> None:
        """It is over: the run under way gets a row with the reason, or the launch where none was."""
        self.served.outcome = str(ended)
        if ended.how != "time":
            self._add_end_row(ended)

    def finish(self) -> None:
        """Let the agents leave, and sum up what there is."""
        with suppress(OSError):  # a full disk: they are ended with their machines
            self.mailbox.done()
        self.served.usd = self.running.usd_so_far()
        self.served.recorded = self.mailbox.recorded()
        self.served.lacked_data |= self._data_lacked()
        not_installed = self.mailbox.not_installed()
        self.served.lacked_data |= {
            spec.name: not_installed[spec.digest]
            for spec, _ in self.job.files
            if spec.digest in not_installed
        }
        seconds = self.served.seconds
        measuring_s, steps_s = seconds.pop("measure", 0.0), benchmark_seconds(self.mailbox.path)
        seconds["benchmark"] = min(steps_s, measuring_s)
        seconds["between runs"] = max(0.0, measuring_s - steps_s)  # building, warming up, agreeing

    def _data_lacked(self) -> dict[str, str]:
        """Workloads whose data some machine could not fetch, and why: nothing of theirs is bought again at once."""
        states = [
            state
            for node in range(self.mailbox.nodes)
            for state in self.mailbox.data_of(node).items()
        ]
        failed = {
            digest: str(one.get("reason")) for digest, one in states if one.get("state") == FAILED
        }
        return {
            spec.name: failed[spec.data_digest]
            for spec, _ in self.job.files
            if spec.data_digest in failed
        }

    def plan(
        self, items: Sequence[Item], workloads: Sequence[WorkloadFile] = (), **more: Any
    ) -> Plan:
        """Ask the nodes for the attempt that `attempts` counts; `more` are fields of the plan."""
        plan = Plan(
            lease_id=self.job.lease_id,
            attempt=self.attempts,
            addresses=list(self.running.addresses),
            expected=list(self.job.expected),
            workloads=list(workloads),
            items=list(items),
            timeout_s=Plan.timeout_s
            + COMPILE_S * any(Mode(switches=item.switches).compiled for item in items),
            **more,
        )
        self.mailbox.put_plan(plan)
        return plan

    def armed(self) -> None:
        """All workers wait for go: the first time, the machines' start-ups are known."""
        if self.attempts == 1:
            self.log.at_work(self.served.seconds)

    def remaining_work(
        self, items: Sequence[Item], under_way_s: float = 0.0, host: int | None = None
    ) -> RemainingWork:
        """What is left after the loss of machines: `items`, the one under way first, then those of later attempts."""
        spent = (
            f"{MOST_REPLACEMENTS} machines were replaced already"
            if self.replaced >= MOST_REPLACEMENTS
            else ""
        )
        later = self._without({item.run_id for item in items} | self.mailbox.recorded())
        return RemainingWork(
            items=[*items, *later],
            under_way_s=under_way_s,
            host=host,
            seconds=self.stop_at - self.clock.monotonic(),
            start_up_s=self.start_up_s,
            no_replacement=self.no_replacement or spent,
        )

    def handle_loss(self, ended: AttemptEnd, *, meanwhile: bool = False) -> Decision:
        """Decide what follows the loss of `ended.nodes` and see to it: rows, other machines, and what is left to do.

        `meanwhile`: the attempt under way goes on without them.
        """
        loss = MachineLoss(nodes=frozenset(ended.nodes))
        self.machines.awaited -= loss.nodes
        self.machines.gone |= loss.nodes
        for node in loss.nodes:
            was_interrupted = self.machines.was_interrupted(node)
            if was_interrupted or self.machines.dead(node):
                self.log.lost(node, self._since_began_s(), interrupted=was_interrupted)
        self.remaining = self._without(self.mailbox.recorded())
        under_way = "" if meanwhile or self.attempt is None else self.attempt.under_way()
        decision = decide(loss, self.remaining_work(self.remaining))
        needed = sorted(loss.nodes & {node for item in self.remaining for node in item.needs})
        if decision.how == "replace" and not self._replace(needed):
            decision = decide(loss, self.remaining_work(self.remaining))
        if meanwhile:
            self._launch_row(ended)
        elif decision.how != "give up":
            self._retry(self._add_end_row(replace(ended, culprit=ended.culprit or under_way)))
        if decision.how != "give up" or meanwhile:
            self.remaining = self._possible(self.remaining)
        return decision

    def lose_meanwhile(self, run_id: str, ended: AttemptEnd) -> None:
        """Machines of an elastic run are gone, which goes on: note when, and ask for others in their places."""
        now_unix = self.running.now_unix()
        losses = [{"node": node, "lost_unix": now_unix} for node in ended.nodes]
        known = self.run_setups[run_id]
        self.run_setups[run_id] = {**known, "losses": [*known.get("losses", ()), *losses]}
        self._write_run_setups()
        self.machines.gone |= set(ended.nodes)
        self.machines.awaited -= set(ended.nodes)
        for node in ended.nodes:
            self.asked_s.pop(node, None)
            self.log.lost(
                node, self._since_began_s(), interrupted=self.machines.was_interrupted(node)
            )
            if self.replaced < MOST_ELASTIC_REPLACEMENTS:
                self._replace([node])

    def at_work(self, node: int, waited_s: float = 0.0) -> None:
        """A machine in the place of another is at work, after it waited so long for others."""
        self.log.replaced(node, self._since_began_s() - self.asked_s.pop(node) - waited_s)

    def _wait_for_machines(self) -> AttemptEnd | None:
        """Wait for machines on their way, unless those that are here have something to do meanwhile."""
        if self.machines.all_here() or (self.attempt is not None and self._runnable()):
            return None
        if (
            self.attempt is not None
        ):  # let them end what they run: a new one must not meet an attempt that lost another
            self.attempts += 1
            self.plan([])
        ended = self.machines.wait_for_all()
        self.laps.lap("start hosts")
        if self.attempt is None:
            self.start_up_s = self.served.seconds["start hosts"]
        return ended

    def _run_attempt(self) -> AttemptEnd:
        """The next attempt, over the machines that are here."""
        self.attempts += 1
        for node in self.asked_s.keys() & set(self.machines.here):
            # it may have waited for the attempt before this one to end
            self.at_work(node, max(0.0, self.running.now_unix() - self.mailbox.ready_of(node)))
        items = self._together(self._runnable())
        self.attempt = (_ElasticAttempt if items[0].kind == ELASTIC else _Attempt)(self, items)
        return self.attempt.run()

    def _together(self, items: Sequence[Item]) -> list[Item]:
        """Those of `items` that one torchrun can serve: plain workloads first, then what needs a process of its own."""
        keys = dict.fromkeys(self._process_key(item) for item in items)
        chosen = next((key for key in keys if not key), next(iter(keys), ()))
        return [item for item in items if self._process_key(item) == chosen]

    def _process_key(self, item: Item) -> tuple[Any, ...]:
        if item.kind == ELASTIC:
            return (planned_id(item.run_id),)
        return next(
            (spec.process_key for spec, _ in self.job.files if spec.name == item.workload), ()
        )

    def _runnable(self) -> list[Item]:
        """What the machines that are here can do."""
        here = set(self.machines.here)
        return [item for item in self.remaining if here.issuperset(item.needs)]

    def _possible(self, items: Sequence[Item]) -> list[Item]:
        return [item for item in items if self.machines.gone.isdisjoint(item.needs)]

    def _without(self, run_ids: set[str]) -> list[Item]:
        return [item for item in self.remaining if item.run_id not in run_ids]

    def _replace(self, nodes: Sequence[int]) -> bool:
        """Ask for other machines in the place of `nodes`; whether all are on the way."""
        for node in nodes:
            asked_s = self._since_began_s()
            try:
                had = self.running.replace(node)
                why = "" if had else "no other machine is to be had"
            except ProviderError as error:
                why = f"none could be asked for: {error}"
            if why:
                self.no_replacement = why
                return False
            self.mailbox.forget(node)
            self.replaced += 1
            self.machines.gone.discard(node)
            self.machines.awaited.add(node)
            self.asked_s[node] = asked_s
            self.log.ordered(node, self.running.cluster.members[node], asked_s)
        self.run_setups = with_acquired(self.run_setups, self.remaining, self.running.cluster)
        self._write_run_setups()
        return True

    def _retry(self, run_id: str) -> None:
        """Let the run that was interrupted be tried under another id: its row tells of the interruption."""
        if all(item.run_id != run_id for item in self.remaining):
            return
        item = replace(self.items[run_id], run_id=retry_id(run_id))
        self.items[item.run_id] = item
        self.run_setups[item.run_id] = self.run_setups[run_id]
        self.remaining = [item if one.run_id == run_id else one for one in self.remaining]
        self._write_run_setups()

    def _add_end_row(self, ended: AttemptEnd) -> str:
        """The row of how it ended: of the run under way, whose id is returned, or of the launch where none was."""
        run_id = ended.culprit or (self.attempt.under_way() if self.attempt is not None else "")
        if run_id and run_id not in self.mailbox.recorded():
            self._add_run_row(run_id, ended)
            return run_id
        self._launch_row(ended)
        return ""

    def _launch_row(self, ended: AttemptEnd) -> None:
        row = launch_row(
            self.job.lease_id, self.job.cluster.name, self.run_setups, ended.status, ended.reason
        )
        launch_rows = sum(one["kind"] == "launch" for one in self.served.rows)
        self._store_row(
            row | {"run_id": f"{row['run_id']}-{launch_rows + 1}"} if launch_rows else row
        )

    def _add_run_row(self, run_id: str, ended: AttemptEnd) -> None:
        self._store_row(item_row(self.job.lease_id, self.items[run_id], self.run_setups, ended))

    def _store_row(self, row: dict[str, Any]) -> None:
        """On disk at once: it outlives a controller that is killed later."""
        self.served.rows.append(row)
        write_rows(self.served)

    def _since_began_s(self) -> float:
        return (
            self.clock.monotonic() - self.laps.began_s
        )  # before the machines were asked for, as their lease

    def _write_run_setups(self) -> None:
        write_json(self.mailbox.path / "controller" / "envelopes.json", dict(self.run_setups))


class _Attempt:
    """One torchrun over the machines that are here, at work on `items`, which need no other: to the last record, or to
    what ended it before."""

    def __init__(self, session: Session, items: Sequence[Item]) -> None:
        self.session, self.number, self.items = session, session.attempts, list(items)
        self.machines, self.running, self.mailbox = (
            session.machines,
            session.running,
            session.mailbox,
        )
        self.clock = session.clock
        self.nodes = self.machines.here
        self._at, self._since = "", 0.0

    def run(self) -> AttemptEnd:
        """How it ended."""
        session = self.session
        named = {item.workload for item in self.items}
        workloads = [spec for spec, _ in session.job.files if spec.name in named]
        plan = session.plan(
            self.items,
            workloads,
            prepare_s=INSTALL_S
            * any(one.requirements and not one.environment for one in workloads),
            join_s=max(60.0, self.running.ready_within_s / 2),
            patience_s=session.job.patience_s if self.number == 1 else 0.0,  # it may be spent
            ranks=self.nodes if len(self.nodes) < self.mailbox.nodes else [],
            pairs=links_matter(self.items, self.running.addresses),
            checkpoints=self._checkpoints(),
        )
        self.host = RankLayout.of(plan).host
        within_s = max(ARMED_WITHIN_S, plan.meet_s + 30.0)
        ended = self.machines.wait(
            within_s, lambda: self._armed() or bool(self._finished()), "start torchrun", self.nodes
        )
        session.laps.lap("launch torchrun")
        if ended is not None:
            return ended
        if self._armed():
            session.armed()
            self.running.settle()
            if plan.pairs:
                said = self.mailbox.pairs(self.number, self.host)
                self.mailbox.go(self.number, *sending_order(said, self.nodes, self.items))
            else:
                self.mailbox.go(self.number)
            ended = self._until_finished()
            session.laps.lap("measure")
            return ended
        ended = self.machines.wait(
            PEERS_REPORT_WITHIN_S,
            lambda: len(self._finished()) == len(self.nodes),
            "speak",
            self.nodes,
        )
        if ended is not None and ended.interrupted:
            return ended
        return blame(self._finished(), "", set())  # before any run began, none is to blame

    def _checkpoints(self) -> str:
        """The folder of the attempt's checkpoints, if it writes any."""
        return ""

    def under_way(self) -> str:
        """What the nodes say they are at, else the first run without a record; "" before any began."""
        if not self.mailbox.gone(self.number):
            return ""
        return (
            self.mailbox.under_way(self.number)
            or ([item.run_id for item in self._missing()] or [""])[0]
        )

    def _missing(self) -> list[Item]:
        """Items that have no record yet, in order."""
        recorded = self.mailbox.recorded()
        return [item for item in self.items if item.run_id not in recorded]

    def _armed(self) -> bool:
        return len(self.mailbox.armed(self.number)) == len(self.nodes)

    def _finished(self) -> list[dict[str, object]]:
        return self.mailbox.finished(self.number)

    def _until_finished(self) -> AttemptEnd:
        planned = {item.run_id for item in self.items}
        heard_at = float("inf")
        while True:
            missing = self._missing()
            under_way = (missing or self.items[-1:])[0].run_id
            self.session.watch(under_way, len(self.mailbox.recorded()), self.running.usd_so_far())
            finished = self._finished()
            ended = self._loss(missing)
            if ended is not None:
                return ended
            here = [node for node in self.nodes if node not in self.machines.gone]
            if len(here) < len(self.nodes) and not missing:
                return AttemptEnd(
                    how="finished"
                )  # those left may wait long for the one that is gone
            if any(node.get("exit_code") != 0 for node in finished):
                heard_at = min(heard_at, self.clock.monotonic())
                patience_s = (
                    LOSS_KNOWN_WITHIN_S if all_lost_a_peer(finished) else PEERS_REPORT_WITHIN_S
                )
                if len(finished) >= len(here) or self.clock.monotonic() > heard_at + patience_s:
                    return blame(finished, under_way, planned)
            elif len(finished) >= len(here):
                left = self._missing()
                if left:
                    reason = "the nodes finished without a record of it"
                    return AttemptEnd(how="failed", culprit=left[0].run_id, reason=reason)
                return AttemptEnd(how="finished")
            ended = self.machines.out_of_time()
            if ended is not None:
                return ended
            self.clock.sleep(POLL_S)

    def _loss(self, missing: Sequence[Item]) -> AttemptEnd | None:
        """What is lost, or about to be, if that ends this attempt."""
        lost = self.machines.lost()
        if lost is not None:
            needed = (
                {self.host, *(node for item in missing for node in item.needs)}
                if missing
                else set()
            )
            if not lost.nodes or not needed.isdisjoint(lost.nodes):
                return lost
            self.session.handle_loss(lost, meanwhile=True)
        going = self.machines.leaving()
        if going is None:
            return None
        left = self.session.remaining_work(missing, self._needs_s(missing), self.host)
        if decide(going, left).how == "go on":
            return None
        reason = f"node {min(going.nodes)}: it goes in {going.leaving_s or 0.0:.0f} s, says its interruption notice"
        return AttemptEnd(
            how="lost", reason=reason, interrupted=True, nodes=tuple(sorted(going.nodes))
        )

    def _needs_s(self, missing: Sequence[Item]) -> float:
        """Seconds that the run under way still needs; one that is late may be measured again while patience lasts."""
        if not missing:
            return 0.0
        if missing[0].run_id != self._at:
            self._at, self._since = missing[0].run_id, self.clock.monotonic()
        whole_s = expected_s(missing[0])
        late_s = self.clock.monotonic() - self._since - whole_s
        return (
            -late_s if late_s < 0 else max(0.0, min(whole_s, self.session.job.patience_s - late_s))
        )


class _ElasticAttempt(_Attempt):
    """A torchrun that goes on with fewer machines, and with those that come in the place of lost ones."""

    def __init__(self, session: Session, items: Sequence[Item]) -> None:
        super().__init__(session, items)
        self.nodes = [node for node in self.nodes if node in self.items[0].nodes]

    def _checkpoints(self) -> str:
        """By the planned id, so that a run that is tried again goes on where it was."""
        folder = self.running.checkpoints
        if folder is None:
            raise NotSupported(
                f"{self.items[0].run_id} needs a folder for checkpoints that all its machines see, and"
                f" {self.running.cluster.members[0].instance_type.provider} has none yet: take local hosts"
            )
        return str(folder / planned_id(self.items[0].run_id))

    def _armed(self) -> bool:
        return self.mailbox.armed(self.number) >= set(self._here())

    def _here(self) -> list[int]:
        return [node for node in self.nodes if node not in self.machines.gone]

    def _until_finished(self) -> AttemptEnd:
        """As long as the first machine is there, losses of others end nothing."""
        run_id = self.items[0].run_id
        lose_at = self.clock.monotonic() + self.session.job.lose_after_s.get(run_id, math.inf)
        while True:
            self.session.watch(run_id, len(self.mailbox.recorded()), self.running.usd_so_far())
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
                # a node lost while the others meet may end their torchrun: another goes on from the checkpoints
                return replace(failed, culprit="") if all_lost_a_peer(finished) else failed
            ended = self.machines.out_of_time()
            if ended is not None:
                return ended
            self.clock.sleep(POLL_S)

    def _welcome(self) -> None:
        """Let machines that joined compute with their own share from now on."""
        self.machines.all_here()
        joined = self.session.asked_s.keys() & self.mailbox.armed(self.number)
        for node in joined:
            self.session.at_work(node)
        if joined:
            self.running.settle()


def _sooner_if_dearer(stop_at: float, now: float, job: Job, running: RunningCluster) -> float:
    """When to stop on machines that cost more than those asked for: with the same dollars."""
    asked, got = job.cluster.total_usd_per_hour, running.cluster.total_usd_per_hour
    return now + (stop_at - now) * asked / got if asked and got and got > asked else stop_at
