"""How long each setup would take for the whole job and what it would cost, with draws.

hours = expected_hours(ceil(samples / global batch) step_s)
usd   = hours x (machines + storage + other) of the whole cluster
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..domain.workload import Setup, Workload
from . import duration as spot
from .job_conditions import Circumstances, Gangs, pools_of

Floats = NDArray[np.float64]

_STATE_PER_WEIGHT = 3  # bytes of a checkpoint per byte of weights: Adam keeps two moments beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Time and money of every setup. Arrays are (setups,) or (setups, draws); dollars are NaN where a price is unknown.

    `hours`, `usd` are expected, `startup_s` is the part of the hours that no step time changes; `mean_hours` are
    expected hours under each draw of the step times; `sampled_hours` also draw start-up and interruptions. `place`
    numbers the clusters with their markets: setups that share one are variants. `price` is dollars an hour of the whole
    bill, of which `machine_price`, `storage_price` and `other_price` are the parts. `interruptions` are expected,
    `interruption_risk` is the chance of any.
    """

    setups: Sequence[Setup]
    predictions: pd.DataFrame
    step_s: Floats
    hours: Floats
    hours_p90: Floats
    usd: Floats
    usd_p90: Floats
    price: Floats
    machine_price: Floats
    storage_price: Floats
    other_price: Floats
    interruptions: Floats
    interruption_risk: Floats
    startup_s: Floats
    mean_hours: Floats
    sampled_hours: Floats
    place: NDArray[np.intp]
    measured_runs: Sequence[int]

    def quantity(self, what: str) -> Floats:
        """Expected "hours" or "usd" of each setup."""
        return self.hours if what == "hours" else self.usd

    def drawn(self, what: str) -> Floats:
        """ "hours" or "usd" under joint draws of step times and interruptions."""
        return self.sampled_hours if what == "hours" else self.price[:, None] * self.sampled_hours

    def expected_by_draw(self, what: str) -> Floats:
        """Expected "hours" or "usd" under each draw of the step times: what tells setups apart."""
        return self.mean_hours if what == "hours" else self.price[:, None] * self.mean_hours


def state_bytes(workload: Workload) -> float:
    """Size of a checkpoint; 0 where nobody has measured the workload's gradient."""
    return state_bytes_of(workload.gradient_bytes)


def state_bytes_of(gradient_bytes: float | None) -> float:
    """The same from the bytes of the gradient; None and NaN are unknown."""
    return 0.0 if gradient_bytes is None or np.isnan(gradient_bytes) else _STATE_PER_WEIGHT * float(gradient_bytes)


def cost_at(step_s: float, *, steps: int, conditions: Gangs, usd_per_hour: float) -> tuple[float, float]:
    """Expected hours and dollars of a job of `steps` at a measured step time; NaN where the step or the price is.

    `conditions` are those of its one cluster. Only the part of the hours that is work scales with the step; start-up
    and interruptions are at their expectation.
    """
    if not np.isfinite(step_s):
        return float("nan"), float("nan")
    work = steps * step_s / 3600.0
    hours = float(hours_at(work, conditions)[0])
    return hours, hours * usd_per_hour


def hours_at(work_hours: ArrayLike, conditions: Gangs) -> Floats:
    """Expected hours of so many hours of work on each cluster of `conditions`."""
    return spot.expected_hours(
        work_hours,
        conditions.hazard_per_hour,
        startup_s=conditions.startup_s,
        checkpoint_s=conditions.checkpoint_s,
        replacement_s=conditions.replacement_s,
    )


def drawn_hours_at(work_hours: Floats, expected_work_hours: ArrayLike, conditions: Gangs, *, seed: int) -> Floats:
    """(clusters, draws) hours under joint draws of work and of everything else; `work_hours` is of that shape.

    How far interruptions bunch goes by the hours of work that are expected.
    """
    meets = conditions.for_work(expected_work_hours)
    return spot.drawn_hours(
        work_hours,
        meets.hazard_per_hour[:, None],
        seed=seed,
        startup_s=meets.startup_s[:, None],
        startup_log_sd=meets.startup_log_sd[:, None],
        checkpoint_s=meets.checkpoint_s[:, None],
        checkpoint_log_sd=meets.checkpoint_log_sd[:, None],
        replacement_s=meets.replacement_s[:, None],
        doubt=meets.doubt[:, None],
        bunching=meets.bunching[:, None],
    )


def outlook(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    draws: Floats,
    *,
    measured_runs: Sequence[int],
    conditions: Circumstances,
    seed: int,
) -> Outlook:
    """Hours and dollars of `workload` on each of `setups`; the other arguments are those of `ranking.recommend`."""
    steps = np.array([-(-workload.samples // setup.global_batch) for setup in setups], dtype=float)
    step_s = predictions["step_s"].to_numpy(dtype=float) if len(setups) else np.zeros(0)
    machines = np.array([setup.cluster.usd_per_hour for setup in setups], dtype=float)  # None becomes NaN
    storage, other = (
        np.array([sum(getattr(one, part) for one in setup.cluster.members) for setup in setups], dtype=float)
        for part in ("storage_usd_per_hour", "other_usd_per_hour")
    )
    price = machines + storage + other
    work_draws = draws * (steps / 3600)[:, None]
    work_hours = step_s * steps / 3600
    gangs = conditions.gangs(*pools_of([setup.cluster for setup in setups]), state_bytes(workload))
    hours = hours_at(work_hours, gangs)
    sampled_hours = drawn_hours_at(work_draws, work_hours, gangs, seed=seed)
    hours_p90 = np.quantile(sampled_hours, 0.9, axis=1) if len(setups) else np.zeros(0)
    mean_hours = spot.expected_hours(
        work_draws,
        gangs.hazard_per_hour[:, None],
        startup_s=gangs.startup_s[:, None],
        checkpoint_s=gangs.checkpoint_s[:, None],
        replacement_s=gangs.replacement_s[:, None],
    )
    meets = gangs.for_work(work_hours)
    numbers: dict[tuple[tuple[str, str, str], ...], int] = {}
    places = [
        numbers.setdefault(tuple((o.instance_type.name, o.market, o.zone) for o in s.cluster.members), len(numbers))
        for s in setups
    ]
    return Outlook(
        setups=setups,
        predictions=predictions,
        step_s=step_s,
        hours=hours,
        hours_p90=hours_p90,
        usd=price * hours,
        usd_p90=price * hours_p90,
        price=price,
        machine_price=machines,
        storage_price=storage,
        other_price=other,
        interruptions=spot.expected_interruptions(
            work_hours, gangs.hazard_per_hour, checkpoint_s=gangs.checkpoint_s, replacement_s=gangs.replacement_s
        ),
        interruption_risk=spot.interruption_risk(
            work_hours,
            gangs.hazard_per_hour,
            seed=seed,
            checkpoint_s=gangs.checkpoint_s,
            replacement_s=gangs.replacement_s,
            doubt=meets.doubt,
            bunching=meets.bunching,
        ),
        startup_s=gangs.startup_s,
        mean_hours=mean_hours,
        sampled_hours=sampled_hours,
        place=np.array(places, dtype=np.intp),
        measured_runs=measured_runs,
    )
