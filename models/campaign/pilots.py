"""Which few runs would settle a choice that is open, and how far: by the model's own uncertainty. Buys nothing.

    E[c | p] = E[c] + K (p - E[p]),   K = S_cp (S_pp + noise)^-1      log steps of choice set c and pilots p, normal

Regret is in logs: what is chosen loses (`planner/choice_rule.py`), overshooting weighed, above the least there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..domain.numeric import first_most
from ..domain.workload import Setup
from ..planner.choice_rule import misses, weighed
from .run_value import Joint
from .value_of_information import (
    LEAST_CHANCE,
    Belief,
    ChoiceSet,
    Floats,
    Question,
    aim_and_meeting,
    choices,
    run_values,
)

_TRUTHS = 400  # joint draws of what the step times may be
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilots:
    """`chosen` are positions among the candidates, the most telling first, each given those before it.

    `regret` is what choosing now is expected to lose against the best there is, as a part; `after[n - 1]` what choosing
    with the first n pilots measured is. Where a probability is required that nobody meets the constraint with now,
    `assured[n - 1]` is the chance that somebody is known to with the first n pilots measured; it is empty elsewhere.
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
    """The `count` candidates (measurement columns) that are expected to better the choice of `goal` most.

    Where no single run would change the choice, the one that moves the choice set most: two may do what one cannot.
    Where nobody meets the constraint with the probability required, those that tell most of whoever is likeliest to.
    `joint` gives moments of log step seconds. A goal for which fewer than two contend is settled: no pilots.
    """
    questions = [one for one in choice_set.questions if one.name == goal]
    if not questions or not len(candidates):
        return Pilots(chosen=(), regret=0.0, after=())
    first = len(choice_set.setups)
    frame = pd.concat(
        [pd.DataFrame([setup.row() for setup in choice_set.setups]), candidates], ignore_index=True
    )
    mean, covariance, noise = joint(frame)
    belief = now = Belief(mean=mean, covariance=covariance, noise=noise)
    places = list(range(first, len(frame)))
    chosen: list[int] = []
    doubted = _likeliest(questions[0], now)
    for _ in range(min(count, len(places))):
        left = [place for place in places if place not in chosen]
        value = (
            run_values(questions, belief, left).regret
            if doubted is None
            else belief.mean_shift(left)[doubted] ** 2
        )
        if not value.any():
            contending = np.unique(np.concatenate([one.places for one in questions]))
            value = (belief.mean_shift(left)[contending] ** 2).mean(axis=0)
        chosen.append(left[first_most(value)])
        belief = belief.given(chosen[-1])
    steps = [chosen[: n + 1] for n in range(len(chosen))]
    return Pilots(
        chosen=tuple(one - first for one in chosen),
        regret=expected_regret(questions, now, [], seed=seed),
        after=tuple(expected_regret(questions, now, one, seed=seed) for one in steps),
        assured=()
        if doubted is None
        else tuple(_assured(questions[0], now, one, seed=seed) for one in steps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRun:
    """The run that tells most of a kind of device: position among the candidates, the chance that a cluster with that
    kind is the best there is, and the regret expected of choosing with the run measured.
    """

    kind: str
    candidate: int
    p_best: float
    after: float


def runs_by_kind(
    choice_set: ChoiceSet,
    candidates: Sequence[Setup],
    joint: Joint,
    *,
    goal: str,
    kinds: Sequence[str],
    seed: int,
) -> list[KindRun]:
    """One for each of the `kinds` (names of devices) that may yet be the best and that a candidate runs on alone.

    The likeliest to be the best come first. `joint` is as in `choose_pilots`.
    """
    questions = [one for one in choice_set.questions if one.name == goal]
    if not questions or not candidates:
        return []
    first = len(choice_set.setups)
    mean, covariance, noise = joint(
        pd.DataFrame([setup.row() for setup in (*choice_set.setups, *candidates)])
    )
    now = Belief(mean=mean, covariance=covariance, noise=noise)
    truth = _after_runs(now, [], seed=seed)[0]
    places = questions[0].places
    loss = weighed(
        questions[0],
        *aim_and_meeting(questions[0], truth[places][:, None, :], np.zeros((len(places), 1, 1))),
    )
    least = loss[:, 0, :].min(axis=0)
    found = []
    for kind in kinds:
        having = np.array(
            [kind in devices_of(choice_set.setups[place]) for place in places], dtype=bool
        )
        own = [first + at for at, setup in enumerate(candidates) if devices_of(setup) == {kind}]
        p_best = float(np.mean((loss[having] <= least).any(axis=0))) if having.any() else 0.0
        if not own or p_best < LEAST_CHANCE:
            continue
        value = run_values(questions, now, own).regret
        if not value.any():
            value = (now.mean_shift(own)[places[having]] ** 2).mean(axis=0)
        place = own[first_most(value)]
        after = expected_regret(questions, now, [place], seed=seed)
        found.append(KindRun(kind=kind, candidate=place - first, p_best=p_best, after=after))
    return sorted(found, key=lambda one: -one.p_best)


def devices_of(setup: Setup) -> set[str]:
    """Names of the devices of a setup's cluster."""
    return {offer.instance_type.device for offer in setup.cluster.members}


def _likeliest(question: Question, belief: Belief) -> int | None:
    """Place of the setup that is likeliest to meet the constraint, where none does as surely as is required."""
    mean, variance = belief.mean[question.places], belief.variance[question.places]
    meeting = aim_and_meeting(question, mean[:, None, None], variance[:, None, None])[1]
    if meeting is None or question.p_required is None or not misses(question, meeting.chance).all():
        return None
    return int(question.places[np.argmax(meeting.chance[:, 0, 0])])


def _assured(question: Question, belief: Belief, pilots: Sequence[int], *, seed: int) -> float:
    """Chance that some setup meets the constraint as surely as is required once the runs at `pilots` are known."""
    _, said, left = _after_runs(belief, pilots, seed=seed)
    places = question.places
    meeting = aim_and_meeting(question, said[places][:, None, :], left[places][:, None, None])[1]
    return 1.0 if meeting is None else float(np.mean(~misses(question, meeting.chance).all(axis=0)))


def expected_regret(
    questions: Sequence[Question], belief: Belief, pilots: Sequence[int], *, seed: int
) -> float:
    """Of the choices made once the runs at the places `pilots` are known, over joint draws of the truth."""
    truth, said, left = _after_runs(belief, pilots, seed=seed)
    return float(np.mean([_regret(one, said, left, truth) for one in questions]))


def _after_runs(
    belief: Belief, pilots: Sequence[int], *, seed: int
) -> tuple[Floats, Floats, Floats]:
    """(n, draws) truths, (n, draws) what would be expected of them once the runs at `pilots` are known, and (n,) the
    variance that is left."""
    picked = np.array(pilots, dtype=np.intp)
    random = np.random.default_rng(seed)
    root = np.linalg.cholesky(belief.covariance + _ROUNDING * np.eye(len(belief.mean)))
    truth = belief.mean[:, None] + root @ random.standard_normal((len(belief.mean), _TRUTHS))
    noise = (
        np.sqrt(belief.noise[picked])[:, None]
        * random.standard_normal((len(belief.mean), _TRUTHS))[picked]
    )
    across = belief.covariance[:, picked]
    inner = across[picked] + np.diag(belief.noise[picked] + _ROUNDING)
    gain = np.linalg.solve(inner, across.T).T if len(picked) else across
    said = belief.mean[:, None] + gain @ (truth[picked] + noise - belief.mean[picked][:, None])
    left = np.maximum(belief.variance - (gain * across).sum(axis=1), 0.0)
    return truth, said, left


def _regret(question: Question, said: Floats, left: Floats, truth: Floats) -> float:
    places = question.places
    picks = choices(
        question, *aim_and_meeting(question, said[places][:, None, :], left[places][:, None, None])
    )[0]
    loss = weighed(
        question,
        *aim_and_meeting(question, truth[places][:, None, :], np.zeros((len(places), 1, 1))),
    )
    return float(np.mean(loss[picks, 0, np.arange(loss.shape[2])] - loss.min(axis=0)[0]))
