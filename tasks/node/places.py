"""Who is who in a launch: the ranks of torchrun, node by node, and those that serve an item. Standard library.

Ranks count through the devices of the first node that takes part, then of the second, and so on, as torchrun's static
rendezvous numbers them. A node has as many ranks as the item that uses most of its devices needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .record import Item, Plan


@dataclass(frozen=True, kw_only=True)
class Places:
    """`devices` of each node that takes part, by its index in the cluster, in the order of their ranks."""

    devices: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan) -> Places:
        """The places of `plan`. Raises ValueError where an item wants a node that takes no part."""
        devices = dict.fromkeys(plan.ranks or range(len(plan.addresses)), 1)
        for item in plan.items:
            for node, used in zip(item.nodes, item.used, strict=True):
                if node not in devices:
                    raise ValueError(f"{item.run_id} needs node {node}, which takes no part in this attempt")
                devices[node] = max(devices[node], used)
        return cls(devices=devices)

    @property
    def world(self) -> int:
        """Ranks of the whole launch."""
        return sum(self.devices.values())

    @property
    def host(self) -> int:
        """The node that the others meet at."""
        return next(iter(self.devices))

    def order(self, node: int) -> int:
        """The node's place among those that take part, which torchrun calls its rank."""
        return list(self.devices).index(node)

    def first_rank(self, node: int) -> int:
        """The rank of the node's first device."""
        nodes = list(self.devices)
        return sum(self.devices[one] for one in nodes[: nodes.index(node)])

    def place(self, rank: int) -> tuple[int, int]:
        """(node, device) of a rank."""
        for node, count in self.devices.items():
            if rank < count:
                return node, rank
            rank -= count
        raise ValueError(f"no rank {rank} beyond the last of {self.world}")

    def ranks(self, item: Item) -> tuple[int, ...]:
        """Who serves `item`, in ascending order: the first devices of each of its nodes."""
        firsts = ((self.first_rank(node), used) for node, used in zip(item.nodes, item.used, strict=True))
        return tuple(sorted(first + local for first, used in firsts for local in range(used)))

    def label(self, rank: int) -> str:
        """What to call a rank to a person: its node, and its device where the node has several at work."""
        node, local = self.place(rank)
        return f"node {node}" if self.devices[node] == 1 else f"node {node} device {local}"
