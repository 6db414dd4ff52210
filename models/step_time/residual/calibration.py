"""The regression's hyperparameters: how large each family of effects is, and how wide its intervals must be.

Variances are learned from the rows, maximum a posteriori around their priors, from the mean of the log likelihoods of a
few samples (composite likelihood: Varin, Reid and Firth 2011): the cost of one grows with the cube of its rows, and
what it says depends on which rows chance put together. The mean and not the sum, since a type or a workload is the same
in all of them: seen three times it would count as three.

The regression's spread is then scaled until held-out groups fall inside as often as they should: all of it where they
fall outside, and what setups share where they fall inside too often. Groups are left out whole: a workload's
multi-machine rows, an arrangement, a workload on an arrangement. Never random rows, but for one question: how noisy are
the runs of a workload, next to those of the others?
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy  # its parts are loaded where they are named: only a fit needs `optimize`, which takes long to import
from scipy.linalg.lapack import dpotri
from scipy.special import gammaincinv

from ...domain.categorical import Keys
from ...domain.numeric import Z_90, FloatArray
from .gp import Posterior
from .kernel import (
    FAMILIES,
    GIVEN,
    LINEAR,
    LOCAL,
    NOISE,
    PRIOR_SD,
    SMOOTH,
    Features,
    blocks,
    covariance,
    noise_variance,
)

_LOG_VARIANCE_SD = 1.2
_SAMPLE, _SAMPLES = 320, 3  # setups in one, and how many there are at most
# Without held-out residuals the model's spread is widened by this [physics.md: too narrow by 1.3 on new workloads],
# which weighs as much as so many rows.
_PRIOR_SCALE, _PRIOR_ROWS = 1.15, 20
# Never narrower: of noise and of what only neighbours share, groups that are left out say little. What all setups share
# may be (below).
_LEAST_SCALE, _MOST_SCALE = 1.0, 2.5
# Groups of a kind that are left out in turn, and how far off a row is an outlier.
_MOST_GROUPS, _OUTLYING, _LEAST_SPREAD = 30, 4.0, 0.05
# Part of a run's noise that its repeats share, how many runs' worth the other setups' repeats say of its noise, and how
# many setups the prior of the noise stands for among them.
_LASTING, _USUAL_RUNS, _PRIOR_SETUPS = 0.1, 2.0, 5
# The least and the most that one workload's noise differs by, in variance, and how many setups stand for no difference.
_NOISINESS, _PRIOR_NOISY = (0.1, 10.0), 30
# What setups share is never held to be surer, however little is off by chance; and rows tell of it where its variance
# is more than this part of what is besides.
_LEAST_SHARED, _TELLING = 0.4, 0.5
# Fewer groups where the regression has many columns, since each costs their cube.
_GROUP_COLUMNS = 24_000


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
    found = scipy.optimize.minimize(
        minus_log_posterior, prior, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 25}
    )
    return starting_variances() | dict(zip(FAMILIES, np.exp(found.x).tolist(), strict=True))


def calibrated(features: Features, target: FloatArray, repeats: FloatArray, spread: FloatArray) -> Posterior:
    """The regression with variances, the noise share of each row (outliers weighed down) and a scale of every spread.

    `repeats` is the number of runs behind each row, `spread` the standard deviation of their logs (0 for one).
    """
    repeated = _share(repeats, spread)
    share = repeated * _outlying(features, target)
    variances = learn_variances(features, target, share)
    plain = Posterior(features, target, share, variances)
    if len(target) < 10:
        return plain.scaled(_PRIOR_SCALE)
    workload = Keys.of(f"{name} {many:g}" for name, many in zip(features.workload, features.several, strict=True))
    most = int(np.clip(_GROUP_COLUMNS / plain.columns, 4, _MOST_GROUPS))
    groupings = [_some(one, most) for one in (workload, features.arrangement, blocks(features))]
    found = [plain.held_out(one, features) for one in groupings]
    rows, held_out = (np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
    standardised = [held_out[0] / np.sqrt(held_out[1] + held_out[2])]
    # repeats that contradict each other say how wide a new measurement may be, whatever the others fit
    again = spread > 0
    standardised.append(spread[again] / np.sqrt(noise_variance(features, variances)[again]))
    seen = float(np.quantile(np.abs(np.concatenate(standardised)), 0.9)) / Z_90
    scale = (len(target) * seen + _PRIOR_ROWS * _PRIOR_SCALE) / (len(target) + _PRIOR_ROWS)
    exchanging = features.several > 0
    groups = max(len(set(one.take(np.flatnonzero(exchanging)).distinct) - {""}) for one in groupings)
    shared_scale = _shared_scale(held_out[:, exchanging[rows]], groups)
    scale = float(np.clip(scale, _LEAST_SCALE, _MOST_SCALE))
    return plain.scaled(scale, _noisiness(plain, features, repeated, scale), shared_scale)


def _shared_scale(held_out: FloatArray, groups: int) -> float:
    """Factor on the standard deviation of what setups share with which 90 % of the rows left out by groups fall inside.

    The rows are of several devices, since one alone tells nothing of exchanges; those that are mostly noise say little.
    Never above 1; groups are counted, and not rows, since the rows of one err together.
    """
    residual, shared, besides = held_out[:, held_out[1] > _TELLING * held_out[2]]
    if not len(residual):
        return 1.0
    needed = (np.square(residual / Z_90) - besides) / shared
    # beyond 0.9, so that the next group falls inside as often [conformal prediction]: of nine groups or fewer the worst
    most = float(np.quantile(needed, min(0.9 * (1 + 1 / groups), 1.0)))
    return float(np.sqrt(np.clip(most, _LEAST_SHARED**2, 1.0)))


def _noisiness(plain: Posterior, features: Features, repeated: FloatArray, scale: float) -> dict[str, float]:
    """By workload the factor on the variance of its noise across machines with which its intervals hold nine tenths.

    Of setups left out one at a time; shrunk towards 1 where there are few. The regression weighs all workloads' rows
    alike: rows weighed by what their own workload showed predicted worse [BENCHMARKS 7].
    """
    residual, variance = plain.left_out()
    noise = noise_variance(features, plain.variances) * repeated
    needed = np.clip(((residual / (Z_90 * scale)) ** 2 - variance) / noise, *_NOISINESS)
    found = {}
    for name, rows in features.workload.groups().items():
        own = needed[rows[features.instances[rows] > 1]]
        if len(own):
            # beyond 0.9, so that the next one falls inside as often [conformal prediction]
            most = float(np.quantile(own, min(0.9 * (1 + 1 / len(own)), 1.0)))
            found[name] = most ** (len(own) / (len(own) + _PRIOR_NOISY))
    return found


def _some(groups: Keys, most: int) -> Keys:
    """At most so many of the groups, by a fixed shuffle; the rows of the others have no group."""
    names = sorted(groups.distinct)
    kept = {names[at] for at in np.random.default_rng(0).permutation(len(names))[:most]}
    return Keys.of(one if one in kept else "" for one in groups.names).take(groups.codes)


def _share(repeats: FloatArray, spread: FloatArray) -> FloatArray:
    """Factor on each row's noise: less where the median is of many runs, more where these differ by more than others'.

    What a setup's few repeats say of its own noise is shrunk towards what all repeats say together.
    """
    again, more = repeats > 1, np.maximum(repeats - 1, 0)
    if not again.any():
        return np.ones_like(repeats)
    # the middle of what such few runs show lies below what they are drawn from
    shown = spread[again] ** 2 * more[again] / (2 * gammaincinv(more[again] / 2, 0.5))
    before = NOISE["noise"] ** 2
    usual = max(float(np.median([*shown, *[before] * _PRIOR_SETUPS])), before)
    own = (more * spread**2 + _USUAL_RUNS * usual) / (more + _USUAL_RUNS)
    return np.asarray(_LASTING + (1 - _LASTING) * own / usual / np.maximum(repeats, 1), dtype=float)


def _outlying(features: Features, target: FloatArray) -> FloatArray:
    """Factor on each row's noise: 1 but for rows far from what the physics says of their workload."""
    residual = target - features.offset
    factor = np.ones(len(residual))
    for own in features.workload.groups().values():
        centred = residual[own] - np.median(residual[own])
        spread = max(1.4826 * float(np.median(np.abs(centred))), _LEAST_SPREAD)
        factor[own] = np.maximum(np.abs(centred) / spread / _OUTLYING, 1.0) ** 4
    return factor
