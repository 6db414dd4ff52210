"""How long each setup would take for the whole job and what it would cost, with draws. Ranks nothing.

hours = job_time(ceil(samples / global batch) step_s);   usd = hours x price of the whole cluster
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import spot
from .conditions import Conditions, Learned, joined_conditions
from .workload import Setup, Workload

Floats = NDArray[np.float64]

_STATE_PER_WEIGHT = 3  # bytes of a checkpoint per byte of weights: Adam keeps two moments beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Time and money of every setup. Arrays are (setups,) or (setups, draws); dollars are NaN where a price is unknown.

    `hours`, `usd` are expected; `mean_hours` are expected hours under each draw of the step times; `lucky_hours`
    also draw the interruptions. `place` numbers the clusters with their markets: setups that share one are variants.
    """

    setups: Sequence[Setup]
    predictions: pd.DataFrame
    step_s: Floats
    hours: Floats
    hours_p90: Floats
    usd: Floats
    usd_p90: Floats
    price: Floats
    mean_hours: Floats
    lucky_hours: Floats
    place: NDArray[np.intp]
    measured_runs: Sequence[int]

    def quantity(self, what: str) -> Floats:
        """Expected "hours" or "usd" of each setup."""
        return self.hours if what == "hours" else self.usd

    def drawn(self, what: str) -> Floats:
        """ "hours" or "usd" under joint draws of step times and interruptions."""
        return self.lucky_hours if what == "hours" else self.price[:, None] * self.lucky_hours

    def expected_by_draw(self, what: str) -> Floats:
        """Expected "hours" or "usd" under each draw of the step times: what tells setups apart, luck aside."""
        return self.mean_hours if what == "hours" else self.price[:, None] * self.mean_hours


def state_bytes(workload: Workload) -> float:
    """Size of a checkpoint; 0 where nobody has measured the workload's gradient."""
    return state_bytes_of(workload.gradient_bytes)


def state_bytes_of(gradient_bytes: float | None) -> float:
    """The same from the bytes of the gradient; None and NaN are unknown."""
    return 0.0 if gradient_bytes is None or np.isnan(gradient_bytes) else _STATE_PER_WEIGHT * float(gradient_bytes)


def cost_at(
    step_s: float, *, steps: int, hazard_per_hour: float, usd_per_hour: float, checkpoint_s: float
) -> tuple[float, float]:
    """Expected hours and dollars of a job of `steps` at a measured step time; NaN where the step or the price is.

    Only the part of the hours that is work scales with the step; start-up and interruptions are at their expectation.
    """
    if not np.isfinite(step_s):
        return float("nan"), float("nan")
    work = steps * step_s / 3600.0
    hours = float(spot.expected_hours(work, hazard_per_hour, checkpoint_s=checkpoint_s))
    return hours, hours * usd_per_hour


def outlook(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    draws: Floats,
    *,
    measured_runs: Sequence[int],
    startup_s: float,
    replacement_s: float,
    checkpoint_s: float | None,
    seed: int,
    learned: Learned | None = None,
) -> Outlook:
    """Hours and dollars of `workload` on each of `setups`; the other arguments are those of `ranking.recommend`."""
    steps = np.array([-(-workload.samples // setup.global_batch) for setup in setups], dtype=float)
    step_s = predictions["step_s"].to_numpy(dtype=float) if len(setups) else np.zeros(0)
    prices = [setup.cluster.usd_per_hour for setup in setups]
    price = np.array([np.nan if one is None else one for one in prices], dtype=float)
    work_draws = draws * (steps / 3600)[:, None]
    work_hours = step_s * steps / 3600
    size = state_bytes(workload)
    if learned is None:
        write_s = spot.checkpoint_seconds(size) if checkpoint_s is None else checkpoint_s
        hazard = np.array([spot.gang_hazard(setup.cluster) for setup in setups], dtype=float)
        met = _stated(hazard, startup_s=startup_s, checkpoint_s=write_s, replacement_s=replacement_s)
    else:
        clusters = [setup.cluster for setup in setups]
        pairs = zip(clusters, work_hours, strict=True)
        met = joined_conditions([learned.conditions(cluster, float(hours), size) for cluster, hours in pairs])
    time = spot.job_time(
        work_hours,
        met.hazard_per_hour,
        price,
        work_draws=work_draws,
        seed=seed,
        startup_s=met.startup_s,
        startup_log_sd=met.startup_log_sd,
        checkpoint_s=met.checkpoint_s,
        checkpoint_log_sd=met.checkpoint_log_sd,
        replacement_s=met.replacement_s,
        doubt=met.doubt,
        bunching=met.bunching,
    )
    mean_hours = spot.expected_hours(
        work_draws,
        met.hazard_per_hour[:, None],
        startup_s=met.startup_s[:, None],
        checkpoint_s=met.checkpoint_s[:, None],
        replacement_s=met.replacement_s[:, None],
    )
    numbers: dict[tuple[tuple[str, str, str], ...], int] = {}
    places = [
        numbers.setdefault(tuple((o.instance_type.name, o.market, o.zone) for o in s.cluster.members), len(numbers))
        for s in setups
    ]
    return Outlook(
        setups=setups,
        predictions=predictions,
        step_s=step_s,
        hours=time.hours,
        hours_p90=time.hours_p90,
        usd=time.usd,
        usd_p90=time.usd_p90,
        price=price,
        mean_hours=mean_hours,
        lucky_hours=time.drawn_hours,
        place=np.array(places, dtype=np.intp),
        measured_runs=measured_runs,
    )


def _stated(hazard: Floats, *, startup_s: float, checkpoint_s: float, replacement_s: float) -> Conditions:
    """The offers' own hazards and the same seconds for all, taken to be known and memoryless."""
    nothing, same = np.zeros_like(hazard), np.ones_like(hazard)
    return Conditions(
        hazard_per_hour=hazard,
        doubt=nothing,
        bunching=nothing,
        startup_s=startup_s * same,
        startup_log_sd=nothing,
        checkpoint_s=checkpoint_s * same,
        checkpoint_log_sd=nothing,
        replacement_s=replacement_s * same,
    )
