"""Hours of a job under start-up, interruptions and checkpoints: expected and drawn.

    checkpoint    c, by checkpoints.py
    interval      I = sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + c / 18M) - c,  M where c >= 2M     Daly [P], beyond Young
    running       r = work + (n - 1) c    n equal pieces, each at most I, checkpoints of c between
    interruptions N = n (exp(h s) - 1), s = r / n, each taking 1/h - s / (exp(h s) - 1) of its piece
    hours           = start-up + r + N (lost + replacement)

Exact for memoryless interruptions at h an hour [D]; a cluster needs all of its machines, so its hazard is the sum of
theirs (physics.md, "Spot"). An interruption while machines are being replaced starts that anew. Bunching widens the
draws: the rate itself is drawn, from Gammas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaincinv, ndtri

from ..domain.numeric import FloatArray, IntArray
from .interruption_rates import passing


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a job meets on each of several clusters, however long it is; (clusters,) arrays.

    Start-up and checkpoints are lognormal with these means and standard deviations of their logs. `doubt` is the
    variance of what is not known of the hazard, over its square; `lasting` and `passing` are those of its bunching that
    stays, and that passes within about a day.
    """

    hazard_per_hour: FloatArray
    doubt: FloatArray
    lasting: FloatArray
    passing: FloatArray
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
        """Rates that are known and memoryless, and the same seconds for all clusters."""
        nothing, same = np.zeros(len(hazard_per_hour)), np.ones(len(hazard_per_hour))
        return cls(
            hazard_per_hour=hazard_per_hour,
            doubt=nothing,
            lasting=nothing,
            passing=nothing,
            startup_s=startup_s * same,
            startup_log_sd=nothing,
            checkpoint_s=checkpoint_s * same,
            checkpoint_log_sd=nothing,
            replacement_s=replacement_s * same,
        )

    @classmethod
    def joined(cls, parts: Sequence[Conditions]) -> Conditions:
        """Several as one, in order; empty for none."""
        empty = np.zeros(0)
        columns = {
            one.name: [empty, *(getattr(part, one.name) for part in parts)] for one in fields(cls)
        }
        return cls(**{name: np.concatenate(column) for name, column in columns.items()})

    def take(self, rows: IntArray | slice) -> Conditions:
        """The clusters at these positions, which may repeat."""
        return Conditions(**{one.name: getattr(self, one.name)[rows] for one in fields(Conditions)})

    def later(self, seconds: ArrayLike) -> Conditions:
        """Of jobs that begin, and go on, so many seconds later: (clusters,) or one number."""
        more = np.asarray(seconds, dtype=float)
        return replace(
            self, startup_s=self.startup_s + more, replacement_s=self.replacement_s + more
        )

    def bunching(self, work_hours: ArrayLike) -> FloatArray:
        """(clusters,) variance of the rate that jobs of so many hours of work meet."""
        return np.asarray(self.lasting + self.passing * passing(work_hours), dtype=float)


_NEVER = 1e-12  # an hour: rarer than that is never


def best_interval(checkpoint_hours: ArrayLike, hazard_per_hour: ArrayLike) -> FloatArray:
    """Hours of work between two checkpoints (Daly [P]), in the broadcast shape; very long where nothing interrupts."""
    mean = 1 / np.maximum(np.asarray(hazard_per_hour, dtype=float), _NEVER)
    cost = np.asarray(checkpoint_hours, dtype=float)
    ratio = np.minimum(cost / (2 * mean), 1.0)
    interval = np.sqrt(2 * cost * mean) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - cost
    return np.asarray(np.where(cost < 2 * mean, interval, mean), dtype=float)


def pieces(work_hours: ArrayLike, interval_hours: ArrayLike) -> FloatArray:
    """Whole numbers of pieces between checkpoints, at least 1: as few as keep each within the interval."""
    ratio = np.asarray(work_hours, dtype=float) / np.maximum(
        np.asarray(interval_hours, dtype=float), 1e-9
    )
    return np.asarray(np.maximum(np.ceil(ratio - 1e-9), 1.0), dtype=float)


STARTUP_S = 12.0  # prior: local hosts, agents and torchrun until the first step
REPLACEMENT_S = 22.0  # prior: resume of an elastic job after a cut link on local hosts (traps.md)
_LEAST_HAZARD = 1e-9  # an hour: rarer than that is never, and differences of exponentials still have their digits
_MOST = 30.0  # interruptions expected in one piece, or while replacing: such a job never ends, and exp stays finite
_NO_VARIANCE, _ALIKE = 1e-6, 0.05  # of a rate: taken to be certain; in logs of it
_RISK_DRAWS = 400
_MANY = 12.0  # interruptions from which Cornish-Fisher replaces the exact Poisson quantile (error below 0.1)


def expected_hours(work_hours: ArrayLike, conditions: Conditions) -> FloatArray:
    """Mean hours of a job, in the shape of `work_hours`: (clusters,) or (clusters, draws).

    At hazard 0: start-up and work, no checkpoints.
    """
    job = _job(work_hours, conditions)
    startup = _beside(job.work, conditions.startup_s) / 3600
    return np.asarray(
        startup + job.running + job.interruptions * (job.lost + job.replacement), dtype=float
    )


def expected_interruptions(work_hours: ArrayLike, conditions: Conditions) -> FloatArray:
    """Mean number of interruptions of a job at work, those that strike the same piece again included; 0 at hazard 0."""
    return _job(work_hours, conditions).interruptions


def interruption_risk(work_hours: ArrayLike, conditions: Conditions, *, seed: int) -> FloatArray:
    """(clusters,) chance of at least one interruption before a job is done; 0 at hazard 0.

    1 - E[exp(-rate x hours at work)], over the same two Gammas of the rate as in `drawn_hours`: where a rate is in
    doubt, jobs are spared more often than at its mean.
    """
    job = _job(work_hours, conditions)
    _, _, shock, _, doubted, _ = _strata(_RISK_DRAWS, seed)
    rate = _rate(doubted, shock, conditions, work_hours)
    mean_count = (conditions.hazard_per_hour * job.running)[:, None]
    return np.asarray(1.0 - np.mean(np.exp(-mean_count * rate), axis=-1), dtype=float)


def drawn_hours(
    work_hours: FloatArray, expected_work_hours: ArrayLike, conditions: Conditions, *, seed: int
) -> FloatArray:
    """(clusters, draws) hours under joint draws of work, of that shape, and of start-up, checkpoints, interruptions.

    All checkpoints of a job are alike; the number of interruptions is Poisson at a rate of its own: the mean times two
    Gammas of mean 1, of variances `doubt` and `bunching`, the latter by the (clusters,) hours of work that are
    expected. Each loses a part of a piece. All jobs share the uniforms that are drawn, so that two of them differ by
    their arguments only.
    """
    job = _job(work_hours, conditions)
    number, loss, shock, launch, doubted, disk = _strata(job.running.shape[-1], seed)
    count = _poisson_quantile(
        number, job.interruptions * _rate(doubted, shock, conditions, expected_work_hours)
    )
    # The sum of N uniforms is near normal(N/2, N/12); inside sqrt(3) deviations it lies in [0, N] for every N >= 1.
    spread = np.clip(ndtri(loss), -(3**0.5), 3**0.5) * np.sqrt(count / 12) * job.piece
    lost = np.clip(count * job.lost + spread, 0.0, count * job.piece)
    startup = (
        conditions.startup_s[:, None]
        / 3600
        * _lognormal(launch, conditions.startup_log_sd[:, None])
    )
    written = (job.running - job.work) * (
        _lognormal(disk, conditions.checkpoint_log_sd[:, None]) - 1
    )
    return np.asarray(startup + job.running + written + lost + count * job.replacement, dtype=float)


def least_startup(conditions: Conditions, *, draws: int, part: float) -> FloatArray:
    """(clusters,) least start-up seconds that a `part` of the draws of `drawn_hours` keeps to, whatever the seed."""
    rank = max(math.ceil(part * draws - 1e-9), 1)
    sd = conditions.startup_log_sd
    return np.asarray(
        conditions.startup_s * np.exp(sd * ndtri((rank - 0.5) / draws) - sd**2 / 2), dtype=float
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Hours, and the mean number of interruptions, before any is drawn."""

    work: FloatArray
    running: FloatArray  # work and checkpoints
    piece: FloatArray  # most that an interruption can take
    interruptions: FloatArray
    lost: FloatArray  # mean, an interruption
    replacement: FloatArray  # with those that are interrupted themselves


def _job(work_hours: ArrayLike, conditions: Conditions) -> _Job:
    work = np.asarray(work_hours, dtype=float)
    hazard = _beside(work, conditions.hazard_per_hour)
    write, replace = (
        _beside(work, one) / 3600 for one in (conditions.checkpoint_s, conditions.replacement_s)
    )
    rate = np.maximum(hazard, _LEAST_HAZARD)
    count = pieces(
        work, best_interval(write, hazard)
    )  # one for a short job, which loses no more than itself
    running = work + (count - 1) * write
    piece = running / count
    chance = np.expm1(np.minimum(rate * piece, _MOST))
    small = rate * piece < 1e-4  # where the difference below has no digits left: its series
    lost = np.where(small, piece / 2, 1 / rate - piece / np.maximum(chance, 1e-300))
    return _Job(
        work=work,
        running=running,
        piece=piece,
        interruptions=np.where(hazard >= _LEAST_HAZARD, count * chance, 0.0),
        lost=lost,
        replacement=np.asarray(np.expm1(np.minimum(rate * replace, _MOST)) / rate, dtype=float),
    )


def _beside(work: FloatArray, one_a_cluster: FloatArray) -> FloatArray:
    """(clusters,) as it broadcasts with work of (clusters,) or (clusters, draws)."""
    return one_a_cluster[:, None] if work.ndim > 1 else one_a_cluster


def _rate(
    doubted: FloatArray, shock: FloatArray, conditions: Conditions, work_hours: ArrayLike
) -> FloatArray:
    """(clusters, draws) the hazard's draws over its mean, at uniforms of doubt and of bunching."""
    bunching = conditions.bunching(work_hours)[:, None]
    return _gamma_quantile(doubted, conditions.doubt[:, None]) * _gamma_quantile(shock, bunching)


def _strata(draws: int, seed: int) -> tuple[FloatArray, ...]:
    """Independent columns of stratified uniforms: `draws` of them cover (0, 1) evenly, tails included."""
    rng = np.random.default_rng(seed)
    even = (np.arange(draws) + rng.random(draws)) / draws
    middle = (np.arange(draws) + 0.5) / draws
    return rng.permutation(even), *(rng.permutation(middle) for _ in range(5))


def _lognormal(probability: FloatArray, log_sd: ArrayLike) -> FloatArray:
    """Quantiles at `probability` of a lognormal of mean 1."""
    sd = np.asarray(log_sd, dtype=float)
    return (
        np.asarray(np.exp(sd * ndtri(probability) - sd**2 / 2), dtype=float)
        if np.any(sd > 0)
        else np.ones(())
    )


def _gamma_quantile(probability: FloatArray, dispersion: ArrayLike) -> FloatArray:
    """Quantiles at `probability` (draws,) of a Gamma of mean 1, variance `dispersion` (a number or (..., 1)); 1 at 0.

    Variances that differ by less than _ALIKE share their quantiles: thousands of setups have few kinds of bunching.
    """
    variance = np.asarray(dispersion, dtype=float)
    if not np.any(variance > _NO_VARIANCE):
        return np.ones(())
    kinds, at = np.unique(
        np.round(np.log(np.maximum(variance, _NO_VARIANCE)) / _ALIKE), return_inverse=True
    )
    level = np.exp(kinds * _ALIKE)[:, None]
    quantiles = np.where(level > 2 * _NO_VARIANCE, gammaincinv(1 / level, probability) * level, 1.0)
    return np.asarray(quantiles[np.reshape(at, variance.shape[:-1])], dtype=float)


def _poisson_quantile(probability: FloatArray, mean: FloatArray) -> FloatArray:
    """Poisson quantiles at `probability` (draws,) for `mean` (..., draws): exact below _MANY, Cornish-Fisher above."""
    z = ndtri(probability)
    large = np.maximum(mean + z * np.sqrt(mean) + (z**2 - 1) / 6, 0.0)
    few = mean <= _MANY
    if not np.any(few & (mean > 0)):
        return np.where(mean > 0, large, 0.0)
    small_mean = np.where(few, mean, 0.0)
    chance = np.exp(-small_mean)
    below = chance.copy()
    count = np.zeros_like(small_mean)
    for number in range(1, 60):
        short = below < probability
        if not np.any(short):
            break
        count += short
        chance = chance * small_mean / number
        below = below + chance
    return np.where(few, count, large)
