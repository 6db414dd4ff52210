"""One torchrun over several machines: armed, item after item, lost peers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tasks.node.processes import EXIT_ITEM_FAILED, EXIT_LOST_PEER
from tasks.node.record import Item, Plan, RankLayout
from tests.warehouse.builders import record

if TYPE_CHECKING:
    from tests.chaos.node import Node

_PROFILE = {
    "batch": 8,
    "forward_s": 0.1,
    "backward_s": 0.2,
    "optimizer_s": 0.01,
    "input_s": None,
    "peak_bytes": None,
}
_FACTS = {"parameters": 1000, "gradient_bytes": 4000}
VALUES: dict[str, dict[str, Any]] = {
    "train": {"step_s": 0.5, "warmup_s": 1.0, "steps_s": 5.0} | _FACTS,
    "profile": {"rows": [_PROFILE], "buckets": [{"bytes": 4000, "ready_fraction": 0.5}]} | _FACTS,
    "probe": {"rows": [{"bytes": 4096, "seconds": 0.001}]},
}


class Gang:
    """The attempt `plan` over the nodes that have joined it. `seconds` are those of each item."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self.plan, self.seconds = plan, seconds
        self.layout = RankLayout.of(plan)
        self.members: dict[int, Node] = {}
        self.index = -1
        self.over = False
        self._first: datetime | None = None
        self._armed: datetime | None = None
        self._since: datetime | None = None
        self._hurt: datetime | None = None

    def join(self, rank: int, node: Node, now: datetime) -> None:
        """A node has started its part."""
        self.members[rank] = node
        self._first = self._first or now

    def leave(self, node: Node, now: datetime) -> None:
        """It was asked to end it."""
        if node in self.members.values():
            self._hurt = self._hurt or now

    def step(self, now: datetime) -> None:
        """A moment later."""
        if self.over or self._first is None:
            return
        if self.index < 0:
            self._begin(now)
        elif self._missing():
            frozen = all(self.members[rank].alive for rank in self._missing())
            self._hurt = self._hurt or now
            if now >= self._hurt + timedelta(seconds=60.0 if frozen else 3.0):
                self._end(1, EXIT_LOST_PEER, "lost a peer")
        else:
            self._go_on(now)

    def _begin(self, now: datetime) -> None:
        assert self._first is not None
        whole = set(self.members) == set(self.layout.devices) and all(
            offer.works for offer in self.members.values()
        )
        if self._armed is None and whole and now >= self._first + timedelta(seconds=6.0):
            self._armed = now
            for offer in self.members.values():
                offer.say(f"armed-{self.plan.attempt}.json", {"attempt": self.plan.attempt})
        elif self._armed is not None and all(
            offer.reads(f"go-{self.plan.attempt}.json") for offer in self.members.values()
        ):
            self._start(0, now)
        elif now >= self._first + timedelta(
            seconds=self.plan.meet_s if self._armed is None else 300.0
        ):
            self._end(1, EXIT_LOST_PEER, "nobody else came")

    def _missing(self) -> list[int]:
        """Those that the item under way waits for in vain; at the end, all."""
        item = self._item()
        needed = {*item.nodes, self.layout.host} if item else set(self.members)
        return [rank for rank in sorted(needed) if not self.members[rank].works]

    def _item(self) -> Item | None:
        return self.plan.items[self.index] if self.index < len(self.plan.items) else None

    def _start(self, index: int, now: datetime) -> None:
        self.index, self._since = index, now
        item = self._item()
        for rank, one in self.members.items():
            if item and rank in item.nodes:
                one.progress(self.plan.attempt, item.run_id, index)

    def _go_on(self, now: datetime) -> None:
        item = self._item()
        if item is None:
            self._end(0, 0, "")
            return
        assert self._since is not None
        if now < self._since + timedelta(seconds=self.seconds):
            return
        first = self.members[item.nodes[0]]
        if first.crashes(item.run_id):
            self._end(1, EXIT_ITEM_FAILED, "the workload raised ValueError", culprit=item.run_id)
            return
        used = [
            {"name": self.members[rank].device, "count": 1, "threads": 1} for rank in item.nodes
        ]
        first.record(
            item.run_id, record_of(self.plan, item, first.clock_unix()) | {"devices": used}
        )
        self._start(self.index + 1, now)

    def _end(self, code: int, worker_code: int, reason: str, culprit: str = "") -> None:
        self.over = True
        for offer in self.members.values():
            if offer.works and offer.gang is self:
                offer.finish(self.plan.attempt, code, worker_code, reason, culprit)


def record_of(plan: Plan, item: Item, unix: float) -> dict[str, Any]:
    """As the worker writes it, by a clock that may be wrong."""
    return record(
        item.run_id,
        lease_id=plan.lease_id,
        attempt=plan.attempt,
        kind=item.kind,
        item=asdict(item),
        started_unix=unix - 5.0,
        ended_unix=unix,
        fingerprint="f1",
        torch_version="2.13.0",
        values=dict(VALUES[item.kind]),
    )
