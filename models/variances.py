"""How large each family of effects is: variances learned from the rows, maximum a posteriori around their priors."""

from __future__ import annotations

import numpy as np
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize

from .arrays import FloatArray
from .effects import FAMILIES, GIVEN, LINEAR, LOCAL, PRIOR_SD, SMOOTH, covariance
from .features import Features

_LOG_VARIANCE_SD = 1.2
# Setups that the variances are learned from: their cost grows with the cube.
_MOST_FOR_VARIANCES = 320


def starting_variances() -> dict[str, float]:
    """Prior variances by family, with those that are given."""
    return {**dict(zip(FAMILIES, PRIOR_SD**2, strict=True)), **{name: sd**2 for name, sd in GIVEN.items()}}


def learn_variances(features: Features, target: FloatArray, share: FloatArray) -> dict[str, float]:
    """Variances at the top of the posterior; `share` scales each row's noise. Few rows: the prior."""
    if len(target) < 6:
        return starting_variances()
    # evenly spaced in a fixed shuffle: the same rows give the same fit
    picked = np.sort(np.random.default_rng(0).permutation(len(target))[:_MOST_FOR_VARIANCES])
    sample, target, share = features.take(picked), target[picked], share[picked]
    stack = {name: covariance([name], {name: 1.0}, sample, sample) for name in (*LINEAR, *SMOOTH, *LOCAL)}
    given = sample.shared @ sample.shared.T
    given += covariance(GIVEN, {name: sd**2 for name, sd in GIVEN.items()}, sample, sample)
    noise = {"noise": share, "noise_exposed": share * sample.exposed**2}
    active = [name for name in FAMILIES if name in noise or np.abs(stack[name]).max() > 1e-9]
    whole = np.stack([np.diag(noise[name]) if name in noise else stack[name] for name in active])
    prior = np.log(np.array([starting_variances()[name] for name in active]))
    flat = whole.reshape(len(active), -1)

    def minus_log_posterior(logs: FloatArray) -> tuple[float, FloatArray]:
        variances = np.exp(logs)
        factor = np.linalg.cholesky(given + np.tensordot(variances, whole, axes=1) + 1e-9 * np.eye(len(target)))
        lower, _ = dpotri(factor, lower=1)
        inverse = np.tril(lower) + np.tril(lower, -1).T
        weights = inverse @ target
        shift = (logs - prior) / _LOG_VARIANCE_SD
        value = 0.5 * float(target @ weights) + float(np.log(np.diag(factor)).sum()) + 0.5 * float(shift @ shift)
        slope = inverse - np.outer(weights, weights)
        return value, 0.5 * (flat @ slope.ravel()) * variances + shift / _LOG_VARIANCE_SD

    bounds = [(one - 6, one + 6) for one in prior]
    found = minimize(minus_log_posterior, prior, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 25})
    return {**starting_variances(), **dict(zip(active, (float(one) for one in np.exp(found.x)), strict=True))}
