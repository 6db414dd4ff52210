"""How long one launch takes. Runs of one machine each go side by side, since every machine has its own processor share
and none uses the network; whatever crosses machines runs alone, after them.

    seconds = start + max over machines (sum of its own runs) + sum of runs over several machines
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cloud import Cluster
from .wants import Want, sub_clusters


@dataclass(slots=True)
class Schedule:
    """A launch being filled: seconds of each machine's own runs, and of those that need several."""

    names: tuple[str, ...]
    alone_s: list[float]
    together_s: float

    @classmethod
    def of(cls, cluster: Cluster) -> Schedule:
        """Nothing to do yet."""
        names = tuple(offer.instance_type.name for offer in cluster.members)
        return cls(names=names, alone_s=[0.0] * len(names), together_s=0.0)

    @property
    def seconds(self) -> float:
        """Of all runs; the start of the machines is not in it."""
        return max(self.alone_s) + self.together_s

    def extra_s(self, want: Want) -> float:
        """By how much `want` would lengthen the launch: nothing, where its machine would stand idle otherwise."""
        if len(want.members) > 1:
            return want.est_s
        return max(0.0, self.alone_s[self._idlest(want.members[0])] + want.est_s - max(self.alone_s))

    def add(self, want: Want) -> tuple[int, ...] | None:
        """Take `want` in. Returns its machine where it needs just one: the idlest of its type."""
        if len(want.members) > 1:
            self.together_s += want.est_s
            return None
        node = self._idlest(want.members[0])
        self.alone_s[node] += want.est_s
        return (node,)

    def _idlest(self, name: str) -> int:
        return min((node for node, other in enumerate(self.names) if other == name), key=self.alone_s.__getitem__)


def in_order(cluster: Cluster, wants: Sequence[Want]) -> tuple[list[tuple[Want, tuple[int, ...]]], float]:
    """`wants` with the nodes that serve each, those of one machine first; and the seconds of all of them."""
    schedule = Schedule.of(cluster)
    nodes = sub_clusters(cluster)
    ordered = sorted(wants, key=lambda want: len(want.members) > 1)
    return [(want, schedule.add(want) or nodes[want.members]) for want in ordered], schedule.seconds
