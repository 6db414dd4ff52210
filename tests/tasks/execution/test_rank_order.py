"""What machines say of their links becomes an order, or a reason; nothing unsound is taken for a
measurement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.planner.placement import Order
from tasks.execution import rank_order
from tasks.execution.rank_order import links_matter, sending_order
from tasks.node.record import Item

NODES = [0, 1, 2, 3]
RACKS = np.array([0, 1, 0, 1])


def item(nodes: list[int] = NODES, strategy: str = "ddp") -> Item:
    return Item(
        run_id="a",
        kind="train",
        nodes=nodes,
        workload="tiny",
        batches=[8] * len(nodes),
        strategy=strategy,
    )


def said(**changes: Any) -> dict[str, Any]:
    """Two racks, in which machines do not come one after another."""
    byte_s = np.where(RACKS[:, None] == RACKS, 1e-9, 1e-8) * (1 - np.eye(4))
    latency_s = 1e-4 * (1 - np.eye(4))
    whole = {"nodes": NODES, "latency_s": [latency_s.tolist()] * 3, "byte_s": [byte_s.tolist()] * 3}
    return whole | {"sharing": [1.0] * 3, "took_s": 1.5} | changes


def test_a_ring_begins_at_the_first_machine_which_has_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rank_order,
        "choose",
        lambda *_: Order(order=(2, 0, 1, 3), gain=0.1, reason="chosen"),
    )
    assert sending_order(said(), NODES, [item()])[0] == (0, 1, 3, 2)
    assert sending_order(said(), NODES, [item(strategy="adasum")])[0] == (2, 0, 1, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": [0, 1, 2]}, "not of nodes 0, 1, 2, 3"),
        ({"byte_s": [[[0.0] * 4] * 4] * 3}, "pairs that take no time"),
        ({"byte_s": [[[0.0, float("nan")] * 2] * 4] * 3}, "finite"),
        ({"latency_s": [[[1e-4] * 3] * 4] * 3}, "not of nodes"),
        ({"sharing": [2.0] * 3}, "less than or equal to 1"),
        ({"sharing": [1.0] * 2}, "shorter"),
        ({"latency_s": "fast"}, "list"),
    ],
)
def test_what_is_not_sound_leaves_machines_as_they_come_and_says_so(
    changes: dict[str, Any], reason: str
) -> None:
    order, why = sending_order(said(**changes), NODES, [item()])
    assert order == () and why.startswith("as they come") and reason in why


@pytest.mark.parametrize(
    ("nodes", "addresses", "matter"),
    [(4, 4, True), (3, 4, False), (3, 3, False), (16, 16, True), (17, 17, False), (4, 1, False)],
)
def test_links_are_measured_where_there_are_orders_to_choose_from(
    nodes: int, addresses: int, matter: bool
) -> None:
    named = (
        [f"10.0.0.{place}" for place in range(addresses)]
        if addresses > 1
        else ["127.0.0.1"] * nodes
    )
    assert links_matter([item([0]), item(list(range(nodes)))], named) is matter
