"""Run one job (the runs of a launch) on an acquired cluster, in one or more attempts.

An attempt is one execution of torchrun, which measures several runs. After a failure, the next
attempt leaves out the failed run. After a loss of machines, the next attempt uses fewer or other
machines.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.domain.workload import Mode

from ..node.record import ELASTIC, Item, Plan
from ..node.requirements import INSTALL_S
from ..providers.base import NoCapacity, Provider, ProviderError, RunningCluster
from .job import POLL_S, Clock, Job, Served, Stopwatch, Watch, placement, write_rows
from .liveness import Machines, nodes_lost
from .mailbox import MachineLog, Mailbox, WorkloadChanged
from .outcomes import AttemptEnd, Row, RunSetups, all_lost_a_peer, blame, launch_row, run_row
from .rank_order import links_matter, sending_order

COMPILE_S = 600.0  # added to the collectives' timeout: ranks wait for each other while they compile
MOST_ATTEMPTS = 3  # maximum attempts that fail because of a run; lost machines do not count
ARMED_MARGIN_S = 30.0  # extra time for the workers of an attempt to join their process group
PEERS_REPORT_WITHIN_S = 5.0  # wait after the first failure, whose cause may be on another node
# Maximum replacements per launch. If a market interrupts more machines, start-ups cost too much.
MOST_REPLACEMENTS = 3
_MOST_ELASTIC = 20  # the same for an elastic run, which measures the cost of losing machines
# Seconds of a run besides its timed steps (`Item.most_s`): to build the model, to warm up, to agree
# between the ranks, and to write and copy the record.
_OVERHEAD_S = 10.0
LOSS_KNOWN_WITHIN_S = 45.0  # wait for the provider or a missed heartbeat to identify the lost node


def serve(
    provider: Provider, job: Job, *, stop_at: float, watch: Watch, clock: Clock | None = None
) -> Served:
    """Rent the machines of `job` from `provider`, and measure the runs of `job` on them.

    The function returns soon after `stop_at` at the latest. It returns earlier if no run remains,
    or if a refusal, an error or a loss of machines ends the launch. The machines are always
    released. Refused requests, errors of the provider and lost machines become rows of the result.
    ProviderError, OSError and WorkloadChanged are not raised, so that the campaign can go on with
    its next launch.

    Args:
        provider: acquires the machines.
        job: the runs and their cluster.
        stop_at: the time to stop, as `clock.monotonic` returns it.
        watch: a callback that receives the progress of the job, see `job.Watch`.
        clock: None means the real clock.
    """
    result = Served(lease_id=job.lease_id)
    laps = Stopwatch(result.seconds, clock or Clock())
    try:
        with provider.acquire(
            job.cluster,
            lease_id=job.lease_id,
            deadline_s=job.deadline_s,
            seed=job.seed,
            max_usd_per_hour=job.max_usd_per_hour,
        ) as running:
            result.mailbox = running.mailbox
            session = Session(running, job, result, stop_at=stop_at, watch=watch, laps=laps)
            try:
                session.serve()
            except BaseException as error:
                session.lose(_lost_by(error, running.mailbox))
                if not isinstance(error, OSError | WorkloadChanged):
                    raise
            finally:
                session.finish()
    except NoCapacity as error:
        result.unavailable = True
        not_served(result, job, "refused", str(error))
    except ProviderError as error:
        not_served(result, job, "failed", str(error))
    except OSError as error:
        why = f"{error}: free some disk space, and run `srift reap` in case machines remain"
        not_served(result, job, "failed", why)
    finally:
        write_rows(result)  # again, because deleted scratch files may have made room on a full disk
    laps.lap("release hosts")
    return result


class Session:
    """Runs one job on one acquired cluster until all runs are recorded or time is up.

    running: the acquired machines.
    served: the result of the launch, which the session fills in.
    stop_at: the time to stop, on the clock of `laps`. The session stops earlier if the acquired
        machines cost more than planned.
    watch: a callback that receives the progress, see `job.Watch`.
    laps: measures the seconds of each phase of the launch.
    """

    def __init__(
        self,
        running: RunningCluster,
        job: Job,
        result: Served,
        *,
        stop_at: float,
        watch: Watch,
        laps: Stopwatch,
    ) -> None:
        self.running, self.job, self.served = running, job, result
        self.watch, self.clock, self.laps = watch, laps.clock, laps
        quote, price = job.cluster.total_usd_per_hour, running.cluster.total_usd_per_hour
        if quote and price and price > quote:  # twice the price halves the remaining time
            now = self.clock.monotonic()
            stop_at = now + (stop_at - now) * quote / price
        self.mailbox = Mailbox(path=running.mailbox, nodes=len(job.cluster.members))
        self.machines = Machines(running, self.mailbox, stop_at, self.clock, job.fetched)
        self.log = MachineLog(self.mailbox, running.cluster)
        self.run_setups = {run_id: dict(setup) for run_id, setup in job.run_setups.items()}
        self.remaining = list(job.items)
        self.attempt: _Attempt | None = None
        self.attempts = self.replaced = 0
        self.faults: Counter[Any] = Counter()  # by process key
        # an estimate until the first start is measured
        self.start_up_s = running.ready_within_s / 2

    def _prepare(self) -> None:
        """Write the run setups, data addresses, list of machines and code to the mailbox.

        If this process dies, these files allow another process to load the launch's records.
        """
        self._note_machines()
        # before `put_data`, after which machines download
        self.running.note_download(self.job.download_usd)
        self.mailbox.put_data(self.job.fetched)
        self.log.write()
        self.mailbox.put_workloads(self.job.files)
        self.laps.lap("start hosts")

    def serve(self) -> None:
        """Run attempts until no run remains, time is up, or a loss of machines ends the launch."""
        self._prepare()
        losses: list[str] = []
        while self.remaining:
            if self.attempt is not None:
                self.running.unsettle()
            end = self._wait_for_machines() or self._run_attempt()
            self.remaining = self._without(self.mailbox.recorded())
            if end.how == "time" or (end.how == "lost" and not end.nodes):
                self.lose(end)
                return
            if end.how == "lost":
                losses.append(self.handle_loss(end))
                end = AttemptEnd(how="lost")
            elif end.how == "failed":
                self._handle_fault(end)
            self.served.outcome = "; ".join([str(end), *losses])

    def lose(self, end: AttemptEnd) -> None:
        """Store in `served` that the launch ended early, and why.

        Unless time is up, a row about the current run is added to `served.rows`. If no run is being
        measured, the row is about the launch.
        """
        self.served.outcome = str(end)
        if end.how != "time":
            under_way = self.attempt.under_way() if self.attempt is not None else ""
            self._add_row(replace(end, culprit=end.culprit or under_way))

    def finish(self) -> None:
        """Tell the agents on the machines to exit, and store the results in `served`."""
        with suppress(OSError):  # on a full disk, agents run until their machines end
            self.mailbox.done()
        self.served.usd = self.running.usd_so_far()
        self.served.recorded = self.mailbox.recorded()

    def plan(self, items: Sequence[Item]) -> Plan:
        """Write the plan of the next attempt, which measures `items`, and return the plan."""
        self.attempts += 1
        used = {node for item in items for node in item.nodes}
        checkpoints = ""
        if items and items[0].kind == ELASTIC:
            assert self.running.checkpoints is not None  # elastic runs need local hosts
            checkpoints = str(self.running.checkpoints / items[0].run_id)
        names = {item.workload for item in items}
        workloads = [spec for spec, _ in self.job.files if spec.name in names]
        compiles = any(Mode(switches=item.switches).compiled for item in items)
        installs = any(spec.requirements and not spec.environment for spec in workloads)
        plan = Plan(
            lease_id=self.job.lease_id,
            attempt=self.attempts,
            addresses=self.running.addresses,
            expected=list(self.job.expected),
            workloads=workloads,
            items=list(items),
            timeout_s=Plan.timeout_s + COMPILE_S * compiles,
            prepare_s=INSTALL_S * installs,
            join_s=max(60.0, self.running.ready_within_s / 2),
            # only the first attempt repeats disturbed measurements
            patience_s=self.job.patience_s if self.attempts == 1 else 0.0,
            ranks=[node for node in self.machines.here if node in used],
            pairs=links_matter(items, self.running.addresses),
            checkpoints=checkpoints,
        )
        self.mailbox.put_plan(plan)
        return plan

    def handle_loss(self, end: AttemptEnd) -> str:
        """Replace the lost machines (`end.nodes`) if remaining runs need them.

        Adds a row for the loss to `served.rows`. Removes from `remaining` the runs that can no
        longer be measured. Requests no machine after MOST_REPLACEMENTS replacements, or if too
        little time or money is left.

        Returns the reason of the loss. If no remaining run can be measured, the result also says
        why there is no replacement.
        """
        nodes = frozenset(end.nodes)
        self._forget(nodes)
        self.remaining = self._without(self.mailbox.recorded())
        affected_items = [item for item in self.remaining if not nodes.isdisjoint(item.needs)]
        shortest_s = min((item.most_s for item in affected_items), default=0.0) + _OVERHEAD_S
        why = ""
        if self.replaced >= MOST_REPLACEMENTS:
            why = f"{MOST_REPLACEMENTS} machines were replaced already"
        elif self.clock.monotonic() + self.start_up_s + shortest_s > self.machines.stop_at:
            why = "too little time or money is left to start another machine"
        for node in sorted(nodes & {node for item in affected_items for node in item.needs}):
            why = why or self._replace(node)
        possible = self._possible(self.remaining)
        if self.remaining and not possible:
            why = f"{end.reason}; all remaining runs need the machine, and {why}"
            end = replace(end, reason=why)
        if end.culprit in {item.run_id for item in possible}:
            end = replace(end, culprit="")  # the run is measured in the next attempt
        self.remaining = possible
        self._add_row(end)
        return end.reason

    def lose_meanwhile(self, run_id: str, end: AttemptEnd) -> None:
        """Store a loss of machines in the setup of the elastic run `run_id`. Request replacements.

        An elastic run measures the cost of losing a machine. The loss does not end the run:
        replacements can join it later. After _MOST_ELASTIC replacements, no more are requested.
        """
        now_unix = self.running.now_unix()
        losses = [{"node": node, "lost_unix": now_unix} for node in end.nodes]
        self.run_setups[run_id].setdefault("losses", []).extend(losses)
        self.mailbox.put_setups(self.run_setups)
        self._forget(frozenset(end.nodes))
        for node in end.nodes if self.replaced < _MOST_ELASTIC else ():
            self._replace(node)

    def _handle_fault(self, end: AttemptEnd) -> None:
        """Remove from `remaining` the failed run, and runs that can no longer be measured.

        These runs can no longer be measured:

        - Runs that need a machine in `end.nodes` (the machines without the expected devices).
        - Runs with a `_process_key` for which MOST_ATTEMPTS attempts have failed.

        If the failed run has no record, a row for this run is added to `served.rows`. If the failed
        run is unknown, a row is added only after MOST_ATTEMPTS failures. The row is about the
        elastic run, or about the launch if the attempt had no elastic run.
        """
        assert self.attempt is not None
        first = self.attempt.items[0]
        key = self._process_key(first)
        self.faults[key] += 1
        last = self.faults[key] == MOST_ATTEMPTS
        if last and first.kind == ELASTIC:
            end = replace(end, culprit=first.run_id)
        if end.culprit not in self.mailbox.recorded() and (end.culprit or last):
            self._add_row(end)
        self.machines.gone.update(end.nodes)  # machines without the devices they were bought with
        self.served.unavailable |= bool(end.nodes)
        self.remaining = self._possible(self._without({end.culprit}))
        if last:
            self.remaining = [item for item in self.remaining if self._process_key(item) != key]

    def _forget(self, nodes: frozenset[int]) -> None:
        """Stop waiting for the machines in `nodes`, and log when they were lost."""
        self.machines.drop(nodes)
        for node in nodes:
            state = self.machines.states[node]
            interrupted = state.interrupted or state.leaving_s is not None
            self.log.lost(node, self.laps.passed_s, interrupted=interrupted)

    def _wait_for_machines(self) -> AttemptEnd | None:
        """Wait for the requested machines. Return None, or why the wait ended early.

        The first attempt waits for all machines. Later attempts do not wait if the ready machines
        can measure a remaining run.
        """
        if self.machines.all_here() or (self.attempt is not None and self._runnable()):
            return None
        if self.attempt is not None:
            self.plan([])  # so that a new machine does not join the previous attempt
        end = self.machines.wait_for_all()
        self.laps.lap("start hosts")
        if self.attempt is None:
            self.start_up_s = self.laps.passed_s
        return end

    def _run_attempt(self) -> AttemptEnd:
        """Run one attempt with the runs that can be measured now, and return how it ended."""
        items = self._runnable()
        keys = [self._process_key(item) for item in items]
        # First measure the workloads without a special environment, whose key is ().
        key = () if () in keys else keys[0]
        plan = self.plan([item for item in items if self._process_key(item) == key])
        self.attempt = _Attempt(self, plan)
        try:
            end = self.attempt.run()
        finally:
            self.laps.lap("measure" if self.attempt.is_measuring else "launch torchrun")
        if end.how == "lost" and not end.culprit:
            end = replace(end, culprit=self.attempt.under_way())
        self.attempt.is_measuring = False
        return end

    def _process_key(self, item: Item) -> tuple[Any, ...]:
        """Return a key. One execution of torchrun can measure all runs with the same key."""
        if item.kind == ELASTIC:
            return (item.run_id,)
        specs = (spec for spec, _ in self.job.files if spec.name == item.workload)
        return next((spec.process_key for spec in specs), ())

    def _runnable(self) -> list[Item]:
        """Return the remaining runs whose machines are all ready to measure."""
        here = set(self.machines.here)
        return [item for item in self.remaining if here.issuperset(item.needs)]

    def _possible(self, items: Iterable[Item]) -> list[Item]:
        """Return the runs in `items`, except runs that need a lost machine."""
        return [item for item in items if self.machines.gone.isdisjoint(item.needs)]

    def _without(self, run_ids: set[str]) -> list[Item]:
        """Return the remaining runs whose ids are not in `run_ids`."""
        return [item for item in self.remaining if item.run_id not in run_ids]

    def _replace(self, node: int) -> str:
        """Request a machine to replace `node`. Return the reason of a failure, else ""."""
        requested_s = self.laps.passed_s
        try:
            if not self.running.replace(node):
                return "no other machine is available"
        except (ProviderError, OSError) as error:
            return f"no other machine could be requested: {error}"
        self.replaced += 1
        self.machines.gone.discard(node)
        self.machines.awaited.add(node)
        self.log.ordered(node, self.running.cluster.members[node], requested_s)
        self._note_machines()
        return ""

    def _note_machines(self) -> None:
        """Store market, zone, price and image of the machines in the setups of remaining runs."""
        for item in self.remaining:
            members = [self.running.cluster.members[node] for node in item.nodes]
            image = {"image_id": self.running.image_id or None}
            self.run_setups[item.run_id].update(placement(members) | image)
        self.mailbox.put_setups(self.run_setups)

    def _add_row(self, end: AttemptEnd) -> None:
        """Add a row to `served.rows` that says how the run `end.culprit` ended.

        If `end` names no run, or if the run already has a record, the row describes the launch.
        """
        lease_id, run_id = self.job.lease_id, end.culprit
        why = ("interrupted" if end.interrupted else "failed", end.reason)
        if run_id and run_id not in self.mailbox.recorded():
            row = run_row(lease_id, run_id, self.run_setups[run_id], *why)
        else:
            row = _launch_row(self.served, self.job, self.run_setups, *why)
        self.served.rows.append(row)
        write_rows(self.served)


class _Attempt:
    """Follows one execution of torchrun, which measures the runs of `plan`, until it ends.

    An elastic run measures the cost of losing a machine, and is the only run of its attempt.
    """

    def __init__(self, session: Session, plan: Plan) -> None:
        self.session, self.plan, self.items = session, plan, plan.items
        self.machines, self.running = session.machines, session.running
        self.mailbox, self.clock = session.mailbox, session.clock
        self.elastic = plan.elastic is not None
        self.nodes = list(plan.rank_counts)
        self.armed: set[int] = set()  # nodes whose workers have joined the process group
        self.is_measuring = False
        self.lose_at = math.inf
        self._at, self._since = "", 0.0  # the current run, and when it began

    def under_way(self) -> str:
        """Return the id of the current run of this attempt; "" before runs are measured.

        If no machine reports a current run, the first run without a record counts as current. If
        every run has a record, the result is "".
        """
        run_ids = self.mailbox.under_way(self.plan.attempt)
        current = [item for item in self.items if item.run_id in run_ids][-1:] or self._unrecorded()
        return current[0].run_id if current and self.is_measuring else ""

    def _unrecorded(self) -> list[Item]:
        """Return the runs of this attempt that have no record yet, in the order of `items`."""
        run_ids = self.mailbox.recorded()
        return [item for item in self.items if item.run_id not in run_ids]

    def run(self) -> AttemptEnd:
        """Poll the machines and their files until this attempt ends. Return how it ended."""
        within_s = self.plan.meet_s + ARMED_MARGIN_S
        arm_by = self.clock.monotonic() + within_s
        failed_at = math.inf
        while missing := self._unrecorded():
            here = {node for node in self.nodes if node not in self.machines.gone}
            if ended := self._loss(missing) or self.machines.out_of_time():
                return ended
            armed_nodes, now = self.mailbox.armed(self.plan.attempt), self.clock.monotonic()
            if not self.is_measuring and armed_nodes >= here:
                self._go()
            reports = self.mailbox.finished(self.plan.attempt)
            # in an elastic run, torchrun's result counts only on the host of the rendezvous store
            if self.elastic and self.is_measuring:
                here = {self.plan.host}
                reports = [report for report in reports if report["node"] in here]
            if any(report.get("exit_code") != 0 for report in reports):
                failed_at = min(failed_at, now)
            lost_peers = all_lost_a_peer(reports)
            patience_s = LOSS_KNOWN_WITHIN_S if lost_peers else PEERS_REPORT_WITHIN_S
            if len(reports) >= len(here) or now > failed_at + patience_s:
                run_ids = [item.run_id for item in self.items if self.is_measuring]
                first = missing[0].run_id if self.is_measuring else ""
                ended = blame(reports, first, run_ids)
                # A node that is lost during the rendezvous may end torchrun. The elastic run is not
                # at fault, and the next attempt resumes it.
                return replace(ended, culprit="") if self.elastic and lost_peers else ended
            if not self.is_measuring and now > arm_by:
                return nodes_lost(
                    here - armed_nodes, f"did not start torchrun within {within_s:.0f} s"
                )
            if self.is_measuring:
                self._follow(missing[0].run_id, armed_nodes)
            self.clock.sleep(POLL_S)
        return AttemptEnd(how="finished")

    def _go(self) -> None:
        """Let the waiting workers start, in the fastest rank order."""
        session, plan, self.is_measuring = self.session, self.plan, True
        session.laps.lap("launch torchrun")
        if plan.attempt == 1:
            session.log.at_work(session.laps.passed_s)
        self.running.settle()
        order: tuple[Sequence[int], str] = ((), "")
        if plan.pairs:
            pairs = self.mailbox.pairs(plan.attempt, plan.host)
            order = sending_order(pairs, self.nodes, self.items)
        self.mailbox.go(plan.attempt, *order)
        lose_after_s = session.job.lose_after_s.get(self.items[0].run_id, math.inf)
        self.lose_at = self.clock.monotonic() + lose_after_s

    def _follow(self, run_id: str, armed_nodes: set[int]) -> None:
        """Report the current run to the user, and stop a machine if an elastic run requires it.

        An elastic run measures the cost of losing a machine. The machine with the highest rank is
        stopped at the planned time.

        armed_nodes: the nodes whose workers have joined the process group.
        """
        session = self.session
        session.watch(run_id, len(self.mailbox.recorded()), self.running.usd_so_far())
        if not self.elastic:
            return
        if self.clock.monotonic() > self.lose_at:
            self.lose_at = math.inf
            self.running.revoke(self.nodes[-1])
        self.machines.all_here()
        if not armed_nodes <= self.armed:  # a replacement has joined the run
            self.running.settle()  # applies its CPU share
        self.armed = armed_nodes

    def _loss(self, missing: Sequence[Item]) -> AttemptEnd | None:
        """Handle lost machines and interruption notices.

        Returns an AttemptEnd if the attempt cannot continue, and None if it continues.

        missing: the attempt's runs that have no record yet, the current run first.
        """
        session, loss = self.session, self.machines.lost()
        if loss is not None:
            needed_nodes = {self.plan.host, *(node for item in missing for node in item.needs)}
            if not (loss.nodes and self.is_measuring) or not needed_nodes.isdisjoint(loss.nodes):
                return loss
            if self.elastic:
                session.lose_meanwhile(missing[0].run_id, loss)
            else:
                session.handle_loss(loss)
        now, run = self.clock.monotonic(), missing[0]
        if run.run_id != self._at:
            self._at, self._since = run.run_id, now
        going, leaving_s = self.machines.leaving()
        is_needed = self.plan.host in going or not going.isdisjoint(run.needs)
        ends_before = self._since + run.most_s + _OVERHEAD_S <= now + leaving_s
        if self.elastic or not is_needed or ends_before:
            return None
        notice = f"got an interruption notice and ends in {leaving_s:.0f} s"
        return nodes_lost(going, notice, interrupted=True)


def _lost_by(error: BaseException, mailbox: Path) -> AttemptEnd:
    """Return an AttemptEnd that says how the exception `error` stopped a launch.

    mailbox: the mailbox of the launch. The reason names this folder if `error` is an OSError.
    """
    stopped, kind = not isinstance(error, Exception), type(error).__name__
    reason = str(error) or kind
    if isinstance(error, OSError):
        reason = f"the mailbox at {mailbox} could not be used: {error}"
    elif stopped:
        reason = f"the launching process was stopped ({kind})"
    return AttemptEnd(how="lost", reason=reason, interrupted=stopped)


def not_served(result: Served, job: Job, status: str, why: str) -> Served:
    """Set the outcome of a launch that got no machines, add a row for it, and return `result`.

    status: "refused" or "failed".
    """
    result.outcome = f"{status}: {why}"
    result.rows.append(_launch_row(result, job, job.run_setups, status, why))
    return result


def _launch_row(result: Served, job: Job, run_setups: RunSetups, status: str, why: str) -> Row:
    """Return a row about the launch. The row's id differs from all ids in `result.rows`."""
    number = sum(row["kind"] == "launch" for row in result.rows)
    return launch_row(job.lease_id, job.cluster.name, run_setups, status, why, number)
