"""What the effects look at, setup by setup: names that are shared, and how much a setup answers to each cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from .arrays import FloatArray, IntArray
from .keys import Keys, numbered
from .physics import PhysicalStep, Physics
from .setups import SetupArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the families look at, one entry a setup. `near` is (rows, d), scaled to length one."""

    workload: Keys
    slowest_type: Keys
    link_type: Keys  # of the machine with the slowest link as far as that is learned
    arrangement: Keys  # types and devices used, in one order
    exact: Keys  # the same as it was written: another order is another placement
    exposed: FloatArray  # part of the step that answers to communication
    doubt: FloatArray  # of a compute time that was not measured, by itself
    rate: FloatArray  # doubt of the log of a link's rate, where no exchange went over one like it
    octaves: FloatArray  # log2 batch outside the measured range
    larger: FloatArray  # log2 devices beyond the largest cluster on which any workload was measured
    near: FloatArray
    batch: FloatArray  # log batch of the slowest machine, scaled
    instances: FloatArray
    several: FloatArray  # 1 with more than one device
    shared: FloatArray  # (rows, parameters) slopes by whitened parameter
    own: FloatArray  # (rows, parameters) slopes by a workload's deviation
    by_type: FloatArray  # (rows, parameters) slopes by an instance type's deviation
    offset: FloatArray

    def take(self, picked: IntArray) -> Features:
        """The entries at these positions."""
        taken: dict[str, Any] = {}
        for one in fields(self):
            whole = getattr(self, one.name)
            taken[one.name] = whole.take(picked) if isinstance(whole, Keys) else whole[picked]
        return Features(**taken)

    def joined(self, other: Features) -> Features:
        """These entries, then the other's."""
        both: dict[str, Any] = {}
        for one in fields(self):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            both[one.name] = ours + theirs if isinstance(ours, Keys) else np.concatenate([ours, theirs])
        return Features(**both)


def features_of(arrays: SetupArrays, step: PhysicalStep, physics: Physics) -> Features:
    """What the effects look at, from the setup and its physical step."""
    times = step.times
    rows = np.arange(len(arrays.workloads))
    slowest = Keys(arrays.names, arrays.kind[rows, times.slowest])
    machines, each = arrays.instances, arrays.ranks / arrays.instances
    known = {name: physics.machines[name] for name in arrays.names}
    cores = arrays.by_type({name: one.cores for name, one in known.items()}, np.inf).min(axis=1, initial=np.inf)
    gbps = arrays.by_type({name: one.bandwidth_gbps for name, one in known.items()}, np.inf).min(axis=1, initial=np.inf)
    pairs, which = numbered(zip(arrays.workloads.codes.tolist(), slowest.codes.tolist(), strict=True))
    compute = physics.compute
    named = [(arrays.workloads.names[one], arrays.names[at]) for one, at in pairs]
    doubt = np.array(
        [(compute.doubt if one in physics.profiled else compute.doubt_apart)(one, at) for one, at in named]
    )
    arrangement, exact = placements(arrays)
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
        link_type=physics.link_types(arrays),
        arrangement=arrangement,
        exact=exact,
        exposed=step.exposed,
        doubt=doubt[which],
        rate=np.where(machines > 1, physics.link_types(arrays).values(physics.rate_doubt), 0.0),
        octaves=step.octaves,
        larger=np.log2(np.maximum(arrays.ranks / physics.most_devices, 1.0)),
        near=np.stack(near, axis=1),
        batch=np.log(batch) / 0.5,
        instances=machines,
        several=(arrays.ranks > 1).astype(float),
        shared=step.shared,
        own=step.own,
        by_type=step.by_type,
        offset=step.offset,
    )


def placements(arrays: SetupArrays) -> tuple[Keys, Keys]:
    """Arrangement and exact of each row, as in `Features`: written once for all rows that have the same machines."""
    columns = np.concatenate([arrays.kind, arrays.count, arrays.layout], axis=1)
    _, which = numbered(row.tobytes() for row in columns)
    firsts = np.unique(which, return_index=True)[1]
    arrangement, exact = [], []
    for used in _members(arrays.take(firsts)):
        exact.append(_runs([(name, devices, count) for name, count, devices, _ in used]))
        arrangement.append(_runs(sorted((name, devices, count) for name, count, devices, _ in used)))
    return Keys.of(arrangement).take(which), Keys.of(exact).take(which)


def identities(arrays: SetupArrays) -> tuple[str, ...]:
    """Placement, batches and accumulation of each row: equal for equal setups alone, whatever they are asked with."""
    found = []
    for used, steps in zip(_members(arrays), arrays.accumulation.tolist(), strict=True):
        placed = _runs([(name, devices, count) for name, count, devices, _ in used])
        batches = _runs([(name, batch, count) for name, count, _, batch in used])
        found.append(f"{placed} {batches} {steps:g}")
    return tuple(found)


def _members(arrays: SetupArrays) -> Iterator[list[tuple[str, float, float, float]]]:
    """Of each row name, count, devices and batch of its members, types in one order."""
    columns = (arrays.kind, arrays.count, arrays.layout, arrays.batch)
    for row in zip(*(one.tolist() for one in columns), strict=True):
        used = [(arrays.names[kind], *rest) for kind, *rest in zip(*row, strict=True) if kind >= 0]
        yield sorted(used, key=itemgetter(0))


def _runs(members: Sequence[tuple[str, float, float]]) -> str:
    """`2*a:4+1*b:8`: equal neighbours are counted together, however many instances a member stands for."""
    parts = []
    for (name, number), run in groupby(members, key=itemgetter(0, 1)):
        parts.append(f"{sum(count for *_, count in run):g}*{name}:{number:g}")
    return "+".join(parts)
