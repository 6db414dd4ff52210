"""Choose the rank order of machines in which a step's communication is fastest.

Communication is a sequence of rounds. In a round, pairs of machines send to each other at the same
time. The seconds follow from measured links:

    seconds of a pair   t = latency + bytes x seconds per byte
    seconds of a round  max t + sharing (sum t - max t), over all pairs

`sharing` is 0 if every pair has a separate link, and 1 if all pairs share one link. A local search
swaps pairs of machines to find the fastest order.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray, IntArray

# Minimum share of the communication seconds that a new order must save. A smaller gain does not
# justify a new order, because runs in different orders are harder to compare.
LEAST_GAIN = 0.05
# A gain must be at least this many standard errors. If all orders are equally fast, three sweeps
# give such a gain in 5 % of cases.
SURE = 3.0
_STARTS = 32  # random starts of a local search
_TIES = 1e-4  # weight of the tie-breaking cost in `seconds_of`


class Links(NamedTuple):
    """Measured network links between n machines.

    - `latency_s`: an (n, n) array with the seconds of an empty message
    - `byte_s`: an (n, n) array with the seconds per byte
    - `sharing`: 0 if every pair of machines has a separate link, 1 if all pairs share one link
    """

    latency_s: FloatArray
    byte_s: FloatArray
    sharing: float = 0.0


class Round(NamedTuple):
    """A round of communication, in which pairs of ranks exchange `bytes` bytes at the same time.

    `places` has the pairs of ranks. `times` is the number of times that the round takes place.
    """

    places: tuple[tuple[int, int], ...]
    bytes: float
    times: int


def ring(machines: int, size: float) -> tuple[Round, ...]:
    """Return the communication rounds of a ring all-reduce of `size` bytes."""
    around = tuple((place, (place + 1) % machines) for place in range(machines))
    return (Round(places=around, bytes=size / machines, times=2 * (machines - 1)),)


def halvings(machines: int, size: float) -> tuple[Round, ...]:
    """Return the communication rounds of Adasum, which uses recursive halving and doubling.

    Adasum combines gradients of `size` bytes. The number of machines is a power of two.
    """
    rounds = []
    for distance in (1 << level for level in range(machines.bit_length() - 1)):
        peers = tuple((at, at ^ distance) for at in range(machines) if not at & distance)
        rounds.append(Round(places=peers, bytes=size / (2 * distance), times=2))
    return tuple(rounds)


def seconds_of(
    links: Links, rounds: Sequence[Round], orders: IntArray, *, ties: float = 0.0
) -> FloatArray:
    """Return an (orders,) array: the total seconds of `rounds` for each rank order.

    orders: an (orders, n) array with the machine at each of n ranks.
    ties: a small weight that breaks ties between equally fast orders. The result includes `ties`
        times the sum of the seconds of all messages.
    """
    total = np.zeros(len(orders))
    for phase in rounds:
        senders, receivers = np.array(phase.places).T
        pair_s = links.latency_s + phase.bytes * links.byte_s
        each = pair_s[orders[:, senders], orders[:, receivers]]
        slowest, summed = each.max(axis=1), each.sum(axis=1)
        total += phase.times * (slowest + links.sharing * (summed - slowest) + ties * summed)
    return total


def fastest(links: Links, rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the rank order of machines in which the communication rounds take the shortest time.

    Local searches start from several orders, and the best order that they find is returned. For up
    to 8 machines, this order is nearly always the best of all orders.
    """
    random, machines = np.random.default_rng(0), np.arange(len(links.latency_s))
    pairs = list(combinations(machines, 2))
    moves = np.tile(machines, (len(pairs), 1))
    for move, (first, second) in zip(moves, pairs, strict=True):
        move[[first, second]] = second, first
    found: list[tuple[float, list[int]]] = []
    for order in [machines, *(random.permutation(machines) for _ in range(_STARTS))]:
        best, better = np.inf, seconds_of(links, rounds, order[None], ties=_TIES)[0]
        while better < best * (1 - 1e-12):
            best = better
            found.append((best, order.tolist()))
            costs = seconds_of(links, rounds, order[moves], ties=_TIES)
            better, order = costs.min(), order[moves][costs.argmin()]
    return tuple(min(found)[1])


def choose(sweeps: Sequence[Links], rounds: Sequence[Round]) -> tuple[tuple[int, ...], str]:
    """Return the rank order to use, and a text with the predicted gain of the fastest order.

    The gain is the share of the communication seconds that the fastest order saves. If the gain is
    small or uncertain, the machines keep their present order. The gain is cross-validated: each
    sweep evaluates the order that is fastest in the other sweeps.

    sweeps: at least two measurements (sweeps) of all links.
    """
    unchanged = tuple(range(len(sweeps[0].latency_s)))
    gains = []
    for left_out, sweep in enumerate(sweeps):
        chosen = fastest(_median([*sweeps[:left_out], *sweeps[left_out + 1 :]]), rounds)
        before_s, after_s = seconds_of(sweep, rounds, np.array([unchanged, chosen]))
        gains.append(1 - after_s / before_s)
    gain, error = np.mean(gains), np.std(gains, ddof=1) / np.sqrt(len(gains))
    reason = f"predicted {gain:.0%} fewer seconds of communication, standard error {error:.1%}"
    if gain < LEAST_GAIN or gain < SURE * error:
        return unchanged, f"unchanged: {reason}"
    return fastest(_median(sweeps), rounds), reason


def _median(sweeps: Sequence[Links]) -> Links:
    """Return the median of each value in `Links` over all sweeps."""
    return Links(*(np.median(values, axis=0) for values in zip(*sweeps, strict=True)))
