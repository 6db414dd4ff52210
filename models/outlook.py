"""How long each setup would take for the whole job and what it would cost, with draws. Ranks nothing.

hours = job_time(ceil(samples / global batch) step_s);   usd = hours x price of the whole cluster
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from .circumstances import spot
from .circumstances.conditions import Circumstances, Gangs, pools_of
from .workload import Setup, Workload

Floats = NDArray[np.float64]

_STATE_PER_WEIGHT = 3  # bytes of a checkpoint per byte of weights: Adam keeps two moments beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Time and money of every setup. Arrays are (setups,) or (setups, draws); dollars are NaN where a price is unknown.

    `hours`, `usd` are expected, `startup_s` is the part of the hours that no step time changes; `mean_hours` are
    expected hours under each draw of the step times; `lucky_hours` also draw start-up and interruptions. `place`
    numbers the clusters with their markets: setups that share one are variants.
    """

    setups: Sequence[Setup]
    predictions: pd.DataFrame
    step_s: Floats
    hours: Floats
    hours_p90: Floats
    usd: Floats
    usd_p90: Floats
    price: Floats
    startup_s: Floats
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


def cost_at(step_s: float, *, steps: int, met: Gangs, usd_per_hour: float) -> tuple[float, float]:
    """Expected hours and dollars of a job of `steps` at a measured step time; NaN where the step or the price is.

    `met` is what its one cluster meets. Only the part of the hours that is work scales with the step; start-up and
    interruptions are at their expectation.
    """
    if not np.isfinite(step_s):
        return float("nan"), float("nan")
    work = steps * step_s / 3600.0
    hours = float(hours_at(work, met)[0])
    return hours, hours * usd_per_hour


def hours_at(work_hours: ArrayLike, met: Gangs) -> Floats:
    """Expected hours of so many hours of work on each cluster of `met`."""
    return spot.expected_hours(
        work_hours,
        met.hazard_per_hour,
        startup_s=met.startup_s,
        checkpoint_s=met.checkpoint_s,
        replacement_s=met.replacement_s,
    )


def drawn_hours_at(work_hours: Floats, expected_work_hours: ArrayLike, met: Gangs, *, seed: int) -> Floats:
    """(clusters, draws) hours under joint draws of work and of everything else; `work_hours` is of that shape.

    How far interruptions bunch goes by the hours of work that are expected.
    """
    meets = met.conditions(expected_work_hours)
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
    met: Circumstances,
    seed: int,
) -> Outlook:
    """Hours and dollars of `workload` on each of `setups`; the other arguments are those of `ranking.recommend`."""
    steps = np.array([-(-workload.samples // setup.global_batch) for setup in setups], dtype=float)
    step_s = predictions["step_s"].to_numpy(dtype=float) if len(setups) else np.zeros(0)
    prices = [setup.cluster.usd_per_hour for setup in setups]
    price = np.array([np.nan if one is None else one for one in prices], dtype=float)
    work_draws = draws * (steps / 3600)[:, None]
    work_hours = step_s * steps / 3600
    gangs = met.gangs(*pools_of([setup.cluster for setup in setups]), state_bytes(workload))
    hours = hours_at(work_hours, gangs)
    lucky_hours = drawn_hours_at(work_draws, work_hours, gangs, seed=seed)
    hours_p90 = np.quantile(lucky_hours, 0.9, axis=1) if len(setups) else np.zeros(0)
    mean_hours = spot.expected_hours(
        work_draws,
        gangs.hazard_per_hour[:, None],
        startup_s=gangs.startup_s[:, None],
        checkpoint_s=gangs.checkpoint_s[:, None],
        replacement_s=gangs.replacement_s[:, None],
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
        hours=hours,
        hours_p90=hours_p90,
        usd=price * hours,
        usd_p90=price * hours_p90,
        price=price,
        startup_s=gangs.startup_s,
        mean_hours=mean_hours,
        lucky_hours=lucky_hours,
        place=np.array(places, dtype=np.intp),
        measured_runs=measured_runs,
    )
