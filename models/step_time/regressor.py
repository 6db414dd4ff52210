"""Regress step seconds on setups: a closed-form mean and Gaussian processes around it.

    log step = log f(theta, log T1) + r + noise

    f       the formula of formula.py
    theta   the parameters of the formula
    T1      the seconds of one device for a forward and a backward pass
    r       the residual: similar setups of a cell have similar residuals

A cell is a workload in one mode on one kind of device. Rows belong to groups. A group is a kind of
device, a neural network, a strategy, a communication library, a workload in one mode, or a cell.

Each parameter in theta is the sum of its prior mean, a deviation that all rows share, and
deviations that the rows of a group share (`kernel._TERMS`). log T1 is also such a sum, plus smooth
curves in the batch.

All deviations are normal. If the formula is linearised in theta and log T1, log step seconds are
therefore a Gaussian process with the covariance of `kernel.terms`. Each iteration of the fit
linearises f at the posterior mean (Gauss-Newton). Groups without rows keep their prior. Therefore
the same fit works with facts alone, with three measured runs and with a thousand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin

from ..domain.numeric import FloatArray, IntArray
from .kernel import COLUMN, LOG_SPREADS, WIDTH, StepCovariance, StepProcess, outlying_factor
from .learning import learn_spreads, learned_spreads
from .posterior import Posterior, interval
from .residuals import ENOUGH, CellSpread, Neighbours, Spreads, fit_neighbours, scales, spreads_of
from .rows import Rows

# A factor on the standard deviations of the residual for each iteration of the fit. The factor is
# large at first and after spreads were learned, so that no iteration changes theta too much.
_LOOSER = (6.0, 6.0, 3.0, 3.0, 1.5, 1.0, 3.0, 1.5, 1.0, 3.0, 1.5, 1.0, 1.0, 1.0, 1.0)
# Maximum number of rows of a cell to which its Gaussian process is fitted; maximum number of rows
# from which the spreads of kernel.py are learned.
_MOST_NEIGHBOURS, _MOST_LEARNED = 1200, 300
# {iteration that learns spreads: upper limit of the growth of the residual's log variance}. The
# limit is small at first, so that the formula explains as much as possible.
_GROWTH = {5: 1.0, 8: 1.0, 11: 5.4}


class StepTimeRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Predicts the step seconds of `Rows`, with the interface of a scikit-learn regressor.

    Args:
        most_rows: the maximum number of multi-device rows from which the parameters are learned.
            If there are more rows, a random sample of them is used. Single-device rows are always
            used.
        random_state: the seed of the random sample.
    """

    def __init__(self, *, most_rows: int = 700, random_state: int = 0) -> None:
        self.most_rows = most_rows
        self.random_state = random_state

    def fit(
        self, X: Rows, y: FloatArray, sample_weight: FloatArray | None = None
    ) -> StepTimeRegressor:
        """Fit the model to rows `X` and their step seconds `y`.

        sample_weight: (rows,) number of runs that each row pools; None means 1.
        """
        weight = np.ones(len(X)) if sample_weight is None else sample_weight
        log_s, random = np.log(y), np.random.default_rng(self.random_state)
        picked = self._thin(X, random)
        rows = X.take(picked)
        outlying: FloatArray = np.ones(len(picked))
        several = rows.ranks > 1
        reach: dict[Any, float] = pd.Series(X.ranks).groupby(X.kind).max().clip(2.0).to_dict()
        no_rows = np.zeros((0, WIDTH)), np.zeros(0), np.zeros(0)
        log_spreads = LOG_SPREADS
        process = StepProcess(StepCovariance(log_spreads), *no_rows)
        found = Posterior(reach=reach, process=process)
        for turn, looser in enumerate(_LOOSER):
            linear, noise_factor = found.linear(rows), outlying / weight[picked]
            residual = log_s[picked] - linear.log_s
            if turn in _GROWTH:
                spreads = learn_spreads(rows, residual, noise_factor, growth=_GROWTH[turn])
                found = replace(found, spreads=spreads)
            spread = spreads_of(found.spreads, rows) * several[:, None]
            inputs = linear.inputs
            inputs[:, [COLUMN["broad"], COLUMN["narrow"]]] = looser * spread[:, :2]
            inputs[:, COLUMN["noise"]] = ~several & (rows.noise_sd == 0)
            noise = spread[:, 2] ** 2 * noise_factor + rows.noise_sd**2 + 1e-6
            target = residual + linear.shift
            if turn in _GROWTH:
                some = np.sort(random.permutation(len(picked))[:_MOST_LEARNED])
                log_spreads = learned_spreads(log_spreads, inputs[some], target[some], noise[some])
            process = StepProcess(StepCovariance(log_spreads), inputs, target, noise)
            found = replace(found, process=process)
            outlying = outlying_factor(process, outlying)
        self.posterior_ = self._with_neighbours(found, X, log_s, weight, rows)
        return self

    def _with_neighbours(
        self, found: Posterior, X: Rows, log_s: FloatArray, weight: FloatArray, picked: Rows
    ) -> Posterior:
        """Return `found`, completed with a Gaussian process of the residuals of each cell.

        A cell is a workload in one mode on one kind of device.

        found: the posterior with fitted parameters.
        X: all rows.
        log_s: (rows,) measured log step seconds.
        weight: (rows,) number of runs that each row pools.
        picked: the rows from which the parameters were learned.
        """
        random = np.random.default_rng([self.random_state, 1])
        neighbours: dict[float, Neighbours] = {}
        cells: Spreads = {}
        several = np.flatnonzero(X.ranks > 1)
        residual = log_s - np.log(found.times(X).step_s)
        for cell in np.unique(X.cell[several]).tolist():
            at = several[X.cell[several] == cell]
            at = np.sort(random.permutation(at)[:_MOST_NEIGHBOURS])
            rows, known = X.take(at), residual[at]
            neighbours[cell], spread = fit_neighbours(
                rows, known, weight[at], spreads_of(found.spreads, rows)[0]
            )
            if len(rows) >= ENOUGH:
                cells[cell] = CellSpread(spread, float(rows.kind[0]))
        spreads = found.spreads | cells
        return replace(
            found,
            spreads=spreads,
            neighbours=neighbours,
            scales=scales(found.process, picked, spreads),
        )

    def _thin(self, X: Rows, random: np.random.Generator) -> IntArray:
        """Return the positions of all single-device rows, and of at most `most_rows` other rows.

        The other rows are a random sample that is balanced over cells. Within a cell, the sample is
        balanced over shapes of clusters. A cell is a workload in one mode on one kind of device.
        """
        several = random.permutation(np.flatnonzero(X.ranks > 1))
        shape = X.features[several][:, 1:4].round(6)
        frame = pd.DataFrame(np.column_stack([X.cell[several], shape]))
        turn = frame.groupby([*frame]).cumcount().sort_values(kind="stable")
        order = frame.loc[turn.index].groupby(0).cumcount().sort_values(kind="stable")
        kept = several[order.index[: self.most_rows]]
        return np.sort(np.append(np.flatnonzero(X.ranks <= 1), kept))

    def predict(self, X: Rows, return_interval: bool = False) -> Any:
        """Return step seconds, or (seconds, lower, upper) if `return_interval` is True.

        The intervals contain the step seconds of a new run with probability 90 %.
        """
        beliefs = self.posterior_.beliefs(X)
        median = np.exp(beliefs.mean)
        if not return_interval:
            return median
        return median, *interval(median, beliefs.variance + beliefs.noise)

    def sample_y(self, X: Rows, n_samples: int = 1, random_state: int = 0) -> FloatArray:
        """Return a (rows, n_samples) array of joint draws of step seconds."""
        beliefs = self.posterior_.beliefs(X, covariance=True)
        random = np.random.default_rng(random_state)
        covariance = beliefs.variance + np.diag(beliefs.noise)
        return np.exp(
            random.multivariate_normal(beliefs.mean, covariance, n_samples, method="eigh").T
        )
