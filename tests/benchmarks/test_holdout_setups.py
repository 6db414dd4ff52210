"""The rule that draws what the champion is judged on: seeded, never measured before, batches split exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from models.domain.cluster import Cluster
from models.domain.workload import Mode, Workload
from tests.benchmarks.trial import FRACTIONS, Unseen, draw, key, split_by_cores
from tests.models.planning import WORKLOADS, cores_fit, offers


def drawn(
    count: int = 100,
    seed: int = 1,
    measured: frozenset[object] = frozenset(),
    workloads: Sequence[Workload] = WORKLOADS,
) -> list[tuple[Cluster, Unseen]]:
    found = draw(
        workloads,
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
        key(
            item.workload,
            [cluster.members[node].instance_type.name for node in item.nodes],
            item.batches,
        )
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


def test_each_setup_is_in_a_mode_that_its_workload_tolerates_and_one_host_shares_nothing() -> None:
    modes = tuple(
        Mode(*one)
        for one in product(("fp32", "bf16", "tf32"), ("ddp", "fsdp"), ("none", "checkpointing"))
    )
    rows = drawn(workloads=[replace(WORKLOADS[0], modes=modes), WORKLOADS[1]])
    setups = [(item.workload, item.mode, len(item.nodes)) for _, item in rows]
    assert {mode for name, mode, _ in setups if name == WORKLOADS[1].name} == {Mode()}
    ours = [(mode, hosts) for name, mode, hosts in setups if name == WORKLOADS[0].name]
    assert {mode for mode, _ in ours} == {mode for mode in modes if mode.precision != "tf32"}, (
        "no processor has tf32"
    )
    assert {hosts for mode, hosts in ours if mode.sharded} == {2, 3, 4} and {
        hosts for _, hosts in ours
    } == {1, 2, 3, 4}
    assert len(set(keys(rows))) == len(rows), "each mode of a setup is another one"


def test_a_batch_is_split_exactly_and_by_share() -> None:
    assert (
        split_by_cores([0.8, 0.4, 0.2], 48) == (28, 14, 6)
        or sum(split_by_cores([0.8, 0.4, 0.2], 48)) == 48
    )
    assert split_by_cores([0.4, 0.4], 9) in {(5, 4), (4, 5)}
    assert min(split_by_cores([1.0, 0.01], 10)) == 1
