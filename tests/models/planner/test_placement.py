"""The chosen order is the best, or near it; noise chooses none."""

from itertools import permutations

import numpy as np
import pytest

from models.planner import placement
from models.planner.placement import (
    Links,
    choose,
    fastest,
    halvings,
    ring,
    seconds_of,
)

SIZE = 1e6
NOISE = 0.03


def links(matrix, sharing=0.0):
    """Seconds of SIZE bytes between each two."""
    byte_s = np.array(matrix, dtype=float) / SIZE
    return Links(latency_s=np.full(byte_s.shape, 1e-4), byte_s=byte_s, sharing=sharing)


def drawn(machines, seed, sharing=0.0):
    half = np.triu(np.exp(np.random.default_rng(seed).normal(0.0, 0.7, (machines, machines))), 1)
    return links(half + half.T, sharing)


def alike(machines):
    return links(1 - np.eye(machines))


def sweeps(of, seed):
    draw = np.random.default_rng(seed)

    def noisy():
        half = np.triu(of.byte_s * np.exp(NOISE * draw.standard_normal(of.byte_s.shape)), 1)
        return of._replace(byte_s=half + half.T)

    return [noisy() for _ in range(3)]


def plain_seconds(of, rounds, order):
    """By the definition, one number at a time."""
    total = 0.0
    for phase in rounds:
        each = [
            of.latency_s[order[a]][order[b]] + phase.bytes * of.byte_s[order[a]][order[b]]
            for a, b in phase.places
        ]
        total += phase.times * (max(each) + of.sharing * (sum(each) - max(each)))
    return total


@pytest.mark.parametrize("traffic", [ring, halvings])
@pytest.mark.parametrize(
    ("machines", "sharing", "seed"), [(4, 0.0, 1), (4, 0.6, 2), (8, 0.0, 3), (8, 1.0, 4)]
)
def test_no_order_is_faster(traffic, machines, sharing, seed):
    links, rounds = drawn(machines, seed, sharing), traffic(machines, SIZE)
    every = list(permutations(range(machines)))
    seconds = [plain_seconds(links, rounds, order) for order in every]
    assert seconds_of(links, rounds, np.array(every[:50])) == pytest.approx(seconds[:50])
    assert plain_seconds(links, rounds, fastest(links, rounds)) == pytest.approx(
        min(seconds), rel=1e-9
    )


def test_adasum_sends_a_half_then_a_quarter_and_rings_a_part_of_all_but_one():
    assert [(half.bytes, half.times) for half in halvings(8, 8.0)] == [(4.0, 2), (2.0, 2), (1.0, 2)]
    [hop] = ring(4, 8.0)
    assert (hop.bytes, hop.times, hop.places) == (2.0, 6, ((0, 1), (1, 2), (2, 3), (3, 0)))


def test_noise_alone_leaves_machines_in_their_order(monkeypatch):
    equal = alike(8)
    orders = {choose(sweeps(equal, seed), ring(8, SIZE))[0] for seed in range(10)}
    assert orders == {tuple(range(8))}
    monkeypatch.setattr(placement, "LEAST_GAIN", -1.0)
    monkeypatch.setattr(placement, "SURE", -1e9)
    assert choose(sweeps(equal, 0), ring(8, SIZE))[0] != tuple(range(8))


def test_a_gain_is_that_of_sweeps_that_did_not_choose():
    """One sweep with a disturbed pair proposes an order that the others do not confirm."""
    equal = alike(4)
    slow = equal.byte_s.copy()
    slow[0, 1] = slow[1, 0] = 9 * slow[0, 1]
    order, reason = choose([equal, equal, equal._replace(byte_s=slow)], ring(4, SIZE))
    assert order == (0, 1, 2, 3) and "predicted 0%" in reason
    order, reason = choose([equal._replace(byte_s=slow)] * 3, ring(4, SIZE))
    assert order != (0, 1, 2, 3) and "predicted 8" in reason


@pytest.mark.parametrize("slower", [(1.03, 1.03, 1.03), (9.0, 9.0, 1.0)])
def test_neither_a_small_gain_nor_a_contested_gain_is_taken(slower):
    found = []
    for times in slower:
        equal = alike(4)
        equal.byte_s[0, 1] = equal.byte_s[1, 0] = times * equal.byte_s[0, 1]
        found.append(equal)
    assert choose(found, ring(4, SIZE))[0] == (0, 1, 2, 3)
