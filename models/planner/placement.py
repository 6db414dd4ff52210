"""The order of machines in which a step's traffic is fastest, from measured links.

Traffic is a sequence of rounds, in each of which machines at certain places send at once. A round
takes

    max t + sharing (sum t - max t),     t = latency + bytes x seconds a byte     of each pair

`sharing` is 0 if every pair has a link of its own, and 1 if all wait for one link. Up to EXACT
machines all orders are compared; of more, a local search exchanges, reverses and moves machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from ..domain.numeric import FloatArray, IntArray

EXACT = 8  # machines: 40,320 orders
LEAST_GAIN = 0.05  # of the seconds: for less, runs in another order are only harder to compare
SURE = 3.0  # standard errors of a gain: by chance 5 times in 100, of three sweeps
_STARTS = 16  # random starts of a local search
_TIES = 1e-4  # weight of all links beside the slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """(n, n) seconds of an empty message and of a byte between machines, and the shared part."""

    latency_s: FloatArray
    byte_s: FloatArray
    sharing: float = 0.0

    @property
    def machines(self) -> int:
        return len(self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Machines at these places send `bytes` to each other at once, `times` in a row."""

    places: tuple[tuple[int, int], ...]
    bytes: float
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The chosen order. `gain` is the share of seconds saved in sweeps that did not choose it."""

    order: tuple[int, ...]
    gain: float
    reason: str


def ring(machines: int, size: float) -> tuple[Round, ...]:
    """Return the rounds of an all-reduce of `size` bytes, or of a reduce-scatter and all-gather."""
    around = tuple((place, (place + 1) % machines) for place in range(machines))
    return (Round(places=around, bytes=size / machines, times=2 * (machines - 1)),)


def halvings(machines: int, size: float) -> tuple[Round, ...]:
    """Return Adasum's rounds: halves of `size` bytes there and back.

    Raises:
        ValueError: the number of machines is no power of two.
    """
    if machines < 2 or machines & (machines - 1):
        raise ValueError(f"{machines} machines: halves are exchanged by a power of two of them")
    rounds = []
    for distance in (1 << level for level in range(machines.bit_length() - 1)):
        peers = tuple((at, at ^ distance) for at in range(machines) if not at & distance)
        rounds.append(Round(places=peers, bytes=size / (2 * distance), times=2))
    return tuple(rounds)


def seconds_of(links: Links, rounds: Sequence[Round], orders: IntArray) -> FloatArray:
    """Return (m,) seconds of `rounds` in each of `orders` (m, n), the machine at each place."""
    total = np.zeros(len(orders))
    for one in rounds:
        senders, receivers = np.array(one.places).T
        pair_s = links.latency_s + one.bytes * links.byte_s
        each = pair_s[orders[:, senders], orders[:, receivers]]
        slowest = each.max(axis=1)
        total += one.times * (slowest + links.sharing * (each.sum(axis=1) - slowest))
    return total


def fastest(links: Links, rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the fastest order: of all up to EXACT machines, else by local search."""
    if links.machines > EXACT:
        return searched(links, rounds)
    orders = np.array(list(permutations(range(links.machines))))
    return tuple(orders[_costs(links, rounds, orders).argmin()].tolist())


def searched(links: Links, rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the best of local searches from several starts.

    A search moves to the best neighbour until none is better.
    """
    random, moves = np.random.default_rng(0), _moves(links.machines)
    starts = [random.permutation(links.machines) for _ in range(_STARTS)]
    found: list[tuple[float, list[int]]] = []
    for order in [np.arange(links.machines), *starts]:
        cost, best = np.inf, float(_costs(links, rounds, order[None])[0])
        while best < cost * (1 - 1e-12):
            cost, neighbours = best, order[moves]
            costs = _costs(links, rounds, neighbours)
            best = float(costs.min())
            if best < cost:
                order = neighbours[costs.argmin()]
        found.append((cost, order.tolist()))
    return tuple(min(found)[1])


def choose(sweeps: Sequence[Links], rounds: Sequence[Round]) -> Order:
    """Return the fastest order by all `sweeps`; machines keep their order if the gain is not sure.

    The gain is measured in a sweep that did not choose: of so many orders, one always looks faster.

    Raises:
        ValueError: there are fewer than two sweeps.
    """
    if len(sweeps) < 2:
        raise ValueError(f"{len(sweeps)} sweep: two or more show the noise")
    unchanged = tuple(range(sweeps[0].machines))
    gains = []
    for left_out, sweep in enumerate(sweeps):
        chosen = fastest(_median([*sweeps[:left_out], *sweeps[left_out + 1 :]]), rounds)
        before_s, after_s = seconds_of(sweep, rounds, np.array([unchanged, chosen]))
        gains.append(1 - after_s / before_s)
    gain, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / np.sqrt(len(gains)))
    reason = f"predicted {gain:.0%} fewer seconds of communication, standard error {error:.1%}"
    if gain < LEAST_GAIN or gain < SURE * error:
        return Order(order=unchanged, gain=gain, reason=f"unchanged: {reason}")
    return Order(order=fastest(_median(sweeps), rounds), gain=gain, reason=reason)


def _median(sweeps: Sequence[Links]) -> Links:
    return Links(
        latency_s=np.median([one.latency_s for one in sweeps], axis=0),
        byte_s=np.median([one.byte_s for one in sweeps], axis=0),
        sharing=float(np.median([one.sharing for one in sweeps])),
    )


def _costs(links: Links, rounds: Sequence[Round], orders: IntArray) -> FloatArray:
    """(m,) seconds, and a little of the seconds on one shared link, which breaks ties."""
    shared = Links(latency_s=links.latency_s, byte_s=links.byte_s, sharing=1.0)
    return seconds_of(links, rounds, orders) + _TIES * seconds_of(shared, rounds, orders)


def _moves(machines: int) -> IntArray:
    """(moves, machines) places to take machines from: exchanges, reversals and shifts."""
    found, places = set(), tuple(range(machines))
    for first, last in combinations(places, 2):
        before, inside, after = places[:first], places[first : last + 1], places[last + 1 :]
        for moved in (
            (last, *inside[1:-1], first),
            inside[::-1],
            (*inside[1:], first),
            (last, *inside[:-1]),
        ):
            found.add((*before, *moved, *after))
    return np.array(sorted(found))
