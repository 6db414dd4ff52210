"""Sound measurements of links become an order of machines; unsound ones leave them as they come."""

import numpy as np
import pytest

from tasks.execution import rank_order
from tasks.execution.rank_order import links_matter, sending_order
from tasks.node.record import Item

NODES = [0, 1, 2, 3]
BETWEEN = 1 - np.eye(4)


def item(nodes=4, strategy="ddp"):
    return Item(run_id="a", kind="train", nodes=list(range(nodes)), strategy=strategy)


def links(**changes):
    whole = {"nodes": NODES, "latency_s": [(1e-4 * BETWEEN).tolist()] * 3, "sharing": [1.0] * 3}
    return whole | {"byte_s": [(1e-9 * BETWEEN).tolist()] * 3, "took_s": 1.5} | changes


def test_a_ring_begins_at_the_first_machine_which_has_the_servers(monkeypatch):
    order = (2, 0, 1, 3), "chosen"
    monkeypatch.setattr(rank_order, "choose", lambda *_: order)
    assert sending_order(links(), NODES, [item()]) == ((0, 1, 3, 2), "chosen")
    assert sending_order(links(), NODES, [item(strategy="adasum")])[0] == (2, 0, 1, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": [0, 1, 2]},
        {"byte_s": [[[0.0] * 4] * 4] * 3},
        {"byte_s": [[[0.0, float("nan")] * 2] * 4] * 3},
        {"latency_s": [[[1e-4] * 3] * 4] * 3},
        {"sharing": [1.0] * 2},
    ],
)
def test_unsound_links_leave_machines_as_they_come(changes):
    order, why = sending_order(links(**changes), NODES, [item()])
    assert order == () and "are invalid" in why
    assert sending_order({}, NODES, [item()])[0] == ()


@pytest.mark.parametrize(
    "nodes, addresses, matter",
    [(4, 4, True), (3, 4, False), (3, 3, False), (16, 16, True), (17, 17, False), (4, 1, False)],
)
def test_links_are_measured_if_there_are_orders_to_choose_from(nodes, addresses, matter):
    named = [f"10.0.0.{place % addresses}" for place in range(max(nodes, addresses))]
    assert links_matter([item(1), item(nodes)], named) is matter
