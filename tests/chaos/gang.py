"""Simulate a torchrun over several machines: its start, its items in turn, and lost peers."""

from dataclasses import asdict

from tasks.node.processes import EXIT_ITEM_FAILED, EXIT_LOST_PEER
from tests.warehouse.builders import PROFILE, ROWS, record

ARM_S, GO_S = 6.0, 300.0  # a torchrun starts in so many seconds, and waits so long for its go
VALUES = {
    "profile": PROFILE,
    "probe": {"rows": [{"bytes": 4096, "seconds": 0.001}]},
}


class Gang:
    """A torchrun that makes the runs (items) of `plan` on the nodes that have joined it.

    Each item takes `item_s` seconds.
    """

    def __init__(self, plan, item_s):
        self.plan, self.item_s = plan, item_s
        self.members = {}
        self.item = None
        self.over = self.armed = False
        self._left = list(plan.items)
        self._began = False
        self._since_s = 0.0  # the first member came, or the item began
        self._hurt_s = None

    def join(self, rank, node, now_s):
        """Add the node that has this rank and has started its process."""
        self._since_s = self._since_s or now_s
        self.members[rank] = node

    def step(self, now_s):
        if self.over or not self.members:
            return
        if not self._began:
            self._begin(now_s)
        elif absent := self._absent():
            frozen = all(self.members[rank].alive for rank in absent)
            self._hurt_s = self._hurt_s or now_s
            if now_s >= self._hurt_s + (60.0 if frozen else 3.0):
                self._end(1, EXIT_LOST_PEER, "lost a peer")
        elif self.item is None:
            self._end(0, 0, "")
        elif now_s >= self._since_s + self.item_s:
            self._finish(self.item, now_s)

    def _begin(self, now_s):
        """Start in two stages, or give up after a time limit.

        When all ranks have joined, their nodes report that they are armed. When all have read the
        controller's go file, the first item starts.
        """
        attempt, nodes = self.plan.attempt, list(self.members.values())
        whole = set(self.members) == set(self.plan.rank_counts) and all(map(self._works, nodes))
        if not self.armed and whole and now_s >= self._since_s + ARM_S:
            self.armed = True
            for node in nodes:
                node.say(f"armed-{attempt}.json", {"attempt": attempt})
        elif self.armed and all(node.reads(f"go-{attempt}.json") for node in nodes):
            self._began = True
            self._start_next(now_s)
        elif now_s >= self._since_s + (GO_S if self.armed else self.plan.meet_s):
            self._end(1, EXIT_LOST_PEER, "nobody else came")

    def _absent(self):
        """Return the lost ranks that the current item needs; after the last item, all lost."""
        needed = {*self.item.nodes, self.plan.host} if self.item else set(self.members)
        return [rank for rank in needed if not self._works(self.members[rank])]

    def _works(self, node):
        return node.works and node.gang is self

    def _start_next(self, now_s):
        index = len(self.plan.items) - len(self._left)
        self.item, self._since_s = self._left.pop(0) if self._left else None, now_s
        for rank in self.item.nodes if self.item else ():
            self.members[rank].progress(self.plan.attempt, self.item.run_id, index)

    def _finish(self, item, now_s):
        first = self.members[item.nodes[0]]
        if first.crashes(item.run_id):
            self._end(1, EXIT_ITEM_FAILED, "the workload raised ValueError", item.run_id)
            return
        first.record(item.run_id, record_of(self.plan, item, first.clock_unix()))
        self._start_next(now_s)

    def _end(self, code, worker_code, reason, culprit=""):
        self.over = True
        for node in self.members.values():
            if self._works(node):
                node.finish(self.plan.attempt, code, worker_code, reason, culprit)


def record_of(plan, item, unix):
    """Return an item's record as the worker writes it, ended at `unix` by the machine's clock."""
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
        values=dict(VALUES.get(item.kind, ROWS["record"]["values"])),
        devices=[asdict(device) | {"threads": 1} for device in plan.expected],
    )
