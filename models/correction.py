"""What physics leaves over, learned: a Gaussian process on log(measured / physics), with physical kernels only.

    log step = log physics + g,   g ~ GP(0, sum_k v_k K_k),   measured = g + noise

The K_k say which setups err together: all, those of a workload, of a type, of a cluster, and neighbours in a few
physical features. Far from every measurement the mean falls back to what its workload and cluster share, then to zero,
and the variance rises: so it cannot ruin extrapolation. The v_k are maximum a posteriori around priors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize

from .setups import FloatArray

KERNELS = (
    "all",
    "workload",
    "workload_communication",
    "pair",
    "type",
    "cluster",
    "cluster_workload",
    "near",
    "own_near",
)
# Prior standard deviation of log error by kernel, then of the noise of one measured setup.
_PRIOR_SD = np.array([0.03, 0.04, 0.08, 0.04, 0.03, 0.03, 0.03, 0.05, 0.05, 0.03])
_LOG_VARIANCE_SD = 1.2
# Variance for each octave of batch outside the measured range, shared by a workload.
_OCTAVE_SD = 0.08
# The mean correction never exceeds a factor of exp(this) either way.
_MOST = 0.7
# Setups predicted at once: the kernels of more would not fit a small machine.
_CHUNK = 2000
# Entries that the variances are learned from: they need no more, and their cost grows with the cube.
_MOST_FOR_VARIANCES = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the kernels look at, one entry a setup. `near` is (rows, d), already scaled to length one."""

    workload: tuple[str, ...]
    slowest_type: tuple[str, ...]
    composition: tuple[str, ...]
    exposed: FloatArray  # part of the physical step that is communication not hidden
    doubt: FloatArray  # standard deviation of the log of a filled-in compute time
    octaves: FloatArray  # log2 batch outside the measured range
    near: FloatArray

    def take(self, picked: list[int]) -> Features:
        """The entries at these positions."""
        return Features(
            workload=tuple(self.workload[one] for one in picked),
            slowest_type=tuple(self.slowest_type[one] for one in picked),
            composition=tuple(self.composition[one] for one in picked),
            exposed=self.exposed[picked],
            doubt=self.doubt[picked],
            octaves=self.octaves[picked],
            near=self.near[picked],
        )


def _same(left: tuple[str, ...], right: tuple[str, ...]) -> FloatArray:
    codes = {name: at for at, name in enumerate(sorted({*left, *right}))}
    a, b = (np.array([codes[name] for name in side], dtype=int) for side in (left, right))
    return np.asarray(a[:, None] == b[None, :], dtype=float)


def _cholesky(covariance: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.cholesky(covariance), dtype=float)


def _inverse(factor: FloatArray) -> FloatArray:
    """Inverse of L L^T from its lower factor, at a third of the cost of solving for the identity."""
    lower, _ = dpotri(factor, lower=1)
    return np.asarray(np.tril(lower) + np.tril(lower, -1).T, dtype=float)


def _kernels(left: Features, right: Features) -> tuple[FloatArray, FloatArray]:
    """(k, rows, columns) correlations in the order of KERNELS, and (rows, columns) of the covariance that is given."""
    workload, types = _same(left.workload, right.workload), _same(left.slowest_type, right.slowest_type)
    cluster = _same(left.composition, right.composition)
    exposed = left.exposed[:, None] * right.exposed[None, :]
    hidden = np.sqrt((1 - left.exposed)[:, None] * (1 - right.exposed)[None, :])
    square = (left.near**2).sum(axis=1)[:, None] + (right.near**2).sum(axis=1)[None, :] - 2 * left.near @ right.near.T
    near = np.exp(-0.5 * np.maximum(square, 0))
    pair = workload * types
    stack = np.stack(
        [
            np.ones_like(near),
            workload,
            workload * exposed,
            pair * hidden,
            types * hidden,
            cluster,
            cluster * workload,
            near,
            near * workload,
        ]
    )
    given = pair * left.doubt[:, None] * right.doubt[None, :]
    given += workload * _OCTAVE_SD**2 * left.octaves[:, None] * right.octaves[None, :]
    return stack, given


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A fitted process: `target` is log(measured / physics), `noise` each entry's variance, `scale` the calibration."""

    features: Features
    target: FloatArray
    noise: FloatArray
    variances: FloatArray  # of KERNELS, then of one measurement
    scale: float = 1.0
    _solved: dict[str, FloatArray] = field(default_factory=dict, compare=False, repr=False)

    def _solve(self) -> tuple[FloatArray, FloatArray]:
        if not self._solved:
            factor = _cholesky(self._covariance())
            self._solved["factor"], self._solved["weights"] = factor, cho_solve((factor, True), self.target)
        return self._solved["factor"], self._solved["weights"]

    def _covariance(self) -> FloatArray:
        return self._between(self.features, self.features) + np.diag(self.noise)

    def _between(self, left: Features, right: Features) -> FloatArray:
        stack, given = _kernels(left, right)
        return np.asarray(np.tensordot(self.variances[:-1], stack, axes=1) + given, dtype=float)

    def moments(self, at: Features) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of log(step / physics) for one new measurement of each setup."""
        own = self.variances.sum() + at.doubt**2 + (_OCTAVE_SD * at.octaves) ** 2
        # the diagonal of _kernels(at, at), without building it
        own += self.variances[2] * (at.exposed**2 - 1) - (self.variances[3] + self.variances[4]) * at.exposed
        if not len(self.target):
            return np.zeros(len(own)), self.scale * np.sqrt(own)
        factor, weights = self._solve()
        mean, known = np.zeros(len(own)), np.zeros(len(own))
        for first in range(0, len(own), _CHUNK):
            part = slice(first, first + _CHUNK)
            across = self._between(at.take(list(range(*part.indices(len(own))))), self.features)
            mean[part] = across @ weights
            known[part] = (solve_triangular(factor, across.T, lower=True) ** 2).sum(axis=0)
        spread = np.sqrt(np.maximum(own - known, self.variances[-1]))
        return np.clip(mean, -_MOST, _MOST), self.scale * spread

    def covariance(self, at: Features) -> FloatArray:
        """(rows, rows) covariance of what the setups' predictions err by, without the noise of a measurement."""
        prior = self._between(at, at)
        if len(self.target):
            factor, _ = self._solve()
            across = self._between(at, self.features)
            half = solve_triangular(factor, across.T, lower=True)
            prior = prior - half.T @ half
        return self.scale**2 * prior

    def held_out(self, groups: tuple[str, ...]) -> FloatArray:
        """Standardised residual of each entry with its whole group left out, the variances kept.

        By blocks of the inverse covariance P: the residual is P_gg^-1 (P y)_g, its covariance P_gg^-1.
        """
        factor, weights = self._solve()
        inverse = cho_solve((factor, True), np.eye(len(self.target)))
        out = np.zeros(len(self.target))
        for name in sorted(set(groups)):
            own = np.array([at for at, group in enumerate(groups) if group == name])
            block = np.linalg.inv(inverse[np.ix_(own, own)])
            out[own] = block @ weights[own] / np.sqrt(np.maximum(np.diag(block), 1e-12))
        return out


def fit_correction(features: Features, target: FloatArray, repeats: FloatArray) -> Correction:
    """Variances by maximum a posteriori, outliers weighed down. `repeats` is the number of runs behind each entry."""
    share = 0.5 + 0.5 / np.maximum(repeats, 1)
    if len(target) < 6:
        return Correction(features=features, target=target, noise=_PRIOR_SD[-1] ** 2 * share, variances=_PRIOR_SD**2)
    logs = np.log(_PRIOR_SD**2)
    # evenly spaced in a fixed shuffle: the same rows give the same fit
    picked = sorted(int(one) for one in np.random.default_rng(0).permutation(len(target))[:_MOST_FOR_VARIANCES])
    sample = features.take(picked)
    stack, given = _kernels(sample, sample)
    weight = np.ones(len(target))
    for _ in range(2):
        logs = _maximise(stack, given, target[picked], (share * weight)[picked], logs)
        variances = np.exp(logs)
        fitted = Correction(features=features, target=target, noise=variances[-1] * share * weight, variances=variances)
        outlying = np.abs(fitted.held_out(tuple(str(at) for at in range(len(target))))) / 3.5
        if outlying.max() <= 1:
            break
        weight = weight * np.maximum(outlying, 1.0) ** 4
    return fitted


def _maximise(
    stack: FloatArray, given: FloatArray, target: FloatArray, share: FloatArray, start: FloatArray
) -> FloatArray:
    """Log variances at the top of the posterior: marginal likelihood with its exact gradient."""

    prior = np.log(_PRIOR_SD**2)

    def minus_log_posterior(logs: FloatArray) -> tuple[float, FloatArray]:
        variances = np.exp(logs)
        covariance = np.tensordot(variances[:-1], stack, axes=1) + given + np.diag(variances[-1] * share)
        factor = _cholesky(covariance)
        inverse = _inverse(factor)
        weights = inverse @ target
        shift = (logs - prior) / _LOG_VARIANCE_SD
        value = 0.5 * float(target @ weights) + float(np.log(np.diag(factor)).sum()) + 0.5 * float(shift @ shift)
        slope = inverse - np.outer(weights, weights)
        traces = np.append(stack.reshape(len(stack), -1) @ slope.ravel(), (np.diag(slope) * share).sum())
        return value, 0.5 * traces * variances + shift / _LOG_VARIANCE_SD

    bounds = [(one - 6, one + 6) for one in prior]
    found = minimize(minus_log_posterior, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 25})
    return np.asarray(found.x, dtype=float)
