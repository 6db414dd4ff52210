"""Learn the standard deviations (spreads) in the Gaussian processes, with scikit-learn.

The logs of the spreads have a normal prior. The learned spreads maximise the marginal likelihood
times this prior.
"""

from typing import Any

import numpy as np
import scipy
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, WhiteKernel

from ..domain.numeric import FloatArray
from .kernel import BROAD, LOG_SPREADS, NARROW, SPREADS, terms
from .residuals import ENOUGH, INITIAL, CellSpread, Spreads
from .rows import Rows

# Standard deviations of the priors of log spreads. Noise has the widest prior, because it differs
# most between providers.
_PRIOR_SD = np.array([1.4 if name.startswith("noise") else 1.0 for name in SPREADS])
# Lower limit of the change of a log variance from its initial value: for a large cell (False), and
# for all small cells together (True). Few rows cannot show that a spread is small.
_SHRINK = {False: -3.0, True: -2.0}
_APART = 100.0  # distance between two cells, in length scales; it makes them independent
_MOST = 150  # approximate maximum number of rows from which the spreads of a cell are learned


class StepKernel(Kernel):  # type: ignore[misc]
    """The covariance function StepCovariance as a scikit-learn kernel.

    The hyperparameters are `log_spreads`, the logs of the standard deviations in SPREADS.
    """

    def __init__(self, log_spreads: FloatArray) -> None:
        self.log_spreads = log_spreads

    @property
    def theta(self) -> FloatArray:
        return self.log_spreads

    @theta.setter
    def theta(self, value: FloatArray) -> None:
        self.log_spreads = value

    def is_stationary(self) -> bool:
        return False

    def diag(self, X: FloatArray) -> FloatArray:
        return np.diag(self(X))

    def __call__(self, X: FloatArray, Y: object = None, eval_gradient: bool = False) -> Any:
        total = np.zeros((len(X), len(X)))
        found = np.zeros((len(X), len(X), len(SPREADS)))
        names = [*SPREADS]
        for name, values in terms(X):
            if name is None:
                total += values
            else:
                at = names.index(name)
                found[:, :, at] += 2 * np.exp(2 * self.log_spreads[at]) * values
        total = total + found.sum(axis=2) / 2
        return (total, found) if eval_gradient else total


def learned_spreads(
    log_spreads: FloatArray, inputs: FloatArray, target: FloatArray, noise: FloatArray
) -> FloatArray:
    """Return the most probable logs of the standard deviations in SPREADS.

    log_spreads: the start of the search.
    inputs, target, noise: kernel inputs, values and noise variances of the measurements.
    """
    search = _penalised_optimizer(LOG_SPREADS, _PRIOR_SD, 12)
    process = GaussianProcessRegressor(StepKernel(log_spreads), alpha=noise, optimizer=search)
    found: FloatArray = process.fit(inputs, target).kernel_.theta
    return found


def learn_spreads(
    rows: Rows, residual: FloatArray, noise_factor: FloatArray, *, growth: float
) -> Spreads:
    """Learn residual standard deviations for each large cell, and for all small cells together.

    A cell is a workload in one mode on one kind of device. Only multi-device rows are used. A large
    cell has at least 40 (ENOUGH) of these rows. The result has these entries:

    - for each large cell: standard deviations learned from the rows of this cell
    - for each kind of device that has only small cells: standard deviations learned from the rows
      of all small cells. These entries are missing if the small cells have fewer than 40 rows.

    residual: (rows,) log measured seconds minus log computed seconds.
    noise_factor: (rows,) factors on the noise variance: above 1 for outliers, below 1 for rows that
        pool several runs.
    growth: maximum increase of a log variance over its initial value.
    """
    several = np.flatnonzero(rows.ranks > 1)
    index, count = np.unique(rows.cell[several], return_inverse=True, return_counts=True)[1:]
    large = count[index] >= ENOUGH
    # The last feature separates the cells.
    features = np.column_stack([rows.features[several], _APART * index])
    found: Spreads = {}
    for cell in [*np.unique(index[large]).tolist(), None]:
        picked = np.flatnonzero(~large if cell is None else index == cell)
        if len(picked) < ENOUGH:
            continue
        picked = picked[:: max(len(picked) // _MOST, 1)]
        at = several[picked]
        wide, near = (
            ConstantKernel(sd**2) * RBF([*length, 1.0], length_scale_bounds="fixed")
            for sd, length in zip(INITIAL[:2].tolist(), (BROAD, NARROW), strict=True)
        )
        kernel = wide + near + WhiteKernel(INITIAL[2] ** 2)
        known = INITIAL[2] ** 2 * np.maximum(noise_factor[at] - 1, 0.0)
        process = GaussianProcessRegressor(
            kernel,
            alpha=known + rows.noise_sd[at] ** 2 + 1e-6,
            optimizer=_penalised_optimizer(kernel.theta, 1.0, 8, (_SHRINK[cell is None], growth)),
        ).fit(features[picked], residual[at])
        spread = np.exp(process.kernel_.theta / 2)
        if cell is None:
            kind = rows.kind[several]
            small = set(kind[~large].tolist()) - set(kind[large].tolist())
            found |= {code: CellSpread(spread, code) for code in small}
        else:
            found[float(rows.cell[at[0]])] = CellSpread(spread, float(rows.kind[at[0]]))
    return found


def _penalised_optimizer(
    centre: FloatArray,
    sd: FloatArray | float,
    most: int,
    limits: tuple[float, float] = (-3.0, 3.0),
) -> Any:
    """Return an optimizer for scikit-learn's GaussianProcessRegressor that adds a normal prior.

    centre, sd: mean and standard deviation of the prior of the hyperparameters.
    most: the maximum number of iterations.
    limits: lower and upper limit of (hyperparameter - `centre`).
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
