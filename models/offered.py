"""Everything that can be had: every shape in each place that sells its types, its price and its luck. Never ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray
from .circumstances.conditions import Circumstances, Gangs, Stated, joined_gangs
from .cloud import Offer
from .clusters import MOST_CLUSTERS, Refusal, sold_together
from .compositions import compositions
from .mixtures import Place, mixed_places
from .outlook import state_bytes
from .shapes import ACCUMULATION_STEPS, Shapes, shapes_of
from .split import Line, Wholes
from .workload import Setup, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """All rows that may be asked about; arrays are (rows,) but for `shapes` and `gangs`. `price` is NaN where unknown.

    `cluster` numbers the clusters with their places, `gang` their entries in `gangs`.
    """

    shapes: Shapes
    places: tuple[Place, ...]
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

    def met(self, rows: IntArray | slice) -> Gangs:
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
    met: Circumstances | None = None,
    accumulation: Sequence[int] = ACCUMULATION_STEPS,
    most: int = MOST_CLUSTERS,
) -> Offered:
    """Every shape in every place that sells all of its types, in the order of places and shapes.

    A place is a market in a zone, or two markets in one (mixtures.py). Where there are at most `most` clusters, those
    that do not fit are left out; of more the search asks when it meets one.
    """
    circumstances = met or Stated()
    groups = sold_together(offers)
    places = (*(Place.of(group) for group in groups), *mixed_places(groups))
    known = {name: one.instance_type for place in places for name, one in place.sold.items()}
    types = [known[name] for name in sorted(known)]
    counts = compositions(len(types), max_hosts=max_hosts, most=most)
    shapes = shapes_of(
        workload, types, counts, totals=totals, line=line, peak_bytes=peak_bytes, accumulation=accumulation
    )
    parts: list[tuple[IntArray, ...]] = []
    prices: list[FloatArray] = []
    gangs: list[Gangs] = []
    first = 0
    for number, place in enumerate(places):
        rows = np.flatnonzero(_sells(place, shapes, counts))
        if len(counts) <= most:
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
        all_fit=len(counts) <= most,
    )


def _sells(place: Place, shapes: Shapes, counts: Wholes) -> BoolArray:
    """Which shapes can be had in the place: it sells all of their types, and a mixture is of one type."""
    sells = np.array([one.name in place.sold for one in shapes.types] + [True], dtype=bool)
    able = sells[shapes.kind].all(axis=1)
    if place.safe is None:
        return np.asarray(able, dtype=bool)
    alone = (counts > 0).sum(axis=1) == 1
    mixable = alone & (counts.sum(axis=1) >= place.fewest)
    return np.asarray(able & mixable[shapes.place], dtype=bool)


def _fitting(shapes: Shapes, rows: IntArray, place: Place, fits: Refusal) -> BoolArray:
    """Which of the shapes at `rows` are of clusters that can be had in this place."""
    places, first, back = np.unique(shapes.place[rows], return_index=True, return_inverse=True)
    able = [not fits(shapes.setup(int(at), place.members).cluster) for at in rows[first]]
    return np.array(able, dtype=bool)[back] if len(places) else np.zeros(0, dtype=bool)
