"""How good are the choices: at equal global batch, under deadlines and caps, against the best that was measured.

    cost regret = dollars of the choice / dollars of the cheapest measured setup that meets the deadline - 1
    time regret = hours of the choice / hours of the fastest measured setup that meets the cap - 1

A choice that misses its constraint is a failure, reported apart, and no regret; so is a question left unanswered. Hours
are those of the work alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..arrays import BoolArray, FloatArray

DEADLINE, CAP = "deadline", "cap"
SLACKS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)  # of a constraint, as a multiple of the least that any measured setup takes
P_REQUIRED = 0.9  # as the table's goals have it where nobody says otherwise
_NEARLY = 0.9  # of the greatest chance that any setup has, where none has enough
_TENTH, _SAMPLES = 0.1, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Measured setups of one workload at one global batch. Arrays are (setups,), `draws` is (setups, draws).

    Times are seconds a step; prices dollars an hour of the whole cluster.
    """

    measured_s: FloatArray
    predicted_s: FloatArray
    draws: FloatArray
    compute_s: FloatArray  # predicted, as if communication were free
    usd_per_hour: FloatArray
    machines: FloatArray
    devices: FloatArray
    full: BoolArray  # all devices of all machines take part


Chooser = Callable[["_Question"], int | None]  # None: no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """`limit` in seconds a step under a deadline, in dollars x seconds / hour under a cap."""

    contest: Contest
    kind: str
    limit: float

    def aim(self, step_s: FloatArray) -> FloatArray:
        """What is to be least: dollars under a deadline, time under a cap."""
        return step_s if self.kind == CAP else self._usd(step_s)

    def used(self, step_s: FloatArray) -> FloatArray:
        """What the constraint limits."""
        return self._usd(step_s) if self.kind == CAP else step_s

    def meets(self, step_s: FloatArray) -> BoolArray:
        """Where the constraint is met; the last digit does not decide."""
        return np.asarray(self.used(step_s) <= self.limit * (1 + 1e-12), dtype=bool)

    def _usd(self, step_s: FloatArray) -> FloatArray:
        price = self.contest.usd_per_hour
        return np.asarray(step_s * (price if step_s.ndim == 1 else price[:, None]), dtype=float)


def _advised(question: _Question, among: BoolArray | None = None, p_required: float = P_REQUIRED) -> int:
    """The best by prediction of those that meet the constraint with enough probability, as the table ranks them.

    Where none has it, and the table would recommend nothing, the best of those that are nearly as likely as any: the
    likeliest itself is often far worse. Where none has a chance, what uses least of what is limited.
    """
    allowed = np.ones(len(question.contest.measured_s), dtype=bool) if among is None or not among.any() else among
    chance = np.where(allowed, question.meets(question.contest.draws).mean(axis=1), -1.0)
    if chance.max() <= 0:
        return int(np.argmin(np.where(allowed, question.used(question.contest.predicted_s), np.inf)))
    enough = chance >= (p_required if chance.max() >= p_required else _NEARLY * chance.max())
    return int(np.argmin(np.where(enough, question.aim(question.contest.predicted_s), np.inf)))


def _recommended(question: _Question) -> int | None:
    """As the table: advice, or none where nothing meets the constraint with the probability that it asks."""
    chance = question.meets(question.contest.draws).mean(axis=1)
    return _advised(question) if chance.max() >= P_REQUIRED else None


def _without_communication(question: _Question) -> int:
    aim, meets = question.aim(question.contest.compute_s), question.meets(question.contest.compute_s)
    return int(np.argmin(np.where(meets, aim, np.inf) if meets.any() else question.used(question.contest.compute_s)))


def _cheapest_per_hour(question: _Question) -> int:
    return int(np.lexsort((-question.contest.devices, question.contest.usd_per_hour))[0])


def _most_machines(question: _Question) -> int:
    return int(np.lexsort((-question.contest.devices, -question.contest.machines))[0])


CHOOSERS: dict[str, Chooser] = {
    "advised": _advised,
    "recommended, or nothing": _recommended,
    "advised, even odds": lambda question: _advised(question, p_required=0.5),
    "full machines only": lambda question: _advised(question, question.contest.full),
    "ignoring communication": _without_communication,
    "cheapest per hour": _cheapest_per_hour,
    "most machines": _most_machines,
}
A_TENTH = "a random tenth measured"


def judge(contest: Contest, *, seed: int) -> pd.DataFrame:
    """A row a question, chooser and sample: kind, slack, chooser, answered, met, regret (NaN where it is not met)."""
    rows = []
    for slack, question in _questions(contest):
        true, meets = question.aim(contest.measured_s), question.meets(contest.measured_s)
        best = true[meets].min()
        for name, pick in _picks(question, seed):
            met = pick is not None and bool(meets[pick])
            regret = true[pick] / best - 1 if met else np.nan
            rows.append((question.kind, slack, name, pick is not None, met, regret))
    return pd.DataFrame(rows, columns=["kind", "slack", "chooser", "answered", "met", "regret"])


def _questions(contest: Contest) -> Iterator[tuple[float, _Question]]:
    for kind in (DEADLINE, CAP):
        least = float(_Question(contest=contest, kind=kind, limit=0.0).used(contest.measured_s).min())
        for slack in SLACKS:
            yield slack, _Question(contest=contest, kind=kind, limit=slack * least)


def _picks(question: _Question, seed: int) -> Iterator[tuple[str, int | None]]:
    for name, chooser in CHOOSERS.items():
        yield name, chooser(question)
    measured = question.contest.measured_s
    count = max(1, round(_TENTH * len(measured)))
    random = np.random.default_rng(seed)
    for _ in range(_SAMPLES):
        known = random.choice(len(measured), count, replace=False)
        meets = question.meets(measured)[known]
        value = (
            np.where(meets, question.aim(measured)[known], np.inf) if meets.any() else question.used(measured)[known]
        )
        yield A_TENTH, int(known[np.argmin(value)])


def summary(judged: pd.DataFrame) -> pd.DataFrame:
    """A row a chooser and kind of constraint: questions, per cent left unanswered, per cent of the answers that missed
    it; mean, 90th percentile and worst of the others' regret in per cent.
    """
    by = ["chooser", "kind"]
    asked = judged.groupby(by, sort=False)["answered"].agg(
        questions="size", unanswered=lambda answered: 100 * (1 - answered.mean())
    )
    grouped = judged[judged["answered"]].groupby(by, sort=False)
    told = grouped.agg(
        missed=("met", lambda met: 100 * (1 - met.mean())),
        mean=("regret", lambda regret: 100 * regret.mean()),
        p90=("regret", lambda regret: 100 * regret.quantile(0.9)),
        worst=("regret", lambda regret: 100 * regret.max()),
    )
    whole: pd.DataFrame = asked.join(told).reset_index()
    return whole
