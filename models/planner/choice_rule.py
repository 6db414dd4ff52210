"""The rule of choice of the table, the campaign, pilots and the regret ledger: the least loss wins.

    overshoot = E[max(0, log used - log limit)]
    loss      = log objective + overshoot_price x overshoot      no probability required
    loss      = log objective where P(used <= limit) >= p_required, else infinite

`used` is the limited quantity under joint draws of step times, start-up and interruptions. Time
falls with machines as n^-e and dollars rise as n^(1 - e): a safety margin costs (1 - e) / e of
itself under a deadline, but e / (1 - e) under a budget. A price of overshooting weighs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from ..domain.numeric import BoolArray, FloatArray

EVEN_ODDS = 0.5  # a choice with a smaller chance is marked, if no probability is required
_ROUNDING = 1e-12
_LEAST_SD, _FAR_BELOW = 1e-6, 1e3  # in logs


class Rule(Protocol):
    """The part of a goal, or of a campaign's question, that judges a constraint."""

    @property
    def p_required(self) -> float | None: ...

    @property
    def overshoot_price(self) -> float: ...


class Meeting(NamedTuple):
    """Probability of staying within a limit, and E[max(0, log(used / limit))]."""

    chance: FloatArray
    overshoot: FloatArray


def drawn_meeting(used: FloatArray, limit: float) -> Meeting:
    """Judge draws `used` (..., draws) of hours or dollars."""
    chance = np.mean(used <= limit, axis=-1)
    return Meeting(chance, np.mean(known_meeting(used, limit).overshoot, axis=-1))


def known_meeting(used: FloatArray, limit: float) -> Meeting:
    """Judge values that are certain, in their shape."""
    with np.errstate(divide="ignore"):
        overshoot = np.maximum(np.log(used) - np.log(limit), 0.0)
    return Meeting(np.asarray(used <= limit, dtype=float), np.asarray(overshoot, dtype=float))


def normal_meeting(log_used: ArrayLike, sd: ArrayLike, limit: float) -> Meeting:
    """Judge normal log values of these means and standard deviations, which broadcast."""
    spread = np.maximum(np.asarray(sd, dtype=float), _LEAST_SD)
    beyond = np.maximum(np.asarray(log_used, dtype=float) - np.log(limit), -_FAR_BELOW)
    density = np.exp(-((beyond / spread) ** 2) / 2) / np.sqrt(2 * np.pi)
    overshoot = np.maximum(beyond * ndtr(beyond / spread) + spread * density, 0.0)
    return Meeting(np.asarray(ndtr(-beyond / spread), dtype=float), np.asarray(overshoot))


def losses(rule: Rule, log_objective: FloatArray, meeting: Meeting | None) -> FloatArray:
    """Return each setup's loss in logs of the objective; infinite if it may not be chosen.

    `meeting` is None without a constraint.
    """
    if meeting is None or rule.p_required is None:
        return weighed(rule, log_objective, meeting)
    return np.where(misses(rule, meeting.chance), np.inf, log_objective)


def weighed(rule: Rule, log_objective: FloatArray, meeting: Meeting | None) -> FloatArray:
    """Return the loss with overshooting weighed, even if a probability is required."""
    if meeting is None:
        return log_objective
    return log_objective + rule.overshoot_price * meeting.overshoot


def misses(rule: Rule, chance: FloatArray) -> BoolArray:
    """True for a smaller chance than required, or than even odds if none is required."""
    required = EVEN_ODDS if rule.p_required is None else rule.p_required
    return np.asarray(chance < required - _ROUNDING, dtype=bool)


def row_misses(row: Mapping[str, Any]) -> bool:
    """Apply `misses` to a published row; a row without a constraint or cluster misses none."""
    chance, required = row.get("p_meets_constraint"), row.get("p_required")
    least = EVEN_ODDS if required is None else required
    return chance is not None and bool(chance < least - _ROUNDING)
