"""Where machines are bought: a market in a zone, or two markets there, some of a type on demand and the rest on spot.

A cluster that loses a machine waits for another, whichever it lost: machines on demand among the others lower how often
that happens, and raise the price. That pays where a deadline lies between what spot keeps and what on demand costs. Of
each type one machine, or half of them, may be safe: the ends, spot and on demand alone, are places of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import FloatArray
from .circumstances.conditions import Pool
from .cloud import ANY_ZONE, Offer
from .split import Wholes

SAFE, CHEAP = "on-demand", "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one place sells, by type. Where there are `safe` offers, the first machines of a cluster are of those.

    They are half of the machines (rounded down), or one: a mixture has at least `fewest` machines, all of one type.
    """

    sold: Mapping[str, Offer]
    safe: Mapping[str, Offer] | None = None
    half: bool = False

    @classmethod
    def of(cls, offers: Sequence[Offer]) -> Place:
        """A market in a zone that sells these, one a type."""
        return cls(sold={one.instance_type.name: one for one in offers})

    @property
    def fewest(self) -> int:
        """Machines from which the mixture is one, and no other one."""
        return 1 if self.safe is None else 4 if self.half else 2

    def members(self, name: str, count: int) -> list[Offer]:
        """The offers of `count` machines of a type, the safe ones first."""
        if self.safe is None:
            return [self.sold[name]] * count
        anchors = int(self._anchors(np.array([count]))[0])
        return [self.safe[name]] * anchors + [self.sold[name]] * (count - anchors)

    def bought(self, names: Sequence[str], counts: Wholes) -> tuple[list[Pool], Wholes, FloatArray]:
        """The pools that clusters of `counts` (clusters, names) machines buy from, how many from each, and its price.

        A type that is not sold here is in none of the clusters; prices are NaN where unknown.
        """
        here = [at for at, name in enumerate(names) if name in self.sold]
        wanted = counts[:, here]
        offers = [self.sold[names[at]] for at in here]
        if self.safe is not None:
            anchors = np.where(wanted > 0, self._anchors(wanted), 0)
            wanted = np.concatenate([anchors, wanted - anchors], axis=1)
            offers = [self.safe[names[at]] for at in here] + offers
        usd = np.array([np.nan if one.usd_per_hour is None else one.usd_per_hour for one in offers], dtype=float)
        return [Pool.of(one) for one in offers], wanted, usd

    def _anchors(self, counts: Wholes) -> Wholes:
        return counts // 2 if self.half else np.ones_like(counts)


def mixed_places(groups: Sequence[Sequence[Offer]]) -> Iterator[Place]:
    """Both mixtures of every two markets that sell the same types in one zone; `groups` are offers by market and zone.

    A price on demand that holds in any zone of its region holds beside each of them.
    """
    for safe in groups:
        for cheap in groups:
            one, other = safe[0], cheap[0]
            together = one.region == other.region and one.zone in (other.zone, ANY_ZONE)
            if not together or (one.market, other.market) != (SAFE, CHEAP):
                continue
            by_name = {offer.instance_type.name: offer for offer in safe}
            shared = [offer for offer in cheap if offer.instance_type.name in by_name]
            for half in (False, True) if shared else ():
                sold = {offer.instance_type.name: offer for offer in shared}
                yield Place(sold=sold, safe={name: by_name[name] for name in sold}, half=half)
