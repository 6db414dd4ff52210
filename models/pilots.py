"""Which few runs would settle a choice that is open, and how far: by the model's own uncertainty. Buys nothing.

    E[c | p] = E[c] + K (p - E[p]),   K = S_cp (S_pp + noise)^-1      log steps of contenders c and pilots p, normal

Regret is in logs: objective of what is chosen, and what missing the constraint counts for, above the least there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .appraisal import Joint
from .contenders import Contenders
from .worth import MISS, Belief, Floats, Question, judged, taken, worths

_TRUTHS = 400  # joint draws of what the step times may be
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilots:
    """`chosen` are positions among the candidates, the most telling first, each given those before it.

    `regret` is what choosing now is expected to lose against the best there is, as a part; `after[n - 1]` what choosing
    with the first n pilots measured is.
    """

    chosen: tuple[int, ...]
    regret: float
    after: tuple[float, ...]


def choose_pilots(
    contenders: Contenders, candidates: pd.DataFrame, joint: Joint, *, goal: str, count: int, seed: int
) -> Pilots:
    """The `count` candidates (measurement columns) that are expected to better the choice of `goal` most.

    Where no single run would change the choice, the one that moves the contenders most: two may do what one cannot.
    `joint` gives moments of log step seconds. A goal for which fewer than two contend is settled: no pilots.
    """
    questions = [one for one in contenders.questions if one.name == goal]
    if not questions or not len(candidates):
        return Pilots(chosen=(), regret=0.0, after=())
    first = len(contenders.setups)
    frame = pd.concat([pd.DataFrame([setup.row() for setup in contenders.setups]), candidates], ignore_index=True)
    mean, covariance, noise = joint(frame)
    belief = now = Belief(mean=mean, covariance=covariance, noise=noise)
    places = list(range(first, len(frame)))
    chosen: list[int] = []
    for _ in range(min(count, len(places))):
        left = [place for place in places if place not in chosen]
        value = worths(questions, belief, left).regret
        if not value.any():
            contending = np.unique(np.concatenate([one.places for one in questions]))
            value = (belief.told(left)[contending] ** 2).mean(axis=0)
        chosen.append(left[int(np.argmax(value))])
        belief = belief.given(chosen[-1])
    after = tuple(expected_regret(questions, now, chosen[: n + 1], seed=seed) for n in range(len(chosen)))
    return Pilots(
        chosen=tuple(one - first for one in chosen),
        regret=expected_regret(questions, now, [], seed=seed),
        after=after,
    )


def expected_regret(questions: Sequence[Question], belief: Belief, pilots: Sequence[int], *, seed: int) -> float:
    """Of the choices made once the runs at the places `pilots` are known, over joint draws of the truth."""
    picked = np.array(pilots, dtype=np.intp)
    random = np.random.default_rng(seed)
    root = np.linalg.cholesky(belief.covariance + _ROUNDING * np.eye(len(belief.mean)))
    truth = belief.mean[:, None] + root @ random.standard_normal((len(belief.mean), _TRUTHS))
    noise = np.sqrt(belief.noise[picked])[:, None] * random.standard_normal((len(belief.mean), _TRUTHS))[picked]
    across = belief.covariance[:, picked]
    inner = across[picked] + np.diag(belief.noise[picked] + _ROUNDING)
    gain = np.linalg.solve(inner, across.T).T if len(picked) else across
    said = belief.mean[:, None] + gain @ (truth[picked] + noise - belief.mean[picked][:, None])
    left = np.maximum(belief.variance - (gain * across).sum(axis=1), 0.0)
    return float(np.mean([_regret(one, said, left, truth) for one in questions]))


def _regret(question: Question, said: Floats, left: Floats, truth: Floats) -> float:
    places = question.places
    picks = taken(question, *judged(question, said[places][:, None, :], left[places][:, None, None]))[0]
    objective, meets = judged(question, truth[places][:, None, :], np.zeros((len(places), 1, 1)))
    loss = (objective if meets is None else objective + MISS * (1 - meets))[:, 0, :]
    return float(np.mean(loss[picks, np.arange(loss.shape[1])] - loss.min(axis=0)))
