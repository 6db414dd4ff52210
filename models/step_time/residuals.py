"""Model the residuals of similar setups with a Gaussian process for each cell.

A cell is a workload in one mode on one kind of device. The residual of a setup is the log of its
measured step seconds minus the log of the seconds that the formula computes. A spread is a standard
deviation.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import scipy

from ..domain.numeric import Z_90, FloatArray
from .kernel import GaussianProcess, ResidualCovariance, outlying_factor
from .rows import Rows

# Initial standard deviations: the broad and the narrow part of the residual, the noise of a run.
INITIAL = np.array([0.05, 0.04, 0.03])
ENOUGH = 40  # the spreads of a cell are learned if it has at least this many rows


class CellSpread(NamedTuple):
    """Standard deviations of residuals in a cell (a workload in one mode on one kind of device).

    spread: (3,) standard deviations of the component with long length scales, of the component with
        short length scales, and of the noise of a run.
    kind: the code of the kind of device (`rows.code_of`).
    """

    spread: FloatArray
    kind: float


# {code of a cell: its standard deviations}. If all cells of a kind have few rows, they share an
# entry under the code of the kind (learning.py).
Spreads = dict[float, CellSpread]


def spreads_of(spreads: Spreads, rows: Rows) -> FloatArray:
    """Return a (rows, 3) array: the residual standard deviations (`CellSpread.spread`) of each row.

    A row gets the entry of its cell in `spreads`. If its cell has no entry, the variances are
    averaged over the entries of its kind of device. If the kind has no entries, the variances are
    averaged over all entries.
    """
    cells, first, which = np.unique(rows.cell, return_index=True, return_inverse=True)
    found, every = np.zeros((len(cells), 3)), spreads.values()
    for at, (cell, kind) in enumerate(zip(cells.tolist(), rows.kind[first].tolist(), strict=True)):
        alike = [each for each in every if each.kind == kind]
        if cell in spreads:
            alike = [spreads[cell]]
        variances = [each.spread**2 for each in alike or every] or [INITIAL**2]
        found[at] = np.sqrt(np.mean(variances, axis=0))
    return found[which]


class Neighbours(NamedTuple):
    """The Gaussian process of the residuals of a cell.

    A cell is a workload in one mode on one kind of device. The process predicts corrections to log
    seconds. They are clipped to the range from `low` to `high`, which contains 0.
    """

    process: GaussianProcess
    low: float
    high: float


def fit_neighbours(
    rows: Rows, residual: FloatArray, weight: FloatArray, spread: FloatArray
) -> tuple[Neighbours, FloatArray]:
    """Fit a Gaussian process to the residuals of a cell, and calibrate its standard deviations.

    A cell is a workload in one mode on one kind of device. Calibration multiplies all standard
    deviations by a factor, so that they match the cross-validation errors. Returns the process and
    the calibrated standard deviations.

    Args:
        rows: the rows of the cell.
        residual: (rows,) log measured minus log computed step seconds.
        weight: (rows,) the number of runs that each row pools.
        spread: (3,) initial standard deviations: of the component with long length scales, of the
            component with short length scales, and of the noise of a run.
    """
    noise = spread[2] ** 2 / weight + rows.noise_sd**2 + 1e-6
    factor: FloatArray | float = 1.0
    for _ in range(3):
        process = _fit_process(rows.features, residual, spread, noise * factor)
        factor = outlying_factor(process, factor)
    noise = noise * factor
    wider = _left_out_factor(process)
    process = _fit_process(rows.features, residual, wider * spread, wider**2 * noise)
    moved, _ = process.posterior(rows.features, joint=False)
    return Neighbours(process, min(moved.min(), 0.0), max(moved.max(), 0.0)), wider * spread


def without_rows(spread: FloatArray) -> Neighbours:
    """Return the Gaussian process of a cell without measurements. Its correction is always 0.

    spread: (3,) prior standard deviations: of the component with long length scales, of the
        component with short length scales, and of the noise of a run.
    """
    none = np.zeros(0)
    return Neighbours(_fit_process(np.zeros((0, 5)), none, spread, none), 0.0, 0.0)


def _fit_process(
    features: FloatArray, residual: FloatArray, spread: FloatArray, noise: FloatArray
) -> GaussianProcess:
    covariance = ResidualCovariance(*spread[:2].tolist())
    return GaussianProcess(covariance, features, residual, noise)


def _left_out_factor(process: GaussianProcess) -> float:
    """Return the factor on the standard deviations of `process` that calibrates its intervals.

    With this factor, 90 % of the cross-validation errors are inside the 90 % intervals. The factor
    is at least 0.8 and at most 4. With fewer than 40 rows (ENOUGH), the factor is 1.
    """
    features = process.inputs
    if len(features) < ENOUGH:
        return 1.0
    # Rows of the same cluster have common causes of errors, so they are left out together.
    cluster = np.unique(features[:, 1:].round(6), axis=0, return_inverse=True)[1].reshape(-1)
    away = np.zeros(len(features))
    for group in range(cluster.max() + 1):
        at = np.flatnonzero(cluster == group)
        left = np.linalg.inv(process.inverse(at))
        away[at] = abs(left @ process.weights[at]) / np.sqrt(np.diag(left))
    return float(np.clip(np.quantile(away, 0.9) / Z_90, 0.8, 4.0))


def scales(process: GaussianProcess, rows: Rows, calibrated: Spreads) -> dict[float, float]:
    """Return {code: factor}: the factors on the standard deviations of predictions.

    A code identifies a kind of device, or a cell with multi-device rows. A cell is a workload in
    one mode on one kind of device. A cell that is not in the result uses the factor of its kind.
    The factors do not apply to the noise of a run.

    The factors widen 90 % intervals to the intervals of a Student-t process [Shah et al. 2014]. A
    kind of device has W + 1 degrees of freedom, where W is the number of its cells with
    multi-device rows. A cell with R multi-device rows has R degrees of freedom more than its kind.
    The factor of a cell increases if the other rows predict its multi-device rows worse than
    expected. Cells in `calibrated` have the factor 1.

    process: the Gaussian process that was fitted to `rows`.
    """
    several = rows.ranks > 1
    kinds = dict(zip(rows.cell[several].tolist(), rows.kind[several].tolist(), strict=True))
    freedoms = {kind: count + 1 for kind, count in Counter(kinds.values()).items()}
    found = {kind: _width_of_t(freedom) for kind, freedom in freedoms.items()}
    for cell, kind in kinds.items():
        if cell in calibrated:
            found[cell] = 1.0
            continue
        at = np.flatnonzero(several & (rows.cell == cell))
        freedom, weights = freedoms[kind], process.weights[at]
        square = float(weights @ np.linalg.solve(process.inverse(at), weights))
        scale = math.sqrt(max((freedom + square) / (freedom + len(at)), 1.0))
        found[cell] = scale * _width_of_t(freedom + len(at))
    return found


def _width_of_t(freedom: int) -> float:
    """Return how many times wider the 90 % interval of Student's t is than the normal interval."""
    return float(scipy.special.stdtrit(freedom, 0.95)) / Z_90
