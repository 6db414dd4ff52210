"""Interruptions, start-up and checkpoints: from hours of work to expected and 90th-percentile hours and dollars.

    running       r = work + (n - 1) c      n pieces, each at most Daly's interval [P], checkpoints of c between
    interruptions N = n (exp(h s) - 1), s = r / n, each taking 1/h - s / (exp(h s) - 1) of its piece
    hours           = start-up + r + N (lost + replacement)

Exact for memoryless interruptions at h an hour [D]; a gang needs all of its machines, so its hazard is the sum of
theirs (physics.md, "Spot"). Bunching widens the draws: the rate itself is drawn, from Gammas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaincinv, ndtri

from .checkpoints import BASE_S, S_PER_MB
from .interrupted import best_interval, pieces

Floats = NDArray[np.float64]

CHECKPOINT_BASE_S = BASE_S
CHECKPOINT_S_PER_MB = S_PER_MB
STARTUP_S = 12.0  # prior: local hosts, agents and torchrun until the first step
REPLACEMENT_S = 22.0  # prior: resume of an elastic job after a cut link on local hosts (traps.md)
_LEAST_HAZARD = 1e-9  # an hour: rarer than that is never, and differences of exponentials still have their digits
_MOST = 30.0  # interruptions expected in one piece, or while replacing: such a job never ends, and exp stays finite
_NO_VARIANCE, _ALIKE = 1e-6, 0.05  # of a rate: taken to be certain; in logs of it
_MANY = 12.0  # interruptions from which Cornish-Fisher replaces the exact Poisson quantile (error below 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Hours and dollars, one entry a job; dollars are NaN where the price is. `drawn_hours` is (jobs, draws)."""

    hours: Floats
    hours_p90: Floats
    usd: Floats
    usd_p90: Floats
    drawn_hours: Floats


def checkpoint_seconds(state_bytes: float) -> float:
    """Seconds to write a checkpoint of `state_bytes`, linear in bytes (CM-DARE [P])."""
    return CHECKPOINT_BASE_S + CHECKPOINT_S_PER_MB * state_bytes / 1e6


def expected_hours(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    startup_s: ArrayLike = STARTUP_S,
    checkpoint_s: ArrayLike = CHECKPOINT_BASE_S,
    replacement_s: ArrayLike = REPLACEMENT_S,
) -> Floats:
    """Mean hours of a job, in the broadcast shape of the arguments. At hazard 0: start-up and work, no checkpoints."""
    job = _job(work_hours, hazard_per_hour, checkpoint_s, replacement_s)
    return np.asarray(_hours(startup_s) + job.running + job.interruptions * (job.lost + job.replacement), dtype=float)


def drawn_hours(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    seed: int,
    startup_s: ArrayLike = STARTUP_S,
    checkpoint_s: ArrayLike = CHECKPOINT_BASE_S,
    replacement_s: ArrayLike = REPLACEMENT_S,
    doubt: ArrayLike = 0.0,
    bunching: ArrayLike = 0.0,
    startup_log_sd: ArrayLike = 0.0,
    checkpoint_log_sd: ArrayLike = 0.0,
) -> Floats:
    """Hours of a job under drawn start-ups and interruptions, each of which loses a part of a piece.

    Shape: that of the arguments broadcast; the last axis holds draws. Start-up is lognormal with mean `startup_s`,
    checkpoints with mean `checkpoint_s` (all of a job's alike), the number of interruptions Poisson at a rate of its
    own: the mean times two Gammas of mean 1, of variances `doubt` (what is not known of it) and `bunching`. All jobs
    share the draws of luck, so that two of them differ by their arguments only.
    """
    job = _job(work_hours, hazard_per_hour, checkpoint_s, replacement_s)
    luck, loss, weather, launch, truth, disk = _strata(job.running.shape[-1], seed)
    rate = _gamma_quantile(truth, doubt)
    rate = rate * _gamma_quantile(weather, bunching)
    count = _poisson_quantile(luck, job.interruptions * rate)
    # The sum of N uniforms is near normal(N/2, N/12); inside sqrt(3) deviations it lies in [0, N] for every N >= 1.
    spread = np.clip(ndtri(loss), -(3**0.5), 3**0.5) * np.sqrt(count / 12) * job.piece
    lost = np.clip(count * job.lost + spread, 0.0, count * job.piece)
    startup = _hours(startup_s) * _lognormal(launch, startup_log_sd)
    written = (job.running - job.work) * (_lognormal(disk, checkpoint_log_sd) - 1)
    return np.asarray(startup + job.running + written + lost + count * job.replacement, dtype=float)


def job_time(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    usd_per_hour: ArrayLike,
    *,
    work_draws: Floats | None = None,
    draws: int = 200,
    seed: int = 0,
    startup_s: ArrayLike = STARTUP_S,
    checkpoint_s: ArrayLike = CHECKPOINT_BASE_S,
    replacement_s: ArrayLike = REPLACEMENT_S,
    doubt: ArrayLike = 0.0,
    bunching: ArrayLike = 0.0,
    startup_log_sd: ArrayLike = 0.0,
    checkpoint_log_sd: ArrayLike = 0.0,
) -> JobTime:
    """Expected and 90th-percentile hours and dollars of jobs.

    `work_hours`, `hazard_per_hour` and `usd_per_hour` (NaN unknown) have one entry a job; the other arrays too, or one
    for all. `work_draws` (jobs, draws) are joint draws of the work hours where they are uncertain; without them the
    work is certain and only luck is drawn.
    """
    work, hazard = np.broadcast_arrays(
        np.atleast_1d(np.asarray(work_hours, dtype=float)), np.asarray(hazard_per_hour, dtype=float)
    )
    price = np.broadcast_to(np.asarray(usd_per_hour, dtype=float), work.shape)
    uncertain = np.repeat(work[:, None], draws, axis=1) if work_draws is None else work_draws
    mean = expected_hours(work, hazard, startup_s=startup_s, checkpoint_s=checkpoint_s, replacement_s=replacement_s)
    drawn = drawn_hours(
        uncertain,
        hazard[:, None],
        seed=seed,
        startup_s=_column(startup_s),
        checkpoint_s=_column(checkpoint_s),
        replacement_s=_column(replacement_s),
        doubt=_column(doubt),
        bunching=_column(bunching),
        startup_log_sd=_column(startup_log_sd),
        checkpoint_log_sd=_column(checkpoint_log_sd),
    )
    p90 = np.quantile(drawn, 0.9, axis=1)
    return JobTime(hours=mean, hours_p90=p90, usd=price * mean, usd_p90=price * p90, drawn_hours=drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Hours, and the mean number of interruptions, before any is drawn."""

    work: Floats
    running: Floats  # work and checkpoints
    piece: Floats  # most that an interruption can take
    interruptions: Floats
    lost: Floats  # mean, an interruption
    replacement: Floats  # with those that are interrupted themselves


def _job(work_hours: ArrayLike, hazard_per_hour: ArrayLike, checkpoint_s: ArrayLike, replacement_s: ArrayLike) -> _Job:
    work, hazard = np.asarray(work_hours, dtype=float), np.asarray(hazard_per_hour, dtype=float)
    write, replace, rate = _hours(checkpoint_s), _hours(replacement_s), np.maximum(hazard, _LEAST_HAZARD)
    count = pieces(work, best_interval(write, hazard))  # one for a short job, which loses no more than itself
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


def _hours(seconds: ArrayLike) -> Floats:
    return np.asarray(seconds, dtype=float) / 3600


def _column(one_a_job: ArrayLike) -> Floats:
    """(jobs, 1) beside (jobs, draws); a single number stays one."""
    array = np.asarray(one_a_job, dtype=float)
    return array[:, None] if array.ndim else array


def _strata(draws: int, seed: int) -> tuple[Floats, ...]:
    """Independent columns of stratified uniforms: `draws` of them cover (0, 1) evenly, so tails are not luck."""
    rng = np.random.default_rng(seed)
    even = (np.arange(draws) + rng.random(draws)) / draws
    middle = (np.arange(draws) + 0.5) / draws
    return rng.permutation(even), *(rng.permutation(middle) for _ in range(5))


def drawn_startup(startup_s: Floats, startup_log_sd: Floats, *, draws: int, part: float) -> Floats:
    """The least start-up seconds that at least a `part` of the draws of `drawn_hours` keeps to, whatever the seed."""
    place = max(math.ceil(part * draws - 1e-9), 1)
    luck = ndtri((place - 0.5) / draws)
    return np.asarray(startup_s * np.exp(startup_log_sd * luck - startup_log_sd**2 / 2), dtype=float)


def _lognormal(luck: Floats, log_sd: ArrayLike) -> Floats:
    """Quantiles at `luck` of a lognormal of mean 1."""
    sd = np.asarray(log_sd, dtype=float)
    return np.asarray(np.exp(sd * ndtri(luck) - sd**2 / 2), dtype=float) if np.any(sd > 0) else np.ones(())


def _gamma_quantile(luck: Floats, dispersion: ArrayLike) -> Floats:
    """Quantiles at `luck` (draws,) of a Gamma of mean 1 and variance `dispersion` (a number or (..., 1)); 1 at 0.

    Variances that differ by less than _ALIKE share their quantiles: thousands of setups have few kinds of luck.
    """
    variance = np.asarray(dispersion, dtype=float)
    if not np.any(variance > _NO_VARIANCE):
        return np.ones(())
    kinds, at = np.unique(np.round(np.log(np.maximum(variance, _NO_VARIANCE)) / _ALIKE), return_inverse=True)
    level = np.exp(kinds * _ALIKE)[:, None]
    quantiles = np.where(level > 2 * _NO_VARIANCE, gammaincinv(1 / level, luck) * level, 1.0)
    return np.asarray(quantiles[np.reshape(at, variance.shape[:-1])], dtype=float)


def _poisson_quantile(luck: Floats, mean: Floats) -> Floats:
    """Poisson quantiles at `luck` (draws,) for `mean` (..., draws): exact below _MANY, Cornish-Fisher above."""
    z = ndtri(luck)
    large = np.maximum(mean + z * np.sqrt(mean) + (z**2 - 1) / 6, 0.0)
    few = mean <= _MANY
    if not np.any(few & (mean > 0)):
        return np.where(mean > 0, large, 0.0)
    small_mean = np.where(few, mean, 0.0)
    chance = np.exp(-small_mean)
    below = chance.copy()
    count = np.zeros_like(small_mean)
    for number in range(1, 60):
        short = below < luck
        if not np.any(short):
            break
        count += short
        chance = chance * small_mean / number
        below = below + chance
    return np.where(few, count, large)
