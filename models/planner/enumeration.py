"""How many machines of each type a cluster may have: every multiset of a few, ladders of counts of many.

Up to `most` multisets are all enumerated. Beyond, a cluster has one type in any number, or two or three types in
numbers of a ladder: a machine more or less among 48 decides little, one among three decides much. The ladders are the
first of LADDERS with at most MOST_MIXED clusters: for ten types and 64 machines 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 of
each of two types, and 1, 2, 3, 4, 6, 8, 16, 32 of each of three; for more than 25 types, two at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement, product

import numpy as np
from numpy.typing import NDArray

from ..domain.cluster import Cluster, Offer

Wholes = NDArray[np.int64]

Refusal = Callable[
    [Cluster], str
]  # why a cluster can never be had; empty where it can. A provider's `fits` is one.

MOST_CLUSTERS, MOST_MIXED = 20_000, 100_000
_FINE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SPARSE = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)
_DOUBLING, _COARSE = (1, 2, 4, 8, 16, 32, 64, 128), (1, 4, 16, 64)
Ladders = tuple[
    tuple[int, ...], tuple[int, ...]
]  # numbers of each of two types, and of each of three
LADDERS: tuple[Ladders, ...] = (
    (_FINE, _FINE),
    (_FINE, _SPARSE),
    (_FINE, _DOUBLING),
    (_FINE, _COARSE),
    (_FINE, ()),
    (_DOUBLING, ()),
    (_COARSE, ()),
    ((), ()),
)


def compositions(types: int, *, max_hosts: int, most: int) -> Wholes:
    """(clusters, types) machines of each type, 1 to `max_hosts` in all; small clusters first, then by type.

    Instances of a type are interchangeable, so these are multisets, C(n+T-1, n) of each size (physics.md, [D]).
    """
    if sum(math.comb(types + size - 1, size) for size in range(1, max_hosts + 1)) <= most:
        return _every(types, max_hosts)
    for pair in LADDERS:
        counts = [_counts(together, max_hosts, pair) for together in (1, 2, 3)]
        if sum(math.comb(types, len(one.T)) * len(one) for one in counts) <= MOST_MIXED:
            break
    return _in_order([_of_each(types, one) for one in counts], types)


Sparse = tuple[
    Wholes, Wholes
]  # (clusters, 3) types, in order, and machines of each; as many types and none where padded


def _of_each(types: int, counts: Wholes) -> Sparse:
    """Every so many of the types with each of the `counts` (combinations, together)."""
    many, together = counts.shape
    picked = np.array(list(combinations(range(types), together)), dtype=np.int64).reshape(
        -1, together
    )
    missing = [(0, 0), (0, 3 - together)]
    return (
        np.pad(np.repeat(picked, many, axis=0), missing, constant_values=types),
        np.pad(np.tile(counts, (len(picked), 1)), missing),
    )


def _in_order(parts: Sequence[Sparse], types: int) -> Wholes:
    """(clusters, types) small clusters first, then those with more machines of the first type, of the second ..."""
    kind, count = (np.concatenate(one) for one in zip(*parts, strict=True))
    keys = [column for at in (2, 1, 0) for column in (-count[:, at], kind[:, at])]
    order = np.lexsort((*keys, count.sum(axis=1)))
    kind, count = kind[order], count[order]
    there = count > 0
    found = np.zeros((len(order), types), dtype=np.int64)
    found[np.nonzero(there)[0], kind[there]] = count[there]
    return found


def _counts(together: int, max_hosts: int, ladders: Ladders) -> Wholes:
    """(combinations, together) numbers of machines of so many types."""
    ladder = tuple(range(1, max_hosts + 1)) if together == 1 else ladders[together - 2]
    counts = [one for one in product(ladder, repeat=together) if sum(one) <= max_hosts]
    return np.array(counts, dtype=np.int64).reshape(-1, together)


def _every(types: int, max_hosts: int) -> Wholes:
    rows = [
        np.bincount(members, minlength=types)
        for size in range(1, max_hosts + 1)
        for members in combinations_with_replacement(range(types), size)
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), types)


def clusters_of(
    offers: Sequence[Offer], *, max_hosts: int, fits: Refusal, most: int
) -> Iterator[Cluster]:
    """Every cluster of 1 to `max_hosts` instances of one market and zone that `fits`, members sorted by type.

    Where a market has more than `most`, clusters keep to at most two types, in any numbers. Built one by one as they
    are asked for: of hundreds of types there are millions. The order does not depend on that of `offers`; of several
    offers of a type in one market and zone the cheapest stands for it.
    """
    for group in sold_together(offers):
        for members in _multisets(group, max_hosts, most):
            cluster = Cluster(members=members)
            if not fits(cluster):
                yield cluster


def _multisets(group: list[Offer], max_hosts: int, most: int) -> Iterator[tuple[Offer, ...]]:
    """Members of each cluster of one market and zone, small clusters first."""
    few = sum(math.comb(len(group) + size - 1, size) for size in range(1, max_hosts + 1)) <= most
    for size in range(1, max_hosts + 1):
        if few:
            yield from combinations_with_replacement(group, size)
            continue
        for offer in group:
            yield (offer,) * size
        for first, second in combinations(group, 2):
            for count in range(1, size):
                yield (first,) * count + (second,) * (size - count)


def sold_together(offers: Sequence[Offer]) -> list[list[Offer]]:
    """Offers by market and zone, each sorted by type with one offer a type, its cheapest."""
    groups: dict[tuple[str, str, str], dict[str, Offer]] = {}
    for offer in sorted(offers, key=lambda o: (o.instance_type.name, price_or_inf(o))):
        group = groups.setdefault((offer.market, offer.region, offer.zone), {})
        group.setdefault(offer.instance_type.name, offer)
    return [list(groups[key].values()) for key in sorted(groups)]


def price_or_inf(offer: Offer) -> float:
    """Dollars an hour of the whole bill; infinite where unknown."""
    total = offer.total_usd_per_hour
    return math.inf if total is None else total
