"""The value of a measurement: by how much it is expected to better the choices of the table (knowledge gradient).

    run r, standard normal z:  mean_c -> mean_c + cov(c, r) / sqrt(var_r + noise_r) z,   var_c -> var_c - (...)^2
    value(r) = sum over goals E_z[ loss of today's choice - loss of the choice made again ],   never below 0

The choice and its loss are those of `planner/choice_rule.py`, step times being normal in logs; where a probability is
required, a choice is valued as if overshooting were weighed. Frazier, Powell and Dayanik 2009. In logs the
best setup nobody knows cancels, so that what the loss falls by is what regret falls by. Knows nothing of dollars,
launches or names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri

from ..domain.numeric import Z_90
from ..domain.setup_table import Key, setup_key
from ..domain.workload import OVERSHOOT_PRICE, Goal, Setup, Workload
from ..job.cost import JobCosts, job_costs
from ..job.job_conditions import JobConditions
from ..planner.choice_rule import Meeting, drawn_meeting, losses, normal_meeting, weighed
from ..planner.ranking import goals_of

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

_NODES = np.linspace(
    -3.0, 3.0, 21
)  # outcomes of a run that are weighed, in its own standard deviations
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()
_TELLING = 1e-5  # a run that moves no setup by more than this, in logs, tells nothing
_AT_ONCE = 400_000  # setups x runs x outcomes held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Log step seconds of setups jointly: `mean` (n,), `covariance` (n, n), `noise` (n,) variance of a run."""

    mean: Floats
    covariance: Floats
    noise: Floats

    @property
    def variance(self) -> Floats:
        """(n,) of the setups themselves, without the noise of a run."""
        return np.maximum(np.diag(self.covariance), 0.0)

    def given(self, place: int, log_step: float | None = None) -> Belief:
        """After one run at `place`: the exact conditional normal. Without its outcome the means stay as they are."""
        across = self.covariance[:, place]
        total = max(float(across[place] + self.noise[place]), 1e-12)
        moved = 0.0 if log_step is None else (log_step - float(self.mean[place])) / total
        return Belief(
            mean=self.mean + across * moved,
            covariance=self.covariance - np.outer(across, across) / total,
            noise=self.noise,
        )

    def mean_shift(self, places: Sequence[int]) -> Floats:
        """(n, places) by how far a run at each place moves each setup's mean, in logs, when it is one sd off."""
        across = self.covariance[:, places]
        return np.asarray(
            across / np.sqrt(np.maximum(self.variance[places] + self.noise[places], 1e-12))
        )

    def alike(self) -> Floats:
        """(n, n) share of what a run at the column would show that a run at the row has shown already."""
        spread = np.sqrt(np.maximum(self.variance + self.noise, 1e-12))
        correlation = self.covariance / np.outer(spread, spread)
        return np.asarray(np.clip(correlation**2, 0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One goal of one job: the setups that may be chosen, and what each would cost. Arrays have one entry a setup.

    hours = fixed_hours + hours_per_step_s x step_s;  usd = usd_per_hour x hours. `aim` and `limited` are "hours" or
    "usd" (`limited` None: no constraint); `irreducible_sd` is that of log hours once the step time is known, and
    `irreducible_mean` how far their mean then is from the log of the hours expected. `p_required` and
    `overshoot_price` are those of the goal.
    """

    name: str
    places: Places
    fixed_hours: Floats
    hours_per_step_s: Floats
    usd_per_hour: Floats
    irreducible_sd: Floats
    aim: str
    limited: str | None = None
    limit: float = np.inf
    p_required: float | None = None
    overshoot_price: float = OVERSHOOT_PRICE
    irreducible_mean: Floats | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Of each run: by how much regret is expected to fall, and with what chance the choice becomes another."""

    regret: Floats
    chance: Floats


def choice(question: Question, belief: Belief) -> int:
    """Position in the choice set of the one to take now: the least loss.

    Where a probability is required that none meets the constraint with, the likeliest to. Raises ValueError where there
    is none.
    """
    if not len(question.places):
        raise ValueError(f"{question.name}: nobody to choose from")
    mean = belief.mean[question.places]
    found = aim_and_meeting(
        question, mean[:, None, None], belief.variance[question.places][:, None, None]
    )
    return int(choices(question, *found)[0, 0])


def gain(question: Question, belief: Belief, runs: Sequence[int]) -> Gain:
    """The value of one run at each of the places `runs` for `question`; (runs,) arrays."""
    found = Gain(regret=np.zeros(len(runs)), chance=np.zeros(len(runs)))
    if len(question.places) < 2 or not len(runs):
        return found
    now = choice(question, belief)
    shift = belief.mean_shift(runs)[question.places]
    telling = np.flatnonzero(np.abs(shift).max(axis=0) > _TELLING)
    step = max(1, _AT_ONCE // (len(question.places) * len(_NODES)))
    for first in range(0, len(telling), step):
        some = telling[first : first + step]
        found.regret[some], found.chance[some] = _outcomes(question, belief, shift[:, some], now)
    return found


def _outcomes(question: Question, belief: Belief, shift: Floats, now: int) -> tuple[Floats, Floats]:
    """(runs,) gain and chance of another choice, over the outcomes of each run."""
    mean = belief.mean[question.places][:, None, None] + shift[:, :, None] * _NODES
    left = np.maximum(belief.variance[question.places][:, None] - shift**2, 0.0)[:, :, None]
    found = aim_and_meeting(question, mean, left)
    picks, loss = choices(question, *found), weighed(question, *found)
    better = loss[now] - np.take_along_axis(loss, picks[None], axis=0)[0]
    return np.maximum(better @ _WEIGHTS, 0.0), (picks != now) @ _WEIGHTS


def aim_and_meeting(
    question: Question, mean: Floats, variance: Floats
) -> tuple[Floats, Meeting | None]:
    """Log of what is aimed at by setups (axis 0), and how they keep to the constraint (None without one)."""
    tall = (slice(None), None, None)
    work = question.hours_per_step_s[tall] * np.exp(mean)
    hours = question.fixed_hours[tall] + work
    by = {"hours": np.log(hours)}
    by["usd"] = by["hours"] + np.log(question.usd_per_hour)[tall]
    if question.limited is None:
        return by[question.aim], None
    spread = np.sqrt(variance * (work / hours) ** 2 + question.irreducible_sd[tall] ** 2)
    off = np.broadcast_to(question.irreducible_mean, question.irreducible_sd.shape)[tall]
    return by[question.aim], normal_meeting(by[question.limited] + off, spread, question.limit)


def choices(question: Question, log_aim: Floats, meeting: Meeting | None) -> Places:
    """Position of the choice for each (run, outcome); ties go to the first."""
    loss = losses(question, log_aim, meeting)
    best = np.argmin(loss.round(9), axis=0)
    if meeting is None:
        return np.asarray(best, dtype=np.intp)
    none = ~np.isfinite(loss).any(axis=0)
    return np.asarray(np.where(none, np.argmax(meeting.chance, axis=0), best), dtype=np.intp)


LEAST_REGRET, LEAST_CHANCE = (
    1e-3,
    0.02,
)  # of one goal: a run below either is not expected to change its choice


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValues:
    """Of each run: the regret that all questions together are expected to lose by it, 0 where none may change.

    `chance` and `question` are those of the question that it betters most.
    """

    regret: Floats
    chance: Floats
    question: tuple[str, ...]


def run_values(questions: Sequence[Question], belief: Belief, runs: Sequence[int]) -> RunValues:
    """The value of each of `runs` (places in `belief`) for all `questions`.

    A question for which regret is expected to fall by less than 0.1 %, or whose choice changes in less than 2 % of
    outcomes, counts nothing: near twins change places for ever, and nobody gains by it.
    """
    total = np.zeros(len(runs))
    most, chance, named = np.zeros(len(runs)), np.zeros(len(runs)), np.zeros(len(runs), dtype=int)
    for number, question in enumerate(questions):
        one = gain(question, belief, runs)
        regret = np.where(
            (one.regret >= LEAST_REGRET) & (one.chance >= LEAST_CHANCE), one.regret, 0.0
        )
        total += regret
        more = regret > most
        most[more], chance[more], named[more] = regret[more], one.chance[more], number
    names = tuple(questions[at].name if most[run] > 0 else "" for run, at in enumerate(named))
    return RunValues(regret=total, chance=chance, question=names)


_OUTCOMES = 41  # quantiles of each setup's step time at which the spread that remains is looked at
_LEAST_CHANCE = 0.02  # to meet a constraint, below which nobody contends
_MOST, _MOST_SAFE = 30, 10  # setups of a goal by their objective, and those that lose least besides


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSet:
    """Distinct setups of a workload that may be chosen; the questions' places are positions among `setups`."""

    workload: str
    setups: tuple[Setup, ...]
    questions: tuple[Question, ...]


def choice_set_of(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    *,
    conditions: JobConditions | None = None,
    seed: int = 0,
) -> ChoiceSet:
    """Those of `setups` that may be chosen; `predictions` (step_s, step_low_s, step_high_s) are aligned by position.

    Of each cluster and market its best split by the goal, of these the 30 with the least expected objective and the 10
    that lose least as things are. A goal that nobody can meet asks nothing; `conditions` is as in
    `job_costs`. Raises ValueError on a goal that cannot be judged.
    """
    goals = goals_of(workload)
    if not setups:
        return ChoiceSet(workload=workload.name, setups=(), questions=())
    step_s = predictions["step_s"].to_numpy(float)
    spread = (
        np.log(
            predictions["step_high_s"].to_numpy(float) / predictions["step_low_s"].to_numpy(float)
        )
        / 2
        / Z_90
    )
    outcomes = ndtri((np.arange(_OUTCOMES) + 0.5) / _OUTCOMES)
    draws = step_s[:, None] * np.exp(spread[:, None] * outcomes)
    costs = job_costs(workload, setups, predictions, draws, job_conditions=conditions, seed=seed)
    irreducible = np.log(costs.sampled_hours / costs.hours_by_draw)
    places: dict[Key, int] = {}
    chosen: list[Setup] = []
    questions = []
    for goal in goals:
        picked = _contending(goal, costs)
        if len(picked) < 2:
            continue
        for at in picked:
            if places.setdefault(setup_key(setups[at]), len(chosen)) == len(chosen):
                chosen.append(setups[at])
        fixed = costs.conditions.startup_s[picked] / 3600
        questions.append(
            Question(
                name=goal.goal,
                places=np.array([places[setup_key(setups[at])] for at in picked], dtype=np.intp),
                fixed_hours=fixed,
                hours_per_step_s=np.maximum(costs.hours[picked] - fixed, 1e-12) / step_s[picked],
                usd_per_hour=costs.usd_per_hour[picked],
                irreducible_sd=np.std(irreducible[picked], axis=1),
                irreducible_mean=np.mean(irreducible[picked], axis=1),
                aim=goal.objective,
                limited=goal.constraint,
                limit=goal.limit or np.inf,
                p_required=goal.p_required,
                overshoot_price=goal.overshoot_price,
            )
        )
    return ChoiceSet(workload=workload.name, setups=tuple(chosen), questions=tuple(questions))


def _contending(goal: Goal, costs: JobCosts) -> NDArray[np.intp]:
    """Positions, the least expected objective first. A run tells the same whichever markets a cluster is of: those of
    two are left to their twins of one.
    """
    usable = np.isfinite(costs.hours) & (costs.hours > 0) & (costs.usd_per_hour > 0)
    usable &= ~np.array([setup.cluster.mixed for setup in costs.setups], dtype=bool)
    what, limit = goal.constraint, goal.limit
    aimed = costs.expected(goal.objective)
    meeting = None if what is None or limit is None else drawn_meeting(costs.drawn(what), limit)
    log_aim = np.log(aimed, out=np.full(len(aimed), np.inf), where=usable)
    order, by_loss = (
        np.argsort(one, kind="stable") for one in (aimed, losses(goal, log_aim, meeting))
    )
    hopeful = usable if meeting is None else usable & (meeting.chance >= _LEAST_CHANCE)
    able = order[hopeful[order]]
    safe = (
        by_loss[(usable & np.isfinite(losses(goal, log_aim, meeting)))[by_loss]]
        if len(able)
        else able
    )
    both = {*_one_of_each(able, costs, _MOST), *_one_of_each(safe, costs, _MOST_SAFE)}
    return np.array([at for at in order if at in both], dtype=np.intp)


def _one_of_each(order: NDArray[np.intp], costs: JobCosts, most: int) -> list[int]:
    """The first of each cluster, at most so many."""
    _, firsts = np.unique(costs.cluster[order], return_index=True)
    return [int(at) for at in order[np.sort(firsts)[:most]]]
