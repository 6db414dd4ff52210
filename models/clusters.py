"""Which clusters there are to choose from: multisets of offers that can be bought together. Never ranks them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement

from .cloud import Cluster, Offer

Refusal = Callable[[Cluster], str]  # why a cluster can never be had; empty where it can. A provider's `fits` is one.

MOST_CLUSTERS = 20_000


def clusters_of(
    offers: Sequence[Offer], *, max_hosts: int, fits: Refusal, most: int = MOST_CLUSTERS
) -> Iterator[Cluster]:
    """Every cluster of 1 to `max_hosts` instances of one market and zone that `fits`, members sorted by type.

    Instances of a type are interchangeable, so these are multisets, C(n+T-1, n) of each size (physics.md, [D]).
    Where a market has more than `most`, clusters keep to at most two types. The order does not depend on that of
    `offers`; of several offers of a type in one market and zone the cheapest stands for it.
    """
    for group in sold_together(offers):
        for members in _multisets(group, max_hosts, most):
            cluster = Cluster(members=members)
            if not fits(cluster):
                yield cluster


def sold_together(offers: Sequence[Offer]) -> list[list[Offer]]:
    """Offers by market and zone, each sorted by type with one offer a type."""
    groups: dict[tuple[str, str, str], dict[str, Offer]] = {}
    for offer in sorted(offers, key=lambda o: (o.instance_type.name, _price(o))):
        group = groups.setdefault((offer.market, offer.region, offer.zone), {})
        group.setdefault(offer.instance_type.name, offer)
    return [list(groups[key].values()) for key in sorted(groups)]


def _price(offer: Offer) -> float:
    return math.inf if offer.usd_per_hour is None else offer.usd_per_hour


def _multisets(group: list[Offer], max_hosts: int, most: int) -> Iterator[tuple[Offer, ...]]:
    total = sum(math.comb(len(group) + size - 1, size) for size in range(1, max_hosts + 1))
    for size in range(1, max_hosts + 1):
        if total <= most:
            yield from combinations_with_replacement(group, size)
            continue
        for offer in group:
            yield (offer,) * size
        for first, second in combinations(group, 2):
            for count in range(1, size):
                yield (first,) * count + (second,) * (size - count)
