"""Compute the loss of each setup; the planner chooses the setup with the lowest loss.

The campaign, the choice of pilot runs and the regret ledger use the same rule.

- `objective`: the quantity to minimise, dollars or hours
- `used`: the quantity that has a limit, hours or dollars. It is uncertain, because step times,
  start-up and interruptions are uncertain.
- `p_required`: the required probability of keeping the limit

If the goal states a `p_required`:

    loss      = log objective                                 if P(used <= limit) >= p_required
              = infinite                                      otherwise

If the goal states no `p_required`:

    overshoot = E[max(0, log used - log limit)]
    loss      = log objective + overshoot_price x overshoot   if P(used <= limit) >= 1/2
              = infinite                                      otherwise

Exceeding the limit by 1 % is therefore as bad as an objective that is `overshoot_price` % higher.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from ..domain.numeric import BoolArray, FloatArray
from ..domain.workload import Goal

# A choice keeps its limit with at least this probability, even if the goal requires none.
EVEN_ODDS = 0.5
_ROUNDING = 1e-12
# In logs: the smallest standard deviation and the largest distance below the limit that are used,
# so that the normal density and its argument stay finite.
_LEAST_SD, _FAR_BELOW = 1e-6, 1e3


class Meeting(NamedTuple):
    """How well a setup meets the goal's limit, which is a deadline or a budget.

    - `chance`: the probability that the job keeps the limit
    - `overshoot`: the expected excess E[max(0, log(used / limit))], where `used` is the job's hours
      or dollars
    """

    chance: FloatArray
    overshoot: FloatArray


def drawn_meeting(used: FloatArray, limit: float) -> Meeting:
    """Estimate how well a limit is met, from random draws of the used hours or dollars.

    The chance is the share of draws that are at most `limit`. The overshoot is the mean of
    max(0, log(used / limit)) over the draws.

    used: a (..., draws) array. The results have the shape (...).
    """
    return Meeting(*(np.mean(values, axis=-1) for values in known_meeting(used, limit)))


def known_meeting(used: FloatArray, limit: float) -> Meeting:
    """Return how well a limit is met if the used hours or dollars are known exactly.

    The chance of keeping `limit` is 0 or 1. The overshoot is max(0, log(used / limit)). Both have
    the shape of `used`.
    """
    with np.errstate(divide="ignore"):
        overshoot = np.maximum(np.log(used) - np.log(limit), 0.0)
    return Meeting((used <= limit).astype(float), overshoot)


def normal_meeting(log_used: ArrayLike, sd: ArrayLike, limit: float) -> Meeting:
    """Return how well a limit is met if the used hours or dollars are log-normal.

    The chance is P(used <= limit). The overshoot is E[max(0, log(used / limit))].

    log_used: the mean of the log of the used hours or dollars.
    sd: the standard deviation of the log. The two arrays are broadcast.
    """
    spread = np.maximum(sd, _LEAST_SD)
    beyond = np.maximum(np.subtract(log_used, np.log(limit)), -_FAR_BELOW)
    density = np.exp(-((beyond / spread) ** 2) / 2) / np.sqrt(2 * np.pi)
    overshoot = np.maximum(beyond * ndtr(beyond / spread) + spread * density, 0.0)
    return Meeting(ndtr(-beyond / spread), overshoot)


def losses(goal: Goal, log_objective: FloatArray, meeting: Meeting) -> FloatArray:
    """Return the loss of each setup; the planner chooses the setup with the lowest loss.

    The loss is the log of the objective. If `goal.p_required` is None, a penalty for exceeding the
    limit is added. The loss is infinite if the probability of keeping the limit is too low (see
    `misses`). `meeting` has this probability, and the expected excess over the limit.
    """
    loss = log_objective if goal.p_required else with_penalty(goal, log_objective, meeting)
    return np.where(misses(goal, meeting.chance), np.inf, loss)


def with_penalty(goal: Goal, log_objective: FloatArray, meeting: Meeting) -> FloatArray:
    """Return the log objective of each setup plus a penalty for its expected excess over the limit.

    The excess is `meeting.overshoot`. Unlike in `losses`, `goal.p_required` has no effect.
    """
    return log_objective + goal.overshoot_price * meeting.overshoot


def misses(goal: Goal, chance: FloatArray) -> BoolArray:
    """Return a mask that is True where `chance` is below the probability that the goal requires.

    `chance` is the probability of keeping the limit. A goal that states no `p_required` requires
    one half (EVEN_ODDS).
    """
    return chance < (goal.p_required or EVEN_ODDS) - _ROUNDING


def row_misses(row: Mapping[str, Any]) -> bool:
    """Return True if a published row is too unlikely to keep its deadline or budget.

    The probability must be at least the row's `p_required`. If the row has none, the probability
    must be at least one half.
    """
    chance, least = row.get("p_meets_constraint"), row.get("p_required") or EVEN_ODDS
    return chance is not None and bool(chance < least - _ROUNDING)
