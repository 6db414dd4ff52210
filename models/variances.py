"""How large each family of effects is: variances learned from the rows, maximum a posteriori around their priors.

From the mean of the log likelihoods of a few samples (composite likelihood: Varin, Reid and Firth 2011): the cost of
one grows with the cube of its rows, and what it says depends on which rows chance put together. The mean and not the
sum, since a type or a workload is the same in all of them: seen three times it would count as three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize

from .arrays import FloatArray
from .effects import FAMILIES, GIVEN, LINEAR, LOCAL, PRIOR_SD, SMOOTH, covariance
from .features import Features

_LOG_VARIANCE_SD = 1.2
_SAMPLE, _SAMPLES = 320, 3  # setups in one, and how many there are at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Some rows: the covariance by family and unit of variance, that of what is given, and the residuals."""

    at: list[int]  # of FAMILIES: those that these rows have anything of
    given: FloatArray  # (rows, rows)
    whole: FloatArray  # (families, rows, rows)
    target: FloatArray  # (rows,)

    @classmethod
    def of(cls, features: Features, target: FloatArray, share: FloatArray) -> _Sample:
        stack = {name: covariance([name], {name: 1.0}, features, features) for name in (*LINEAR, *SMOOTH, *LOCAL)}
        stack |= {"noise": np.diag(share), "noise_exposed": np.diag(share * features.exposed**2)}
        given = features.shared @ features.shared.T
        given += covariance(GIVEN, {name: sd**2 for name, sd in GIVEN.items()}, features, features)
        at = [place for place, name in enumerate(FAMILIES) if np.abs(stack[name]).max() > 1e-9]
        whole = np.stack([stack[FAMILIES[place]] for place in at])
        return cls(at=at, given=given, whole=whole, target=target)

    def minus_log_likelihood(self, variances: FloatArray) -> tuple[float, FloatArray]:
        """And its slope by log variance; `variances` of these families."""
        rows = len(self.target)
        factor = np.linalg.cholesky(self.given + np.tensordot(variances, self.whole, axes=1) + 1e-9 * np.eye(rows))
        lower, _ = dpotri(factor, lower=1)
        inverse = np.tril(lower) + np.tril(lower, -1).T
        weights = inverse @ self.target
        value = 0.5 * float(self.target @ weights) + float(np.log(np.diag(factor)).sum())
        slope = inverse - np.outer(weights, weights)
        return value, 0.5 * (self.whole.reshape(len(self.at), -1) @ slope.ravel()) * variances


def starting_variances() -> dict[str, float]:
    """Prior variances by family, with those that are given."""
    return {**dict(zip(FAMILIES, PRIOR_SD**2, strict=True)), **{name: sd**2 for name, sd in GIVEN.items()}}


def learn_variances(features: Features, target: FloatArray, share: FloatArray) -> dict[str, float]:
    """Variances at the top of the posterior; `share` scales each row's noise. Few rows: the prior."""
    if len(target) < 6:
        return starting_variances()
    # evenly spaced in a fixed shuffle: the same rows give the same fit
    shuffled = np.random.default_rng(0).permutation(len(target))[: _SAMPLE * _SAMPLES]
    parts = [shuffled[first : first + _SAMPLE] for first in range(0, len(shuffled), _SAMPLE)]
    samples = [_Sample.of(features.take(part), target[part], share[part]) for part in map(np.sort, parts)]
    weight = min(len(shuffled), _SAMPLE) / len(shuffled)  # together they count as one
    prior = np.log(PRIOR_SD**2)

    def minus_log_posterior(logs: FloatArray) -> tuple[float, FloatArray]:
        shift = (logs - prior) / _LOG_VARIANCE_SD
        value, slope = 0.5 * float(shift @ shift), shift / _LOG_VARIANCE_SD
        for one in samples:
            more, steeper = one.minus_log_likelihood(np.exp(logs[one.at]))
            value += weight * more
            slope[one.at] += weight * steeper
        return value, slope

    bounds = [(one - 6, one + 6) for one in prior]
    found = minimize(minus_log_posterior, prior, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 25})
    return starting_variances() | dict(zip(FAMILIES, np.exp(found.x).tolist(), strict=True))
