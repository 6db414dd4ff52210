"""Who may yet be chosen for each goal of a workload, and what is asked of them: the questions that a run can answer.

hours = start-up + (hours a second of step) x step, from the outlook; usd = price of the whole cluster x hours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri

from .circumstances.conditions import Circumstances, Stated
from .identity import Key, setup_key
from .outlook import Outlook, outlook
from .ranking import LIMITED_BY, goals_of, limit_of
from .workload import Goal, Setup, Workload
from .worth import Question

_Z_90 = 1.6448536269514722
_OUTCOMES = 41  # quantiles of each setup's step time under which luck is looked at
_LEAST_CHANCE = 0.02  # to meet a constraint, below which nobody contends
_MOST, _MOST_SAFE = 30, 10  # contenders of a goal by their objective, and those that meet its constraint besides


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """Distinct setups of a workload that may be chosen; the questions' places are positions among `setups`."""

    workload: str
    setups: tuple[Setup, ...]
    questions: tuple[Question, ...]


def contenders_of(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    *,
    met: Circumstances | None = None,
    seed: int = 0,
) -> Contenders:
    """The contenders among `setups`, with `predictions` (step_s, step_low_s, step_high_s) aligned by position.

    Of each cluster and market its best split by the goal, of these the 30 with the least expected objective and the 10
    best that meet the constraint already. A goal that nobody can meet asks nothing; `met` is as in `ranking.recommend`.
    Raises ValueError as that does on a goal that cannot be judged.
    """
    goals = goals_of(workload)
    if not setups:
        return Contenders(workload=workload.name, setups=(), questions=())
    step_s = predictions["step_s"].to_numpy(float)
    spread = np.log(predictions["step_high_s"].to_numpy(float) / predictions["step_low_s"].to_numpy(float)) / 2 / _Z_90
    outcomes = ndtri((np.arange(_OUTCOMES) + 0.5) / _OUTCOMES)
    view = outlook(
        workload,
        setups,
        predictions.reset_index(drop=True),
        step_s[:, None] * np.exp(spread[:, None] * outcomes),
        measured_runs=[0] * len(setups),
        met=met or Stated(),
        seed=seed,
    )
    luck = np.std(np.log(view.lucky_hours / view.mean_hours), axis=1)
    places: dict[Key, int] = {}
    chosen: list[Setup] = []
    questions = []
    for goal in goals:
        picked = _contending(goal, view)
        if len(picked) < 2:
            continue
        for at in picked:
            if places.setdefault(setup_key(setups[at]), len(chosen)) == len(chosen):
                chosen.append(setups[at])
        fixed = view.startup_s[picked] / 3600
        questions.append(
            Question(
                name=goal.goal,
                places=np.array([places[setup_key(setups[at])] for at in picked], dtype=np.intp),
                fixed_hours=fixed,
                hours_per_step_s=np.maximum(view.hours[picked] - fixed, 1e-12) / step_s[picked],
                usd_per_hour=view.price[picked],
                luck=luck[picked],
                aim=_aim(goal),
                limited=LIMITED_BY.get(goal.goal),
                limit=limit_of(goal) or np.inf,
                p_required=goal.p_required,
            )
        )
    return Contenders(workload=workload.name, setups=tuple(chosen), questions=tuple(questions))


def _aim(goal: Goal) -> str:
    return "usd" if goal.goal.startswith("cheapest") else "hours"


def _contending(goal: Goal, view: Outlook) -> NDArray[np.intp]:
    """Positions, the least expected objective first. A run tells the same whichever markets a cluster is of: those of
    two are left to their twins of one.
    """
    usable = np.isfinite(view.hours) & (view.hours > 0) & np.isfinite(view.usd) & (view.price > 0)
    usable &= ~np.array([setup.cluster.mixed for setup in view.setups], dtype=bool)
    what, limit = LIMITED_BY.get(goal.goal), limit_of(goal)
    meets = np.ones(len(view.hours))
    if what is not None and limit is not None:
        meets = np.mean(view.drawn(what) <= limit, axis=1)
    order = np.argsort(view.quantity(_aim(goal)), kind="stable")
    able = order[(usable & (meets >= _LEAST_CHANCE))[order]]
    safe = order[(usable & (meets >= goal.p_required))[order]]
    both = {*_one_of_each(able, view, _MOST), *_one_of_each(safe, view, _MOST_SAFE)}
    return np.array([at for at in order if at in both], dtype=np.intp)


def _one_of_each(order: NDArray[np.intp], view: Outlook, most: int) -> list[int]:
    """The first of each place, at most so many."""
    _, firsts = np.unique(view.place[order], return_index=True)
    return [int(at) for at in order[np.sort(firsts)[:most]]]
