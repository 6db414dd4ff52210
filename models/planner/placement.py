"""The order of machines in which a step's traffic takes least time, from what is measured between each two of them.

Traffic is a sequence of rounds, in each of which machines at certain places of the order send at once. A round takes

    max t + sharing (sum t - max t),     t = latency + bytes x seconds a byte       of each two that send in it

`sharing` is 0 where every two machines have a link of their own, so that the slowest rules, and 1 where all wait for
one link. Up to EXACT machines all orders are compared; of more, a local search finds one that no exchange of two
machines, no reversal of a stretch and no move of one machine makes faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations

import numpy as np

from ..domain.numeric import FloatArray, IntArray

EXACT = 8  # machines: 40,320 orders
LEAST_GAIN = 0.05  # of the seconds: for less, runs in another order would only be harder to compare
SURE = 3.0  # standard errors that a gain must be from nothing: by chance 5 times in 100, of three sweeps
_STARTS = 8  # of a local search, at random
_TIES = 1e-4  # of all seconds: where the slowest two machines are the same, the others decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Between machines: (n, n) seconds of an empty message and of a byte; and what part of a link pairs share."""

    latency_s: FloatArray
    byte_s: FloatArray
    sharing: float = 0.0

    @property
    def machines(self) -> int:
        """How many."""
        return len(self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Machines at these places of an order send `bytes` to each other at once, `times` one after another."""

    places: tuple[tuple[int, int], ...]
    bytes: float
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The order to take. `gain` is what its seconds are less than those of machines as they come, with standard error
    `error`, in sweeps that the order was not chosen by; `reason` says why they stay as they come, or that they do not.
    """

    order: tuple[int, ...]
    gain: float
    error: float
    reason: str


def ring(machines: int, size: float) -> tuple[Round, ...]:
    """An all-reduce of `size` bytes: each machine sends a part to the next, and the sums come round again.

    So do a reduce-scatter and the all-gather after it.
    """
    around = tuple((place, (place + 1) % machines) for place in range(machines))
    return (Round(places=around, bytes=size / machines, times=2 * (machines - 1)),)


def halvings(machines: int, size: float) -> tuple[Round, ...]:
    """Adasum's halves of `size` bytes, and back. Raises ValueError where machines are no power of two."""
    if machines < 2 or machines & (machines - 1):
        raise ValueError(f"{machines} machines: halves are exchanged by a power of two of them")
    found = []
    for level in range(machines.bit_length() - 1):
        distance = 1 << level
        peers = tuple(
            (place, place ^ distance) for place in range(machines) if not place & distance
        )
        found.append(Round(places=peers, bytes=size / (2 * distance), times=2))
    return tuple(found)


def seconds_of(links: Links, rounds: Sequence[Round], orders: IntArray) -> FloatArray:
    """(m,) seconds of `rounds` in each of `orders` (m, n), the machine at each place."""
    total = np.zeros(len(orders))
    for one in rounds:
        senders, receivers = np.array(one.places).T
        each = (links.latency_s + one.bytes * links.byte_s)[
            orders[:, senders], orders[:, receivers]
        ]
        slowest = each.max(axis=1)
        total += one.times * (slowest + links.sharing * (each.sum(axis=1) - slowest))
    return total


def fastest(links: Links, rounds: Sequence[Round]) -> tuple[int, ...]:
    """The order with fewest seconds, of all up to EXACT machines; beyond, what `searched` finds."""
    if links.machines > EXACT:
        return searched(links, rounds)
    orders = _orders(links.machines)
    return tuple(map(int, orders[_costs(links, rounds, orders).argmin()]))


def searched(links: Links, rounds: Sequence[Round]) -> tuple[int, ...]:
    """The best of local searches: from machines as they come, breadth first, by nearest neighbours, and at random."""
    many = links.machines
    random = np.random.default_rng(0)
    starts = [np.arange(many), np.array(breadth_first(links))]
    starts += [_nearest(links, first) for first in range(many)]
    starts += [random.permutation(many) for _ in range(_STARTS)]
    best = min((_descended(links, rounds, start) for start in starts), key=lambda one: one[1])
    return tuple(map(int, best[0]))


def breadth_first(links: Links) -> tuple[int, ...]:
    """From the first machine to all others, those with the fastest links to it first."""
    return (0, *(int(one) for one in np.argsort(links.byte_s[0], kind="stable") if one))


def choose(sweeps: Sequence[Links], rounds: Sequence[Round]) -> Choice:
    """The fastest order by all `sweeps`, each a measurement of all links; as they come where the gain is not sure.

    The gain is that of the order chosen by the other sweeps, one sweep left out at a time: among so many orders one
    always looks faster in what it was chosen by. Raises ValueError for fewer than two sweeps.
    """
    if len(sweeps) < 2:
        raise ValueError(f"{len(sweeps)} sweep: noise is told by two or more")
    as_they_come = np.arange(sweeps[0].machines)
    gains = []
    for left_out, one in enumerate(sweeps):
        chosen = fastest(_median([*sweeps[:left_out], *sweeps[left_out + 1 :]]), rounds)
        before_s, after_s = seconds_of(one, rounds, np.array([as_they_come, chosen]))
        gains.append(1 - after_s / before_s)
    gain, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / np.sqrt(len(gains)))
    order = fastest(_median(sweeps), rounds)
    found = f"predicted {gain:.0%} fewer seconds of communication, standard error {error:.1%}"
    if gain < LEAST_GAIN or gain < SURE * error:
        return Choice(
            order=tuple(map(int, as_they_come)),
            gain=gain,
            error=error,
            reason=f"as they come: {found}",
        )
    return Choice(order=order, gain=gain, error=error, reason=found)


def _median(sweeps: Sequence[Links]) -> Links:
    return Links(
        latency_s=np.median([one.latency_s for one in sweeps], axis=0),
        byte_s=np.median([one.byte_s for one in sweeps], axis=0),
        sharing=float(np.median([one.sharing for one in sweeps])),
    )


def _costs(links: Links, rounds: Sequence[Round], orders: IntArray) -> FloatArray:
    """(m,) seconds, and a little of what they would be on one shared link."""
    costs = seconds_of(links, rounds, orders)
    if links.sharing < 1:
        shared = Links(latency_s=links.latency_s, byte_s=links.byte_s, sharing=1.0)
        costs = costs + _TIES * seconds_of(shared, rounds, orders)
    return costs


@lru_cache(maxsize=2)
def _orders(machines: int) -> IntArray:
    """(machines!, machines) all of them, the one in which they come first."""
    return np.array(list(permutations(range(machines))))


def _nearest(links: Links, first: int) -> IntArray:
    """A chain from `first`, to the fastest link of those left each time."""
    chain, left = [first], set(range(links.machines)) - {first}
    while left:
        chain.append(min(left, key=lambda one: (links.byte_s[chain[-1], one], one)))
        left.remove(chain[-1])
    return np.array(chain)


def _descended(links: Links, rounds: Sequence[Round], start: IntArray) -> tuple[IntArray, float]:
    """From `start` to the best neighbour, again and again, until none is better; and its cost."""
    order, cost = start, float(_costs(links, rounds, start[None])[0])
    moves = _moves(links.machines)
    while True:
        neighbours = order[moves]
        costs = _costs(links, rounds, neighbours)
        best = int(costs.argmin())
        if not costs[best] < cost * (1 - 1e-12):
            return order, cost
        order, cost = neighbours[best], float(costs[best])


@lru_cache(maxsize=2)
def _moves(machines: int) -> IntArray:
    """(moves, machines) places to take machines from: two exchanged, a stretch reversed, one moved elsewhere."""
    found, places = set(), list(range(machines))
    for first, last in combinations(places, 2):
        swapped = places.copy()
        swapped[first], swapped[last] = last, first
        found.add(tuple(swapped))
        found.add((*places[:first], *places[first : last + 1][::-1], *places[last + 1 :]))
        found.add((*places[:first], *places[first + 1 : last + 1], first, *places[last + 1 :]))
        found.add((*places[:first], last, *places[first:last], *places[last + 1 :]))
    return np.array(sorted(found - {tuple(places)}))
