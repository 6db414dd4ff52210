"""The few runs that settle an open choice, by the model's own uncertainty.

    E[c | p] = E[c] + S_cp (p - E[p]) / (S_pp + noise)

for log steps of choice set c, one pilot p after the other.

Regret is in logs: the loss of the choice (`planner/choice_rule.py`, overshooting weighed) above the
least there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..domain.numeric import first_most
from ..planner.choice_rule import misses, weighed
from .value_of_information import (
    Belief,
    ChoiceSet,
    Floats,
    Joint,
    OpenChoice,
    choices,
    judged,
    run_values,
)

_TRUTHS = 400  # joint draws of the step times
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilots:
    """`chosen` are positions of candidates, the most valuable first, each given those before it.

    `regret` is that of choosing now, `after[n - 1]` with the first n pilots measured. If no setup
    meets a required probability now, `assured[n - 1]` is the chance that one then does; else empty.
    """

    chosen: tuple[int, ...]
    regret: float
    after: tuple[float, ...]
    assured: tuple[float, ...] = ()


def choose_pilots(
    choice_set: ChoiceSet,
    candidates: pd.DataFrame,
    joint: Joint,
    *,
    goal: str,
    count: int,
    seed: int,
) -> Pilots:
    """Return the `count` candidates that better the choice of `goal` most; none if it is settled.

    If no single run changes the choice, take the one that moves the choice set most: two may do
    what one cannot. If no setup meets a required probability, take those that show most of the
    likeliest.
    """
    question = next((one for one in choice_set.questions if one.name == goal), None)
    if question is None or not len(candidates):
        return Pilots(chosen=(), regret=0.0, after=())
    first = len(choice_set.setups)
    setups = pd.DataFrame([setup.row() for setup in choice_set.setups])
    now = Belief(*joint(pd.concat([setups, candidates], ignore_index=True)))
    belief, chosen = now, list[int]()
    doubted = _likeliest(question, now)
    for _ in range(min(count, len(candidates))):
        left = [place for place in range(first, len(now.mean)) if place not in chosen]
        if doubted is not None:
            value = belief.mean_shift(left)[doubted] ** 2
        else:
            value = _value(question, belief, left)
        chosen.append(left[first_most(value)])
        belief = belief.given(chosen[-1])
    steps = [chosen[: n + 1] for n in range(len(chosen))]
    regret, *after = (expected_regret(question, now, runs, seed=seed) for runs in ([], *steps))
    assured = [_assured(question, now, runs, seed=seed) for runs in steps if doubted is not None]
    return Pilots(
        chosen=tuple(place - first for place in chosen),
        regret=regret,
        after=tuple(after),
        assured=tuple(assured),
    )


def _value(question: OpenChoice, belief: Belief, runs: Sequence[int]) -> Floats:
    """Return (runs,) regret saved, or how far each moves the choice set if none saves any."""
    value = run_values([question], belief, runs).regret[runs]
    if value.any():
        return value
    return np.asarray((belief.mean_shift(runs)[question.places] ** 2).mean(axis=0))


def _likeliest(question: OpenChoice, belief: Belief) -> int | None:
    """Return the place of the setup likeliest to meet the constraint, if none meets it surely."""
    _, meeting = judged(question, belief.mean[:, None], belief.variance)
    if meeting is None or question.p_required is None or not misses(question, meeting.chance).all():
        return None
    return int(question.places[np.argmax(meeting.chance[:, 0, 0])])


def _assured(question: OpenChoice, belief: Belief, pilots: Sequence[int], *, seed: int) -> float:
    """Return the chance that some setup surely meets the constraint once `pilots` are measured."""
    _, predicted, left = _after_runs(belief, pilots, seed=seed)
    _, meeting = judged(question, predicted, left)
    return 1.0 if meeting is None else float(np.mean(~misses(question, meeting.chance).all(axis=0)))


def expected_regret(
    question: OpenChoice, belief: Belief, pilots: Sequence[int], *, seed: int
) -> float:
    """Return the mean regret of choosing with the runs at `pilots` measured, over joint draws."""
    truth, predicted, left = _after_runs(belief, pilots, seed=seed)
    picks = choices(question, *judged(question, predicted, left))
    loss = weighed(question, *judged(question, truth, np.zeros(len(truth))))[:, 0, :]
    return float(np.mean(np.take_along_axis(loss, picks, axis=0) - loss.min(axis=0)))


def _after_runs(
    belief: Belief, pilots: Sequence[int], *, seed: int
) -> tuple[Floats, Floats, Floats]:
    """Return (n, draws) truths, (n, draws) predictions with `pilots` measured, (n,) variances."""
    random = np.random.default_rng(seed)
    size = len(belief.mean)
    root = np.linalg.cholesky(belief.covariance + _ROUNDING * np.eye(size))
    truth = belief.mean[:, None] + root @ random.standard_normal((size, _TRUTHS))
    measured = truth + np.sqrt(belief.noise)[:, None] * random.standard_normal((size, _TRUTHS))
    predicted = np.repeat(belief.mean[:, None], _TRUTHS, axis=1)
    left = belief
    for place in pilots:
        total = max(left.covariance[place, place] + left.noise[place], _ROUNDING)
        weights = left.covariance[:, place] / total
        predicted = predicted + np.outer(weights, measured[place] - predicted[place])
        left = left.given(place)
    return truth, predicted, left.variance
