"""Everything that can be had: every shape in each market and zone that sells its types, and its price. Never ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .cloud import Offer
from .clusters import MOST_CLUSTERS, Refusal, sold_together
from .compositions import compositions
from .setups import BoolArray, FloatArray, IntArray
from .shapes import ACCUMULATION_STEPS, Shapes, shapes_of
from .split import Line
from .workload import Setup, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """All rows that may be asked about; arrays are (rows,) but for `shapes`. `price` is NaN where unknown."""

    shapes: Shapes
    markets: tuple[dict[str, Offer], ...]
    shape: IntArray
    market: IntArray
    cluster: IntArray
    price: FloatArray
    hazard: FloatArray
    clusters: int
    all_fit: bool

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.shape)

    def setup(self, row: int) -> Setup:
        """The row as a setup."""
        return self.shapes.setup(int(self.shape[row]), self.markets[self.market[row]])


def offered(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Refusal,
    line: Callable[[str], Line],
    peak_bytes: Callable[[str, int], float] | None,
    totals: Sequence[int],
    accumulation: Sequence[int] = ACCUMULATION_STEPS,
    most: int = MOST_CLUSTERS,
) -> Offered:
    """Every shape in every market and zone that sells all of its types, in the order of markets and shapes.

    Clusters have members of one market and zone only. Where there are at most `most`, those that do not fit are left
    out; of more the search asks when it meets one.
    """
    groups = sold_together(offers)
    markets = tuple({one.instance_type.name: one for one in group} for group in groups)
    known = {name: one.instance_type for market in markets for name, one in market.items()}
    types = [known[name] for name in sorted(known)]
    counts = compositions(len(types), max_hosts=max_hosts, most=most)
    shapes = shapes_of(
        workload, types, counts, totals=totals, line=line, peak_bytes=peak_bytes, accumulation=accumulation
    )
    parts: list[tuple[IntArray, ...]] = []
    prices: list[FloatArray] = []
    hazards: list[FloatArray] = []
    for number, market in enumerate(markets):
        sells = np.array([one.name in market for one in types] + [True], dtype=bool)
        usd = np.array([_price(market.get(one.name)) for one in types], dtype=float)
        hazard = np.array([_hazard(market.get(one.name)) for one in types], dtype=float)
        rows = np.flatnonzero(sells[shapes.kind].all(axis=1))
        if len(counts) <= most:
            rows = rows[_fitting(shapes, rows, market, fits)]
        place = shapes.place[rows]
        price = np.where(counts > 0, counts * usd, 0.0).sum(axis=1)
        parts.append((rows, np.full(len(rows), number), number * len(counts) + place))
        prices.append(price[place])
        hazards.append((counts @ hazard)[place])
    nothing = (np.zeros(0, dtype=np.intp),) * 3
    shape, at, cluster = (np.concatenate(one).astype(np.intp) for one in zip(nothing, *parts, strict=True))
    return Offered(
        shapes=shapes,
        markets=markets,
        shape=shape,
        market=at,
        cluster=cluster,
        price=np.concatenate([*prices, np.zeros(0)]),
        hazard=np.concatenate([*hazards, np.zeros(0)]),
        clusters=len(np.unique(cluster)),
        all_fit=len(counts) <= most,
    )


def _price(offer: Offer | None) -> float:
    return np.nan if offer is None or offer.usd_per_hour is None else offer.usd_per_hour


def _hazard(offer: Offer | None) -> float:
    return offer.interruptions_per_hour if offer is not None and offer.market == "spot" else 0.0


def _fitting(shapes: Shapes, rows: IntArray, market: dict[str, Offer], fits: Refusal) -> BoolArray:
    """Which of the shapes at `rows` are of clusters that can be had in this market."""
    places, first, back = np.unique(shapes.place[rows], return_index=True, return_inverse=True)
    able = [not fits(shapes.setup(int(at), market).cluster) for at in rows[first]]
    return np.array(able, dtype=bool)[back] if len(places) else np.zeros(0, dtype=bool)
