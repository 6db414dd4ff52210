"""One torchrun over the machines that take part: from the plan to the last record, or to what ended it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..node.record import Item, Plan, RankLayout
from .job import POLL_S, Job, Stopwatch, Watch
from .liveness import Decision, MachineLoss, Machines, expected_s
from .outcomes import AttemptEnd, all_lost_a_peer, blame

ARMED_WITHIN_S = 90.0
PEERS_REPORT_WITHIN_S = (
    5.0  # of the first node that failed, so that the one that was hit is heard and not only its peers
)
LOSS_KNOWN_WITHIN_S = 45.0  # where all who speak just lost a peer: the provider, or silence, tells which

OnNotice = Callable[[MachineLoss, Sequence[Item], float, int], Decision]
"""Called with machines that will go, items without a record, the seconds that the first still needs, and the host."""


class Attempt:
    """`nodes` at work on `items`, which need no other.

    `on_armed` is called once all are armed, `on_unneeded_loss` where machines are lost that none of `items` needs.
    """

    def __init__(
        self,
        machines: Machines,
        job: Job,
        number: int,
        items: Sequence[Item],
        *,
        watch: Watch,
        laps: Stopwatch,
        on_armed: Callable[[], object],
        on_notice: OnNotice,
        on_unneeded_loss: Callable[[AttemptEnd], object],
    ) -> None:
        self.machines, self.job, self.number, self.items = machines, job, number, list(items)
        self.running, self.mailbox, self.clock = machines.running, machines.mailbox, machines.clock
        self.nodes = machines.here
        self.watch, self.laps, self.on_notice, self.on_unneeded_loss = watch, laps, on_notice, on_unneeded_loss
        self.on_armed = on_armed
        self._at, self._since = "", 0.0

    def run(self) -> AttemptEnd:
        """How it ended."""
        join_s = max(60.0, self.running.ready_within_s / 2)
        plan = Plan(
            lease_id=self.job.lease_id,
            attempt=self.number,
            addresses=list(self.running.addresses),
            expected=list(self.job.expected),
            workloads=[spec for spec, _ in self.job.files],
            items=self.items,
            join_s=join_s,
            patience_s=self.job.patience_s if self.number == 1 else 0.0,  # it may be spent
            ranks=self.nodes if len(self.nodes) < self.mailbox.nodes else [],
        )
        self.host = RankLayout.of(plan).host
        self.mailbox.put_plan(plan)
        within_s = max(ARMED_WITHIN_S, plan.meet_s + 30.0)
        ended = self.machines.wait(
            within_s, lambda: self._armed() or bool(self._finished()), "start torchrun", lambda: self.nodes
        )
        self.laps.lap("launch torchrun")
        if ended is not None:
            return ended
        if self._armed():
            self.on_armed()
            self.running.settle()
            self.mailbox.go(self.number)
            ended = self._until_finished()
            self.laps.lap("measure")
            return ended
        ended = self.machines.wait(
            PEERS_REPORT_WITHIN_S, lambda: len(self._finished()) == len(self.nodes), "speak", lambda: self.nodes
        )
        if ended is not None and ended.interrupted:
            return ended
        return blame(self._finished(), "", set())  # before any run began, none is to blame

    def under_way(self) -> str:
        """What the nodes say they are at, else the first run without a record; "" before any began."""
        if not self.mailbox.gone(self.number):
            return ""
        return self.mailbox.under_way(self.number) or ([item.run_id for item in self.missing()] or [""])[0]

    def missing(self) -> list[Item]:
        """Items that have no record yet, in order."""
        recorded = self.mailbox.recorded()
        return [item for item in self.items if item.run_id not in recorded]

    def _armed(self) -> bool:
        return self.mailbox.armed(self.number) == len(self.nodes)

    def _finished(self) -> list[dict[str, object]]:
        return self.mailbox.finished(self.number)

    def _until_finished(self) -> AttemptEnd:
        planned = {item.run_id for item in self.items}
        heard_at = float("inf")
        while True:
            missing = self.missing()
            under_way = (missing or self.items[-1:])[0].run_id
            self.watch(under_way, len(self.mailbox.recorded()), self.running.usd_so_far())
            finished = self._finished()
            ended = self._loss(missing)
            if ended is not None:
                return ended
            here = [node for node in self.nodes if node not in self.machines.gone]
            if len(here) < len(self.nodes) and not missing:
                return AttemptEnd(how="finished")  # those left may wait long for the one that is gone
            if any(node.get("exit_code") != 0 for node in finished):
                heard_at = min(heard_at, self.clock.monotonic())
                patience_s = LOSS_KNOWN_WITHIN_S if all_lost_a_peer(finished) else PEERS_REPORT_WITHIN_S
                if len(finished) >= len(here) or self.clock.monotonic() > heard_at + patience_s:
                    return blame(finished, under_way, planned)
            elif len(finished) >= len(here):
                left = self.missing()
                if left:
                    return AttemptEnd(
                        how="failed", culprit=left[0].run_id, reason="the nodes finished without a record of it"
                    )
                return AttemptEnd(how="finished")
            ended = self.machines.out_of_time()
            if ended is not None:
                return ended
            self.clock.sleep(POLL_S)

    def _loss(self, missing: Sequence[Item]) -> AttemptEnd | None:
        """What is lost, or about to be, if that ends this attempt."""
        lost = self.machines.lost()
        if lost is not None:
            needed = {self.host, *(node for item in missing for node in item.nodes)} if missing else set()
            if not lost.nodes or not needed.isdisjoint(lost.nodes):
                return lost
            self.on_unneeded_loss(lost)
        going = self.machines.leaving()
        if going is None or self.on_notice(going, missing, self._needs_s(missing), self.host).how == "go on":
            return None
        first = min(going.nodes)
        reason = f"node {first}: it goes in {going.leaving_s or 0.0:.0f} s, says its interruption notice"
        return AttemptEnd(how="lost", reason=reason, interrupted=True, nodes=tuple(sorted(going.nodes)))

    def _needs_s(self, missing: Sequence[Item]) -> float:
        """Seconds that the run under way still needs; one that is late may be measured again while patience lasts."""
        if not missing:
            return 0.0
        if missing[0].run_id != self._at:
            self._at, self._since = missing[0].run_id, self.clock.monotonic()
        whole_s = expected_s(missing[0])
        late_s = self.clock.monotonic() - self._since - whole_s
        return -late_s if late_s < 0 else max(0.0, min(whole_s, self.job.patience_s - late_s))
