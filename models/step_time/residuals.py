"""The residuals of similar setups: how large they are, and Gaussian processes of each cell's.

A cell is a workload in one mode on one kind of device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from ..domain.numeric import Z_90, FloatArray
from .kernel import BROAD, NARROW, Regression, outlying_factor, penalised
from .rows import Rows

# Initial standard deviations: broad residual, narrow residual, noise of a run.
_INITIAL = np.array([0.05, 0.04, 0.03])
_ENOUGH, _MOST = 40, 150  # rows of a cell from which its spreads are learned: least, most
# Least log variance relative to the initial one: few rows of small cells cannot show a small spread.
_SHRINK = {False: -3.0, True: -2.0}
_SMALL = 0.0  # code of all small cells together
_APART = 100.0  # distance of two small cells, in length scales


class CellSpread(NamedTuple):
    """The standard deviations (3,) of a cell, as _INITIAL, and the code of its kind of device."""

    spread: FloatArray
    kind: float


class Spreads:
    """Standard deviations of residuals, by cell.

    A cell that is not known gets the root mean square over its kind's cells and an average cell.
    """

    def __init__(self, cells: dict[float, CellSpread]) -> None:
        self.cells = cells
        self._usual = np.mean([each.spread**2 for each in cells.values()] or [_INITIAL**2], axis=0)

    def of(self, rows: Rows) -> FloatArray:
        """Return a (rows, 3) array."""
        codes = np.stack([rows.cell, rows.kind], axis=1)
        pairs, which = np.unique(codes, axis=0, return_inverse=True)
        found = [self._of_cell(cell, kind) for cell, kind in pairs.tolist()]
        return np.array(found).reshape(-1, 3)[which.reshape(-1)]

    def _of_cell(self, cell: float, kind: float) -> FloatArray:
        if cell in self.cells:
            return self.cells[cell].spread
        alike = [each.spread**2 for each in self.cells.values() if each.kind == kind]
        return np.asarray(np.sqrt(np.mean([self._usual, *alike], axis=0)), dtype=float)


def learn_spreads(
    rows: Rows, residual: FloatArray, noise_factor: FloatArray, *, growth: float
) -> Spreads:
    """Learn the spreads of each large cell, and of all small cells together.

    `residual` (rows,) is log measured minus log computed seconds. `noise_factor` (rows,) multiplies
    the variance of a run's noise. `growth` limits by how much a log variance may exceed the
    initial one.
    """
    several = np.flatnonzero(rows.line.ranks > 1)
    index, count = np.unique(rows.cell[several], return_inverse=True, return_counts=True)[1:]
    large = count[index] >= _ENOUGH
    features = np.column_stack([rows.features[several], _APART * index])
    found: dict[float, CellSpread] = {}
    for cell in [*np.unique(index[large]).tolist(), None]:
        picked = np.flatnonzero(~large if cell is None else index == cell)
        if len(picked) < _ENOUGH:
            continue
        picked = picked[:: max(len(picked) // _MOST, 1)]
        at = several[picked]
        kernel = residual_kernel(*_INITIAL[:2].tolist(), 1.0) + WhiteKernel(_INITIAL[2] ** 2)
        known = _INITIAL[2] ** 2 * np.maximum(noise_factor[at] - 1, 0.0)
        process = Regression(
            kernel,
            alpha=known + rows.noise_sd[at] ** 2 + 1e-6,
            optimizer=penalised(kernel.theta, 1.0, 8, (_SHRINK[cell is None], growth)),
        ).fit(features[picked], residual[at])
        spread = np.exp(process.kernel_.theta / 2)
        first = at[0]
        code, kind = (_SMALL, _SMALL) if cell is None else (rows.cell[first], rows.kind[first])
        found[float(code)] = CellSpread(spread, float(kind))
    return Spreads(found)


class Neighbours(NamedTuple):
    """The Gaussian process of a cell's residuals, and the range of its corrections."""

    process: Regression
    low: float
    high: float


def fit_neighbours(
    rows: Rows, residual: FloatArray, weight: FloatArray, spread: FloatArray
) -> tuple[Neighbours, FloatArray]:
    """Fit the residuals of a cell; return its neighbours, and its spreads as they turned out.

    `weight` (rows,) are effective numbers of runs.
    """
    noise = spread[2] ** 2 / weight + rows.noise_sd**2 + 1e-6
    factor: FloatArray | float = 1.0
    for _ in range(3):
        process = _fitted(rows.features, residual, spread, noise * factor)
        factor = outlying_factor(process, factor)
    noise = noise * factor
    wider = _left_out_factor(process, rows.features)
    process = _fitted(rows.features, residual, wider * spread, wider**2 * noise)
    moved = process.predict(rows.features)
    return Neighbours(process, min(moved.min(), 0.0), max(moved.max(), 0.0)), wider * spread


def without_rows(spread: FloatArray) -> Neighbours:
    """Return the prior of a cell without rows."""
    return Neighbours(Regression(residual_kernel(*spread[:2].tolist())), 0.0, 0.0)


def _fitted(
    features: FloatArray, residual: FloatArray, spread: FloatArray, noise: FloatArray
) -> Regression:
    kernel = residual_kernel(*spread[:2].tolist())
    process: Regression = Regression(kernel, alpha=noise, optimizer=None).fit(features, residual)
    return process


def _left_out_factor(process: Regression, features: FloatArray) -> float:
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


def with_neighbours(
    spreads: Spreads, found: dict[float, tuple[FloatArray, Rows]], process: Regression, rows: Rows
) -> Spreads:
    """Return the spreads after the neighbours of each cell were fitted.

    `found` has the spreads and rows of each cell. Small cells keep their common spreads, widened
    if left-out `rows` exceed the standard deviations of `process`, which has the levels.
    """
    cells = {
        cell: CellSpread(spread, float(own.kind[0]))
        for cell, (spread, own) in found.items()
        if len(own) >= _ENOUGH
    }
    small = ~np.isin(rows.cell, list(cells)) & (rows.line.ranks > 1)
    if _SMALL in spreads.cells and small.any():
        inverse = scipy.linalg.cho_solve((process.L_, True), np.eye(len(rows)))
        away = np.abs(process.alpha_ / np.sqrt(np.diag(inverse)))
        factor = float(np.clip(np.quantile(away[small], 0.9) / Z_90, 1.0, 4.0))
        cells[_SMALL] = CellSpread(factor * spreads.cells[_SMALL].spread, _SMALL)
    return Spreads(cells)


def residual_kernel(broad: float, narrow: float, *lengths: float) -> Any:
    """Return the covariance of a cell's residuals, a function of `Rows.features`.

    `lengths` are the length scales of further features.
    """
    wide, near = (
        ConstantKernel(sd**2) * RBF([*length, *lengths], length_scale_bounds="fixed")
        for sd, length in ((broad, BROAD), (narrow, NARROW))
    )
    return wide + near
