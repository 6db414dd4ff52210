"""Which setups the champion is judged on: a seeded rule, fixed before any model was fitted. Never looks at a step time.

The rule. Take every multiset of at most `max_hosts` instance types that fits. Draw clusters without replacement, in
turn from the strata (hosts, uniform or mixed), so that none dominates. On each, for every workload, draw two total
batches out of `FRACTIONS` of the global batch, split by CPU share; then draw two strict sub-clusters with one
workload each.
Setups already measured (same workload, same multiset of type and batch) are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from ..cloud import Cluster, Offer
from ..workload import Workload

FRACTIONS = (0.375, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """One setup to measure on a cluster: the instances that take part and the samples each sees in a step."""

    workload: str
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    accumulation_steps: int = 1


Key = tuple[str, tuple[tuple[str, int], ...]]


def key(workload: str, types: Sequence[str], batches: Sequence[int]) -> Key:
    """Identity of a setup with the order of its machines forgotten."""
    return workload, tuple(sorted(zip(types, batches, strict=True)))


def draw(
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Callable[[Cluster], str],
    measured: Collection[Key],
    count: int,
    seed: int,
) -> list[tuple[Cluster, tuple[Unseen, ...]]]:
    """At least `count` setups (fewer only if there are no more), grouped by the cluster that serves them."""
    rng = np.random.default_rng(seed)
    seen = set(measured)
    drawn: list[tuple[Cluster, tuple[Unseen, ...]]] = []
    total = 0
    for cluster in _clusters_in_turn(offers, max_hosts, fits, rng):
        if total >= count:
            break
        items = _setups(cluster, workloads, seen, rng)
        if items:
            drawn.append((cluster, items))
            total += len(items)
    return drawn


def at_one_batch(
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Callable[[Cluster], str],
    measured: Collection[Key],
    clusters: int,
    seed: int,
) -> list[tuple[Cluster, tuple[Unseen, ...]]]:
    """Every host alone and up to `clusters` clusters of several, with every workload at its least global batch.

    The batch is split by cores. What was measured already is left out, and so is a cluster with nothing left.
    """
    rng = np.random.default_rng(seed)
    drawn: list[tuple[Cluster, tuple[Unseen, ...]]] = []
    alone = [cluster for cluster in (Cluster(members=(offer,)) for offer in offers) if not fits(cluster)]
    for cluster in [*alone, *_clusters_in_turn(offers, max_hosts, fits, rng)[:clusters]]:
        types = [member.instance_type for member in cluster.members]
        items = []
        for workload in workloads:
            batches = split_by_cores([one.cores for one in types], workload.global_batch_least)
            if key(workload.name, [one.name for one in types], batches) not in measured:
                items.append(Unseen(workload=workload.name, nodes=tuple(range(len(types))), batches=batches))
        if items:
            drawn.append((cluster, tuple(items)))
    return drawn


def _clusters_in_turn(
    offers: Sequence[Offer], max_hosts: int, fits: Callable[[Cluster], str], rng: np.random.Generator
) -> list[Cluster]:
    """All clusters of two hosts or more, one from each stratum in turn, in random order within a stratum."""
    strata: dict[tuple[int, bool], list[Cluster]] = {}
    ordered = sorted(offers, key=lambda offer: (-offer.instance_type.cores, offer.instance_type.name))
    for size in range(2, max_hosts + 1):
        for members in combinations_with_replacement(ordered, size):
            cluster = Cluster(members=members)
            if not fits(cluster):
                strata.setdefault((size, len(set(members)) == 1), []).append(cluster)
    queues = [[group[i] for i in rng.permutation(len(group))] for _, group in sorted(strata.items())]
    turns = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]


def _setups(
    cluster: Cluster, workloads: Sequence[Workload], seen: set[Key], rng: np.random.Generator
) -> tuple[Unseen, ...]:
    hosts = tuple(range(len(cluster.members)))
    wanted = [(w, hosts, f) for w in workloads for f in rng.choice(FRACTIONS, size=2, replace=False)]
    for _ in range(2):
        size = int(rng.integers(1, len(hosts)))
        nodes = tuple(sorted(int(i) for i in rng.choice(len(hosts), size=size, replace=False)))
        wanted.append((workloads[int(rng.integers(len(workloads)))], nodes, rng.choice(FRACTIONS)))
    kept = []
    for workload, nodes, fraction in wanted:
        types = [cluster.members[node].instance_type for node in nodes]
        batches = split_by_cores([t.cores for t in types], round(float(fraction) * workload.global_batch_least))
        identity = key(workload.name, [t.name for t in types], batches)
        if identity not in seen:
            seen.add(identity)
            kept.append(Unseen(workload=workload.name, nodes=nodes, batches=batches))
    return tuple(kept)


def split_by_cores(cores: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` samples in proportion to `cores`, by largest remainder, at least one each (so `total` >= len(cores))."""
    share = np.asarray(cores, dtype=float) / sum(cores) * total
    batches = np.maximum(1, np.floor(share)).astype(int)
    for i in np.argsort(batches - share, kind="stable")[: max(0, total - int(batches.sum()))]:
        batches[i] += 1
    return tuple(int(batch) for batch in batches)
