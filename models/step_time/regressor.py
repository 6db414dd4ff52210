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

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin

from ..domain.numeric import Z_90, FloatArray, IntArray
from .formula import MEAN, Times, slopes, step_times
from .kernel import (
    CODES,
    COLUMN,
    SPREADS,
    T1,
    THETA,
    WIDTH,
    Regression,
    StepKernel,
    learned_spreads,
    outlying_factor,
    point_inputs,
)
from .residuals import (
    Neighbours,
    Spreads,
    fit_neighbours,
    learn_spreads,
    with_neighbours,
    without_rows,
)
from .rows import Points, Rows

# Turns of the fit: a factor on the residual, so that a poor start pulls less; and the largest
# growth of a residual's log variance, since the formula shall explain what it can.
_LOOSER = (6.0, 6.0, 3.0, 3.0, 1.5, *[1.0] * 8)
_GROWTH = {5: 1.0, 8: 1.0, 11: 5.4}  # in the turns that learn spreads


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
        log_s, random = np.log(y), np.random.default_rng(self.random_state)
        picked = self._thinned(X, random)
        rows = X.take(picked)
        outlying: FloatArray = np.ones(len(picked))
        several = rows.line.ranks > 1
        self.process_: Any = None  # the prior, at first
        self.reach_: dict[float, float] = {}  # the most devices, by kind
        for kind, ranks in zip(X.kind.tolist(), X.line.ranks.tolist(), strict=True):
            self.reach_[kind] = max(self.reach_.get(kind, 2.0), ranks)
        self.spreads_ = Spreads({})
        self.log_spreads_ = np.log(list(SPREADS.values()))
        for turn, looser in enumerate(_LOOSER):
            linear, noise_factor = self._linear(rows), outlying / weight[picked]
            residual = log_s[picked] - linear.log_s
            if turn in _GROWTH:
                self.spreads_ = learn_spreads(rows, residual, noise_factor, growth=_GROWTH[turn])
            spread = self.spreads_.of(rows) * several[:, None]
            inputs = linear.inputs
            inputs[:, [COLUMN["broad"], COLUMN["narrow"]]] = looser * spread[:, :2]
            noise = spread[:, 2] ** 2 * noise_factor + rows.noise_sd**2 + 1e-6
            target = residual + linear.shift
            if turn in _GROWTH:
                some = np.sort(random.permutation(len(picked))[: self.most_learned])
                found = learned_spreads(self.log_spreads_, inputs[some], target[some], noise[some])
                self.log_spreads_ = found
            process = Regression(StepKernel(self.log_spreads_), alpha=noise, optimizer=None)
            self.process_ = process.fit(inputs, target)
            outlying = outlying_factor(process, outlying)
        self._fit_neighbours(X, log_s, weight, random, rows)
        return self

    def _fit_neighbours(
        self,
        X: Rows,
        log_s: FloatArray,
        weight: FloatArray,
        random: np.random.Generator,
        picked: Rows,
    ) -> None:
        self.neighbours_: dict[float, Neighbours] = {}
        found: dict[float, tuple[FloatArray, Rows]] = {}
        several = np.flatnonzero(X.line.ranks > 1)
        for cell in np.unique(X.cell[several]).tolist():
            at = several[X.cell[several] == cell]
            at = np.sort(random.permutation(at)[: self.most_neighbours])
            rows = X.take(at)
            residual, spread = log_s[at] - self._linear(rows).log_s, self.spreads_.of(rows)[0]
            self.neighbours_[cell], spread = fit_neighbours(rows, residual, weight[at], spread)
            found[cell] = spread, rows
        self.spreads_ = with_neighbours(self.spreads_, found, self.process_, picked)

    def _thinned(self, X: Rows, random: np.random.Generator) -> IntArray:
        """Choose rows: all of one device, and of each cell as many as fit, its layouts in turn."""
        several = random.permutation(np.flatnonzero(X.line.ranks > 1))
        columns = [X.cell[several, None], X.features[several][:, 1:4].round(6)]
        frame = pd.DataFrame(np.hstack(columns))
        turn = frame.groupby([*frame]).cumcount().sort_values(kind="stable")
        order = frame.loc[turn.index].groupby(0).cumcount().sort_values(kind="stable")
        kept = several[order.index[: self.most_rows]]
        return np.sort(np.append(np.flatnonzero(X.line.ranks <= 1), kept))

    def _seconds(self, points: Points) -> FloatArray:
        """Return the posterior mean of the points' log seconds."""
        if self.process_ is None or not len(points.mean):
            return points.mean
        moved: FloatArray = self.process_.predict(point_inputs(points))
        return points.mean + moved

    def _values(self, rows: Rows) -> FloatArray:
        """Return a (rows, parameters) array: posterior means of the formula's parameters."""
        if self.process_ is None:
            return np.tile(MEAN, (len(rows), 1))
        codes = np.stack([rows.kind, rows.strategy, rows.cell], axis=1)
        groups, which = np.unique(codes, axis=0, return_inverse=True)
        inputs = np.zeros((len(groups) * len(MEAN), WIDTH))
        inputs[:, THETA] = np.tile(np.eye(len(MEAN)), (len(groups), 1))
        for column, group in enumerate(("link", "strategy", "mode")):
            inputs[:, COLUMN[group]] = np.repeat(groups[:, column], len(MEAN))
        found = self.process_.predict(inputs).reshape(-1, len(MEAN))
        return np.asarray(MEAN + found[which.reshape(-1)], dtype=float)

    def _linear(self, rows: Rows) -> Linear:
        values, log_t1 = self._values(rows), self._seconds(rows.points)
        line = rows.with_seconds(log_t1)
        times = step_times(line, values)
        log_s = np.log(times.step_s)
        by_theta, by_t1 = slopes(line, values, log_s)
        point = np.take_along_axis(rows.point, times.slowest[:, None], axis=1)[:, 0]
        inputs = np.vstack([point_inputs(rows.points), np.zeros(WIDTH)])[point]
        inputs[:, T1] *= by_t1[:, None]
        inputs[:, [COLUMN["alone"], COLUMN["transformer"]]] *= by_t1[:, None]
        inputs[:, THETA] = by_theta
        for group, codes in zip(CODES[4:], (rows.kind, rows.strategy, rows.cell), strict=True):
            inputs[:, COLUMN[group]] = codes
        inputs[:, COLUMN["features"]] = rows.features
        inputs[:, COLUMN["noise"]] = (rows.line.ranks <= 1) & (rows.noise_sd == 0)
        reach = np.array([self.reach_.get(kind, 2.0) for kind in rows.kind.tolist()])
        inputs[:, COLUMN["beyond"]] = np.log2(np.maximum(rows.line.ranks / reach, 1.0))
        deviation = np.append(log_t1 - rows.points.mean, 0.0)[point]
        shift = (by_theta * (values - MEAN)).sum(axis=1) + by_t1 * deviation
        return Linear(log_s, shift, times, inputs)

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
        inputs[:, [COLUMN["broad"], COLUMN["narrow"], COLUMN["noise"]]] = 0.0
        mean, several = linear.log_s.copy(), X.line.ranks > 1
        if covariance:
            variance = self.process_.predict(inputs, return_cov=True)[1]
        else:
            variance = self.process_.predict(inputs, return_std=True)[1] ** 2
        spread = self.spreads_.of(X)
        noise = np.where(several, spread[:, 2], np.exp(self.log_spreads_[-1])) ** 2
        for cell in np.unique(X.cell[several]).tolist():
            at = np.flatnonzero(several & (X.cell == cell))
            process, low, high = self.neighbours_.get(cell) or without_rows(spread[at[0]])
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
