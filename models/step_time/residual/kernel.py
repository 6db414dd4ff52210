"""What setups err by together, beyond the physics: random effects with physical weights, and smooth functions.

    log step = log physics + sum over families of effect + noise

A linear family is one unknown number a key (a workload, a type, an arrangement ...) times a weight that says how much
the setup answers to it: the exposed communication, the compute, the slope of a parameter. A smooth family is a Gaussian
process over the shape of the cluster or the batch. A local family is shared only by setups of one workload on one
arrangement of machines. Far from everything measured all of them are zero with a known variance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from ...domain.categorical import Keys, numbered
from ...domain.numeric import FloatArray, IntArray
from ...domain.setup_table import SetupArrays
from ..physics.physics import PhysicalStep, Physics
from ..physics.step_formula import NAMES, OWN_SD, TYPE_SD


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One family's keys and weights for some setups; smooth or local ones may also look at shape and batch."""

    keys: Keys
    weight: FloatArray
    shape: bool = False
    batch: bool = False


DEVIATIONS = tuple(f"own_{name}" for name, sd in zip(NAMES, OWN_SD, strict=True) if sd > 0)
_DEVIATING = tuple(int(at) for at in np.flatnonzero(OWN_SD > 0))
TYPE_DEVIATIONS = tuple(f"type_{name}" for name, sd in zip(NAMES, TYPE_SD, strict=True) if sd > 0)
_DEVIATING_BY_TYPE = tuple(int(at) for at in np.flatnonzero(TYPE_SD > 0))
# Prior standard deviation of log step by family; the variances are learned around these.
LINEAR = {
    **dict.fromkeys((*DEVIATIONS, *TYPE_DEVIATIONS), 1.0),
    "all": 0.02,
    "workload": 0.03,
    "workload_exposed": 0.05,
    "pair": 0.03,
    "type": 0.03,
    "link": 0.1,
    "arrangement": 0.03,
    "batch": 0.02,
}
SMOOTH = {"shape": 0.05, "own_shape": 0.05, "own_dense": 0.03, "own_batch": 0.03, "own_shape_batch": 0.04}
# no name of a deviation: both would be one family
LOCAL = {
    "own_arrangement": 0.02,
    "own_exchange": 0.04,
    "two_exchange": 0.06,
    "placement": 0.035,
    "placement_batch": 0.05,
}
NOISE = {"noise": 0.025, "noise_exposed": 0.04}
# Given, not learned: a compute time that was not measured, a link's rate that was not, an octave of batch outside what
# was measured, and a doubling of devices beyond it.
GIVEN = {"doubt": 1.0, "rate": 1.0, "octaves": 0.08, "larger": 0.04}
# How unsure these are no group that is left out can check: types are few, and nothing measured tells of what is given.
UNCHECKED = (*GIVEN, *TYPE_DEVIATIONS, "type", "link")
FAMILIES = (*LINEAR, *SMOOTH, *LOCAL, *NOISE)
PRIOR_SD = np.array([*LINEAR.values(), *SMOOTH.values(), *LOCAL.values(), *NOISE.values()])


def blocks(features: Features) -> Keys:
    """Which setups share local effects: one workload on one arrangement."""
    return Keys.joined(features.workload, features.arrangement)


def terms(features: Features) -> dict[str, Term]:
    """Every family but noise, by name."""
    answers, hidden = features.exposed, 1 - features.exposed
    ones, everywhere = np.ones_like(answers), Keys(("",), np.zeros(len(answers), dtype=np.intp))
    work, kind, pair = features.workload, features.slowest_type, Keys.joined(features.workload, features.slowest_type)
    numbers, which = np.unique(features.batch, return_inverse=True)
    batches = Keys.joined(pair, Keys.of(f"{one:.6g}" for one in numbers.tolist()).take(which))
    block, exact = blocks(features), Keys.joined(work, features.exact)
    across = Keys(("inside", "across"), (features.instances > 1).astype(np.intp))  # other wires
    found = {name: Term(keys=work, weight=features.own[:, at]) for name, at in zip(DEVIATIONS, _DEVIATING, strict=True)}
    found |= {
        name: Term(keys=features.link_type, weight=features.by_type[:, at])
        for name, at in zip(TYPE_DEVIATIONS, _DEVIATING_BY_TYPE, strict=True)
    }
    two = answers * (features.instances == 2)
    found |= {
        "all": Term(keys=everywhere, weight=ones),
        "workload": Term(keys=work, weight=ones),
        "workload_exposed": Term(keys=work, weight=answers),
        "pair": Term(keys=pair, weight=hidden),
        "type": Term(keys=kind, weight=hidden),
        "link": Term(keys=Keys.joined(features.link_type, across), weight=answers),
        "arrangement": Term(keys=features.arrangement, weight=answers),
        "batch": Term(keys=batches, weight=features.several),
        "doubt": Term(keys=pair, weight=features.doubt * hidden),
        "rate": Term(keys=features.link_type, weight=features.rate * answers),
        "octaves": Term(keys=work, weight=features.octaves),
        "larger": Term(keys=work, weight=features.larger * answers),
        "shape": Term(keys=everywhere, weight=answers, shape=True),
        "own_shape": Term(keys=work, weight=answers, shape=True),
        "own_dense": Term(keys=work, weight=hidden, shape=True),
        "own_batch": Term(keys=work, weight=hidden, batch=True),
        "own_shape_batch": Term(keys=work, weight=answers, shape=True, batch=True),
        "own_arrangement": Term(keys=block, weight=ones),
        "own_exchange": Term(keys=block, weight=answers),
        "two_exchange": Term(keys=block, weight=two),
        "placement": Term(keys=exact, weight=answers),
        "placement_batch": Term(keys=exact, weight=answers, batch=True),
    }
    return found


def noise_variance(features: Features, variances: Mapping[str, float]) -> FloatArray:
    """(rows,) variance of one new measurement of each setup."""
    return np.asarray(variances["noise"] + variances["noise_exposed"] * features.exposed**2, dtype=float)


def same(left: Keys, right: Keys) -> FloatArray:
    """(left, right) 1 where the keys are equal."""
    return np.asarray(left.within(right)[:, None] == right.codes[None, :], dtype=float)


def covariance(names: Collection[str], variances: Mapping[str, float], left: Features, right: Features) -> FloatArray:
    """(left, right) covariance of some families together."""
    ours, theirs = terms(left), terms(right)
    shape = bell(left.near, right.near) if any(ours[name].shape for name in names) else None
    batch = bell(left.batch[:, None], right.batch[:, None]) if any(ours[name].batch for name in names) else None
    total = np.zeros((len(left.exposed), len(right.exposed)))
    for name in names:
        here, there = ours[name], theirs[name]
        found = same(here.keys, there.keys)
        found *= variances[name] * here.weight[:, None]
        found *= there.weight[None, :]
        if shape is not None and here.shape:
            found *= shape
        if batch is not None and here.batch:
            found *= batch
        total += found
    return total


def each_with_all(
    names: Iterable[str], variances: Mapping[str, float], features: Features
) -> Callable[[int], FloatArray]:
    """(rows,) covariance by some families of the setup at a position with every one."""
    told = terms(features)
    families = [(variances[name], told[name]) for name in names]
    square = (features.near**2).sum(axis=1)
    sizes, which = np.unique(features.batch, return_inverse=True)  # few: a setup shares its batch with many

    def across(at: int) -> FloatArray:
        shape = bell(features.near[[at]], features.near, square)[0]
        batch = bell(features.batch[[at], None], sizes[:, None])[0][which]
        total = np.zeros(len(batch))
        for variance, term in families:
            found = (term.keys.codes == term.keys.codes[at]) * term.weight[at] * term.weight
            found = found * shape if term.shape else found
            total += variance * (found * batch if term.batch else found)
        return total

    return across


def bell(left: FloatArray, right: FloatArray, right_square: FloatArray | None = None) -> FloatArray:
    """(left, right) exp(-d^2 / 2), d the distance of their (rows, dimensions); `right_square` is the sum of squares of
    each row of `right`, where somebody has it.
    """
    theirs = (right**2).sum(axis=1) if right_square is None else right_square
    square = (left**2).sum(axis=1)[:, None] + theirs[None, :] - 2 * left @ right.T
    return np.asarray(np.exp(-0.5 * np.maximum(square, 0)), dtype=float)
