"""Enumerate clusters: choose the number of machines of each instance type.

If there are few combinations, all are enumerated. If there are many, the enumeration depends on the
number of different instance types in a cluster:

- A cluster of one type may have any number of machines.
- Clusters of two or three types have machine counts from a list (a ladder), such as 1, 2, 4, 8.
- Clusters of more types are left out.

A ladder is denser at small counts, because one more machine changes a cluster of 3 much more than a
cluster of 48.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement, product

import numpy as np

from ..domain.cluster import Cluster, Offer
from ..domain.numeric import IntArray

Zone = tuple[str, str, str]  # market, region, zone
Refusal = Callable[[Cluster], str]  # returns why a cluster can never be launched, or ""

MOST_CLUSTERS, MOST_MIXED = 20_000, 50_000
_FINE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SPARSE, _DOUBLING = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128)
_SMALL, _COARSE = (1, 2, 4, 8), _DOUBLING[::2]
# Pairs of ladders: machine counts in clusters of two types, and in clusters of three types.
LADDERS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    *((_FINE, three) for three in (_FINE, _SPARSE, _DOUBLING, _COARSE, ())),
    *((two, ()) for two in (_DOUBLING, _SMALL, _COARSE, ())),
)


def compositions(
    types: int, *, max_hosts: int, most: int = MOST_CLUSTERS, most_mixed: int = MOST_MIXED
) -> IntArray:
    """Return a (clusters, types) array: the number of machines of each type in each cluster.

    Clusters have 1 to `max_hosts` machines and are sorted by their number of machines. If there are
    at most `most` combinations, all are returned. If there are more, clusters have at most three
    types. The machine counts of mixed clusters are then limited to a ladder such as 1, 2, 4, 8. The
    first entry of LADDERS that gives at most `most_mixed` rows is used.

    types: the number of instance types.
    """
    sizes = range(1, max_hosts + 1)
    if math.comb(types + max_hosts, max_hosts) - 1 <= most:
        rows = [
            np.bincount(members, minlength=types)
            for size in sizes
            for members in combinations_with_replacement(range(types), size)
        ]
        return np.array(rows, np.int64)
    for ladders in LADDERS:
        counts = [
            [each for each in product(ladder, repeat=number) if sum(each) <= max_hosts]
            for number, ladder in enumerate((sizes, *ladders), 1)
        ]
        total = sum(math.comb(types, number) * len(each) for number, each in enumerate(counts, 1))
        if total <= most_mixed:
            break
    blocks = []
    for number, each in enumerate(counts, 1):
        chosen, machines = (
            np.array(list(rows), np.int64).reshape(-1, number)
            for rows in (combinations(range(types), number), each)
        )
        block = np.zeros((len(chosen), len(machines), types), np.int64)
        np.put_along_axis(block, chosen[:, None], machines[None], axis=2)
        blocks.append(block.reshape(-1, types))
    found = np.concatenate(blocks)
    return found[np.argsort(found.sum(axis=1), kind="stable")]


def clusters_of(
    offers: Sequence[Offer], *, max_hosts: int, fits: Refusal, most: int
) -> Iterator[Cluster]:
    """Yield each cluster that can be launched, with all its machines in one market and zone.

    If a market and zone has more than `most` combinations of machines, only some are considered
    (see `compositions`). `fits(cluster)` returns "" if the cluster can be launched, else the reason
    why it cannot.
    """
    for group in sold_together(offers):
        found = compositions(len(group), max_hosts=max_hosts, most=most, most_mixed=most)
        for counts in found.tolist():
            cluster = Cluster.of(*zip(counts, group.values(), strict=True))
            if not fits(cluster):
                yield cluster


def cheapest_cluster(names: Sequence[str], offers: Sequence[Offer]) -> Cluster | None:
    """Return a cluster of the instance types `names`, in the cheapest market and zone.

    `names` has the instance type of each machine. Returns None if no market and zone sells all
    types at a known price.
    """
    able = [
        Cluster(members=tuple(group[name] for name in names))
        for group in sold_together([offer for offer in offers if offer.usd_per_hour is not None])
        if group.keys() >= set(names)
    ]
    return min(able, key=lambda offer: offer.total_usd_per_hour or 0.0, default=None)


def sold_together(offers: Sequence[Offer]) -> list[dict[str, Offer]]:
    """Return, for each market and zone, a dictionary of the cheapest offer of each instance type.

    The keys are the names of the instance types, in alphabetical order.
    """
    groups: dict[Zone, dict[str, Offer]] = {}
    for offer in sorted(offers, key=lambda offer: (offer.instance_type.name, price_or_inf(offer))):
        groups.setdefault(zone_of(offer), {}).setdefault(offer.instance_type.name, offer)
    return [groups[key] for key in sorted(groups)]


def zone_of(offer: Offer) -> Zone:
    return offer.market, offer.region, offer.zone


def price_or_inf(offer: Offer) -> float:
    """Return the total price of the offer in dollars per hour, or infinity if it is unknown."""
    total = offer.total_usd_per_hour
    return math.inf if total is None else total
