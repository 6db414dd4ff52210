"""Compute how much a run is expected to improve the published choices (knowledge gradient).

A run r measures the log step time of a setup. Log step times are jointly normal, so the result also
changes the mean log step time of every other setup c. The result is z standard deviations above its
mean, and z is a standard normal variable.

    mean_c   -> mean_c + z cov(c, r) / sqrt(var_r + noise_r)
    value(r) = sum over goals E_z[ loss of today's choice - loss of the choice after r ] >= 0

`choice_rule.losses` determines the choice. The loss in value(r) is `choice_rule.with_penalty`: the
log objective plus a penalty for exceeding the goal's limit (a deadline or a budget).

Regret is the loss of the choice minus the loss of the best setup. A run can change the choice, but
not the best setup. The expected regret and the expected loss of the choice therefore decrease by
the same amount (Frazier, Powell and Dayanik 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import ndtri

from ..domain.numeric import Z_90, FloatArray, IntArray
from ..domain.workload import Goal, Setup, Workload
from ..job.cost import JobCosts, job_costs
from ..job.job_conditions import STATED, JobConditions
from ..planner.choice_rule import Meeting, drawn_meeting, losses, normal_meeting, with_penalty
from ..planner.ranking import best_of_each

# Maps n setups to mean (n,), covariance (n, n) and noise (n,) of log step seconds.
Joint = Callable[[pd.DataFrame], tuple[FloatArray, FloatArray, FloatArray]]

_NODES = np.linspace(-3.0, 3.0, 21)  # outcomes of a run, in standard deviations from its mean
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()
# A run has no value for a goal if it lowers regret by less than LEAST_REGRET, or if its chance to
# change the choice is below LEAST_CHANCE. Without these limits, Srift would keep buying runs that
# compare nearly equal setups. A setup is also ignored if it keeps the goal's limit with a chance
# below LEAST_CHANCE.
LEAST_REGRET, LEAST_CHANCE = 1e-3, 0.02
_OUTCOMES = 41  # number of quantiles of a setup's step time for which its hours are computed
_MOST, _MOST_SAFE = 30, 10  # maximum setups per goal with the best objective, and the lowest loss


class Belief(NamedTuple):
    """A joint normal distribution of the log step seconds of n setups.

    `mean` is an (n,) array. After simulated runs, it is a (draws, n) array, because each drawn
    result leads to another mean. `covariance` is an (n, n) array. `noise` is an (n,) array: the
    variance of a measured log step time around the setup's true value.
    """

    mean: FloatArray
    covariance: FloatArray
    noise: FloatArray

    @property
    def variance(self) -> FloatArray:
        return np.maximum(np.diag(self.covariance), 0.0)

    def given(self, place: int, log_step: float | FloatArray | None = None) -> Belief:
        """Return the distribution after a run of the setup at position `place`.

        `log_step` is the measured log step time. If it is None (not measured yet), only the
        covariance changes. If it is a (draws,) array of simulated results, the mean becomes a
        (draws, n) array.
        """
        across = self.covariance[place]
        total = self.outcome_sd[place] ** 2
        moved = 0.0 if log_step is None else (log_step - self.mean[..., place]) / total
        covariance = self.covariance - np.outer(across, across) / total
        return Belief(self.mean + np.multiply.outer(moved, across), covariance, self.noise)

    @property
    def outcome_sd(self) -> FloatArray:
        """An (n,) array: the standard deviation of the measured log step time of each setup."""
        return np.sqrt(np.maximum(self.variance + self.noise, 1e-12))

    def mean_shift(self, places: Sequence[int]) -> FloatArray:
        """Return a (places, n) array: how much a run changes the mean log step time of each setup.

        Row j is for a run of the setup at position `places[j]`. The run is assumed to measure a log
        step time that is one standard deviation (`outcome_sd`) above its mean.
        """
        return self.covariance[places] / self.outcome_sd[places, None]


class OpenChoice(NamedTuple):
    """A goal of a workload, and the setups that compete for this goal.

    Each array has an entry per setup. If a step takes `step_s` seconds, the whole job has these
    expected hours and dollars:

        hours = fixed_hours + hours_per_step_s x step_s
        usd   = usd_per_hour x hours + download_usd

    Start-up and interruptions vary. The hours are therefore uncertain even if the step time is
    known: log(hours / expected hours) has the mean `irreducible_mean` and the standard deviation
    `irreducible_sd`.

    `places` has the positions of the setups in a `Belief`.
    """

    goal: Goal
    places: IntArray
    fixed_hours: FloatArray
    hours_per_step_s: FloatArray
    usd_per_hour: FloatArray
    download_usd: FloatArray
    irreducible_sd: FloatArray
    irreducible_mean: FloatArray


def choice(question: OpenChoice, belief: Belief) -> int:
    """Return the best setup according to `belief`, as an index into `question.places`.

    The best setup has the lowest finite loss. If no loss is finite, the setup that is most likely
    to keep the goal's limit is the best.
    """
    mean, variance = belief.mean[question.places], belief.variance[question.places]
    return int(choices(question, *aim_and_meeting(question, mean, variance)))


def gain(
    question: OpenChoice, belief: Belief, runs: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """Return, for each run, the expected decrease of regret and the chance of a changed choice.

    Both results are (runs,) arrays. `runs` has the position in `belief` of each run's setup.
    """
    now = choice(question, belief)
    shift = belief.mean_shift(runs)[:, None, question.places]
    mean = belief.mean[question.places] + shift * _NODES[:, None]
    variance = np.maximum(belief.variance[question.places] - shift**2, 0.0)
    found = aim_and_meeting(question, mean, variance)
    picks, loss = choices(question, *found), with_penalty(question.goal, *found)
    saved = loss[..., now] - np.take_along_axis(loss, picks[..., None], axis=-1)[..., 0]
    return np.maximum(saved @ _WEIGHTS, 0.0), (picks != now) @ _WEIGHTS


def aim_and_meeting(
    question: OpenChoice, mean: FloatArray, variance: FloatArray
) -> tuple[FloatArray, Meeting]:
    """Return the log of each setup's objective, and how likely the setup keeps the goal's limit.

    The objective is the job's expected hours or dollars, whichever the goal minimises. The
    `Meeting` has the probability of keeping the limit and the expected excess over the limit.

    mean, variance: the mean and the variance of log step seconds. The two arrays are broadcast to
        (..., setups). The results have the same shape.
    """
    goal = question.goal
    work = question.hours_per_step_s * np.exp(mean)
    hours = question.fixed_hours + work
    usd = hours * question.usd_per_hour + question.download_usd
    logs = {"hours": np.log(hours), "usd": np.log(usd)}
    spread = np.sqrt(variance * (work / hours) ** 2 + question.irreducible_sd**2)
    log_used = logs[goal.used] + question.irreducible_mean
    return logs[goal.objective], normal_meeting(log_used, spread, goal.limit)


def choices(question: OpenChoice, log_aim: FloatArray, meeting: Meeting) -> IntArray:
    """Return the chosen setup as an index into `question.places`, in an array of shape (...).

    The setup with the lowest finite loss is chosen (see `choice_rule.losses`). If no loss is
    finite, the setup that is most likely to keep the goal's limit is chosen.

    log_aim: (..., setups) logs of the job's expected hours or dollars, whichever the goal
        minimises.
    meeting: (..., setups) the probability of keeping the limit, and the expected excess over it.
    """
    loss = losses(question.goal, log_aim, meeting)
    cheapest, safest = loss.round(9).argmin(axis=-1), meeting.chance.argmax(axis=-1)
    best: IntArray = np.where(np.isfinite(loss).any(axis=-1), cheapest, safest)
    return best


def run_values(questions: Sequence[OpenChoice], belief: Belief, runs: Sequence[int]) -> FloatArray:
    """Return an (n,) array: how much a run of each of the n setups in `belief` would lower regret.

    The decrease is summed over `questions`. A question adds 0 in two cases:

    - The decrease is below 0.001 (LEAST_REGRET), which is 0.1 % of the objective.
    - The probability that the run changes the choice is below 2 % (LEAST_CHANCE).

    runs: the positions of the setups to compute. All other setups get 0.
    """
    saved = np.zeros(len(belief.mean))
    for question in questions:
        regret, chance = gain(question, belief, runs)
        saved[runs] += np.where((regret < LEAST_REGRET) | (chance < LEAST_CHANCE), 0.0, regret)
    return saved


class ChoiceSet(NamedTuple):
    """The goals of a workload, and the setups that compete for them.

    `questions` has an OpenChoice for each goal. `OpenChoice.places` has positions in `setups`.
    """

    setups: tuple[Setup, ...]
    questions: tuple[OpenChoice, ...]


def choice_set_of(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    *,
    conditions: JobConditions = STATED,
) -> ChoiceSet:
    """Return the setups of `workload` that are good enough to compete for one of its goals.

    These setups compete for a goal:

    - up to 30 setups with the lowest expected objective (hours or dollars)
    - up to 10 setups with the lowest loss (see `planner/choice_rule.py`)

    Each of the two lists has at most one setup per cluster. A goal is left out if fewer than two
    setups compete for it.

    predictions: predicted step times, with a row for each of `setups` in the same order.
    conditions: start-up, checkpoint and interruption models.
    """
    columns = predictions[["step_s", "step_low_s", "step_high_s"]].to_numpy(float)
    step_s, low_s, high_s = columns.T
    sd = np.log(high_s / low_s) / 2 / Z_90
    outcomes = ndtri((np.arange(_OUTCOMES) + 0.5) / _OUTCOMES)
    draws = step_s[:, None] * np.exp(sd[:, None] * outcomes)
    costs = job_costs(workload, setups, predictions, draws, job_conditions=conditions)
    irreducible = np.log(costs.drawn["hours"] / costs.expected_by_draw["hours"])
    fixed = costs.conditions.startup_s / 3600
    variable = np.maximum(costs.expected["hours"] - fixed, 1e-12)
    contending = {goal: _contenders(goal, costs) for goal in workload.goals}
    contending = {goal: picked for goal, picked in contending.items() if len(picked) > 1}
    chosen = sorted(set().union(*contending.values()))
    questions = [
        OpenChoice(
            goal=goal,
            places=np.searchsorted(chosen, picked),
            fixed_hours=fixed[picked],
            hours_per_step_s=variable[picked] / step_s[picked],
            usd_per_hour=costs.usd_per_hour[picked],
            download_usd=costs.download_usd[picked],
            irreducible_sd=np.std(irreducible[picked], axis=1),
            irreducible_mean=np.mean(irreducible[picked], axis=1),
        )
        for goal, picked in contending.items()
    ]
    setups = tuple(setups[at] for at in chosen)
    return ChoiceSet(setups=setups, questions=tuple(questions))


def _contenders(goal: Goal, costs: JobCosts) -> IntArray:
    """Return the positions of the setups that compete for `goal`, in ascending order.

    `choice_set_of` describes the selection. A setup whose expected hours or dollars are unknown is
    not selected. A setup is also not selected if it keeps the goal's limit with a probability below
    2 % (LEAST_CHANCE).
    """
    aim = costs.expected[goal.objective]
    meeting = drawn_meeting(costs.drawn[goal.used], goal.limit)
    hopeful = np.isfinite(aim) & (meeting.chance >= LEAST_CHANCE)
    loss = losses(goal, np.log(aim), meeting)  # not finite if a price is unknown
    cheapest, safest = np.argsort(aim, kind="stable"), np.argsort(loss, kind="stable")
    cheapest = best_of_each(costs.cluster, cheapest[hopeful[cheapest]])[:_MOST]
    safest = best_of_each(costs.cluster, safest[np.isfinite(loss[safest])])[:_MOST_SAFE]
    return np.union1d(cheapest, safest)
