"""Define the covariance functions and the Gaussian processes of log step seconds.

theta are the parameters of the step-time formula (formula.py). T1 is the time in seconds that one
device needs for a forward and a backward pass (single_device.py). A spread is a standard deviation
in a covariance function. Spreads are hyperparameters, which learning.py learns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import scipy

from ..domain.numeric import BoolArray, FloatArray, IntArray
from .formula import NAMES, PARAMETERS
from .single_device import EFFECTS

# Ways to group rows. Rows of a group share deviations. The first four are for deviations of log T1.
# They group rows by kind of device, by network, by (workload, one-device mode), and by (workload,
# one-device mode, kind). The others are for deviations of theta. They group rows by the kind with
# the slowest link, by strategy, by (workload, mode, kind), and by communication library.
CODES = ("kind", "network", "workload", "cell", "link", "strategy", "mode", "library")
_LINEAR = len(NAMES) + len(EFFECTS)
THETA, T1 = slice(0, len(NAMES)), slice(len(NAMES), _LINEAR)


# Effects that only transformers have. Their spreads are learned separately.
_SHAPED = ("transformer", "linear layers", "attention", "activations", "intensity")
_PLAIN = tuple(name for name in EFFECTS if name not in _SHAPED)


def _spreads(level: str, names: tuple[str, ...]) -> FloatArray:
    """Return a (linear terms,) array: the prior standard deviations in the field `level`.

    A linear term is a parameter of the formula (formula.py) or an effect on log T1
    (single_device.py). Terms that are not in `names` get 0.

    level: a field of `Parameter`, such as "kind" (kind of device).
    """
    every = {**PARAMETERS, **EFFECTS}
    return np.array([getattr(each, level) * (name in names) for name, each in every.items()])


# Linear terms of the covariance: the group of rows, prior standard deviations, and the name of the
# learned factor on these standard deviations. None means that no factor is learned.
_TERMS = (
    ("all", _spreads("all", (*NAMES, *EFFECTS)), None),
    ("library", _spreads("library", NAMES), None),
    ("link", _spreads("kind", NAMES), "formula by kind"),
    ("strategy", _spreads("strategy", NAMES), "formula by strategy"),
    ("mode", _spreads("cell", NAMES), "formula by cell"),
    *(
        (level, _spreads(level, names), f"{title} by {level}")
        for title, names in (("one device", _PLAIN), ("transformer", _SHAPED))
        for level in ("kind", "network", "workload", "cell")
    ),
)
# Learned spreads of curves, residuals and noise, with their initial values.
SPREADS = {
    **{name: 1.0 for _, _, name in _TERMS if name},
    "curve of workload": 0.3,
    "batch of workload": 0.03,
    "curve of cell": 0.06,
    "batch of cell": 0.02,
    "transformer curve of workload": 0.06,
    "transformer batch of workload": 0.02,
    "transformer curve of cell": 0.03,
    "transformer batch of cell": 0.02,
    "shape of transformer": 0.15,
    "noise of one device": 0.03,
}
LOG_SPREADS = np.log(list(SPREADS.values()))
_OCTAVES = 2.5  # length scale of the curves, in octaves (factors of two) of the batch
_SHAPE = np.array([1.5, 2.0, 2.0, 1.0])  # length scales of a transformer's shape
# Length scales of the features of the residual (rows.py): octaves of the batch, of machines and of
# devices per machine; unevenness; octaves of speed.
BROAD, NARROW = np.array([[3.0, 1.5, 1.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.2, 0.3]])
# Maximum number of inputs for which `inverse_factor` is stored (18 MB). For 777 inputs, its
# computation takes 0.2 s.
_MOST_STORED = 1500
_FREEDOM = 2.0  # degrees of freedom of Student's t, the noise of rows with outliers


# The numbers of columns of the kernel's input.
_WIDTHS = {
    "linear": _LINEAR,  # derivatives of log step with respect to theta and the effects on log T1
    "codes": len(CODES),  # codes of the groups
    "alone": 1,  # derivative of log step with respect to log T1
    "octave": 1,  # log2(batch / middle batch)
    "shape": 4,  # shape of a transformer
    "transformer": 1,  # the same as "alone" for transformers, 0 for other networks
    "beyond": 1,  # doublings of devices beyond the largest measured cluster of the kind
    "pace": 1,  # standard deviation of log step at the first of these doublings
    "broad": 1,  # standard deviation of the residual's component with long length scales
    "narrow": 1,  # standard deviation of the residual's component with short length scales
    "features": 5,  # features of the residual
    "noise": 1,  # 1 for rows of one device
}
_ENDS = np.cumsum(list(_WIDTHS.values())).tolist()
WIDTH = _ENDS[-1]
COLUMN: dict[str, Any] = {
    name: slice(end - width, end) if width > 1 else end - 1
    for (name, width), end in zip(_WIDTHS.items(), _ENDS, strict=True)
}
COLUMN |= {group: COLUMN["codes"].start + at for at, group in enumerate(CODES)}
# The codes that group deviations of log T1, and the codes that group deviations of theta.
POINT_CODES = slice(COLUMN["kind"], COLUMN["link"])
ROW_CODES = slice(COLUMN["link"], COLUMN["codes"].stop)


def _near(a: FloatArray, b: FloatArray, length: FloatArray) -> FloatArray:
    """Return exp(-d^2 / 2), the covariance of each row of `a` with each row of `b`.

    d is the Euclidean distance of the two rows, after each column is divided by its length scale.
    `length` has the length scales. The result has the shape (rows of a, rows of b).
    """
    a, b = a / length, b / length
    square = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    near: FloatArray = np.exp(-0.5 * np.maximum(square, 0.0))
    return near


def terms(X: FloatArray, Y: FloatArray | None = None) -> Iterator[tuple[str | None, FloatArray]]:
    """Yield the terms that add up to the covariance of the rows of `X` with the rows of `Y`.

    Each term is a pair (name, array). The array has the shape (X rows, Y rows). The caller
    multiplies it by the learned variance of the name, or by 1 if the name is None. If `Y` is None,
    the terms are for `X` with itself and include the noise of single-device rows.
    """
    other = X if Y is None else Y
    left, right = ({name: each[:, at] for name, at in COLUMN.items()} for each in (X, other))

    def outer(name: str) -> FloatArray:
        return np.multiply.outer(left[name], right[name])

    same = {group: _same(X, other, group) for group in ("all", *CODES)}
    for group, spread, name in _TERMS:
        used = np.flatnonzero(spread)
        if X[:, used].any():
            yield name, same[group] * ((X[:, used] * spread[used] ** 2) @ other[:, used].T)
    apart = left["octave"][:, None] - right["octave"]
    near, equal = np.exp(-0.5 * (apart / _OCTAVES) ** 2), abs(apart) < 1e-6
    both = outer("transformer")
    # Of two rows with the same workload or cell, both are transformers or neither is.
    for prefix, alone in (("", outer("alone") - both), ("transformer ", both)):
        for level in ("workload", "cell") if alone.any() else ():
            yield f"{prefix}curve of {level}", alone * (same[level] * near)
            yield f"{prefix}batch of {level}", alone * (same[level] & equal)
    if both.any():
        yield "shape of transformer", both * _near(left["shape"], right["shape"], _SHAPE)
    for name, length in (("broad", BROAD), ("narrow", NARROW)) if left["broad"].any() else ():
        near = _near(left["features"], right["features"], length)
        yield None, same["mode"] * outer(name) * near
    # the covariance of a random walk over the doublings
    beyond: FloatArray = np.minimum(left["beyond"][:, None], right["beyond"])
    yield None, same["link"] * outer("pace") * beyond
    if Y is None:
        yield "noise of one device", np.diag(left["noise"])


@dataclass(frozen=True)
class StepCovariance:
    """The covariance function of linearised log step seconds.

    `log_spreads` are the logs of the learned standard deviations, in the order of SPREADS.
    """

    log_spreads: FloatArray

    def __call__(self, X: FloatArray, Y: FloatArray | None = None) -> FloatArray:
        variances = self.variances
        found = np.zeros((len(X), len(X if Y is None else Y)))
        for name, values in terms(X, Y):
            found += variances[name] * values
        return found

    @property
    def variances(self) -> dict[str | None, float]:
        """Return {name of a term: its learned variance}. Terms without a name have the key None."""
        squares = np.exp(2 * self.log_spreads).tolist()
        return {None: 1.0, **dict(zip(SPREADS, squares, strict=True))}


@dataclass(frozen=True)
class ResidualCovariance:
    """The covariance function of the residuals of a workload in one mode on one kind of device.

    The inputs are rows of `Rows.features`. The residual is the sum of two components. `broad` is
    the standard deviation of the component with long length scales. `narrow` is the standard
    deviation of the component with short length scales.
    """

    broad: float
    narrow: float

    def __call__(self, X: FloatArray, Y: FloatArray | None = None) -> FloatArray:
        other = X if Y is None else Y
        wide = self.broad**2 * _near(X, other, BROAD)
        return wide + self.narrow**2 * _near(X, other, NARROW)


@dataclass(frozen=True)
class GaussianProcess:
    """A Gaussian process conditioned on measured `values` at `inputs`.

    `noise` has the noise variance of each value.
    """

    covariance: StepCovariance | ResidualCovariance
    inputs: FloatArray
    values: FloatArray
    noise: FloatArray

    def __getstate__(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def inverse_factor(self) -> FloatArray:
        """Return W, the inverse of the Cholesky factor of K. K^-1 is W.T @ W.

        K is the covariance matrix of the measurements, including noise.
        """
        known = self.covariance(self.inputs) + np.diag(self.noise)
        identity = np.eye(len(known))
        return scipy.linalg.solve_triangular(np.linalg.cholesky(known), identity, lower=True)

    @cached_property
    def weights(self) -> FloatArray:
        """Return K^-1 @ values, with the matrix K of `inverse_factor`."""
        return self.inverse_factor.T @ (self.inverse_factor @ self.values)

    def inverse(self, at: IntArray) -> FloatArray:
        """Return the submatrix of K^-1 with the rows and columns `at` (see `inverse_factor`)."""
        columns = self.inverse_factor[:, at]
        return columns.T @ columns

    def posterior(self, X: FloatArray, *, joint: bool) -> tuple[FloatArray, FloatArray]:
        """Return the posterior means and variances at the rows of `X`.

        If `joint` is True, the second result is the covariance matrix instead of the variances.
        """
        cross = self.covariance(X, self.inputs)
        white = self.inverse_factor @ cross.T
        if joint:
            return cross @ self.weights, self.covariance(X) - white.T @ white
        chunks = np.array_split(X, max(len(X) // 100, 1))
        prior = np.concatenate([np.diag(self.covariance(chunk)) for chunk in chunks])
        return cross @ self.weights, np.maximum(prior - (white**2).sum(axis=0), 0.0)


class StepProcess(GaussianProcess):
    """The Gaussian process of log step seconds, given the linearised formula (see regressor.py)."""

    covariance: StepCovariance

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        if len(self.inputs) <= _MOST_STORED:
            state["inverse_factor"] = self.inverse_factor
        return state

    def deviations(self, X: FloatArray) -> FloatArray:
        """Return a (rows, linear terms) array: posterior mean minus prior mean of each term.

        Each value is a sum over the groups of the row, such as its kind of device and its workload.
        """
        total = np.zeros((len(X), _LINEAR))
        pulls = self.inputs[:, :_LINEAR] * self.weights[:, None]
        for group, spread, name in _TERMS:
            variance = self.covariance.variances[name] * spread**2
            total += _same(X, self.inputs, group) @ pulls * variance
        return total

    @cached_property
    def _points(self) -> tuple[FloatArray, FloatArray]:
        """Return the kernel inputs of each measured point, and the summed `weights` of its rows.

        A point is a workload in a mode, on a kind of device, with a batch. Several rows have the
        same point if they differ only in the size of the cluster.
        """
        columns = [COLUMN[name] for name in ("workload", "cell", "octave", "transformer")]
        columns += range(COLUMN["shape"].start, COLUMN["shape"].stop)
        values = self.inputs[:, columns]
        values[:, 3] = values[:, 3] > 0
        # There are far fewer points than rows, so summing weights makes `curves` faster.
        distinct, which = np.unique(values, axis=0, return_inverse=True)
        inputs = np.zeros((len(distinct), WIDTH))
        inputs[:, columns], inputs[:, COLUMN["alone"]] = distinct, 1.0
        weights = np.zeros(len(distinct))
        np.add.at(weights, which.reshape(-1), self.weights * self.inputs[:, COLUMN["alone"]])
        return inputs, weights

    def curves(self, X: FloatArray) -> FloatArray:
        """Return a (points,) array: the posterior mean of the curves in log T1.

        T1 is the time that one device needs for a forward and a backward pass. log T1 is a sum of
        linear terms and curves. Curves are smooth functions of the batch and of a transformer's
        shape. `X` has the kernel inputs of each point (`rows.Points`).
        """
        inputs, weights = self._points
        found, bare = np.zeros(len(X)), X.copy()
        bare[:, :_LINEAR] = 0.0
        workload, shaped = COLUMN["workload"], COLUMN["transformer"]
        for code in np.unique(X[:, workload]):
            at = np.flatnonzero(X[:, workload] == code)
            alike = (inputs[:, workload] == code) | (inputs[:, shaped] * X[at[0], shaped] > 0)
            found[at] = self.covariance(bare[at], inputs[alike]) @ weights[alike]
        return found


def _same(X: FloatArray, Y: FloatArray, group: str) -> BoolArray:
    """Return an (X rows, Y rows) mask: True if both rows are in the same group.

    `group` is a name in CODES, such as "kind", or "all" for a single group of all rows. Rows with
    the code 0 are in no group.
    """
    if group == "all":
        return np.ones((len(X), len(Y)), bool)
    left, right = X[:, COLUMN[group], None], Y[:, COLUMN[group]]
    same: BoolArray = (left == right) & (left > 0)
    return same


def outlying_factor(process: GaussianProcess, factor: FloatArray | float) -> FloatArray:
    """Return a (rows,) array of factors for the noise variances: above 1 for outliers, else 1.

    The caller multiplies the noise variances by these factors and fits again, several times. Normal
    noise then approximates noise with Student's t distribution.

    process: the current fit.
    factor: the factors that the current fit used; 1 at first.
    """
    # squared errors of predictions from all other rows, relative to their variances
    square: FloatArray = factor * process.weights**2 / (process.inverse_factor**2).sum(axis=0)
    return np.maximum(1.0, (_FREEDOM + square) / (_FREEDOM + 1))
