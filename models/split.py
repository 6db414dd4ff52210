"""The batch split that makes unequal machines finish together, in whole samples. Never guesses a machine's speed.

    T_i(b) = a_i + k_i b;   b_i = (tau - a_i) / k_i;   tau = (B + sum d_i a_i / k_i) / sum(d_i / k_i)

with B samples a micro-step and d_i devices on machine i (physics.md, "Unequal machines", [D]).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_LEAST_SECONDS_PER_SAMPLE = 1e-12  # a profile may fit a flat line; the split must stay finite
_ALMOST = 1e-9  # of a sample, or relative of a second: below what arithmetic on floats can tell apart

Line = tuple[float, float]  # (a, k): seconds of forward and backward on one device are a + k * batch


def finish_together(lines: Sequence[Line], total: int, devices: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Samples per device of each machine, adding up to exactly `total` over all devices, with the earliest finish.

    `lines` holds one (a, k) a machine; `devices` how many devices share the machine's line (1 where None). Rounding is
    by largest remainder, then samples move off the slowest machine while that helps: with one device a machine no
    other whole split finishes earlier. Of equal machines the first ones get the odd samples.
    None where a machine would get less than one sample (the cluster without it is no slower), or where the devices'
    counts cannot add up to `total`. Raises ValueError on empty `lines` or lengths that differ.
    """
    counts = tuple(devices) if devices is not None else (1,) * len(lines)
    if not lines or len(counts) != len(lines):
        raise ValueError(f"{len(lines)} machines and {len(counts)} device counts: one of each a machine")
    a = np.array([line[0] for line in lines], dtype=float)
    k = np.maximum(np.array([line[1] for line in lines], dtype=float), _LEAST_SECONDS_PER_SAMPLE)
    d = np.array(counts, dtype=float)
    tau = (total + float(np.sum(d * a / k))) / float(np.sum(d / k))
    ideal = (tau - a) / k
    if float(np.min(ideal)) < 1 - _ALMOST:
        return None
    batches = _rounded(ideal, total, counts)
    return None if batches is None else _exchanged(batches, a, k, counts)


def finish_s(lines: Sequence[Line], batches: Sequence[int]) -> float:
    """Seconds until the slowest machine is done with its share: max of a_i + k_i b_i."""
    return max(a + k * batch for (a, k), batch in zip(lines, batches, strict=True))


def global_batches(least: int, most: int) -> tuple[int, ...]:
    """Global batches worth comparing in [least, most]: least, its doublings, and most.

    Raises ValueError where the range is empty or starts below 1.
    """
    if not 1 <= least <= most:
        raise ValueError(f"global batch [{least}, {most}] is no range of at least 1")
    doublings = [least * 2**i for i in range((most // least).bit_length())]
    return tuple(sorted({batch for batch in doublings if batch <= most} | {most}))


def _rounded(ideal: np.ndarray, total: int, devices: tuple[int, ...]) -> list[int] | None:
    """Largest remainder: round down, then one more for the machines that lost most, until `total` is reached."""
    whole = [max(1, math.floor(share + _ALMOST)) for share in ideal]
    left = total - sum(count * batch for count, batch in zip(devices, whole, strict=True))
    by_remainder = sorted(range(len(whole)), key=lambda i: (whole[i] - float(ideal[i]), i))
    while left > 0:
        takers = [i for i in by_remainder if devices[i] <= left]
        if not takers:
            return None
        for i in takers:
            if devices[i] <= left:
                whole[i] += 1
                left -= devices[i]
    return whole if left == 0 else None


def _exchanged(batches: list[int], a: np.ndarray, k: np.ndarray, devices: tuple[int, ...]) -> tuple[int, ...]:
    """Move samples from the slowest machine to whoever then still finishes before it did, until nobody does."""
    times = [float(a[i] + k[i] * batches[i]) for i in range(len(batches))]
    moved = True
    while moved:
        moved = False
        slowest = max(range(len(batches)), key=lambda i: times[i])
        moves = []
        for j in range(len(batches)):
            shared = math.gcd(devices[slowest], devices[j])
            gives, takes = devices[j] // shared, devices[slowest] // shared
            after = float(a[j] + k[j] * (batches[j] + takes))
            if j != slowest and batches[slowest] > gives and after < times[slowest] * (1 - _ALMOST):
                moves.append((after, j, gives, takes))
        if moves:
            after, taker, gives, takes = min(moves)
            batches[slowest] -= gives
            batches[taker] += takes
            times[slowest] = float(a[slowest] + k[slowest] * batches[slowest])
            times[taker] = after
            moved = True
    return tuple(batches)
