"""The batch split that makes unequal machines finish together, in whole samples. Never guesses a machine's speed.

    T_i(b) = a_i + k_i b;   b_i = (tau - a_i) / k_i;   tau = (B + sum d_i a_i / k_i) / sum(d_i / k_i)

with B samples a micro-step and d_i devices on machine i (physics.md, "Unequal machines", [D]).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_SECONDS_PER_SAMPLE = 1e-12  # a profile may fit a flat line; the split must stay finite
_ALMOST = 1e-9  # of a sample, or relative of a second: below what arithmetic on floats can tell apart

Line = tuple[float, float]  # (a, k): seconds of forward and backward on one device are a + k * batch
Floats = NDArray[np.float64]
Wholes = NDArray[np.int64]


def finish_together(lines: Sequence[Line], total: int, devices: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Samples per device of each machine, adding up to exactly `total` over all devices, with the earliest finish.

    `lines` holds one (a, k) a machine; `devices` how many devices share the machine's line (1 where None). With one
    device a machine no other whole split finishes earlier. Of equal machines the first ones get the odd samples.
    None where a machine would get less than one sample (the cluster without it is no slower), or where the devices'
    counts cannot add up to `total`. Raises ValueError on empty `lines` or lengths that differ.
    """
    counts = tuple(devices) if devices is not None else (1,) * len(lines)
    if not lines or len(counts) != len(lines):
        raise ValueError(f"{len(lines)} machines and {len(counts)} device counts: one of each a machine")
    line = np.array(lines, dtype=float)
    samples, possible = split_groups(
        line[None, :, 0],
        line[None, :, 1],
        count=np.ones((1, len(lines)), dtype=np.int64),
        devices=np.array([counts], dtype=np.int64),
        total=np.array([total], dtype=np.int64),
    )
    return tuple(int(one) for one in samples[0]) if possible[0] else None


def split_groups(
    a: Floats, k: Floats, *, count: Wholes, devices: Wholes, total: Wholes
) -> tuple[Wholes, NDArray[np.bool_]]:
    """The same for many clusters at once, machines of a type together: (clusters, types) arrays, `count` 0 padded.

    First result: the samples of one device of each machine, summed over the machines of the type; they are shared as
    evenly as they can be, so that the first (samples mod count) machines get one more. Second: where there is a split.
    """
    present = count > 0
    pace = np.maximum(k, _LEAST_SECONDS_PER_SAMPLE)
    weight = count * devices / pace
    tau = (total + (weight * a).sum(axis=1)) / np.maximum(weight.sum(axis=1), 1e-300)
    ideal = np.where(present, (tau[:, None] - a) / pace, np.inf)
    possible = present.any(axis=1) & (ideal.min(axis=1) >= 1 - _ALMOST)
    possible &= ((ideal < np.inf) & (devices > 0) | ~present).all(axis=1)  # a machine without a device trains nothing
    whole = np.maximum(1, np.floor(np.where(present & possible[:, None], ideal, 1.0) + _ALMOST)).astype(np.int64)
    samples = whole * count
    left = total - (samples * devices).sum(axis=1)
    possible &= left >= 0
    _hand_out(samples, left, possible, a, pace, count, devices)
    _exchange(samples, possible, a, pace, count, devices)
    return samples, possible


def global_batches(least: int, most: int) -> tuple[int, ...]:
    """Global batches worth comparing in [least, most]: least, its doublings, and most.

    Raises ValueError where the range is empty or starts below 1.
    """
    if not 1 <= least <= most:
        raise ValueError(f"global batch [{least}, {most}] is no range of at least 1")
    doublings = [least * 2**i for i in range((most // least).bit_length())]
    return tuple(sorted({batch for batch in doublings if batch <= most} | {most}))


def _hand_out(
    samples: Wholes, left: Wholes, possible: NDArray[np.bool_], a: Floats, k: Floats, count: Wholes, devices: Wholes
) -> None:
    """Give what rounding down has `left` to whoever then finishes first, again and again; in place."""
    active = np.flatnonzero(possible & (left > 0))
    while len(active):
        n, d = count[active], devices[active]
        able = (n > 0) & (d <= left[active, None])
        stuck = ~able.any(axis=1)
        possible[active[stuck]] = False
        each = np.maximum(n, 1)
        after = np.where(able, a[active] + k[active] * (samples[active] // each + 1), np.inf)
        taker = after.argmin(axis=1)
        row = np.arange(len(active))
        still = each[row, taker] - samples[active, taker] % each[row, taker]  # machines that have not had theirs
        given = np.where(stuck, 0, np.minimum(still, left[active] // d[row, taker].clip(1)))
        samples[active, taker] += given
        left[active] -= given * d[row, taker]
        active = active[~stuck & (left[active] > 0)]


def _exchange(
    samples: Wholes, possible: NDArray[np.bool_], a: Floats, k: Floats, count: Wholes, devices: Wholes
) -> None:
    """Where device counts differ, move samples off the slowest type while the taker still finishes before it did.

    With equal counts handing out was the best already: no machine could finish earlier with one sample more.
    """
    known = np.where(count > 0, devices, 0)
    uneven = known.max(axis=1) != np.where(count > 0, devices, np.iinfo(np.int64).max).min(axis=1)
    active = np.flatnonzero(possible & uneven)
    while len(active):
        n, d, have = count[active], np.maximum(devices[active], 1), samples[active]
        each, row = np.maximum(n, 1), np.arange(len(active))
        times = np.where(n > 0, a[active] + k[active] * -(-have // each), -np.inf)
        giver = times.argmax(axis=1)
        slowest = times[row, giver]
        moved = np.lcm(d, d[row, giver][:, None])
        gives, takes = moved // d[row, giver][:, None], moved // d
        after = a[active] + k[active] * -(-(have + takes) // each)
        helps = (n > 0) & (have[row, giver][:, None] - gives >= each[row, giver][:, None])
        helps &= after < slowest[:, None] * (1 - _ALMOST)
        helps[row, giver] = False
        going = helps.any(axis=1)
        taker = np.where(helps, after, np.inf).argmin(axis=1)
        active, row = active[going], row[going]
        samples[active, giver[going]] -= gives[row, taker[going]]
        samples[active, taker[going]] += takes[row, taker[going]]
