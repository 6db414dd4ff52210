"""The Gaussian process of linearised log step seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel

from ..domain.numeric import FloatArray
from .formula import NAMES, PARAMETERS
from .one_device import EFFECTS
from .rows import Points

# Groups that share deviations: of T1 (kind of device, network, workload in a mode of one device,
# workload on a kind), and of theta (kind with the slowest link, strategy, workload in a mode on a
# kind).
CODES = ("kind", "network", "workload", "cell", "link", "strategy", "mode")
_LINEAR = len(NAMES) + len(EFFECTS)
THETA, T1 = slice(0, len(NAMES)), slice(len(NAMES), _LINEAR)


def _spreads(level: str, *, formula: bool = True, effects: bool = True) -> FloatArray:
    """Return a (linear terms,) array: the prior standard deviations of a level."""
    theta = [getattr(each, level) * formula for each in PARAMETERS.values()]
    return np.array([*theta, *(getattr(each, level) * effects for each in EFFECTS.values())])


# Linear terms of the covariance: group, prior standard deviations, learned factor on them.
_TERMS = (
    ("all", _spreads("all"), None),
    ("link", _spreads("kind", effects=False), "formula by kind"),
    ("strategy", _spreads("strategy", effects=False), "formula by strategy"),
    ("mode", _spreads("cell", effects=False), "formula by cell"),
    ("kind", _spreads("kind", formula=False), "one device by kind"),
    ("network", _spreads("network", formula=False), "one device by network"),
    ("workload", _spreads("workload", formula=False), "one device by workload"),
    ("cell", _spreads("cell", formula=False), "one device by cell"),
)
# Learned spreads of curves, residuals and noise, with their initial values.
SPREADS = {
    "formula by kind": 1.0,
    "formula by strategy": 1.0,
    "formula by cell": 1.0,
    "one device by kind": 1.0,
    "one device by network": 1.0,
    "one device by workload": 1.0,
    "one device by cell": 1.0,
    "curve of workload": 0.3,
    "batch of workload": 0.03,
    "curve of cell": 0.06,
    "batch of cell": 0.02,
    "shape of transformer": 0.15,
    "noise of one device": 0.02,
}
_NAMES = tuple(SPREADS)
# Standard deviation of the prior of a learned log spread.
_PRIOR_SD = np.array([1.4 if name.startswith("noise") else 0.7 for name in _NAMES])
_OCTAVES = 2.5  # length scale of the curves in the batch
_SHAPE = np.array([1.5, 2.0, 2.0, 1.0])  # length scales of a transformer's shape
# Length scales of the residual: octaves of batch, of machines and of devices per machine;
# unevenness; octaves of speed.
BROAD, NARROW = np.array([[3.0, 1.5, 1.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.2, 0.3]])
# Standard deviation of log step seconds for each doubling of devices beyond the largest measured
# number: the library may switch to another algorithm.
_BEYOND_SD = 0.1


# Columns of the kernel's input: linear terms, codes of groups, derivative of log step with respect
# to log T1, octave, shape and presence of a transformer, doublings of devices beyond the largest
# measured cluster of the kind, broad and narrow standard deviations of the residual, features of
# the residual, and 1 for rows of one device.
_WIDTHS = {
    "linear": _LINEAR,
    "codes": len(CODES),
    "alone": 1,
    "octave": 1,
    "shape": 4,
    "transformer": 1,
    "beyond": 1,
    "broad": 1,
    "narrow": 1,
    "features": 5,
    "noise": 1,
}
_ENDS = np.cumsum(list(_WIDTHS.values())).tolist()
WIDTH = _ENDS[-1]
COLUMN: dict[str, Any] = {
    name: slice(end - width, end) if width > 1 else end - 1
    for (name, width), end in zip(_WIDTHS.items(), _ENDS, strict=True)
}
COLUMN |= {group: COLUMN["codes"].start + at for at, group in enumerate(CODES)}


def _squared(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return squared distances between the rows of two arrays."""
    found = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.asarray(np.maximum(found, 0.0), dtype=float)


class StepKernel(Kernel):  # type: ignore[misc]
    """Covariance of linearised log step seconds.

    `log_spreads` are learned, in the order of SPREADS.
    """

    def __init__(self, log_spreads: FloatArray) -> None:
        self.log_spreads = log_spreads

    @property
    def theta(self) -> FloatArray:
        return self.log_spreads

    @theta.setter
    def theta(self, value: FloatArray) -> None:
        self.log_spreads = np.asarray(value, dtype=float)

    @property
    def bounds(self) -> FloatArray:
        centre = np.log(list(SPREADS.values()))
        return np.stack([centre - 3, centre + 3], axis=1)

    def is_stationary(self) -> bool:
        return False

    def __call__(
        self, X: FloatArray, Y: FloatArray | None = None, eval_gradient: bool = False
    ) -> Any:
        other = X if Y is None else Y
        variance = dict(zip(_NAMES, np.exp(2 * self.log_spreads), strict=True))
        parts: dict[str, FloatArray] = {}
        total = np.zeros((len(X), len(other)))

        def add(name: str | None, values: FloatArray) -> None:
            nonlocal total
            values = values * variance[name] if name else values
            total += values
            if eval_gradient and name:
                parts[name] = parts.get(name, 0.0) + values

        same: dict[str, Any] = {"all": 1.0}
        for at, group in enumerate(CODES, start=COLUMN["codes"].start):
            same[group] = (X[:, at, None] == other[:, at]) & (X[:, at, None] > 0)
        for group, spread, name in _TERMS:
            used = np.flatnonzero(spread)
            add(name, same[group] * ((X[:, used] * spread[used] ** 2) @ other[:, used].T))
        alone = np.multiply.outer(X[:, COLUMN["alone"]], other[:, COLUMN["alone"]])
        apart = X[:, COLUMN["octave"], None] - other[:, COLUMN["octave"]]
        near, equal = np.exp(-0.5 * (apart / _OCTAVES) ** 2), np.abs(apart) < 1e-6
        for level in ("workload", "cell"):
            add(f"curve of {level}", alone * (same[level] * near))
            add(f"batch of {level}", alone * (same[level] & equal))
        both = np.multiply.outer(X[:, COLUMN["transformer"]], other[:, COLUMN["transformer"]])
        if both.any():
            distance = _squared(X[:, COLUMN["shape"]] / _SHAPE, other[:, COLUMN["shape"]] / _SHAPE)
            add("shape of transformer", both * np.exp(-0.5 * distance))
        for column, length in ((COLUMN["broad"], BROAD), (COLUMN["narrow"], NARROW)):
            distance = _squared(
                X[:, COLUMN["features"]] / length, other[:, COLUMN["features"]] / length
            )
            spread = np.multiply.outer(X[:, column], other[:, column])
            add(None, same["mode"] * spread * np.exp(-0.5 * distance))
        beyond = np.multiply.outer(X[:, COLUMN["beyond"]], other[:, COLUMN["beyond"]])
        add(None, _BEYOND_SD**2 * same["link"] * beyond)
        if Y is None:
            add("noise of one device", np.diag(X[:, COLUMN["noise"]]))
        if not eval_gradient:
            return total
        none = np.zeros_like(total)
        return total, np.stack([2 * parts.get(name, none) for name in _NAMES], axis=2)

    def diag(self, X: FloatArray) -> FloatArray:
        chunks = np.array_split(X, max(len(X) // 100, 1))
        return np.concatenate([np.diag(self(chunk)) for chunk in chunks])


class Regression(GaussianProcessRegressor):  # type: ignore[misc]
    """A Gaussian process that is stored without its Cholesky factor, which is large."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("L_", "_rng")}

    def __getattr__(self, name: str) -> Any:
        if name != "L_" or "X_train_" not in self.__dict__:
            raise AttributeError(name)
        covariance = self.kernel_(self.X_train_)
        covariance[np.diag_indices_from(covariance)] += self.alpha
        self.L_ = scipy.linalg.cholesky(covariance, lower=True)
        return self.L_


def point_inputs(points: Points) -> FloatArray:
    """Return the kernel's input for the log seconds of points."""
    inputs = np.zeros((len(points.mean), WIDTH))
    inputs[:, T1], inputs[:, COLUMN["alone"]] = points.effects, 1.0
    inputs[:, COLUMN["codes"].start : COLUMN["link"]] = points.codes
    inputs[:, COLUMN["octave"]], inputs[:, COLUMN["shape"]] = points.octave, points.shape
    inputs[:, COLUMN["transformer"]] = points.shape[:, 0] > 0
    return inputs


_FREEDOM = 2.0  # of Student's t for outlying rows


def outlying_factor(process: Regression, factor: FloatArray | float = 1.0) -> FloatArray:
    """Return the factor on each row's noise variance, above 1 for outliers (Student's t).

    `factor` is the factor with which `process` was fitted.
    """
    inverse = scipy.linalg.cho_solve((process.L_, True), np.eye(len(process.L_)))
    square = factor * process.alpha_**2 / np.diag(inverse)
    return np.asarray(np.maximum(1.0, (_FREEDOM + square) / (_FREEDOM + 1)), dtype=float)


def learned_spreads(
    log_spreads: FloatArray, inputs: FloatArray, target: FloatArray, noise: FloatArray
) -> FloatArray:
    """Return the most probable log spreads; their prior is centred on the initial values."""
    search = penalised(np.log(list(SPREADS.values())), _PRIOR_SD, 12)
    process = Regression(StepKernel(log_spreads), alpha=noise, optimizer=search)
    return np.asarray(process.fit(inputs, target).kernel_.theta, dtype=float)


def penalised(
    centre: FloatArray,
    sd: FloatArray | float,
    most: int,
    limits: tuple[float, float] = (-3.0, 3.0),
) -> Any:
    """Return an optimizer for scikit-learn with a normal prior around `centre`.

    It takes at most `most` steps. `limits` bound the distance to `centre`.
    """

    def search(objective: Any, start: FloatArray, bounds: FloatArray) -> tuple[FloatArray, float]:
        def loss(theta: FloatArray) -> tuple[float, FloatArray]:
            value, slope = objective(theta)
            away = (theta - centre) / sd
            return value + 0.5 * float(away @ away), slope + away / sd

        within = [(each + limits[0], each + limits[1]) for each in centre.tolist()]
        minimize: Any = scipy.optimize.minimize
        found = minimize(
            loss, start, jac=True, method="L-BFGS-B", bounds=within, options={"maxiter": most}
        )
        return found.x, found.fun

    return search
