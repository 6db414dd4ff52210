"""Hours of a job under start-up, interruptions and checkpoints: expected and drawn.

    checkpoint    c = a + k MB            linear in bytes (CM-DARE [P])
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
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaincinv, ndtri

Floats = NDArray[np.float64]

# CM-DARE [P, physics.md]: 3.6 s + 0.02 s/MB on its cloud's storage. Ours may differ by a factor: half of a or k is one
# standard deviation.
BASE_S, S_PER_MB = 3.6, 0.02
_PRIOR_PART = 0.5
# Relative spread: CM-DARE's networks lie about a tenth around its line, repeats of one a twentieth.
_BETWEEN, _WITHIN = 0.1, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel:
    """`base_s` + `s_per_mb` MB, the covariance of the two, and the relative spread of a network not seen."""

    base_s: float
    s_per_mb: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    between: float
    within: float

    def seconds(self, mb: ArrayLike) -> Floats:
        """Expected seconds for `mb` megabytes (10^6 bytes), in its shape."""
        return np.asarray(self.base_s + self.s_per_mb * np.asarray(mb, dtype=float), dtype=float)

    def log_sd(self, mb: ArrayLike) -> Floats:
        """Standard deviation of the log seconds of one checkpoint of a network not seen, in the shape of `mb`."""
        size = np.asarray(mb, dtype=float)
        design = np.stack([np.ones_like(size), size])
        doubt = np.einsum("i...,ij,j...->...", design, np.array(self.covariance), design)
        return np.asarray(np.sqrt(doubt / self.seconds(size) ** 2 + self.between**2 + self.within**2), dtype=float)


def prior_checkpoints() -> CheckpointModel:
    """The line before any checkpoint was written."""
    return CheckpointModel(
        base_s=BASE_S,
        s_per_mb=S_PER_MB,
        covariance=(((_PRIOR_PART * BASE_S) ** 2, 0.0), (0.0, (_PRIOR_PART * S_PER_MB) ** 2)),
        between=_BETWEEN,
        within=_WITHIN,
    )


_NEVER = 1e-12  # an hour: rarer than that is never


def best_interval(checkpoint_hours: ArrayLike, hazard_per_hour: ArrayLike) -> Floats:
    """Hours of work between two checkpoints (Daly [P]), in the broadcast shape; very long where nothing interrupts."""
    mean = 1 / np.maximum(np.asarray(hazard_per_hour, dtype=float), _NEVER)
    cost = np.asarray(checkpoint_hours, dtype=float)
    ratio = np.minimum(cost / (2 * mean), 1.0)
    interval = np.sqrt(2 * cost * mean) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - cost
    return np.asarray(np.where(cost < 2 * mean, interval, mean), dtype=float)


def pieces(work_hours: ArrayLike, interval_hours: ArrayLike) -> Floats:
    """Whole numbers of pieces between checkpoints, at least 1: as few as keep each within the interval."""
    ratio = np.asarray(work_hours, dtype=float) / np.maximum(np.asarray(interval_hours, dtype=float), 1e-9)
    return np.asarray(np.maximum(np.ceil(ratio - 1e-9), 1.0), dtype=float)


STARTUP_S = 12.0  # prior: local hosts, agents and torchrun until the first step
REPLACEMENT_S = 22.0  # prior: resume of an elastic job after a cut link on local hosts (traps.md)
_LEAST_HAZARD = 1e-9  # an hour: rarer than that is never, and differences of exponentials still have their digits
_MOST = 30.0  # interruptions expected in one piece, or while replacing: such a job never ends, and exp stays finite
_NO_VARIANCE, _ALIKE = 1e-6, 0.05  # of a rate: taken to be certain; in logs of it
_MANY = 12.0  # interruptions from which Cornish-Fisher replaces the exact Poisson quantile (error below 0.1)


def checkpoint_seconds(state_bytes: float) -> float:
    """Seconds to write a checkpoint of `state_bytes`, linear in bytes (CM-DARE [P])."""
    return BASE_S + S_PER_MB * state_bytes / 1e6


def expected_hours(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    startup_s: ArrayLike = STARTUP_S,
    checkpoint_s: ArrayLike = BASE_S,
    replacement_s: ArrayLike = REPLACEMENT_S,
) -> Floats:
    """Mean hours of a job, in the broadcast shape of the arguments. At hazard 0: start-up and work, no checkpoints."""
    job = _job(work_hours, hazard_per_hour, checkpoint_s, replacement_s)
    return np.asarray(_hours(startup_s) + job.running + job.interruptions * (job.lost + job.replacement), dtype=float)


def expected_interruptions(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    checkpoint_s: ArrayLike = BASE_S,
    replacement_s: ArrayLike = REPLACEMENT_S,
) -> Floats:
    """Mean number of interruptions of a job at work, those that strike the same piece again included; 0 at hazard 0."""
    return _job(work_hours, hazard_per_hour, checkpoint_s, replacement_s).interruptions


def interruption_risk(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    seed: int,
    checkpoint_s: ArrayLike = BASE_S,
    replacement_s: ArrayLike = REPLACEMENT_S,
    doubt: ArrayLike = 0.0,
    bunching: ArrayLike = 0.0,
    draws: int = 400,
) -> Floats:
    """Chance of at least one interruption before a job is done, one entry a job; 0 at hazard 0.

    1 - E[exp(-rate x hours at work)], over the same two Gammas of the rate as in `drawn_hours`: where a rate is in
    doubt, jobs are spared more often than at its mean.
    """
    job = _job(work_hours, hazard_per_hour, checkpoint_s, replacement_s)
    _, _, shock, _, doubted, _ = _strata(draws, seed)
    rate = _gamma_quantile(doubted, _column(doubt)) * _gamma_quantile(shock, _column(bunching))
    mean_count = np.asarray(np.asarray(hazard_per_hour, dtype=float) * job.running, dtype=float)
    return np.asarray(1.0 - np.mean(np.exp(-mean_count[..., None] * rate), axis=-1), dtype=float)


def drawn_hours(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    seed: int,
    startup_s: ArrayLike = STARTUP_S,
    checkpoint_s: ArrayLike = BASE_S,
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
    share the uniforms that are drawn, so that two of them differ by their arguments only.
    """
    job = _job(work_hours, hazard_per_hour, checkpoint_s, replacement_s)
    number, loss, shock, launch, doubted, disk = _strata(job.running.shape[-1], seed)
    rate = _gamma_quantile(doubted, doubt)
    rate = rate * _gamma_quantile(shock, bunching)
    count = _poisson_quantile(number, job.interruptions * rate)
    # The sum of N uniforms is near normal(N/2, N/12); inside sqrt(3) deviations it lies in [0, N] for every N >= 1.
    spread = np.clip(ndtri(loss), -(3**0.5), 3**0.5) * np.sqrt(count / 12) * job.piece
    lost = np.clip(count * job.lost + spread, 0.0, count * job.piece)
    startup = _hours(startup_s) * _lognormal(launch, startup_log_sd)
    written = (job.running - job.work) * (_lognormal(disk, checkpoint_log_sd) - 1)
    return np.asarray(startup + job.running + written + lost + count * job.replacement, dtype=float)


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
    """Independent columns of stratified uniforms: `draws` of them cover (0, 1) evenly, tails included."""
    rng = np.random.default_rng(seed)
    even = (np.arange(draws) + rng.random(draws)) / draws
    middle = (np.arange(draws) + 0.5) / draws
    return rng.permutation(even), *(rng.permutation(middle) for _ in range(5))


def drawn_startup(startup_s: Floats, startup_log_sd: Floats, *, draws: int, part: float) -> Floats:
    """The least start-up seconds that at least a `part` of the draws of `drawn_hours` keeps to, whatever the seed."""
    rank = max(math.ceil(part * draws - 1e-9), 1)
    normal = ndtri((rank - 0.5) / draws)
    return np.asarray(startup_s * np.exp(startup_log_sd * normal - startup_log_sd**2 / 2), dtype=float)


def _lognormal(probability: Floats, log_sd: ArrayLike) -> Floats:
    """Quantiles at `probability` of a lognormal of mean 1."""
    sd = np.asarray(log_sd, dtype=float)
    return np.asarray(np.exp(sd * ndtri(probability) - sd**2 / 2), dtype=float) if np.any(sd > 0) else np.ones(())


def _gamma_quantile(probability: Floats, dispersion: ArrayLike) -> Floats:
    """Quantiles at `probability` (draws,) of a Gamma of mean 1, variance `dispersion` (a number or (..., 1)); 1 at 0.

    Variances that differ by less than _ALIKE share their quantiles: thousands of setups have few kinds of bunching.
    """
    variance = np.asarray(dispersion, dtype=float)
    if not np.any(variance > _NO_VARIANCE):
        return np.ones(())
    kinds, at = np.unique(np.round(np.log(np.maximum(variance, _NO_VARIANCE)) / _ALIKE), return_inverse=True)
    level = np.exp(kinds * _ALIKE)[:, None]
    quantiles = np.where(level > 2 * _NO_VARIANCE, gammaincinv(1 / level, probability) * level, 1.0)
    return np.asarray(quantiles[np.reshape(at, variance.shape[:-1])], dtype=float)


def _poisson_quantile(probability: Floats, mean: Floats) -> Floats:
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
