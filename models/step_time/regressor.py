"""Regress step seconds on setups: a closed-form mean and Gaussian processes around it.

    log step = log f(theta, log T1) + r + noise

f is the equation of formula.py. Its parameters theta, and the log seconds of one device T1, are
sums of deviations: of all rows, of a kind of device, a network, a workload in one mode, a strategy,
and a workload on a kind. T1 also has smooth curves in the batch. r is the residual: similar setups
of a cell (a workload in one mode on one kind of device) have similar residuals. All deviations are
normal, so log steps, linearised in theta and log T1, are a Gaussian process with the covariance of
`StepKernel`. Each iteration of the fit linearises f at the posterior mean (Gauss-Newton). Groups
without rows keep their prior: facts alone, three pilots and a thousand rows are one fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, WhiteKernel

from ..domain.numeric import Z_90, FloatArray, IntArray
from .formula import MEAN, NAMES, PARAMETERS, Line, Times, moved_step_s, step_times
from .one_device import EFFECTS
from .rows import Points, Rows

# Groups that share deviations: of T1 (kind of device, network, workload in a mode of one device,
# workload on a kind), and of theta (kind with the slowest link, strategy, workload in a mode on a
# kind).
CODES = ("kind", "network", "workload", "cell", "link", "strategy", "mode")
_FORMULA, _LINEAR = len(NAMES), len(NAMES) + len(EFFECTS)
_THETA, _T1 = slice(0, _FORMULA), slice(_FORMULA, _LINEAR)


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
_SPREADS = {
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
_NAMES = tuple(_SPREADS)
# Standard deviation of the prior of a learned log spread.
_PRIOR_SD = np.array([1.4 if name.startswith("noise") else 0.7 for name in _NAMES])
_OCTAVES = 2.5  # length scale of the curves in the batch
_SHAPE = np.array([1.5, 2.0, 2.0, 1.0])  # length scales of a transformer's shape
# Length scales of the residual: octaves of batch, of machines and of devices per machine;
# unevenness; octaves of speed.
BROAD, NARROW = np.array([[3.0, 1.5, 1.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.2, 0.3]])
# Initial standard deviations of residuals: broad, narrow, noise of a run.
RESIDUAL = np.array([0.05, 0.04, 0.03])
_ENOUGH = 40  # rows from which a cell's spreads are learned
_MOST_RESIDUALS = 150  # rows of a cell from which its spreads are learned
_SMALL = 0.0  # code of the small cells together
_APART, _ONE_LENGTH = 100.0, (1.0,)  # distance of cells in a pooled fit, and its length scale
_STEP = 1e-4
# Standard deviation of log step seconds for each doubling of devices beyond the largest measured
# number: the library may switch to another algorithm.
_BEYOND_SD = 0.1
# Turns of the fit: a factor on the residual, so that a poor start pulls less; and the largest
# growth of a residual's log variance, since the formula shall explain what it can.
_LOOSER = (6.0, 6.0, 3.0, 3.0, 1.5, *[1.0] * 8)
_MOST_GROWTH, _FREE_GROWTH, _FREE_TURN = 1.0, 5.4, 9
_LEARN_AT = (5, 8, 11)  # turns that learn the spreads of the levels
_FREEDOM = 2.0  # of Student's t for outlying rows


class _Process(GaussianProcessRegressor):  # type: ignore[misc]
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
_AT: dict[str, Any] = {
    name: slice(end - width, end) if width > 1 else end - 1
    for (name, width), end in zip(_WIDTHS.items(), _ENDS, strict=True)
}
_CODE = {group: _AT["codes"].start + at for at, group in enumerate(CODES)}


def _squared(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return squared distances between the rows of two arrays."""
    found = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.asarray(np.maximum(found, 0.0), dtype=float)


class StepKernel(Kernel):  # type: ignore[misc]
    """Covariance of linearised log step seconds. `log_spreads` are learned, in the order of _NAMES."""

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
        centre = np.log(list(_SPREADS.values()))
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
        for at, group in enumerate(CODES, start=_AT["codes"].start):
            same[group] = (X[:, at, None] == other[:, at]) & (X[:, at, None] > 0)
        for group, spread, name in _TERMS:
            used = np.flatnonzero(spread)
            add(name, same[group] * ((X[:, used] * spread[used] ** 2) @ other[:, used].T))
        alone = np.multiply.outer(X[:, _AT["alone"]], other[:, _AT["alone"]])
        apart = X[:, _AT["octave"], None] - other[:, _AT["octave"]]
        near, equal = np.exp(-0.5 * (apart / _OCTAVES) ** 2), np.abs(apart) < 1e-6
        for level in ("workload", "cell"):
            add(f"curve of {level}", alone * (same[level] * near))
            add(f"batch of {level}", alone * (same[level] & equal))
        both = np.multiply.outer(X[:, _AT["transformer"]], other[:, _AT["transformer"]])
        if both.any():
            distance = _squared(X[:, _AT["shape"]] / _SHAPE, other[:, _AT["shape"]] / _SHAPE)
            add("shape of transformer", both * np.exp(-0.5 * distance))
        for column, length in ((_AT["broad"], BROAD), (_AT["narrow"], NARROW)):
            distance = _squared(X[:, _AT["features"]] / length, other[:, _AT["features"]] / length)
            spread = np.multiply.outer(X[:, column], other[:, column])
            add(None, same["mode"] * spread * np.exp(-0.5 * distance))
        beyond = np.multiply.outer(X[:, _AT["beyond"]], other[:, _AT["beyond"]])
        add(None, _BEYOND_SD**2 * same["link"] * beyond)
        if Y is None:
            add("noise of one device", np.diag(X[:, _AT["noise"]]))
        if not eval_gradient:
            return total
        none = np.zeros_like(total)
        return total, np.stack([2 * parts.get(name, none) for name in _NAMES], axis=2)

    def diag(self, X: FloatArray) -> FloatArray:
        chunks = np.array_split(X, max(len(X) // 100, 1))
        return np.concatenate([np.diag(self(chunk)) for chunk in chunks])


class Beliefs(NamedTuple):
    """The distribution of log step seconds, and the formula's times.

    `mean` (rows,) and `variance`, (rows,) or a covariance (rows, rows), leave out `noise` (rows,),
    the variance of a run.
    """

    mean: FloatArray
    variance: FloatArray
    noise: FloatArray
    times: Times


class Linear(NamedTuple):
    """The formula at the posterior mean, and the kernel's input."""

    log_s: FloatArray  # (rows,)
    shift: FloatArray  # (rows,) effect of all deviations, linearised
    times: Times
    inputs: FloatArray


class StepTimeRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Predicts the step seconds of `Rows`.

    Args:
        most_rows: rows of several devices from which the levels are learned.
        most_neighbours: rows of a cell from which its residual is learned.
        most_learned: rows from which spreads are learned.
        random_state: seed of the choice of rows.
    """

    def __init__(
        self,
        *,
        most_rows: int = 700,
        most_neighbours: int = 1200,
        most_learned: int = 300,
        random_state: int = 0,
    ) -> None:
        self.most_rows = most_rows
        self.most_neighbours = most_neighbours
        self.most_learned = most_learned
        self.random_state = random_state

    def fit(
        self, X: Rows, y: FloatArray, sample_weight: FloatArray | None = None
    ) -> StepTimeRegressor:
        """Fit to rows and their step seconds; `sample_weight` are effective numbers of runs."""
        weight = np.ones(len(X)) if sample_weight is None else sample_weight
        log_s = np.log(y)
        random = np.random.default_rng(self.random_state)
        picked = self._thinned(X, random)
        rows, outlying = X.take(picked), np.ones(len(picked))
        several = rows.line.ranks > 1
        self.process_: Any = None  # the prior, at first
        self.reach_ = {
            kind: max(float(X.line.ranks[X.kind == kind].max()), 2.0)
            for kind in np.unique(X.kind).tolist()
        }
        self.residual_ = Residuals({}, {})
        log_spreads = np.log(list(_SPREADS.values()))
        for turn, looser in enumerate(_LOOSER):
            linear = self._linear(rows)
            target = log_s[picked] - linear.log_s
            if turn in _LEARN_AT:
                growth = _MOST_GROWTH if turn < _FREE_TURN else _FREE_GROWTH
                self.residual_ = _residuals(rows, target, weight[picked], outlying, growth)
            spread = self.residual_.of(rows)
            inputs = linear.inputs
            inputs[:, [_AT["broad"], _AT["narrow"]]] = looser * spread[:, :2] * several[:, None]
            noise = (spread[:, 2] ** 2 * several * outlying) / weight[picked]
            noise += rows.noise_sd**2 + 1e-6
            target = target + linear.shift
            if turn in _LEARN_AT:
                some = np.sort(random.permutation(len(picked))[: self.most_learned])
                log_spreads = _learned(log_spreads, inputs[some], target[some], noise[some])
            self.process_ = _Process(StepKernel(log_spreads), alpha=noise, optimizer=None).fit(
                inputs, target
            )
            outlying *= _outlying(self.process_)
        self.log_spreads_ = log_spreads
        self._fit_neighbours(X, log_s, weight, rows)
        return self

    def _thinned(self, X: Rows, random: np.random.Generator) -> IntArray:
        """Choose rows: all of one device, and as many of each cell's layouts as fit."""
        alone = X.line.ranks <= 1
        several = random.permutation(np.flatnonzero(~alone))
        cells = np.unique(X.cell[several], return_inverse=True)[1]
        layout = np.unique(X.features[several][:, 1:4].round(6), axis=0, return_inverse=True)[1]
        order = _places(cells * (layout.max(initial=0) + 1) + layout)
        order = _places(cells, order)
        kept = several[np.argsort(order, kind="stable")][: self.most_rows]
        return np.sort(np.concatenate([np.flatnonzero(alone), kept]))

    def _seconds(self, points: Points) -> FloatArray:
        """Return the posterior mean of the points' log seconds."""
        if self.process_ is None or not len(points.mean):
            return points.mean
        moved: FloatArray = self.process_.predict(_point_inputs(points))
        return points.mean + moved

    def _values(self, rows: Rows) -> FloatArray:
        """Return a (rows, parameters) array: posterior means of the formula's parameters."""
        if self.process_ is None:
            return np.tile(MEAN, (len(rows), 1))
        codes = np.stack([rows.kind, rows.strategy, rows.cell], axis=1)
        groups, which = np.unique(codes, axis=0, return_inverse=True)
        inputs = np.zeros((len(groups) * _FORMULA, _ENDS[-1]))
        inputs[:, _THETA] = np.tile(np.eye(_FORMULA), (len(groups), 1))
        for column, group in enumerate(("link", "strategy", "mode")):
            inputs[:, _CODE[group]] = np.repeat(groups[:, column], _FORMULA)
        found = self.process_.predict(inputs).reshape(-1, _FORMULA)
        return np.asarray(MEAN + found[which.reshape(-1)], dtype=float)

    def _linear(self, rows: Rows) -> Linear:
        values, log_t1 = self._values(rows), self._seconds(rows.points)
        line = rows.with_seconds(log_t1)
        times = step_times(line, values)
        log_s = np.log(times.step_s)
        slopes = (np.log(moved_step_s(line, values, by=_STEP)) - log_s[:, None]) / _STEP
        longer = step_times(_scaled(line, np.exp(_STEP)), values)
        alone = (np.log(longer.step_s) - log_s) / _STEP
        point = np.take_along_axis(rows.point, times.slowest[:, None], axis=1)[:, 0]
        alone = np.where(point >= 0, alone, 0.0)
        inputs = (
            _point_inputs(rows.points)[point]
            if len(rows.points.mean)
            else np.zeros((len(rows), _ENDS[-1]))
        )
        inputs[:, _T1] *= alone[:, None]
        inputs[:, [_AT["alone"], _AT["transformer"]]] *= alone[:, None]
        inputs[:, _THETA] = slopes
        for group, codes in zip(CODES[4:], (rows.kind, rows.strategy, rows.cell), strict=True):
            inputs[:, _CODE[group]] = codes
        inputs[:, _AT["features"]] = rows.features
        inputs[:, _AT["noise"]] = rows.line.ranks <= 1
        reach = np.array([self.reach_.get(kind, 2.0) for kind in rows.kind.tolist()])
        inputs[:, _AT["beyond"]] = np.log2(np.maximum(rows.line.ranks / reach, 1.0))
        deviation = np.append(log_t1 - rows.points.mean, 0.0)[point]
        shift = (slopes * (values - MEAN)).sum(axis=1) + alone * deviation
        return Linear(log_s, shift, times, inputs)

    def _fit_neighbours(self, X: Rows, log_s: FloatArray, weight: FloatArray, picked: Rows) -> None:
        """Fit a Gaussian process to the residuals of each cell; `picked` are the rows of levels."""
        self.neighbours_: dict[float, tuple[_Process, float, float]] = {}
        wider: dict[float, tuple[FloatArray, float, int]] = {}
        random = np.random.default_rng([self.random_state, 1])
        several = np.flatnonzero(X.line.ranks > 1)
        for cell in np.unique(X.cell[several]).tolist():
            at = several[X.cell[several] == cell]
            at = np.sort(random.permutation(at)[: self.most_neighbours])
            rows = X.take(at)
            residual = log_s[at] - self._linear(rows).log_s
            broad, narrow, noise_sd = self.residual_.of(rows)[0].tolist()
            noise = noise_sd**2 / weight[at] + rows.noise_sd**2 + 1e-6
            for _ in range(2):
                process = _Process(residual_kernel(broad, narrow), alpha=noise, optimizer=None).fit(
                    rows.features, residual
                )
                noise = noise * _outlying(process)
            factor = _wider(process, rows.features)
            process = _Process(
                residual_kernel(factor * broad, factor * narrow),
                alpha=factor**2 * noise,
                optimizer=None,
            ).fit(rows.features, residual)
            wider[cell] = factor * np.array([broad, narrow, noise_sd]), float(rows.kind[0]), len(at)
            moved = process.predict(rows.features)
            self.neighbours_[cell] = process, min(moved.min(), 0.0), max(moved.max(), 0.0)
        if _SMALL in self.residual_.cells:
            spread = self._wider_small(picked) * self.residual_.cells[_SMALL]
            wider[_SMALL] = spread, _SMALL, _ENOUGH
        self.residual_ = Residuals.of_cells(wider)

    def _wider_small(self, rows: Rows) -> float:
        """Return the factor by which left-out rows of small cells exceed their deviations."""
        cells, count = np.unique(rows.cell, return_counts=True)
        small = np.isin(rows.cell, cells[count < _ENOUGH]) & (rows.line.ranks > 1)
        inverse = scipy.linalg.cho_solve((self.process_.L_, True), np.eye(len(rows)))
        away = np.abs(self.process_.alpha_ / np.sqrt(np.diag(inverse)))[small]
        return float(np.clip(np.quantile(away, 0.9) / Z_90, 1.0, 4.0))

    def times(self, X: Rows) -> Times:
        """Return the formula's times at the posterior mean of its parameters."""
        return step_times(X.with_seconds(self._seconds(X.points)), self._values(X))

    def one_device_s(self, points: Points) -> FloatArray:
        """Return the seconds of one device at each point."""
        return np.asarray(np.exp(self._seconds(points)), dtype=float)

    def beliefs(self, X: Rows, *, covariance: bool = False) -> Beliefs:
        """Return the distribution of log step seconds; `covariance` asks for the joint one."""
        linear = self._linear(X)
        inputs = linear.inputs.copy()
        inputs[:, [_AT["broad"], _AT["narrow"], _AT["noise"]]] = 0.0
        mean, several = linear.log_s.copy(), X.line.ranks > 1
        if covariance:
            variance = self.process_.predict(inputs, return_cov=True)[1]
        else:
            variance = self.process_.predict(inputs, return_std=True)[1] ** 2
        spread = self.residual_.of(X)
        noise = np.where(several, spread[:, 2], np.exp(self.log_spreads_[-1])) ** 2
        for cell in np.unique(X.cell[several]).tolist():
            at = np.flatnonzero(several & (X.cell == cell))
            process, low, high = self.neighbours_.get(cell, (None, 0.0, 0.0))
            if process is None:  # the prior of a process without rows
                process = _Process(residual_kernel(*spread[at[0], :2].tolist()))
            if covariance:
                moved, local = process.predict(X.features[at], return_cov=True)
                variance[np.ix_(at, at)] += local
            else:
                moved, sd = process.predict(X.features[at], return_std=True)
                variance[at] += sd**2
            mean[at] += np.clip(moved, low, high)
        return Beliefs(mean, variance, noise, linear.times)

    def predict(self, X: Rows, return_interval: bool = False) -> Any:
        """Return step seconds, or (seconds, lower, upper) with 90 % intervals of a new run."""
        beliefs = self.beliefs(X)
        if not return_interval:
            return np.exp(beliefs.mean)
        half = Z_90 * np.sqrt(beliefs.variance + beliefs.noise)
        return tuple(np.exp(beliefs.mean + sign * half) for sign in (0, -1, 1))

    def sample_y(self, X: Rows, n_samples: int = 1, random_state: int = 0) -> FloatArray:
        """Return a (rows, n_samples) array of joint draws of step seconds."""
        beliefs = self.beliefs(X, covariance=True)
        random = np.random.default_rng(random_state)
        covariance = beliefs.variance + np.diag(beliefs.noise)
        return np.exp(
            random.multivariate_normal(beliefs.mean, covariance, n_samples, method="eigh").T
        )


def _scaled(line: Line, factor: float) -> Line:
    from dataclasses import replace

    return replace(line, alone_s=line.alone_s * factor)


def _places(group: IntArray, key: IntArray | None = None) -> IntArray:
    """Return each row's rank within its group, in order of `key` or of appearance."""
    order = np.argsort(group, kind="stable") if key is None else np.lexsort((key, group))
    sizes = np.bincount(group)
    places = np.empty(len(group), dtype=np.intp)
    places[order] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _point_inputs(points: Points) -> FloatArray:
    """Return the kernel's input for the log seconds of points."""
    inputs = np.zeros((len(points.mean), _ENDS[-1]))
    inputs[:, _T1], inputs[:, _AT["alone"]] = points.effects, 1.0
    inputs[:, _AT["codes"].start : _CODE["link"]] = points.codes
    inputs[:, _AT["octave"]], inputs[:, _AT["shape"]] = points.octave, points.shape
    inputs[:, _AT["transformer"]] = points.shape[:, 0] > 0
    return inputs


def _outlying(process: _Process) -> FloatArray:
    """Return a factor on each row's noise variance, above 1 for outliers (Student's t)."""
    inverse = scipy.linalg.cho_solve((process.L_, True), np.eye(len(process.L_)))
    away = process.alpha_ / np.sqrt(np.diag(inverse))
    return np.asarray(np.maximum(1.0, (_FREEDOM + away**2) / (_FREEDOM + 1)), dtype=float)


def _learned(
    log_spreads: FloatArray, inputs: FloatArray, target: FloatArray, noise: FloatArray
) -> FloatArray:
    """Return the most probable log spreads; their prior is centred on the initial values."""
    search = _penalised(np.log(list(_SPREADS.values())), _PRIOR_SD, 12)
    process = _Process(StepKernel(log_spreads), alpha=noise, optimizer=search)
    return np.asarray(process.fit(inputs, target).kernel_.theta, dtype=float)


class Residuals(NamedTuple):
    """Standard deviations of residuals: broad, narrow, and noise of a run.

    `cells` has those of cells with rows, `kinds` the root mean squares over the cells of a kind.
    """

    cells: dict[float, FloatArray]
    kinds: dict[float, FloatArray]
    usual: FloatArray = RESIDUAL

    @classmethod
    def of_cells(cls, found: dict[float, tuple[FloatArray, float, int]]) -> Residuals:
        """Pool the spreads of cells: (spreads, code of the kind, number of rows) by cell.

        The root mean square is the spread of a cell that is not known: it may be any of them.
        Few rows cannot show a small spread.
        """
        known = {cell: each for cell, each in found.items() if each[2] >= _ENOUGH}
        squares = [spread**2 for spread, _, _ in known.values()] or [RESIDUAL**2]
        usual = np.mean(squares, axis=0)
        kinds = {}
        for kind in {each[1] for each in known.values()}:
            alike = [spread**2 for spread, name, _ in known.values() if name == kind]
            kinds[kind] = np.sqrt((usual + np.sum(alike, axis=0)) / (1 + len(alike)))
        return cls({cell: each[0] for cell, each in known.items()}, kinds, np.sqrt(usual))

    def of(self, rows: Rows) -> FloatArray:
        """Return a (rows, 3) array. A kind without rows gets the median of all cells."""
        pairs, which = np.unique(
            np.stack([rows.cell, rows.kind], axis=1), axis=0, return_inverse=True
        )
        found = [
            self.cells.get(cell, self.kinds.get(kind, self.usual)) for cell, kind in pairs.tolist()
        ]
        return np.array(found).reshape(-1, 3)[which.reshape(-1)]


def _residuals(
    rows: Rows, target: FloatArray, weight: FloatArray, outlying: FloatArray, growth: float
) -> Residuals:
    """Learn the spreads of each large cell, and of all small cells together, from `target`."""
    several = np.flatnonzero(rows.line.ranks > 1)
    index, count = np.unique(rows.cell[several], return_inverse=True, return_counts=True)[1:]
    large = count[index] >= _ENOUGH
    groups = [several[index == cell] for cell in np.unique(index[large]).tolist()]
    found: dict[float, tuple[FloatArray, float, int]] = {}
    apart = np.column_stack([rows.features[several], _APART * index])  # cells do not correlate
    features = np.zeros((len(rows), apart.shape[1]))
    features[several] = apart
    for at in [*groups, several[~large]]:
        if len(at) < _ENOUGH:
            continue
        kernel = residual_kernel(*RESIDUAL[:2], *_ONE_LENGTH) + WhiteKernel(RESIDUAL[2] ** 2)
        more = RESIDUAL[2] ** 2 * (outlying[at] / weight[at] - 1).clip(0)
        noise = rows.noise_sd[at] ** 2 + 1e-6 + more
        search = _penalised(kernel.theta, 1.0, 8, growth)
        process = _Process(kernel, alpha=noise, optimizer=search)
        some = at[:: max(len(at) // _MOST_RESIDUALS, 1)]
        process.alpha = noise[:: max(len(at) // _MOST_RESIDUALS, 1)]
        theta = process.fit(features[some], target[some]).kernel_.theta
        small = len(np.unique(rows.cell[at])) > 1
        cell, kind = (
            (_SMALL, _SMALL) if small else (float(rows.cell[at[0]]), float(rows.kind[at[0]]))
        )
        found[cell] = np.exp(theta / 2), kind, len(at)
    return Residuals.of_cells(found)


def _wider(process: _Process, features: FloatArray) -> float:
    """Return the factor by which errors exceed a process's standard deviations.

    Rows of one cluster are left out together, because their errors have causes in common.
    """
    if len(features) < _ENOUGH:
        return 1.0
    inverse = scipy.linalg.cho_solve((process.L_, True), np.eye(len(features)))
    cluster = np.unique(features[:, 1:].round(6), axis=0, return_inverse=True)[1].reshape(-1)
    away = np.zeros(len(features))
    for group in range(cluster.max() + 1):
        at = np.flatnonzero(cluster == group)
        left = np.linalg.inv(inverse[np.ix_(at, at)])
        away[at] = np.abs(left @ process.alpha_[at]) / np.sqrt(np.diag(left))
    return float(np.clip(np.quantile(away, 0.9) / Z_90, 0.8, 4.0))


def residual_kernel(broad: float, narrow: float, *lengths: float) -> Any:
    """Return the covariance of a cell's residuals, a function of `Rows.features`.

    `lengths` are the length scales of further features.
    """
    parts = [
        ConstantKernel(sd**2) * RBF([*length, *lengths], length_scale_bounds="fixed")
        for sd, length in ((broad, BROAD), (narrow, NARROW))
    ]
    return parts[0] + parts[1]


def _penalised(centre: FloatArray, sd: FloatArray | float, most: int, growth: float = 3.0) -> Any:
    """Return an optimizer for scikit-learn with a normal prior around `centre`."""

    def search(objective: Any, start: FloatArray, bounds: FloatArray) -> tuple[FloatArray, float]:
        def loss(theta: FloatArray) -> tuple[float, FloatArray]:
            value, slope = objective(theta)
            away = (theta - centre) / sd
            return value + 0.5 * float(away @ away), slope + away / sd

        limits = np.stack([centre - 2, centre + growth], axis=1)
        minimize: Any = scipy.optimize.minimize
        found = minimize(
            loss, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": most}
        )
        return found.x, found.fun

    return search
