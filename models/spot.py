"""Interruptions, start-up and checkpoints: from hours of work to expected and 90th-percentile hours and dollars.

    interval I = sqrt(2 c M)      checkpoint cost c, mean time between interruptions of the gang M = 1 / hazard
    hours      = start-up + work + work c / I + interruptions (lost work + replacement)

Young's interval [P]; a gang needs all of its machines, so its hazard is the sum of theirs (physics.md, "Spot").
First order in hazard x c: right while checkpoints are much shorter than the time between interruptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

from .cloud import Cluster

Floats = NDArray[np.float64]

CHECKPOINT_BASE_S = 3.6  # CM-DARE [P]: linear in bytes on its cloud storage; holds when a network is held out
CHECKPOINT_S_PER_MB = 0.02  # the same
STARTUP_S = 12.0  # prior: local hosts, agents and torchrun until the first step
REPLACEMENT_S = 22.0  # prior: resume of an elastic job after a cut link on local hosts (traps.md)
_MOST_REWORK = 0.9  # share of time lost to rework at which the first order stops meaning anything
_LEAST_HAZARD = 1e-12  # an hour: rarer than that is never
_MANY = 12.0  # interruptions from which Cornish-Fisher replaces the exact Poisson quantile (error below 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Hours and dollars, one entry a job; dollars are NaN where the price is. `drawn_hours` is (jobs, draws)."""

    hours: Floats
    hours_p90: Floats
    usd: Floats
    usd_p90: Floats
    drawn_hours: Floats


def gang_hazard(cluster: Cluster) -> float:
    """Interruptions an hour of the whole cluster: the sum over its spot machines; on-demand ones are safe."""
    return sum(offer.interruptions_per_hour for offer in cluster.members if offer.market == "spot")


def checkpoint_seconds(state_bytes: float) -> float:
    """Seconds to write a checkpoint of `state_bytes`, linear in bytes (CM-DARE [P])."""
    return CHECKPOINT_BASE_S + CHECKPOINT_S_PER_MB * state_bytes / 1e6


def expected_hours(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    startup_s: float = STARTUP_S,
    checkpoint_s: float = CHECKPOINT_BASE_S,
    replacement_s: float = REPLACEMENT_S,
) -> Floats:
    """Mean hours of a job, in the broadcast shape of the arguments. At hazard 0: start-up and work, no checkpoints."""
    work, hazard = _broadcast(work_hours, hazard_per_hour)
    interval, interruptions, running = _interruptions(work, hazard, checkpoint_s / 3600)
    return startup_s / 3600 + running + interruptions * (interval / 2 + replacement_s / 3600)


def drawn_hours(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    *,
    seed: int,
    startup_s: float = STARTUP_S,
    checkpoint_s: float = CHECKPOINT_BASE_S,
    replacement_s: float = REPLACEMENT_S,
) -> Floats:
    """Hours of a job under drawn interruptions: Poisson in number, each losing a uniform part of an interval.

    Shape: that of `work_hours` and `hazard_per_hour` broadcast; the last axis holds draws. All jobs share the draws of
    luck, so that two of them differ by their work and hazard only.
    """
    work, hazard = _broadcast(work_hours, hazard_per_hour)
    interval, mean, running = _interruptions(work, hazard, checkpoint_s / 3600)
    luck, loss = _strata(work.shape[-1], seed)
    count = _poisson_quantile(luck, mean)
    # The sum of N uniforms is near normal(N/2, N/12); inside sqrt(3) deviations it lies in [0, N] for every N >= 1.
    lost = count / 2 + np.clip(norm.ppf(loss), -(3**0.5), 3**0.5) * np.sqrt(count / 12)
    result: Floats = startup_s / 3600 + running + interval * lost + count * replacement_s / 3600
    return result


def job_time(
    work_hours: ArrayLike,
    hazard_per_hour: ArrayLike,
    usd_per_hour: ArrayLike,
    *,
    work_draws: Floats | None = None,
    draws: int = 200,
    seed: int = 0,
    startup_s: float = STARTUP_S,
    checkpoint_s: float = CHECKPOINT_BASE_S,
    replacement_s: float = REPLACEMENT_S,
) -> JobTime:
    """Expected and 90th-percentile hours and dollars of jobs.

    `work_hours`, `hazard_per_hour` and `usd_per_hour` (NaN unknown) have one entry a job. `work_draws` (jobs, draws)
    are joint draws of the work hours where they are uncertain; without them the work is certain and only luck is drawn.
    A percentile is never below its mean.
    """
    work, hazard = _broadcast(np.atleast_1d(np.asarray(work_hours, dtype=float)), hazard_per_hour)
    price = np.broadcast_to(np.asarray(usd_per_hour, dtype=float), work.shape)
    uncertain = np.repeat(work[:, None], draws, axis=1) if work_draws is None else work_draws
    mean = expected_hours(work, hazard, startup_s=startup_s, checkpoint_s=checkpoint_s, replacement_s=replacement_s)
    drawn = drawn_hours(
        uncertain,
        hazard[:, None],
        seed=seed,
        startup_s=startup_s,
        checkpoint_s=checkpoint_s,
        replacement_s=replacement_s,
    )
    p90 = np.maximum(np.quantile(drawn, 0.9, axis=1), mean)
    return JobTime(hours=mean, hours_p90=p90, usd=price * mean, usd_p90=price * p90, drawn_hours=drawn)


def _broadcast(work_hours: ArrayLike, hazard_per_hour: ArrayLike) -> tuple[Floats, Floats]:
    work, hazard = np.broadcast_arrays(np.asarray(work_hours, dtype=float), np.asarray(hazard_per_hour, dtype=float))
    return work, hazard


def _interruptions(work: Floats, hazard: Floats, checkpoint_hours: float) -> tuple[Floats, Floats, Floats]:
    """(hours at stake between checkpoints, mean number of interruptions, hours of work and checkpoints)."""
    safe = np.maximum(hazard, _LEAST_HAZARD)
    interval = np.sqrt(2 * checkpoint_hours / safe)
    checkpoints = work * np.sqrt(checkpoint_hours * hazard / 2)
    at_stake = np.minimum(interval, work)  # a job shorter than its interval loses no more than itself
    rework = np.minimum(hazard * at_stake / 2, _MOST_REWORK)
    running = work + checkpoints
    return at_stake, hazard * running / (1 - rework), running


def _strata(draws: int, seed: int) -> tuple[Floats, Floats]:
    """Two independent columns of stratified uniforms: `draws` of them cover (0, 1) evenly, so tails are not luck."""
    rng = np.random.default_rng(seed)
    even = (np.arange(draws) + rng.random(draws)) / draws
    return rng.permutation(even), rng.permutation((np.arange(draws) + 0.5) / draws)


def _poisson_quantile(luck: Floats, mean: Floats) -> Floats:
    """Poisson quantiles at `luck` (draws,) for `mean` (..., draws): exact below _MANY, Cornish-Fisher above."""
    z = norm.ppf(luck)
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
