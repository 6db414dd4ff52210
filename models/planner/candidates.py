"""Every candidate: batch splits x zones x markets, each with its price and what interrupts it.

A purchase option is a market in a zone, or two markets there. A cluster that loses a machine waits for another, so
machines on demand among spot ones lower how often that happens and raise the price: of one type, one machine or half of
them may be on demand. A zone whose machines another zone sells no dearer and no riskier cannot win.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..domain.cluster import ANY_ZONE, Offer
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.workload import Setup, Workload
from ..job.cost import state_bytes
from ..job.job_conditions import Circumstances, Gangs, Pool, Stated, joined_gangs
from .batch_split import Line, Shapes, Wholes, shapes_of
from .enumeration import MOST_CLUSTERS, Refusal, compositions, sold_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """All rows that may be asked about; arrays are (rows,) but for `shapes` and `gangs`. `price` (dollars an hour
    of the whole bill) is NaN where unknown.

    `cluster` numbers the clusters with their places, `gang` their entries in `gangs`.
    """

    shapes: Shapes
    places: tuple[PurchaseOption, ...]
    shape: IntArray
    place: IntArray
    cluster: IntArray
    price: FloatArray
    gang: IntArray
    gangs: Gangs
    clusters: int
    all_fit: bool

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.shape)

    def setup(self, row: int) -> Setup:
        """The row as a setup."""
        return self.shapes.setup(int(self.shape[row]), self.places[self.place[row]].members)

    def conditions(self, rows: IntArray | slice) -> Gangs:
        """What jobs on the clusters of these rows meet."""
        return self.gangs.take(self.gang[rows])


def offered(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Refusal,
    line: Callable[[str], Line],
    peak_bytes: Callable[[str, int], float] | None,
    totals: Sequence[int],
    conditions: Circumstances | None = None,
) -> Offered:
    """Every shape under every purchase option that sells all of its types, in the order of options and shapes.

    Where there are at most MOST_CLUSTERS clusters, those that do not fit are left out; of more the search asks when it
    comes to one.
    """
    circumstances = conditions or Stated()
    groups = sold_together(offers)
    places = (*(PurchaseOption.of(group) for group in groups), *mixed_options(groups))
    known = {name: one.instance_type for place in places for name, one in place.sold.items()}
    types = [known[name] for name in sorted(known)]
    counts = compositions(len(types), max_hosts=max_hosts, most=MOST_CLUSTERS)
    shapes = shapes_of(workload, types, counts, totals=totals, line=line, peak_bytes=peak_bytes)
    parts: list[tuple[IntArray, ...]] = []
    prices: list[FloatArray] = []
    gangs: list[Gangs] = []
    first = 0
    for number, place in enumerate(places):
        rows = np.flatnonzero(_sells(place, shapes, counts))
        if len(counts) <= MOST_CLUSTERS:
            rows = rows[_fitting(shapes, rows, place, fits)]
        used, back = np.unique(shapes.place[rows], return_inverse=True)
        pools, bought, usd = place.bought([one.name for one in types], counts[used])
        price = np.where(bought > 0, bought * usd, 0.0).sum(axis=1)
        parts.append((rows, np.full(len(rows), number), number * len(counts) + shapes.place[rows], first + back))
        prices.append(price[back])
        gangs.append(circumstances.gangs(pools, bought, state_bytes(workload)))
        first += len(used)
    nothing = (np.zeros(0, dtype=np.intp),) * 4
    shape, at, cluster, gang = (np.concatenate(one).astype(np.intp) for one in zip(nothing, *parts, strict=True))
    return Offered(
        shapes=shapes,
        places=places,
        shape=shape,
        place=at,
        cluster=cluster,
        price=np.concatenate([*prices, np.zeros(0)]),
        gang=gang,
        gangs=joined_gangs(gangs),
        clusters=len(np.unique(cluster)),
        all_fit=len(counts) <= MOST_CLUSTERS,
    )


def _sells(place: PurchaseOption, shapes: Shapes, counts: Wholes) -> BoolArray:
    """Which shapes can be had in the place: it sells all of their types, and a mixture is of one type."""
    sells = np.array([one.name in place.sold for one in shapes.types] + [True], dtype=bool)
    able = sells[shapes.kind].all(axis=1)
    if place.safe is None:
        return np.asarray(able, dtype=bool)
    alone = (counts > 0).sum(axis=1) == 1
    mixable = alone & (counts.sum(axis=1) >= place.fewest)
    return np.asarray(able & mixable[shapes.place], dtype=bool)


def _fitting(shapes: Shapes, rows: IntArray, place: PurchaseOption, fits: Refusal) -> BoolArray:
    """Which of the shapes at `rows` are of clusters that can be had in this place."""
    places, first, back = np.unique(shapes.place[rows], return_index=True, return_inverse=True)
    able = [not fits(shapes.setup(int(at), place.members).cluster) for at in rows[first]]
    return np.array(able, dtype=bool)[back] if len(places) else np.zeros(0, dtype=bool)


SAFE, CHEAP = "on-demand", "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class PurchaseOption:
    """What one place sells, by type. Where there are `safe` offers, the first machines of a cluster are of those.

    They are half of the machines (rounded down), or one: a mixture has at least `fewest` machines, all of one type.
    """

    sold: Mapping[str, Offer]
    safe: Mapping[str, Offer] | None = None
    half: bool = False

    @classmethod
    def of(cls, offers: Sequence[Offer]) -> PurchaseOption:
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
        """The pools that clusters of `counts` (clusters, names) machines buy from, how many of each, and their prices.

        A type that is not sold here is in none of the clusters; prices are dollars an hour of a machine's whole bill,
        NaN where unknown.
        """
        here = [at for at, name in enumerate(names) if name in self.sold]
        wanted = counts[:, here]
        offers = [self.sold[names[at]] for at in here]
        if self.safe is not None:
            anchors = np.where(wanted > 0, self._anchors(wanted), 0)
            wanted = np.concatenate([anchors, wanted - anchors], axis=1)
            offers = [self.safe[names[at]] for at in here] + offers
        usd = np.array([one.total_usd_per_hour for one in offers], dtype=float)  # None becomes NaN
        return [Pool.of(one) for one in offers], wanted, usd

    def _anchors(self, counts: Wholes) -> Wholes:
        return counts // 2 if self.half else np.ones_like(counts)


def mixed_options(groups: Sequence[Sequence[Offer]]) -> Iterator[PurchaseOption]:
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
                yield PurchaseOption(sold=sold, safe={name: by_name[name] for name in sold}, half=half)


Zone = tuple[str, str, str]  # market, region, zone
Terms = Mapping[str, tuple[float, float]]  # instance type -> dollars an hour (inf: unknown), interruptions an hour

# Places of one market that are compared whole, beaten ones aside: each costs as much again as the first.
MOST_PLACES = 4


def worth_asking(offers: Sequence[Offer], *, most: int = MOST_PLACES) -> list[Offer]:
    """`offers` without those of beaten places, in the same order; of equal places the first by name stays.

    Where more than `most` of a market are left, those stay that are the cheapest for most types, and of the others only
    the types that are nowhere cheaper: a cluster of one type is still found where it costs least, one of several types
    might have cost less elsewhere.
    """
    sold: dict[Zone, dict[str, tuple[float, float]]] = {}
    for offer in offers:
        total = offer.total_usd_per_hour
        usd = math.inf if total is None else total
        terms = sold.setdefault(_place(offer), {})
        name = offer.instance_type.name
        terms[name] = min((usd, offer.interruptions_per_hour), terms.get(name, (math.inf, math.inf)))
    whole: set[Zone] = set()
    cheapest: set[tuple[Zone, str]] = set()
    for market in {place[0] for place in sold}:
        mine = _unbeaten({place: terms for place, terms in sorted(sold.items()) if place[0] == market})
        by_type = _cheapest(mine)
        cheapest |= {(place, name) for name, place in by_type.items()}
        whole |= set(_most_often(by_type, mine)[:most])
    return [one for one in offers if _place(one) in whole or (_place(one), one.instance_type.name) in cheapest]


def _place(offer: Offer) -> Zone:
    return offer.market, offer.region, offer.zone


def _unbeaten(places: Mapping[Zone, Terms]) -> dict[Zone, Terms]:
    """Those that no other beats; of two that beat each other the one that sorts first."""
    return {
        place: terms
        for place, terms in places.items()
        if not any(
            other != place and _beats(others, terms) and (other < place or not _beats(terms, others))
            for other, others in places.items()
        )
    }


def _beats(ours: Terms, theirs: Terms) -> bool:
    """Has `ours` every type of `theirs`, none dearer and none riskier?"""
    return all(
        name in ours and ours[name][0] <= usd and ours[name][1] <= hazard for name, (usd, hazard) in theirs.items()
    )


def _cheapest(places: Mapping[Zone, Terms]) -> dict[str, Zone]:
    """The place where each type costs least."""
    names = {name for terms in places.values() for name in terms}
    return {name: min((terms[name][0], place) for place, terms in places.items() if name in terms)[1] for name in names}


def _most_often(by_type: Mapping[str, Zone], places: Iterable[Zone]) -> list[Zone]:
    """`places`, first those that are the cheapest for most types."""
    wins = Counter(by_type.values())
    return sorted(places, key=lambda place: (-wins[place], place))
