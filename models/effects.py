"""What setups err by together, beyond the physics: random effects with physical weights, and smooth functions.

    log step = log physics + sum over families of effect + noise

A linear family is one unknown number a key (a workload, a type, an arrangement ...) times a weight that says how much
the setup answers to it: the exposed communication, the compute, the slope of a parameter. A smooth family is a Gaussian
process over the shape of the cluster or the batch. A local family is shared only by setups of one workload on one
arrangement of machines. Far from everything measured all of them are zero with a known variance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from .arrays import FloatArray
from .closed_form import NAMES, OWN_SD, TYPE_SD
from .features import Features
from .keys import Keys


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

    def across(at: int) -> FloatArray:
        shape = bell(features.near[[at]], features.near)[0]
        batch = bell(features.batch[[at], None], features.batch[:, None])[0]
        total = np.zeros(len(batch))
        for variance, term in families:
            found = (term.keys.codes == term.keys.codes[at]) * term.weight[at] * term.weight
            found = found * shape if term.shape else found
            total += variance * (found * batch if term.batch else found)
        return total

    return across


def bell(left: FloatArray, right: FloatArray) -> FloatArray:
    """(left, right) exp(-d^2 / 2), d the distance of their (rows, dimensions)."""
    square = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    return np.asarray(np.exp(-0.5 * np.maximum(square, 0)), dtype=float)
