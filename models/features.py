"""What the effects look at, setup by setup: names that are shared, and how much a setup answers to each cause."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    slowest = tuple(types[at] for types, at in zip(arrays.types, times.slowest, strict=True))
    used = [
        list(zip(types, row, strict=False)) for types, row in zip(arrays.types, arrays.layout.tolist(), strict=True)
    ]
    machines, each = arrays.instances, arrays.ranks / arrays.instances
    cores = np.array([min(physics.machines[name].cores for name in types) for types in arrays.types])
    gbps = np.array([min(physics.machines[name].bandwidth_gbps for name in types) for types in arrays.types])
    doubt = [physics.compute.doubt(*pair) for pair in zip(arrays.workloads, slowest, strict=True)]
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
        arrangement=tuple(_text(sorted(one)) for one in used),
        exact=tuple(_text(sorted(one, key=itemgetter(0))) for one in used),
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


def _text(members: list[tuple[str, float]]) -> str:
    return "+".join(f"{name}:{devices:g}" for name, devices in members)
