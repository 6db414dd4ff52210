"""The rule of choice: table, campaign, pilots and judge take the setup that loses least by it.

    overshoot = E[max(0, log used - log limit)]
    loss      = log aim + overshoot_price x overshoot                       weighed: where no probability is required
    loss      = log aim where P(used <= limit) >= p_required, else infinite  strict

`aim` is dollars or hours as expected; `used` is what the constraint limits, under joint draws of step times, start-up
and interruptions. Time falls with machines as n^-e and dollars rise as n^(1 - e): a margin kept for safety costs
(1 - e) / e of itself under a deadline, but e / (1 - e) of itself under a cap, so that a probability which is cheap for
the one is ruinous for the other. A price of overshooting weighs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from ..domain.numeric import BoolArray, FloatArray

EVEN_ODDS = (
    0.5  # chance to meet below which a setup is said to miss, where no probability is required
)
_ROUNDING = 1e-12
_LEAST_SD, _ENDLESS = (
    1e-6,
    1e3,
)  # of logs: surer than any prediction; below a limit that binds nobody


class Rule(Protocol):
    """What a goal says of its constraint."""

    @property
    def p_required(self) -> float | None:
        """Probability with which the constraint must be met; None: overshooting is weighed."""

    @property
    def overshoot_price(self) -> float:
        """Logs of the aim that one log of overshooting costs."""


class Meeting(NamedTuple):
    """Chance to keep to a limit, and expected log by which it is overshot; arrays of one shape."""

    chance: FloatArray
    overshoot: FloatArray


def drawn_meeting(used: FloatArray, limit: float) -> Meeting:
    """Of `used` (..., draws), hours or dollars above zero; NaN overshoot where those are unknown."""
    return Meeting(
        np.mean(used <= limit, axis=-1), np.mean(known_meeting(used, limit).overshoot, axis=-1)
    )


def known_meeting(used: FloatArray, limit: float) -> Meeting:
    """Of `used` that is known for certain, in its shape."""
    with np.errstate(divide="ignore"):
        overshoot = np.maximum(np.log(used) - np.log(limit), 0.0)
    return Meeting(np.asarray(used <= limit, dtype=float), np.asarray(overshoot, dtype=float))


def normal_meeting(log_used: ArrayLike, sd: ArrayLike, limit: float) -> Meeting:
    """Of log hours or dollars that are normal with these means and standard deviations, which broadcast."""
    spread = np.maximum(np.asarray(sd, dtype=float), _LEAST_SD)
    beyond = np.maximum(np.asarray(log_used, dtype=float) - np.log(limit), -_ENDLESS)
    density = np.exp(-((beyond / spread) ** 2) / 2) / np.sqrt(2 * np.pi)
    overshoot = np.maximum(beyond * ndtr(beyond / spread) + spread * density, 0.0)
    return Meeting(
        np.asarray(ndtr(-beyond / spread), dtype=float), np.asarray(overshoot, dtype=float)
    )


def losses(rule: Rule, log_aim: FloatArray, meeting: Meeting | None) -> FloatArray:
    """What each setup loses, in logs of the aim: the least is chosen, and nobody whose loss is infinite.

    `meeting` is None for a goal without a constraint.
    """
    if meeting is None or rule.p_required is None:
        return weighed(rule, log_aim, meeting)
    return np.where(misses(rule, meeting.chance), np.inf, log_aim)


def weighed(rule: Rule, log_aim: FloatArray, meeting: Meeting | None) -> FloatArray:
    """The same where overshooting is weighed, whatever is required: the loss of a choice that was made."""
    return log_aim if meeting is None else log_aim + rule.overshoot_price * meeting.overshoot


def misses(rule: Rule, chance: FloatArray) -> BoolArray:
    """Is the chance to meet the constraint less than required, or, where nothing is required, than even odds?"""
    required = EVEN_ODDS if rule.p_required is None else rule.p_required
    return np.asarray(chance < required - _ROUNDING, dtype=bool)


def row_misses(row: Mapping[str, Any]) -> bool:
    """The same of a published row, a first choice too. One without a constraint or a cluster misses none."""
    chance, required = row.get("p_meets_constraint"), row.get("p_required")
    return chance is not None and bool(
        chance < (EVEN_ODDS if required is None else required) - _ROUNDING
    )
