"""Divide a global batch over machines and micro-steps so that unequal machines finish together.

    T_i(b) = a_i + k_i b;  b_i = (tau - a_i) / k_i;  tau = (B + sum d_i a_i / k_i) / sum(d_i / k_i)

B is the samples of a micro-step and d_i the devices of machine i; shares are whole samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..domain.cluster import Cluster, InstanceType, Offer
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.workload import Mode, Setup, Workload
from ..step_time.machine_specs import computes
from ..step_time.model import StepTimeModel
from ..step_time.setup_arrays import SetupArrays

_LEAST_SECONDS_PER_SAMPLE = 1e-12  # a profile may fit a flat line; the split must stay finite
_ROUNDING = 1e-9  # of a sample, or relative of a second
ACCUMULATION_STEPS = (1, 2, 4)

Line = tuple[float, float]  # (a, k): forward and backward of one device take a + k * batch seconds
Wholes = NDArray[np.int64]


def finish_together(
    lines: Sequence[Line], total: int, devices: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Return samples per device of each machine with the earliest finish.

    `devices` is the number of devices of each machine, 1 by default. The shares of all devices add
    up to `total`. None if a machine would get no sample (the cluster without it is no slower) or
    the device counts cannot add up to `total`.

    Raises:
        ValueError: `lines` is empty or of another length than `devices`.
    """
    counts = tuple(devices) if devices is not None else (1,) * len(lines)
    if not lines or len(counts) != len(lines):
        raise ValueError(f"{len(lines)} lines for {len(counts)} device counts")
    line = np.array(lines, dtype=float)
    samples, possible = split_groups(
        line[None, :, 0],
        line[None, :, 1],
        count=np.ones((1, len(lines)), dtype=np.int64),
        devices=np.array([counts], dtype=np.int64),
        total=np.array([total], dtype=np.int64),
    )
    return tuple(int(share) for share in samples[0]) if possible[0] else None


def split_groups(
    a: FloatArray, k: FloatArray, *, count: Wholes, devices: Wholes, total: Wholes
) -> tuple[Wholes, BoolArray]:
    """Split for many clusters at once; arrays are (clusters, types), padded with `count` 0.

    Returns the samples of one device of each machine, summed over the machines of a type, and
    whether there is a split. Of a type's machines the first (samples mod count) get one more.
    """
    present = count > 0
    pace = np.maximum(k, _LEAST_SECONDS_PER_SAMPLE)
    weight = count * devices / pace
    tau = (total + (weight * a).sum(axis=1)) / np.maximum(weight.sum(axis=1), 1e-300)
    ideal = np.where(present, (tau[:, None] - a) / pace, np.inf)
    possible = present.any(axis=1) & (ideal.min(axis=1) >= 1 - _ROUNDING)
    possible &= ((ideal < np.inf) & (devices > 0) | ~present).all(axis=1)
    floor = np.floor(np.where(present & possible[:, None], ideal, 1.0) + _ROUNDING)
    samples = np.maximum(1, floor).astype(np.int64) * count
    left = total - (samples * devices).sum(axis=1)
    possible &= left >= 0
    _hand_out(samples, left, possible, lines=(a, pace), count=count, devices=devices)
    _exchange(samples, possible, lines=(a, pace), count=count, devices=devices)
    return samples, possible


def _hand_out(
    samples: Wholes,
    left: Wholes,
    possible: BoolArray,
    *,
    lines: tuple[FloatArray, FloatArray],
    count: Wholes,
    devices: Wholes,
) -> None:
    """Give the samples `left` by rounding to the type that then finishes first; in place."""
    a, k = lines
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
        without = each[row, taker] - samples[active, taker] % each[row, taker]
        given = np.where(stuck, 0, np.minimum(without, left[active] // d[row, taker].clip(1)))
        samples[active, taker] += given
        left[active] -= given * d[row, taker]
        active = active[~stuck & (left[active] > 0)]


def _exchange(
    samples: Wholes,
    possible: BoolArray,
    *,
    lines: tuple[FloatArray, FloatArray],
    count: Wholes,
    devices: Wholes,
) -> None:
    """Move samples off the slowest type while that helps; in place.

    Only where device counts differ: with equal counts handing out is optimal.
    """
    a, k = lines
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
        helps &= after < slowest[:, None] * (1 - _ROUNDING)
        helps[row, giver] = False
        going = helps.any(axis=1)
        taker = np.where(helps, after, np.inf).argmin(axis=1)
        active, row = active[going], row[going]
        samples[active, giver[going]] -= gives[row, taker[going]]
        samples[active, taker[going]] += takes[row, taker[going]]


def global_batches(least: int, most: int) -> tuple[int, ...]:
    """Return the global batches to compare: least, its doublings, and most.

    Raises:
        ValueError: the range is empty or starts below 1.
    """
    if not 1 <= least <= most:
        raise ValueError(f"global batch [{least}, {most}] is no range of at least 1")
    doublings = [least * 2**power for power in range((most // least).bit_length())]
    return tuple(sorted({batch for batch in doublings if batch <= most} | {most}))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplits:
    """Batch splits of clusters as columns, in the order of clusters, modes, batches and steps.

    `mode` numbers `modes`, `cluster` the enumerated clusters and `kind` (splits, types) the
    `types` (-1: padded). `count` are machines of each type, `samples` of one device of each
    machine, summed over the machines of the type; `total` is the global batch.
    """

    workload: str
    modes: tuple[Mode, ...]
    types: tuple[InstanceType, ...]
    mode: IntArray
    cluster: IntArray
    kind: IntArray
    count: Wholes
    samples: Wholes
    total: Wholes
    steps: Wholes

    def __len__(self) -> int:
        return len(self.cluster)

    def arrays(self, rows: IntArray | slice = slice(None)) -> SetupArrays:
        """Return the model's input: of each type the machines with an odd sample, then others."""
        kind, number, samples = (one[rows] for one in (self.kind, self.count, self.samples))
        count = np.maximum(number, 1)
        batch, odd = samples // count, samples % count
        double = (len(kind), 2 * kind.shape[1])
        machines = np.stack([odd, number - odd], axis=2).reshape(double)
        batches = np.stack([batch + 1, batch], axis=2).reshape(double)
        kinds = np.repeat(kind, 2, axis=1)
        devices = np.array([one.devices for one in self.types] + [0])[kinds]
        present = machines > 0
        return SetupArrays.planned(
            self.workload,
            self.modes,
            self.mode[rows],
            names=tuple(one.name for one in self.types),
            kind=np.where(present, kinds, -1),
            count=machines.astype(float),
            batch=np.where(present, batches, 0).astype(float),
            layout=np.where(present, devices, 0).astype(float),
            accumulation=self.steps[rows].astype(float),
        )

    def setup(self, at: int, offers: Mapping[str, Offer]) -> Setup:
        """Return a split as a setup of these offers, by the name of their type."""
        members: list[Offer] = []
        batches: list[int] = []
        columns = (self.kind[at], self.count[at], self.samples[at])
        for kind, count, samples in zip(*(one.tolist() for one in columns), strict=True):
            if kind >= 0:
                batch, odd = divmod(samples, count)
                members += [offers[self.types[kind].name]] * count
                batches += [batch + 1] * odd + [batch] * (count - odd)
        return Setup(
            workload=self.workload,
            cluster=Cluster(members=tuple(members)),
            layout=tuple(one.instance_type.devices for one in members),
            batch_per_device=tuple(batches),
            accumulation_steps=int(self.steps[at]),
            **self.modes[self.mode[at]]._asdict(),
        )


def splits_of(
    workload: Workload,
    types: Sequence[InstanceType],
    counts: Wholes,
    *,
    totals: Sequence[int],
    model: StepTimeModel,
) -> BatchSplits:
    """Return the splits of clusters of `counts` (clusters, types) machines, in each mode.

    The batch is one of `totals`, and all devices hold it. Accumulation steps are those of
    ACCUMULATION_STEPS that divide the batch; if memory suffices in none of them, the least greater
    divisor with which it does. A machine without a sample makes no split.
    """
    width = max(1, int((counts > 0).sum(axis=1).max(initial=0)))
    order = np.argsort(counts == 0, axis=1, kind="stable")[:, :width]
    count = np.take_along_axis(counts, order, axis=1)
    kind = np.where(count > 0, order, -1)
    devices = np.array([one.devices for one in types] + [0], dtype=np.int64)
    present, most_devices = devices[kind], devices.max()
    ranks, machines = (count * present).sum(axis=1), count.sum(axis=1)
    fewest = np.where(kind >= 0, present, most_devices).min(axis=1, initial=most_devices)
    largest = present.max(axis=1, initial=0)
    splits: list[tuple[IntArray, ...]] = []
    for number, mode in enumerate(workload.modes):
        lines = [model.compute_line(workload.name, one.name, mode) for one in types]
        computing = np.array([*(computes(one.device, mode) for one in types), True], dtype=bool)
        able = computing[kind].all(axis=1) & mode.runs_on(machines, fewest, largest, ranks)
        powers = np.ones_like(ranks)
        if mode.sharded:  # memory of a half, a quarter ...: between two powers the lower counts
            powers = 2 ** np.floor(np.log2(np.maximum(ranks, 1))).astype(np.int64)
        for power in np.unique(powers[able]).tolist():
            rows = np.flatnonzero(able & (powers == power))
            limits = [
                [_largest_batch(model, workload.name, mode, one, max(totals), power, several)
                 for one in types]
                for several in (False, True)
            ]  # fmt: skip
            divided = _divided(
                (kind[rows], count[rows]),
                totals,
                lines=np.array([*lines, (0.0, 1.0)], dtype=float),
                devices=devices,
                limit=np.array([[*few, max(totals)] for few in limits], dtype=np.int64),
            )
            for at, total, steps, samples in divided:
                if mode.of_equal_batches:
                    same = _equal(count[rows[at]], samples)
                    at, samples = at[same], samples[same]
                constant = (np.full(len(at), value) for value in (number, total, steps))
                splits.append((rows[at], samples, *constant))
    if not splits:
        splits.append((np.zeros(0, dtype=np.intp), count[:0], *[np.zeros(0, dtype=np.intp)] * 3))
    cluster, samples, numbers, total_of, steps_of = (
        np.concatenate(column) for column in zip(*splits, strict=True)
    )
    order = np.lexsort((steps_of, total_of, numbers, cluster))
    return BatchSplits(
        workload=workload.name,
        modes=workload.modes,
        types=tuple(types),
        mode=numbers[order].astype(np.intp),
        cluster=cluster[order],
        kind=kind[cluster[order]],
        count=count[cluster[order]],
        samples=samples[order],
        total=total_of[order],
        steps=steps_of[order],
    )


def _divided(
    machines: tuple[IntArray, Wholes],
    totals: Sequence[int],
    *,
    lines: FloatArray,
    devices: Wholes,
    limit: Wholes,
) -> list[tuple[IntArray, int, int, Wholes]]:
    """Return (clusters, total, steps, samples) of the possible splits of clusters.

    `machines` are the kinds and counts of each cluster's types. By type, with a last entry for
    padding: `lines`, `devices`, and `limit` (2, types), the largest batch in one micro-step and in
    several.
    """
    kind, count = machines
    found: list[tuple[IntArray, int, int, Wholes]] = []

    def divide(rows: IntArray, total: int, steps: int) -> tuple[BoolArray, BoolArray]:
        """Add the splits that fit. Returns which clusters fit, and which lack only memory."""
        own, number = kind[rows], count[rows]
        micro = np.full(len(rows), total // steps, dtype=np.int64)
        samples, possible = split_groups(
            lines[own, 0], lines[own, 1], count=number, devices=devices[own], total=micro
        )
        most = -(-samples // np.maximum(number, 1))
        held = ((number == 0) | (most <= limit[int(steps > 1), own])).all(axis=1)
        found.append((rows[possible & held], total, steps, samples[possible & held]))
        return possible & held, possible & ~held

    everything = np.arange(len(kind))
    for total in totals:
        usual = [steps for steps in ACCUMULATION_STEPS if total % steps == 0]
        fits, lacks = zip(*(divide(everything, total, steps) for steps in usual), strict=True)
        pending = everything[np.any(lacks, axis=0) & ~np.any(fits, axis=0)]
        for steps in _divisors(total, above=max(usual)):
            if len(pending):
                pending = pending[~divide(pending, total, steps)[0]]
    return found


def _equal(count: Wholes, samples: Wholes) -> BoolArray:
    """(splits,) has every device the same number of samples?"""
    each, left = np.divmod(samples, np.maximum(count, 1))
    same = (left == 0) & (each == each.max(axis=1, keepdims=True))
    return np.asarray((same | (count == 0)).all(axis=1), dtype=bool)


def _divisors(total: int, *, above: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(total) + 1) if total % each == 0]
    return sorted(each for each in {*small, *(total // each for each in small)} if each > above)


def _largest_batch(
    model: StepTimeModel,
    workload: str,
    mode: Mode,
    kind: InstanceType,
    most: int,
    ranks: int,
    accumulates: bool,
) -> int:
    """The largest batch up to `most` that a device holds. Unknown memory suffices."""

    def too_large(batch: int) -> bool:
        peak = model.peak_bytes(
            workload, kind.name, batch, ranks, mode=mode, accumulates=accumulates
        )
        return peak > kind.device_memory_gib * 2**30

    return bisect_left(range(1, most + 1), True, key=too_large)
