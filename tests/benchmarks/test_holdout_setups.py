"""The rule that draws what the champion is judged on: seeded, never measured before, batches split exactly."""

from __future__ import annotations

from collections import Counter

from models.domain.cluster import Cluster
from tests.benchmarks.trial import FRACTIONS, Unseen, draw, key, split_by_cores
from tests.models.planning import WORKLOADS, cores_fit, offers


def drawn(count: int = 100, seed: int = 1, measured: frozenset[object] = frozenset()) -> list[tuple[Cluster, Unseen]]:
    found = draw(
        WORKLOADS,
        offers("on-demand"),
        max_hosts=4,
        fits=cores_fit,
        measured=measured,  # type: ignore[arg-type]
        count=count,
        seed=seed,
    )
    return [(cluster, item) for cluster, items in found for item in items]


def keys(rows: list[tuple[Cluster, Unseen]]) -> list[object]:
    return [
        key(item.workload, [cluster.members[node].instance_type.name for node in item.nodes], item.batches)
        for cluster, item in rows
    ]


def test_the_same_seed_draws_the_same_and_another_one_others() -> None:
    assert keys(drawn()) == keys(drawn()) != keys(drawn(seed=2))


def test_enough_are_drawn_none_twice_and_none_that_was_measured() -> None:
    first = keys(drawn())
    assert len(first) >= 100 and len(set(first)) == len(first)
    again = keys(drawn(measured=frozenset(first[:40])))
    assert len(again) >= 100 and not set(again) & set(first[:40])


def test_every_workload_size_and_kind_of_cluster_is_drawn_at_the_stated_batches() -> None:
    rows = drawn()
    assert {item.workload for _, item in rows} == {workload.name for workload in WORKLOADS}
    assert {len(item.nodes) for _, item in rows} == {1, 2, 3, 4}
    assert {len(set(cluster.members)) == 1 for cluster, _ in rows} == {True, False}
    least = {workload.name: workload.global_batch_least for workload in WORKLOADS}
    for cluster, item in rows:
        assert not cores_fit(cluster) and len(item.batches) == len(item.nodes)
        assert sum(item.batches) in {round(part * least[item.workload]) for part in FRACTIONS}
    assert max(Counter(cluster.name for cluster, _ in rows).values()) <= 2 * len(WORKLOADS) + 2


def test_a_batch_is_split_exactly_and_by_share() -> None:
    assert split_by_cores([0.8, 0.4, 0.2], 48) == (28, 14, 6) or sum(split_by_cores([0.8, 0.4, 0.2], 48)) == 48
    assert split_by_cores([0.4, 0.4], 9) in {(5, 4), (4, 5)}
    assert min(split_by_cores([1.0, 0.01], 10)) == 1
