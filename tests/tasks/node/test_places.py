"""Ranks count through the devices of the nodes that take part; an item has the first devices of each of its nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.node.places import Places
from tasks.node.record import Item, Plan


def item(nodes: list[int], devices: list[int] | None = None) -> Item:
    return Item(run_id="r", kind="train", nodes=nodes, batches=[1] * len(nodes), devices=devices or [])


def places(items: list[Item], ranks: list[int] | None = None, nodes: int = 3) -> Places:
    addresses = [f"10.0.0.{n}" for n in range(nodes)]
    plan = Plan(lease_id="l", attempt=1, addresses=addresses, workloads=[], items=items, ranks=ranks or [])
    return Places.of(plan)


def test_one_device_each_makes_ranks_and_nodes_the_same() -> None:
    found = places([item([0, 2]), item([1])])
    assert found.world == 3 and [found.place(rank) for rank in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert found.ranks(item([0, 2])) == (0, 2)
    assert found.label(1) == "node 1"


def test_a_node_has_the_ranks_of_its_largest_item_and_smaller_ones_use_the_first() -> None:
    small, large = item([0, 1], [1, 2]), item([1, 2], [4, 1])
    found = places([small, large])
    assert found.devices == {0: 1, 1: 4, 2: 1} and found.world == 6
    assert found.ranks(small) == (0, 1, 2)
    assert found.ranks(large) == (1, 2, 3, 4, 5)
    assert found.label(2) == "node 1 device 1" and found.label(5) == "node 2"


def test_without_a_node_the_others_close_ranks() -> None:
    found = places([item([0, 2], [2, 1])], ranks=[0, 2])
    assert found.ranks(item([2])) == (2,) and found.order(2) == 1 and found.host == 0
    assert places([item([2])], ranks=[1, 2]).host == 1
    with pytest.raises(ValueError, match="needs node 1, which takes no part"):
        places([item([1])], ranks=[0, 2])


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_rank_has_one_place(devices: list[int]) -> None:
    whole = item(list(range(len(devices))), devices)
    found = places([whole], nodes=len(devices))
    assert found.ranks(whole) == tuple(range(sum(devices)))
    assert [found.first_rank(node) + local for node, local in map(found.place, range(found.world))] == list(
        range(found.world)
    )
    with pytest.raises(ValueError, match="no rank"):
        found.place(found.world)
