"""What the effects look at, setup by setup: names that are shared, and how much a setup answers to each cause."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from .physics import PhysicalStep, Physics
from .setups import FloatArray, SetupArrays

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the families look at, one entry a setup. `near` is (rows, d), scaled to length one."""

    workload: Keys
    slowest_type: Keys
    arrangement: Keys  # types and devices used, in one order
    exact: Keys  # the same as it was written: another order is another placement
    identity: Keys  # and the batches: equal for equal setups alone
    exposed: FloatArray  # part of the step that answers to communication
    doubt: FloatArray  # of a filled-in compute time, where no parameter stands for it
    octaves: FloatArray  # log2 batch outside the measured range
    near: FloatArray
    batch: FloatArray  # log batch of the slowest machine, scaled
    instances: FloatArray
    several: FloatArray  # 1 with more than one device
    shared: FloatArray  # (rows, parameters) slopes by whitened parameter
    own: FloatArray  # (rows, parameters) slopes by a workload's deviation
    offset: FloatArray

    def take(self, picked: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> Features:
        """The entries at these positions."""
        taken: dict[str, Any] = {}
        for one in fields(self):
            whole = getattr(self, one.name)
            taken[one.name] = tuple(whole[at] for at in picked) if isinstance(whole, tuple) else whole[picked]
        return Features(**taken)

    def joined(self, other: Features) -> Features:
        """These entries, then the other's."""
        both: dict[str, Any] = {}
        for one in fields(self):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            both[one.name] = ours + theirs if isinstance(ours, tuple) else np.concatenate([ours, theirs])
        return Features(**both)


def features_of(arrays: SetupArrays, step: PhysicalStep, physics: Physics) -> Features:
    """What the effects look at, from the setup and its physical step."""
    times = step.times
    rows = np.arange(len(arrays.workloads))
    slowest = tuple(arrays.names[kind] for kind in arrays.kind[rows, times.slowest].tolist())
    machines, each = arrays.instances, arrays.ranks / arrays.instances
    known = {name: physics.machines[name] for name in arrays.names}
    cores = arrays.by_type({name: one.cores for name, one in known.items()}, np.inf).min(axis=1, initial=np.inf)
    gbps = arrays.by_type({name: one.bandwidth_gbps for name, one in known.items()}, np.inf).min(axis=1, initial=np.inf)
    doubts = {pair: physics.compute.doubt(*pair) for pair in set(zip(arrays.workloads, slowest, strict=True))}
    doubt = [doubts[pair] for pair in zip(arrays.workloads, slowest, strict=True)]
    arrangement, exact, identity = _names(arrays)
    by_timeline = np.array([name in physics.profiled for name in arrays.workloads], dtype=bool)
    batch = np.take_along_axis(arrays.batch, times.slowest[:, None], axis=1)[:, 0]
    near = [
        np.log(machines) / 0.7,
        np.log(each) / 0.7,
        (1 - each / arrays.layout.max(axis=1)) / 0.2,
        (machines == 2) / 0.5,
        (machines == 1) / 0.5,
        np.log(cores) / 0.8,
        np.log(gbps),
        (1 - times.mean_compute_s / times.compute_s) / 0.3,
    ]
    return Features(
        workload=arrays.workloads,
        slowest_type=slowest,
        arrangement=arrangement,
        exact=exact,
        identity=identity,
        exposed=step.exposed,
        doubt=np.where(by_timeline, np.array(doubt), 0.0),
        octaves=step.octaves,
        near=np.stack(near, axis=1),
        batch=np.log(batch) / 0.5,
        instances=machines,
        several=(arrays.ranks > 1).astype(float),
        shared=step.shared,
        own=step.own,
        offset=step.offset,
    )


def _names(arrays: SetupArrays) -> tuple[Keys, Keys, Keys]:
    """Arrangement, exact and identity of each row, as in `Features`."""
    arrangement, exact, identity = [], [], []
    columns = (arrays.kind, arrays.count, arrays.layout, arrays.batch)
    for kinds, *numbers, steps in zip(*(one.tolist() for one in (*columns, arrays.accumulation)), strict=True):
        used = [
            (arrays.names[kind], *rest) for kind, *rest in zip(kinds, *numbers, strict=True) if kind >= 0
        ]  # name, count, devices, batch
        placed = _runs([(name, devices, count) for name, count, devices, _ in sorted(used, key=itemgetter(0))])
        exact.append(placed)
        arrangement.append(_runs(sorted((name, devices, count) for name, count, devices, _ in used)))
        batches = _runs([(name, batch, count) for name, count, _, batch in sorted(used, key=itemgetter(0))])
        identity.append(f"{placed} {batches} {steps:g}")
    return tuple(arrangement), tuple(exact), tuple(identity)


def _runs(members: list[tuple[str, float, float]]) -> str:
    """`2*a:4+1*b:8`: equal neighbours are counted together, however many instances a member stands for."""
    parts = []
    for (name, number), run in groupby(members, key=itemgetter(0, 1)):
        parts.append(f"{sum(count for *_, count in run):g}*{name}:{number:g}")
    return "+".join(parts)
