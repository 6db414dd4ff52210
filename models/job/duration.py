"""Compute the expected and drawn hours of a job with start-up, interruptions and checkpoints.

Checkpoints divide the training steps of a job into n equal pieces. An interruption loses the work
since the last checkpoint.

- h: the hazard, which is the expected number of interruptions per hour. The hazard of a cluster is
  the sum of its machines' hazards.
- c: the hours to write a checkpoint (checkpoints.py).
- I: the optimal hours of work between two checkpoints.
- n: the smallest number of pieces for which no piece has more than I hours of work.
- `replacement`: the mean hours until a lost machine is replaced. An interruption during a
  replacement restarts the replacement.

    M     = 1 / h                         mean hours between interruptions
    I     = sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + c / 18M) - c;  I = M if c >= 2M      [Daly 2006]
    r     = work + (n - 1) c              hours of training steps (work) and checkpoints
    s     = r / n                         hours of one piece
    N     = n (exp(h s) - 1)              expected number of interruptions
    lost  = 1/h - s / (exp(h s) - 1)      mean hours that are lost by one interruption
    hours = start-up + r + N (lost + replacement)

The last five formulas were derived for Srift. They are exact for memoryless interruptions.
Real interruptions come in bunches, so `drawn_hours` also draws the hazard at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaincinv, ndtri, pdtrik

from ..domain.numeric import FloatArray, IntArray
from .checkpoints import best_interval, pieces
from .interruption_rates import short_job_weight

STARTUP_S = 12.0  # prior seconds to start local hosts, agents and torchrun, until the first step
_LEAST_HAZARD = 1e-9  # per hour; below it, differences of exponentials lose all digits
_MOST = 30.0  # largest exponent h s, so that exp is finite; a job with a larger h s never ends
_NO_VARIANCE = 1e-6  # a smaller variance is treated as 0
_ALIKE = 0.05  # log variances are rounded to multiples of this, so that few quantiles are computed
_RISK_DRAWS = 400


class Conditions(NamedTuple):
    """Start-up, checkpoint and interruption parameters of clusters, as (clusters,) arrays.

    - `hazard_per_hour` is the expected number of interruptions per hour (the hazard).
    - `doubt` is the relative variance of the estimated hazard.
    - `bunching` is the relative variance of the true hazard over days and weeks.
    - `startup_s`, `checkpoint_s` and `replacement_s` are mean seconds.
    - `startup_log_sd` and `checkpoint_log_sd` are standard deviations of log seconds: start-up and
      checkpoint times are lognormal.
    """

    hazard_per_hour: FloatArray
    doubt: FloatArray
    bunching: FloatArray
    startup_s: FloatArray
    startup_log_sd: FloatArray
    checkpoint_s: FloatArray
    checkpoint_log_sd: FloatArray
    replacement_s: FloatArray

    @classmethod
    def joined(cls, parts: Sequence[Conditions]) -> Conditions:
        """Concatenate several `Conditions`, each for its own list of clusters."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def take(self, rows: IntArray) -> Conditions:
        return Conditions(*(column[rows] for column in self))

    def later(self, seconds: float | FloatArray) -> Conditions:
        """Return a copy whose start-ups and replacements each take `seconds` longer.

        `seconds` is a number, or a (clusters,) array.
        """
        return self._replace(
            startup_s=self.startup_s + seconds, replacement_s=self.replacement_s + seconds
        )


def expected_hours(work_hours: ArrayLike, conditions: Conditions) -> FloatArray:
    """Return the expected hours of jobs, including start-up, checkpoints and interruptions.

    `work_hours` are the hours of training steps, of shape (clusters,) or (clusters, draws). The
    result has the same shape.
    """
    job = _job(work_hours, conditions)
    lost = job.interruptions * (job.lost + job.replacement)
    return (conditions.startup_s / 3600 + job.running + lost).T


def interruptions(
    work_hours: ArrayLike, conditions: Conditions, *, seed: int
) -> tuple[FloatArray, FloatArray]:
    """Return the expected number of interruptions, and the chance of at least one interruption.

    Both results are (clusters,) arrays. The chance is 1 - E[exp(-hazard x hours)]. `hours` is the
    duration of training steps and checkpoints. `hazard` (interruptions per hour) is the product of
    the estimated hazard and two Gamma variables of mean 1. The first Gamma variable is for the
    uncertainty of the estimate, and the second is for bunches of interruptions.

    work_hours: (clusters,) hours of training steps.
    """
    job = _job(work_hours, conditions)
    _, _, shock, _, doubted, _ = _strata(_RISK_DRAWS, seed)
    rate = _rate(doubted, shock, conditions, work_hours)
    undisturbed = np.exp(-conditions.hazard_per_hour * job.running * rate)
    return job.interruptions, 1.0 - np.mean(undisturbed, axis=0)


def drawn_hours(
    work_hours: FloatArray, expected_work_hours: ArrayLike, conditions: Conditions, *, seed: int
) -> FloatArray:
    """Return a (clusters, draws) array: random draws of the hours of jobs.

    Start-up, checkpoints and interruptions are drawn here; the hours of training steps are given.
    The number of interruptions is Poisson. Its mean is multiplied by two Gamma variables of mean 1:

    - The first models the uncertainty of the estimated hazard. Its variance is `conditions.doubt`.
    - The second models bunches of interruptions. Its variance is
      (1 + `conditions.bunching` x (1 + passing(expected_work_hours))) x (1 + 1/n) - 1.

    `short_job_weight` is in interruption_rates.py. Checkpoints divide the steps into n pieces. A
    piece is repeated until it succeeds, so its number of interruptions is geometric, not Poisson.
    The factor 1 + 1/n adds the missing variance.

    All clusters use the same uniform draws, so their results differ only because of the arguments.

    work_hours: (clusters, draws) drawn hours of training steps.
    expected_work_hours: (clusters,) expected hours of training steps.
    """
    job = _job(work_hours, conditions)
    number, loss, shock, launch, doubted, disk = _strata(len(job.work), seed)
    expected = _job(expected_work_hours, conditions)
    repeats = expected.piece / expected.running
    rate = _rate(doubted, shock, conditions, expected_work_hours, repeats)
    # Quantiles of Poisson variables. A job with a billion interruptions never ends. Most draws have
    # no interruption, and pdtrik is slow.
    mean = np.minimum(job.interruptions * rate, 1e9)
    count = pdtrik(number, mean, out=np.zeros_like(mean), where=np.exp(-mean) < number)
    count = np.ceil(count)
    # Each of the N interruptions loses a uniform share of a piece. The sum of N uniforms is nearly
    # normal(N/2, N/12). Within sqrt(3) standard deviations it lies in [0, N] for every N >= 1.
    spread = np.clip(ndtri(loss), -(3**0.5), 3**0.5) * np.sqrt(count / 12) * job.piece
    lost = np.clip(count * job.lost + spread, 0.0, count * job.piece)
    startup_s = conditions.startup_s * _lognormal(launch, conditions.startup_log_sd)
    written = (job.running - job.work) * _lognormal(disk, conditions.checkpoint_log_sd)
    hours: FloatArray = startup_s / 3600 + job.work + written + lost + count * job.replacement
    return hours.T


class _Job(NamedTuple):
    """Expected hours and interruptions of jobs, as (clusters,) or (draws, clusters) arrays."""

    work: FloatArray
    running: FloatArray  # work and checkpoints
    piece: FloatArray  # between two checkpoints; an interruption loses at most a piece
    interruptions: FloatArray
    lost: FloatArray  # mean hours of work that an interruption loses
    replacement: FloatArray  # mean hours of a replacement, including interrupted attempts


def _job(work_hours: ArrayLike, conditions: Conditions) -> _Job:
    """Return expected hours and interruptions of jobs whose training steps take `work_hours`.

    If `work_hours` is (clusters,), so are the arrays of the result. If it is (clusters, draws),
    they are transposed: (draws, clusters).
    """
    work = np.asarray(work_hours, float).T
    write = conditions.checkpoint_s / 3600
    rate = np.maximum(conditions.hazard_per_hour, _LEAST_HAZARD)
    count = pieces(work, best_interval(write, conditions.hazard_per_hour))
    running = work + (count - 1) * write
    piece = running / count
    chance = np.expm1(np.minimum(rate * piece, _MOST))
    small = rate * piece < 1e-4  # the difference would lose all digits: use its series instead
    lost = np.where(small, piece / 2, 1 / rate - piece / np.maximum(chance, 1e-300))
    interruptions = np.where(conditions.hazard_per_hour >= _LEAST_HAZARD, count * chance, 0.0)
    replacement = np.expm1(np.minimum(rate * conditions.replacement_s / 3600, _MOST)) / rate
    return _Job(work, running, piece, interruptions, lost, replacement)


def _rate(
    doubted: FloatArray,
    shock: FloatArray,
    conditions: Conditions,
    work_hours: ArrayLike,
    repeats: FloatArray | float = 0.0,
) -> FloatArray:
    """Return a (draws, clusters) array: drawn interruption rates divided by their mean.

    doubted: (draws, 1) uniform draws for the uncertainty of the estimated rate.
    shock: (draws, 1) uniform draws for the variation of the true rate over days and weeks.
    work_hours: the expected hours of training steps.
    repeats: 1/n, if checkpoints divide the training steps into n pieces. It adds the variance
        that `drawn_hours` describes. 0 adds no variance.
    """
    bunching = conditions.bunching * (1 + short_job_weight(work_hours))
    varying = (1 + bunching) * (1 + repeats) - 1
    return _gamma_quantile(doubted, conditions.doubt) * _gamma_quantile(shock, varying)


def _strata(draws: int, seed: int) -> tuple[FloatArray, ...]:
    """Return six independent (draws, 1) arrays of stratified uniform draws.

    Each array has one draw in each of `draws` equal intervals of (0, 1), in random order.
    """
    rng = np.random.default_rng(seed)
    strata = np.arange(draws)[:, None]
    even = (strata + rng.random((draws, 1))) / draws
    middle = (strata + 0.5) / draws
    return rng.permutation(even), *(rng.permutation(middle) for _ in range(5))


def _lognormal(probability: FloatArray, log_sd: FloatArray) -> FloatArray:
    """Return a (draws, clusters) array: quantiles of lognormal distributions with mean 1.

    probability: (draws, 1) probabilities of the quantiles.
    log_sd: (clusters,) standard deviations of the logs.
    """
    return np.exp(log_sd * ndtri(probability) - log_sd**2 / 2)


def _gamma_quantile(probability: FloatArray, variance: FloatArray) -> FloatArray:
    """Return a (draws, clusters) array: quantiles of Gamma distributions with mean 1.

    probability: (draws, 1) probabilities of the quantiles.
    variance: (clusters,) variances of the distributions.
    """
    # Rounding to steps of 5 % leaves few different variances, which saves time.
    steps = np.round(np.log(np.maximum(variance, _NO_VARIANCE)) / _ALIKE)
    kinds, at = np.unique(steps, return_inverse=True)
    level = np.exp(kinds * _ALIKE)
    quantiles = (gammaincinv(1 / level, probability) * level)[:, at]
    return np.where(variance > _NO_VARIANCE, quantiles, 1.0)
