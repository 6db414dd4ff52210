"""The few runs that settle an open choice, by the model's own uncertainty.

    E[c | p] = E[c] + K (p - E[p]),   K = S_cp (S_pp + noise)^-1

for log steps of choice set c and pilots p.

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
from .run_value import Joint
from .value_of_information import (
    Belief,
    ChoiceSet,
    Floats,
    OpenChoice,
    Places,
    aim_and_meeting,
    choices,
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
    now = _belief(joint, pd.concat([setups, candidates], ignore_index=True))
    belief, chosen = now, list[int]()
    doubted = _likeliest(question, now)
    for _ in range(min(count, len(candidates))):
        left = [place for place in range(first, len(now.mean)) if place not in chosen]
        if doubted is not None:
            value = belief.mean_shift(left)[doubted] ** 2
        else:
            value = _value(question, belief, left, question.places)
        chosen.append(left[first_most(value)])
        belief = belief.given(chosen[-1])
    steps = [chosen[: n + 1] for n in range(len(chosen))]
    assured: tuple[float, ...] = ()
    if doubted is not None:
        assured = tuple(_assured(question, now, pilots, seed=seed) for pilots in steps)
    return Pilots(
        chosen=tuple(place - first for place in chosen),
        regret=expected_regret(question, now, [], seed=seed),
        after=tuple(expected_regret(question, now, pilots, seed=seed) for pilots in steps),
        assured=assured,
    )


def _belief(joint: Joint, frame: pd.DataFrame) -> Belief:
    mean, covariance, noise = joint(frame)
    return Belief(mean=mean, covariance=covariance, noise=noise)


def _value(question: OpenChoice, belief: Belief, runs: Sequence[int], shown: Places) -> Floats:
    """Return (runs,) regret saved, or how far each moves the setups at `shown` if none saves
    any.
    """
    value = run_values([question], belief, runs).regret
    if value.any():
        return value
    return np.asarray((belief.mean_shift(runs)[shown] ** 2).mean(axis=0))


def _likeliest(question: OpenChoice, belief: Belief) -> int | None:
    """Return the place of the setup likeliest to meet the constraint, if none meets it surely."""
    mean, variance = belief.mean[question.places], belief.variance[question.places]
    meeting = aim_and_meeting(question, mean[:, None, None], variance[:, None, None])[1]
    if meeting is None or question.p_required is None or not misses(question, meeting.chance).all():
        return None
    return int(question.places[np.argmax(meeting.chance[:, 0, 0])])


def _assured(question: OpenChoice, belief: Belief, pilots: Sequence[int], *, seed: int) -> float:
    """Return the chance that some setup surely meets the constraint once `pilots` are measured."""
    _, predicted, left = _after_runs(belief, pilots, seed=seed)
    mean, variance = predicted[question.places][:, None, :], left[question.places][:, None, None]
    meeting = aim_and_meeting(question, mean, variance)[1]
    return 1.0 if meeting is None else float(np.mean(~misses(question, meeting.chance).all(axis=0)))


def expected_regret(
    question: OpenChoice, belief: Belief, pilots: Sequence[int], *, seed: int
) -> float:
    """Return the mean regret of choosing with the runs at `pilots` measured, over joint draws."""
    truth, predicted, left = _after_runs(belief, pilots, seed=seed)
    mean, variance = predicted[question.places][:, None, :], left[question.places][:, None, None]
    picks = choices(question, *aim_and_meeting(question, mean, variance))[0]
    loss = _loss(question, truth)
    return float(np.mean(loss[picks, np.arange(loss.shape[1])] - loss.min(axis=0)))


def _loss(question: OpenChoice, log_step: Floats) -> Floats:
    """Return (places, draws) losses at known step times."""
    known = np.zeros((len(question.places), 1, 1))
    found = aim_and_meeting(question, log_step[question.places][:, None, :], known)
    return np.asarray(weighed(question, *found)[:, 0, :])


def _after_runs(
    belief: Belief, pilots: Sequence[int], *, seed: int
) -> tuple[Floats, Floats, Floats]:
    """Return (n, draws) truths, (n, draws) predictions with `pilots` measured, (n,) variances."""
    picked = np.array(pilots, dtype=np.intp)
    random = np.random.default_rng(seed)
    size = len(belief.mean)
    root = np.linalg.cholesky(belief.covariance + _ROUNDING * np.eye(size))
    truth = belief.mean[:, None] + root @ random.standard_normal((size, _TRUTHS))
    noise = np.sqrt(belief.noise)[:, None] * random.standard_normal((size, _TRUTHS))
    across = belief.covariance[:, picked]
    inner = across[picked] + np.diag(belief.noise[picked] + _ROUNDING)
    weights = np.linalg.solve(inner, across.T).T if len(picked) else across
    surprise = (truth + noise)[picked] - belief.mean[picked][:, None]
    left = np.maximum(belief.variance - (weights * across).sum(axis=1), 0.0)
    return truth, belief.mean[:, None] + weights @ surprise, left
