"""Choose the few runs (pilots) that would improve an uncertain choice most.

A pilot measures y_p, the log step time of a setup p. The result also changes the expected value of
y_c, the log step time of any other setup c. S is the model's covariance of log step times:

    E[y_c | y_p] = E[y_c] + S_cp (y_p - E[y_p]) / (S_pp + noise)

Pilots are chosen one after another. Each pilot is the run that lowers the expected regret most. If
no single run lowers regret enough, the pilot is the run that changes expected log step times most.

Regret is the loss of the chosen setup minus the lowest loss of all setups. This loss is the log
objective plus a penalty for exceeding the goal's deadline or budget (`choice_rule.with_penalty`).
The choice itself follows `choice_rule.losses`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..planner.choice_rule import with_penalty
from .value_of_information import (
    Belief,
    ChoiceSet,
    Joint,
    OpenChoice,
    aim_and_meeting,
    choices,
    run_values,
)

_TRUTHS = 400  # joint draws of the step times


class Pilots(NamedTuple):
    """The runs chosen as pilots, and the expected regret that remains after them.

    Regret is the loss of the chosen setup minus the lowest loss of all setups.

    Attributes:
        chosen: positions of the pilots in the argument `candidates` of `choose_pilots`, in the
            order in which they were chosen.
        regret: the expected regret of a choice without any pilot.
        after: `after[n - 1]` is the expected regret of a choice after the first n pilots.
    """

    chosen: tuple[int, ...]
    regret: float
    after: tuple[float, ...]


def choose_pilots(
    choice_set: ChoiceSet,
    candidates: pd.DataFrame,
    joint: Joint,
    *,
    goal: str,
    count: int,
    seed: int,
) -> Pilots:
    """Choose up to `count` runs (pilots) that would improve the choice for `goal` most.

    Args:
        choice_set: the setups that compete for the workload's goals.
        candidates: a row for each setup that can be measured.
        joint: a function that takes a frame of setups and returns the mean, covariance and noise
            variance of their log step times.
        goal: the name of the goal.
        count: the maximum number of pilots.
        seed: the random seed of the simulated outcomes.
    """
    question = next(
        (candidate for candidate in choice_set.questions if candidate.goal.goal == goal), None
    )
    if question is None or not len(candidates):
        return Pilots(chosen=(), regret=0.0, after=())
    first = len(choice_set.setups)
    setups = pd.DataFrame([setup.row() for setup in choice_set.setups])
    now = belief = Belief(*joint(pd.concat([setups, candidates], ignore_index=True)))
    left, chosen = list(range(first, len(now.mean))), list[int]()
    for _ in range(min(count, len(left))):
        value = run_values([question], belief, left)[left]
        # If no single run would change the choice, two runs together may.
        if not value.any():
            value = (belief.mean_shift(left)[:, question.places] ** 2).mean(axis=1)
        chosen.append(left.pop(int(np.argmax(value.round(9)))))
        belief = belief.given(chosen[-1])
    regret, *after = simulate_regret(question, now, chosen, seed=seed)
    return Pilots(
        chosen=tuple(place - first for place in chosen), regret=regret, after=tuple(after)
    )


def simulate_regret(
    question: OpenChoice, belief: Belief, pilots: Sequence[int], *, seed: int
) -> Iterator[float]:
    """Yield the mean regret of a choice without pilots, then the mean regret after each pilot.

    Regret is the loss of the chosen setup minus the lowest loss of all setups. The mean is taken
    over joint draws of the true step times. `pilots` has the position of each pilot's setup in
    `belief`.
    """
    random, places = np.random.default_rng(seed), question.places
    truth = random.multivariate_normal(*belief[:2], _TRUTHS, method="eigh", check_valid="ignore")
    measured = random.normal(truth, np.sqrt(belief.noise))
    loss = with_penalty(question.goal, *aim_and_meeting(question, truth[:, places], np.zeros(1)))
    for place in (None, *pilots):
        if place is not None:
            belief = belief.given(place, measured[:, place])
        mean, variance = belief.mean[..., places], belief.variance[places]
        picks = choices(question, *aim_and_meeting(question, mean, variance))
        regret = loss[np.arange(_TRUTHS), picks] - loss.min(axis=1)
        yield float(regret.mean())
