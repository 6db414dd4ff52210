"""Every way to divide the workload's global batch over a cluster's machines and micro-steps, as arrays. Never ranks.

A shape is a cluster without its market, a global batch, a number of accumulation steps, and the samples of each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray
from .cloud import Cluster, InstanceType, Offer
from .keys import Keys
from .setups import SetupArrays
from .split import Line, Wholes, split_groups
from .workload import Setup, Workload

ACCUMULATION_STEPS = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes in the order of clusters, batches and steps; (shapes, types) arrays hold a cluster's own types in order.

    `place` numbers the rows of `counts` that a shape came from; `kind` the types (-1: padded); `samples` of one device
    of each machine, summed over the machines of the type.
    """

    workload: str
    types: tuple[InstanceType, ...]
    place: IntArray
    kind: IntArray
    count: Wholes
    samples: Wholes
    total: Wholes
    steps: Wholes

    def __len__(self) -> int:
        """How many shapes there are."""
        return len(self.place)

    def take(self, picked: IntArray) -> Shapes:
        """The shapes at these positions."""
        arrays = {name: getattr(self, name)[picked] for name in _ARRAYS}
        return Shapes(workload=self.workload, types=self.types, **arrays)

    def arrays(self) -> SetupArrays:
        """What a step time is predicted from: of each type the machines with an odd sample, then the others."""
        count = np.maximum(self.count, 1)
        batch, odd = self.samples // count, self.samples % count
        rows, width = self.kind.shape
        double = (rows, 2 * width)
        number = np.stack([odd, self.count - odd], axis=2).reshape(double)
        devices = np.array([one.devices for one in self.types] + [0], dtype=float)[np.repeat(self.kind, 2, axis=1)]
        there = number > 0
        return SetupArrays(
            workloads=Keys.of([self.workload]).take(np.zeros(rows, dtype=np.intp)),
            names=tuple(one.name for one in self.types),
            kind=np.where(there, np.repeat(self.kind, 2, axis=1), -1),
            count=number.astype(float),
            batch=np.where(there, np.stack([batch + 1, batch], axis=2).reshape(double), 0).astype(float),
            layout=np.where(there, devices, 0.0),
            accumulation=self.steps.astype(float),
        )

    def setup(self, at: int, offers: Callable[[str, int], Sequence[Offer]]) -> Setup:
        """One shape as a setup; `offers` gives those of so many machines of a type by name."""
        members: list[Offer] = []
        batches: list[int] = []
        for kind, count, samples in zip(self.kind[at], self.count[at], self.samples[at], strict=True):
            if kind >= 0:
                members += offers(self.types[kind].name, int(count))
                batch, odd = divmod(int(samples), int(count))
                batches += [batch + 1] * odd + [batch] * (int(count) - odd)
        return Setup(
            workload=self.workload,
            cluster=Cluster(members=tuple(members)),
            layout=tuple(one.instance_type.devices for one in members),
            batch_per_device=tuple(batches),
            accumulation_steps=int(self.steps[at]),
        )


_ARRAYS = ("place", "kind", "count", "samples", "total", "steps")


def shapes_of(
    workload: Workload,
    types: Sequence[InstanceType],
    counts: Wholes,
    *,
    totals: Sequence[int],
    line: Callable[[str], Line],
    peak_bytes: Callable[[str, int], float] | None,
    accumulation: Sequence[int] = ACCUMULATION_STEPS,
) -> Shapes:
    """Shapes of every cluster in `counts` (clusters, types), whose batch is one of `totals` and whose devices hold it.

    Steps are those of `accumulation` that divide the batch; where a cluster could hold the batch in none of them, the
    least greater divisor with which it can. A machine that would get no sample makes no shape: the cluster without it
    is no slower.
    """
    width = max(1, int((counts > 0).sum(axis=1).max(initial=0)))
    order = np.argsort(counts == 0, axis=1, kind="stable")[:, :width]
    count = np.take_along_axis(counts, order, axis=1)
    clusters = _Clusters(
        workload=workload.name,
        types=tuple(types),
        kind=np.where(count > 0, order, -1),
        count=count,
        lines=np.array([line(one.name) for one in types] + [(0.0, 1.0)], dtype=float),
        devices=np.array([one.devices for one in types] + [0], dtype=np.int64),
        limit=_largest_batches(types, max(totals, default=1), peak_bytes),
    )
    everyone = np.arange(len(counts))
    parts: list[Shapes] = []
    for total in totals:
        first = [steps for steps in accumulation if total % steps == 0]
        lacking, able = np.zeros(len(counts), dtype=bool), np.zeros(len(counts), dtype=bool)
        for steps in first:
            part, done, short = clusters.divided(everyone, total, steps)
            parts.append(part)
            able, lacking = able | done, lacking | short
        pending = np.flatnonzero(lacking & ~able)
        for steps in _divisors(total, above=max(first, default=1)):
            if len(pending):
                part, done, _ = clusters.divided(pending, total, steps)
                parts.append(part)
                pending = pending[~done]
    whole = {name: np.concatenate([getattr(one, name) for one in parts]) for name in _ARRAYS} if parts else {}
    found = Shapes(workload=workload.name, types=tuple(types), **whole) if parts else _none(workload, types)
    return found.take(np.lexsort((found.steps, found.total, found.place)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clusters:
    """Clusters by the types that they have, as in Shapes, and what is known of each type (the last entry: padding)."""

    workload: str
    types: tuple[InstanceType, ...]
    kind: IntArray
    count: Wholes
    lines: FloatArray
    devices: Wholes
    limit: Wholes

    def divided(self, places: IntArray, total: int, steps: int) -> tuple[Shapes, BoolArray, BoolArray]:
        """Shapes of those of `places` that can be divided so, which these are, and which lacked but memory."""
        kind, count = self.kind[places], self.count[places]
        micro = np.full(len(places), total // steps, dtype=np.int64)
        a, k = self.lines[kind, 0], self.lines[kind, 1]
        samples, possible = split_groups(a, k, count=count, devices=self.devices[kind], total=micro)
        most = -(-samples // np.maximum(count, 1))
        held = ((count == 0) | (most <= self.limit[kind])).all(axis=1)
        picked = np.flatnonzero(possible & held)
        shapes = Shapes(
            workload=self.workload,
            types=self.types,
            place=places[picked],
            kind=kind[picked],
            count=count[picked],
            samples=samples[picked],
            total=np.full(len(picked), total, dtype=np.int64),
            steps=np.full(len(picked), steps, dtype=np.int64),
        )
        return shapes, possible & held, possible & ~held


def _none(workload: Workload, types: Sequence[InstanceType]) -> Shapes:
    flat, wide = np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int64)
    arrays = {name: wide if name in ("kind", "count", "samples") else flat for name in _ARRAYS}
    return Shapes(workload=workload.name, types=tuple(types), **arrays)


def _divisors(total: int, *, above: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(total) + 1) if total % one == 0]
    return sorted(one for one in {*small, *(total // one for one in small)} if one > above)


def _largest_batches(
    types: Sequence[InstanceType], most: int, peak_bytes: Callable[[str, int], float] | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """By type the largest batch up to `most` that a device holds, by bisection: memory grows with the batch.

    What nobody knows (NaN) is allowed. The last entry stands for padding.
    """
    return np.array([_largest(one, most, peak_bytes) for one in types] + [most], dtype=np.int64)


def _largest(one: InstanceType, most: int, peak_bytes: Callable[[str, int], float] | None) -> int:
    def held(batch: int) -> bool:
        peak = math.nan if peak_bytes is None else peak_bytes(one.name, batch)
        return math.isnan(peak) or peak <= one.device_memory_gib * 2**30

    low, high = 0, most + 1  # held at low, not at high
    if held(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle) else (low, middle)
    return low
