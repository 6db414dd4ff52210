"""Predict log step seconds after regressor.py has fitted the model.

The predicted mean is the formula at the posterior mean of its parameters, plus a correction from
the residuals of similar setups. The predicted variance is the sum of two variances: of the
linearised formula, and of the correction.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..domain.numeric import Z_90, FloatArray
from .formula import MEAN, Times, slopes, step_times
from .kernel import COLUMN, ROW_CODES, T1, THETA, WIDTH, StepProcess
from .residuals import Neighbours, Spreads, spreads_of, without_rows
from .rows import Points, Rows

# Standard deviation of the error on clusters with twice the devices of the largest measured
# cluster, relative to the standard deviation of residuals. On larger clusters of T4, 2080 Ti and
# V100, predictions are off by 6, 7 and 38 %. The residuals vary by 6, 8 and 25 %.
_DOUBT = 2.5


class Beliefs(NamedTuple):
    """The normal distribution of the log step seconds of setups.

    Attributes:
        mean: (rows,) means.
        variance: (rows,) variances, or a (rows, rows) covariance matrix. `noise` is not included.
        noise: (rows,) variances of log step seconds between runs of a setup.
        times: seconds of the step and its parts by the formula alone (`formula.step_times`).
    """

    mean: FloatArray
    variance: FloatArray
    noise: FloatArray
    times: Times


def interval(median: FloatArray, variance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the lower and the upper end of 90 % intervals of seconds.

    The logs of the seconds are normal. `median` has the medians of the seconds, and `variance` the
    variances of their logs.
    """
    factor = np.exp(Z_90 * np.sqrt(variance))
    return median / factor, median * factor


class Linear(NamedTuple):
    """The formula, linearised at the posterior mean of its parameters."""

    log_s: FloatArray  # (rows,) log step seconds at the posterior mean
    shift: FloatArray  # (rows,) linearised effect of the parameters' deviations from the prior mean
    times: Times
    inputs: FloatArray  # (rows, WIDTH) inputs of the kernel, without residuals and noise


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """The fitted regression, which predicts step seconds.

    A cell is a workload in one mode on one kind of device.

    Attributes:
        reach: {code of a kind of device: number of devices of the largest measured cluster}.
        process: the Gaussian process of log step seconds. Before the first iteration of the fit, it
            has no measurements.
        spreads: standard deviations of residuals.
        neighbours: {code of a cell: the Gaussian process of the cell's residuals}.
        scales: factors for the standard deviations of predictions (see `residuals.scales`).
    """

    reach: dict[float, float]
    process: StepProcess
    spreads: Spreads = field(default_factory=dict)
    neighbours: dict[float, Neighbours] = field(default_factory=dict)
    scales: dict[float, float] = field(default_factory=dict)

    def times(self, X: Rows) -> Times:
        """Return the seconds of steps and of their parts by the formula alone.

        The correction from the residuals of similar setups is not included.
        """
        return step_times(X.with_seconds(self.log_single_device_s(X.points)), self._values(X))

    def beliefs(self, X: Rows, *, covariance: bool = False) -> Beliefs:
        """Return the distribution of the log step seconds of the rows `X`.

        covariance: if True, `Beliefs.variance` is a (rows, rows) covariance matrix.
        """
        linear = self.linear(X)
        mean, scale, several = linear.log_s.copy(), np.ones(len(X)), X.ranks > 1
        variance = self.process.posterior(linear.inputs, joint=covariance)[1]
        spread = spreads_of(self.spreads, X)
        noise = (
            np.where(several, spread[:, 2], np.exp(self.process.covariance.log_spreads[-1])) ** 2
        )
        for cell in np.unique(X.cell[several]).tolist():
            at = np.flatnonzero(several & (X.cell == cell))
            process, low, high = self.neighbours.get(cell) or without_rows(spread[at[0]])
            moved, local = process.posterior(X.features[at], joint=covariance)
            variance[np.ix_(at, at) if covariance else at] += local
            mean[at] += np.clip(moved, low, high)
            scale[at] = self.scales.get(cell, self.scales.get(float(X.kind[at[0]]), 1.0))
        variance *= np.multiply.outer(scale, scale) if covariance else scale**2
        return Beliefs(mean, variance, noise, linear.times)

    def log_single_device_s(self, points: Points) -> FloatArray:
        """Return a (points,) array: posterior means of the log one-device seconds."""
        inputs = points.inputs
        cells = inputs[:, COLUMN["cell"]]
        _, first, cell = np.unique(cells, return_index=True, return_inverse=True)
        deviations = self.process.deviations(inputs[first])[cell, T1]
        moved: FloatArray = (inputs[:, T1] * deviations).sum(axis=1)
        return points.mean + moved + self.process.curves(inputs)

    def _values(self, rows: Rows) -> FloatArray:
        """Return a (rows, parameters) array: posterior means of the formula's parameters."""
        # Rows of a cell have the same kind of device and strategy, but may differ in the library.
        # A complex number holds both codes, because np.unique is slow for rows of two numbers.
        keys = rows.cell + 1j * rows.codes[:, 3]
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        inputs = np.zeros((len(first), WIDTH))
        inputs[:, ROW_CODES] = rows.codes[first]
        return (MEAN + self.process.deviations(inputs)[:, THETA])[which]

    def linear(self, rows: Rows) -> Linear:
        values, log_t1 = self._values(rows), self.log_single_device_s(rows.points)
        line = rows.with_seconds(log_t1)
        times = step_times(line, values)
        log_s = np.log(times.step_s)
        by_theta, by_t1 = slopes(line, values, log_s)
        point = np.take_along_axis(rows.point, times.slowest[:, None], axis=1)[:, 0]
        inputs = np.vstack([rows.points.inputs, np.zeros(WIDTH)])[point]
        inputs[:, T1] *= by_t1[:, None]
        inputs[:, [COLUMN["alone"], COLUMN["transformer"]]] *= by_t1[:, None]
        inputs[:, THETA] = by_theta
        inputs[:, ROW_CODES] = rows.codes
        inputs[:, COLUMN["features"]] = rows.features
        reach = np.array([self.reach.get(kind, 2.0) for kind in rows.kind.tolist()])
        spread = np.linalg.norm(spreads_of(self.spreads, rows)[:, :2], axis=1)
        inputs[:, COLUMN["pace"]] = _DOUBT * spread
        inputs[:, COLUMN["beyond"]] = np.log2(np.maximum(rows.ranks / reach, 1.0))
        deviation = np.append(log_t1 - rows.points.mean, 0.0)[point]
        shift = (by_theta * (values - MEAN)).sum(axis=1) + by_t1 * deviation
        return Linear(log_s, shift, times, inputs)
