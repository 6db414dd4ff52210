"""Hours of a job under start-up, interruptions and checkpoints: expected and drawn.

    checkpoint    c, by checkpoints.py
    interval      I = sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + c / 18M) - c,  M where c >= 2M
                  Daly [P], the next order after Young
    running       r = work + (n - 1) c    n equal pieces, each at most I, checkpoints of c between
    interruptions N = n (exp(h s) - 1), s = r / n, each taking 1/h - s / (exp(h s) - 1) of its piece
    hours           = start-up + r + N (lost + replacement)

Exact for memoryless interruptions at h an hour [D]. A cluster needs all of its machines, so its
hazard is the sum of theirs. An interruption during a replacement starts the replacement anew.
Bunching widens the draws: the rate is drawn from Gammas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaincinv, ndtri

from ..domain.numeric import FloatArray, IntArray
from .interruption_rates import passing

STARTUP_S = 12.0  # prior: local hosts, agents and torchrun until the first step
REPLACEMENT_S = 22.0  # prior: resume of an elastic job after a cut link on local hosts
_LEAST_HAZARD = 1e-9  # an hour: below it differences of exponentials have no digits left
_MOST = 30.0  # interruptions expected in one piece: such a job never ends, and exp stays finite
_NO_VARIANCE, _ALIKE = 1e-6, 0.05  # of a rate: certain; in logs of it
_RISK_DRAWS = 400
_EXACT = 12.0  # mean up to which Poisson quantiles are exact; Cornish-Fisher errs by 0.1 above


class Conditions(NamedTuple):
    """Start-up, checkpoints and interruptions of jobs on clusters; (clusters,) arrays.

    Start-up and checkpoints are lognormal with these means and standard deviations of their logs.
    `doubt` is the relative variance of the hazard's estimate, `bunching` that of its variation
    over days and weeks.
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
    def certain(
        cls,
        hazard_per_hour: FloatArray,
        *,
        startup_s: float,
        checkpoint_s: float,
        replacement_s: float,
    ) -> Conditions:
        """Return known, memoryless rates with the same seconds for all clusters."""
        zero = np.zeros(len(hazard_per_hour))
        seconds = startup_s + zero, zero, checkpoint_s + zero, zero, replacement_s + zero
        return cls(hazard_per_hour, zero, zero, *seconds)

    @classmethod
    def joined(cls, parts: Sequence[Conditions]) -> Conditions:
        """Concatenate the clusters of `parts`."""
        nothing = [np.zeros(0)] * len(cls._fields)
        return cls(*map(np.concatenate, zip(nothing, *parts, strict=True)))

    def take(self, rows: IntArray | slice) -> Conditions:
        return Conditions(*(column[rows] for column in self))

    def later(self, seconds: ArrayLike) -> Conditions:
        """Add `seconds`, (clusters,) or one number, to each start and each replacement."""
        more = np.asarray(seconds, dtype=float)
        return self._replace(
            startup_s=self.startup_s + more, replacement_s=self.replacement_s + more
        )


def best_interval(checkpoint_hours: ArrayLike, hazard_per_hour: ArrayLike) -> FloatArray:
    """Return Daly's hours of work between two checkpoints; very long where nothing interrupts."""
    mean = 1 / np.maximum(np.asarray(hazard_per_hour, dtype=float), 1e-12)
    cost = np.asarray(checkpoint_hours, dtype=float)
    ratio = np.minimum(cost / (2 * mean), 1.0)
    interval = np.sqrt(2 * cost * mean) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - cost
    return np.asarray(np.where(cost < 2 * mean, interval, mean), dtype=float)


def pieces(work_hours: ArrayLike, interval_hours: ArrayLike) -> FloatArray:
    """Return the fewest pieces, at least 1, that keep each within the interval."""
    interval = np.maximum(np.asarray(interval_hours, dtype=float), 1e-9)
    ratio = np.asarray(work_hours, dtype=float) / interval
    return np.asarray(np.maximum(np.ceil(ratio - 1e-9), 1.0), dtype=float)


def expected_hours(work_hours: ArrayLike, conditions: Conditions) -> FloatArray:
    """Return mean hours in the shape of `work_hours`: (clusters,) or (clusters, draws)."""
    job = _job(work_hours, conditions)
    lost = job.interruptions * (job.lost + job.replacement)
    return np.asarray((conditions.startup_s / 3600 + job.running + lost).T, dtype=float)


def expected_interruptions(work_hours: ArrayLike, conditions: Conditions) -> FloatArray:
    """Return the mean number of interruptions, repeated ones of the same piece included."""
    return _job(work_hours, conditions).interruptions.T


def interruption_risk(work_hours: ArrayLike, conditions: Conditions, *, seed: int) -> FloatArray:
    """Return (clusters,) chances of at least one interruption: 1 - E[exp(-rate x hours at work)].

    The rate is drawn as in `drawn_hours`.
    """
    _, _, shock, _, doubted, _ = _strata(_RISK_DRAWS, seed)
    rate = _rate(doubted, shock, conditions, work_hours)
    mean_count = conditions.hazard_per_hour * _job(work_hours, conditions).running
    return np.asarray(1.0 - np.mean(np.exp(-mean_count * rate), axis=0), dtype=float)


def drawn_hours(
    work_hours: FloatArray, expected_work_hours: ArrayLike, conditions: Conditions, *, seed: int
) -> FloatArray:
    """Return (clusters, draws) hours under joint draws of work, start-up, checkpoints and
    interruptions.

    The number of interruptions is Poisson; its rate is the mean times two Gammas of mean 1, of
    variances `doubt` and bunching over `expected_work_hours` (clusters,). All jobs share the
    uniforms, so that two of them differ by their arguments only.
    """
    job = _job(work_hours, conditions)
    number, loss, shock, launch, doubted, disk = _strata(len(job.work), seed)
    rate = _rate(doubted, shock, conditions, expected_work_hours)
    count = _poisson_quantile(number, job.interruptions * rate)
    # The sum of N uniforms is near normal(N/2, N/12); inside sqrt(3) deviations it lies in [0, N]
    # for every N >= 1.
    spread = np.clip(ndtri(loss), -(3**0.5), 3**0.5) * np.sqrt(count / 12) * job.piece
    lost = np.clip(count * job.lost + spread, 0.0, count * job.piece)
    startup_s = conditions.startup_s * _lognormal(launch, conditions.startup_log_sd)
    written = (job.running - job.work) * _lognormal(disk, conditions.checkpoint_log_sd)
    hours = startup_s / 3600 + job.work + written + lost + count * job.replacement
    return np.asarray(hours.T, dtype=float)


class _Job(NamedTuple):
    """Hours, and the mean number of interruptions, before any is drawn: (..., clusters)."""

    work: FloatArray
    running: FloatArray  # work and checkpoints
    piece: FloatArray  # most that an interruption can take
    interruptions: FloatArray
    lost: FloatArray  # mean, an interruption
    replacement: FloatArray  # including interrupted replacements


def _job(work_hours: ArrayLike, conditions: Conditions) -> _Job:
    work = np.asarray(work_hours, dtype=float).T
    write = conditions.checkpoint_s / 3600
    rate = np.maximum(conditions.hazard_per_hour, _LEAST_HAZARD)
    count = pieces(work, best_interval(write, conditions.hazard_per_hour))
    running = work + (count - 1) * write
    piece = running / count
    chance = np.expm1(np.minimum(rate * piece, _MOST))
    small = rate * piece < 1e-4  # where the difference below has no digits left: its series
    lost = np.where(small, piece / 2, 1 / rate - piece / np.maximum(chance, 1e-300))
    interruptions = np.where(conditions.hazard_per_hour >= _LEAST_HAZARD, count * chance, 0.0)
    replacement = np.expm1(np.minimum(rate * conditions.replacement_s / 3600, _MOST)) / rate
    return _Job(work, running, piece, interruptions, lost, np.asarray(replacement))


def _rate(
    doubted: FloatArray, shock: FloatArray, conditions: Conditions, work_hours: ArrayLike
) -> FloatArray:
    """Return (draws, clusters) hazards over their mean, at uniforms of doubt and of bunching."""
    bunching = conditions.bunching * (1 + passing(work_hours))
    return _gamma_quantile(doubted, conditions.doubt) * _gamma_quantile(shock, bunching)


def _strata(draws: int, seed: int) -> tuple[FloatArray, ...]:
    """Return independent (draws, 1) stratified uniforms, which cover (0, 1) evenly with both
    tails.
    """
    rng = np.random.default_rng(seed)
    strata = np.arange(draws)[:, None]
    even = (strata + rng.random((draws, 1))) / draws
    middle = (strata + 0.5) / draws
    return rng.permutation(even), *(rng.permutation(middle) for _ in range(5))


def _lognormal(probability: FloatArray, log_sd: FloatArray) -> FloatArray:
    """Return (draws, clusters) quantiles of lognormals of mean 1."""
    return np.asarray(np.exp(log_sd * ndtri(probability) - log_sd**2 / 2), dtype=float)


def _gamma_quantile(probability: FloatArray, variance: FloatArray) -> FloatArray:
    """Return (draws, clusters) quantiles of Gammas of mean 1; 1 at variance 0.

    Variances within 5 % share their quantiles: thousands of setups have few kinds of bunching.
    """
    steps = np.round(np.log(np.maximum(variance, _NO_VARIANCE)) / _ALIKE)
    kinds, at = np.unique(steps, return_inverse=True)
    level = np.exp(kinds * _ALIKE)
    quantiles = (gammaincinv(1 / level, probability) * level)[:, at]
    return np.where(variance > _NO_VARIANCE, quantiles, 1.0)


def _poisson_quantile(probability: FloatArray, mean: FloatArray) -> FloatArray:
    """Return Poisson quantiles for `mean` (draws, clusters)."""
    z = ndtri(probability)
    large = np.maximum(mean + z * np.sqrt(mean) + (z**2 - 1) / 6, 0.0)
    few = np.minimum(mean, _EXACT)
    chance = np.exp(-few)
    below, count = chance, np.zeros_like(mean)
    for number in range(1, 60):
        short = (below < probability) & (mean <= _EXACT)
        if not short.any():
            break
        count += short
        chance = chance * few / number
        below = below + chance
    return np.where(mean <= _EXACT, count, large)
