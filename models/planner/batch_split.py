"""Divides a global batch over a cluster's machines and micro-steps so that unequal machines finish together.

    T_i(b) = a_i + k_i b;   b_i = (tau - a_i) / k_i;   tau = (B + sum d_i a_i / k_i) / sum(d_i / k_i)

with B samples a micro-step and d_i devices on machine i (physics.md, "Unequal machines", [D]), in whole samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..domain.cluster import Cluster, InstanceType, Offer
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.workload import Mode, Setup, Workload
from ..step_time.machine_specs import computes
from ..step_time.setup_arrays import SetupArrays

_LEAST_SECONDS_PER_SAMPLE = 1e-12  # a profile may fit a flat line; the split must stay finite
_ALMOST = (
    1e-9  # of a sample, or relative of a second: below what arithmetic on floats can tell apart
)

Line = tuple[
    float, float
]  # (a, k): seconds of forward and backward on one device are a + k * batch
Wholes = NDArray[np.int64]


def finish_together(
    lines: Sequence[Line], total: int, devices: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Samples per device of each machine, adding up to exactly `total` over all devices, with the earliest finish.

    `lines` holds one (a, k) a machine; `devices` how many devices share the machine's line (1 where None). With one
    device a machine no other whole split finishes earlier. Of equal machines the first ones get the odd samples.
    None where a machine would get less than one sample (the cluster without it is no slower), or where the devices'
    counts cannot add up to `total`. Raises ValueError on empty `lines` or lengths that differ.
    """
    counts = tuple(devices) if devices is not None else (1,) * len(lines)
    if not lines or len(counts) != len(lines):
        raise ValueError(
            f"{len(lines)} machines and {len(counts)} device counts: one of each a machine"
        )
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
    a: FloatArray, k: FloatArray, *, count: Wholes, devices: Wholes, total: Wholes
) -> tuple[Wholes, BoolArray]:
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
    possible &= ((ideal < np.inf) & (devices > 0) | ~present).all(
        axis=1
    )  # a machine without a device trains nothing
    whole = np.maximum(
        1, np.floor(np.where(present & possible[:, None], ideal, 1.0) + _ALMOST)
    ).astype(np.int64)
    samples = whole * count
    left = total - (samples * devices).sum(axis=1)
    possible &= left >= 0
    _hand_out(samples, left, possible, a, pace, count, devices)
    _exchange(samples, possible, a, pace, count, devices)
    return samples, possible


def global_batches(least: int, most: int) -> tuple[int, ...]:
    """Global batches to compare in [least, most]: least, its doublings, and most.

    Raises ValueError where the range is empty or starts below 1.
    """
    if not 1 <= least <= most:
        raise ValueError(f"global batch [{least}, {most}] is no range of at least 1")
    doublings = [least * 2**i for i in range((most // least).bit_length())]
    return tuple(sorted({batch for batch in doublings if batch <= most} | {most}))


def _hand_out(
    samples: Wholes,
    left: Wholes,
    possible: BoolArray,
    a: FloatArray,
    k: FloatArray,
    count: Wholes,
    devices: Wholes,
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
        still = (
            each[row, taker] - samples[active, taker] % each[row, taker]
        )  # machines that have not had theirs
        given = np.where(stuck, 0, np.minimum(still, left[active] // d[row, taker].clip(1)))
        samples[active, taker] += given
        left[active] -= given * d[row, taker]
        active = active[~stuck & (left[active] > 0)]


def _exchange(
    samples: Wholes,
    possible: BoolArray,
    a: FloatArray,
    k: FloatArray,
    count: Wholes,
    devices: Wholes,
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


ACCUMULATION_STEPS = (1, 2, 4)
_ARRAYS = ("mode", "cluster", "kind", "count", "samples", "total", "steps")


class StepModel(Protocol):
    """What planning asks of a step-time model. Draws of a setup must not depend on what else is asked about."""

    def compute_line(self, workload: str, instance_type: str, mode: Mode = ...) -> Line:
        """(a, k): forward and backward of one device take about a + k * batch seconds."""

    def peak_bytes(
        self,
        workload: str,
        instance_type: str,
        batch: int,
        ranks: int = 1,
        *,
        mode: Mode = ...,
        accumulates: bool = False,
    ) -> float:
        """Peak memory of one of so many devices, in one or several micro-steps a step; NaN where unknown."""

    def least_seconds(self, arrays: SetupArrays) -> FloatArray:
        """(rows,) seconds that no prediction of these setups undercuts."""

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """step_s, step_low_s, step_high_s and bottleneck by row."""

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """(rows, count) joint draws of step seconds, in pairs about the prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplits:
    """Splits in the order of clusters, modes, batches and steps.

    (splits, types) arrays hold a cluster's own types in order. `mode` numbers `modes`, and `cluster` the rows
    of `counts` that a split came from; `kind` the types (-1: padded); `samples` of one device of each machine, summed
    over the machines of the type; `total` is the global batch.
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
        """How many splits there are."""
        return len(self.cluster)

    def arrays(self) -> SetupArrays:
        """What a step time is predicted from: of each type the machines with an odd sample, then the others."""
        count = np.maximum(self.count, 1)
        batch, odd = self.samples // count, self.samples % count
        rows, width = self.kind.shape
        double = (rows, 2 * width)
        number = np.stack([odd, self.count - odd], axis=2).reshape(double)
        devices = np.array([one.devices for one in self.types] + [0], dtype=float)[
            np.repeat(self.kind, 2, axis=1)
        ]
        there = number > 0
        return SetupArrays.planned(
            self.workload,
            self.modes,
            self.mode,
            names=tuple(one.name for one in self.types),
            kind=np.where(there, np.repeat(self.kind, 2, axis=1), -1),
            count=number.astype(float),
            batch=np.where(there, np.stack([batch + 1, batch], axis=2).reshape(double), 0).astype(
                float
            ),
            layout=np.where(there, devices, 0.0),
            accumulation=self.steps.astype(float),
        )

    def setup(self, at: int, offers: Callable[[str, int], Sequence[Offer]]) -> Setup:
        """One split as a setup; `offers` gives those of so many machines of a type by name."""
        members: list[Offer] = []
        batches: list[int] = []
        for kind, count, samples in zip(
            self.kind[at], self.count[at], self.samples[at], strict=True
        ):
            if kind >= 0:
                members += offers(self.types[kind].name, int(count))
                batch, odd = divmod(int(samples), int(count))
                batches += [batch + 1] * odd + [batch] * (int(count) - odd)
        mode = self.modes[self.mode[at]]
        return Setup(
            workload=self.workload,
            cluster=Cluster(members=tuple(members)),
            layout=tuple(one.instance_type.devices for one in members),
            batch_per_device=tuple(batches),
            accumulation_steps=int(self.steps[at]),
            precision=mode.precision,
            strategy=mode.strategy,
            switches=mode.switches,
        )


def splits_of(
    workload: Workload,
    types: Sequence[InstanceType],
    counts: Wholes,
    *,
    totals: Sequence[int],
    model: StepModel,
) -> BatchSplits:
    """Splits of every cluster in `counts` (clusters, types), whose batch is one of `totals` and whose devices hold it,
    in each mode that the workload tolerates and the cluster can train in. One device shares and sends nothing.

    Steps are those of ACCUMULATION_STEPS that divide the batch; where a cluster could hold the batch in none of them,
    the least greater divisor with which it can. A machine that would get no sample makes no split: the cluster without
    it is no slower.
    """
    width = max(1, int((counts > 0).sum(axis=1).max(initial=0)))
    order = np.argsort(counts == 0, axis=1, kind="stable")[:, :width]
    count = np.take_along_axis(counts, order, axis=1)
    kind = np.where(count > 0, order, -1)
    devices = np.array([one.devices for one in types] + [0], dtype=np.int64)
    parts: list[tuple[IntArray, ...]] = []
    ranks, machines = (count * devices[kind]).sum(axis=1), count.sum(axis=1)
    most = np.where(kind >= 0, devices[kind], 0).max(axis=1, initial=0)
    fewest = np.where(kind >= 0, devices[kind], devices.max()).min(axis=1, initial=devices.max())
    for number, mode in enumerate(workload.modes):
        lines = np.array(
            [model.compute_line(workload.name, one.name, mode) for one in types] + [(0.0, 1.0)],
            dtype=float,
        )
        computing = np.array([*(computes(one.device, mode) for one in types), True], dtype=bool)
        able = computing[kind].all(axis=1) & mode.runs_on(machines, fewest, most, ranks)
        # what devices share is a half, a quarter ...: of ranks between two powers of two the fewer count
        powers = (
            2 ** np.floor(np.log2(np.maximum(ranks, 1))).astype(np.int64)
            if mode.sharded
            else np.ones_like(ranks)
        )
        for power in sorted({1, *powers.tolist()}):
            largest = [
                [
                    _largest_batch(
                        partial(
                            fits,
                            model,
                            workload.name,
                            one,
                            mode=mode,
                            ranks=power,
                            accumulates=several,
                        ),
                        max(totals),
                    )
                    for one in types
                ]
                for several in (False, True)
            ]
            limit = np.array([[*few, max(totals)] for few in largest], dtype=np.int64)
            rows = np.flatnonzero(able & (powers == power))
            divided = _divided(
                rows, kind, count, totals=totals, lines=lines, devices=devices, limit=limit
            )
            divided = [_equal(*one) for one in divided] if mode.of_equal_batches else divided
            parts += [(np.full(len(one[0]), number), *one) for one in divided]
    arrays = dict(
        zip(_ARRAYS, (np.concatenate(one) for one in zip(*parts, strict=True)), strict=True)
    )
    order = np.lexsort((arrays["steps"], arrays["total"], arrays["mode"], arrays["cluster"]))
    sorted_ = {name: array[order] for name, array in arrays.items()}
    return BatchSplits(workload=workload.name, modes=workload.modes, types=tuple(types), **sorted_)


def _divided(
    clusters: IntArray,
    kind: IntArray,
    count: Wholes,
    *,
    totals: Sequence[int],
    lines: FloatArray,
    devices: Wholes,
    limit: Wholes,
) -> list[tuple[IntArray, ...]]:
    """Columns cluster, kind, count, samples, total and steps of the splits of `clusters`, rows of `kind` and `count`.

    `lines` and `devices` are a type's seconds and devices, `limit` its largest batch in one micro-step and in several;
    the last entry where padded.
    """
    parts: list[tuple[IntArray, ...]] = []

    def divide(rows: IntArray, total: int, steps: int) -> tuple[BoolArray, BoolArray]:
        """Which of the clusters at `rows` can be divided so, and which lack but memory; the former join `parts`."""
        own, many = kind[rows], count[rows]
        micro = np.full(len(rows), total // steps, dtype=np.int64)
        samples, possible = split_groups(
            lines[own, 0], lines[own, 1], count=many, devices=devices[own], total=micro
        )
        most = -(-samples // np.maximum(many, 1))
        held = ((many == 0) | (most <= limit[int(steps > 1), own])).all(axis=1)
        at = np.flatnonzero(possible & held)
        whole, every = (
            np.full(len(at), total, dtype=np.int64),
            np.full(len(at), steps, dtype=np.int64),
        )
        parts.append((rows[at], own[at], many[at], samples[at], whole, every))
        return possible & held, possible & ~held

    for total in totals:
        usual = [steps for steps in ACCUMULATION_STEPS if total % steps == 0]
        done = [divide(clusters, total, steps) for steps in usual]
        able, lacking = (np.any(which, axis=0) for which in zip(*done, strict=True))
        pending = clusters[lacking & ~able]
        for steps in _divisors(total, above=max(usual)):
            if len(pending):
                pending = pending[~divide(pending, total, steps)[0]]
    return parts


def _equal(
    clusters: IntArray, kind: IntArray, count: Wholes, samples: Wholes, *others: IntArray
) -> tuple[IntArray, ...]:
    """Of the columns that `_divided` makes the rows in which each device has as many samples."""
    each, left = np.divmod(samples, np.maximum(count, 1))
    same = ((left == 0) & (each == each.max(axis=1, keepdims=True)) | (count == 0)).all(axis=1)
    return tuple(one[same] for one in (clusters, kind, count, samples, *others))


def _divisors(total: int, *, above: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(total) + 1) if total % one == 0]
    return sorted(one for one in {*small, *(total // one for one in small)} if one > above)


def fits(
    model: StepModel,
    workload: str,
    one: InstanceType,
    batch: int,
    *,
    mode: Mode,
    ranks: int,
    accumulates: bool,
) -> bool:
    """Whether one of so many devices holds a batch; memory that nobody knows is allowed."""
    peak = model.peak_bytes(workload, one.name, batch, ranks, mode=mode, accumulates=accumulates)
    return math.isnan(peak) or peak <= one.device_memory_gib * 2**30


def _largest_batch(holds: Callable[[int], bool], most: int) -> int:
    """The largest batch up to `most` that a device holds: memory grows with the batch."""
    return bisect_left(range(1, most + 1), True, key=lambda batch: not holds(batch))
