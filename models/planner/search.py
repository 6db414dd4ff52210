"""Which candidates decide the answer: best-first by lower bounds of hours and dollars, with exact pruning.

Bounds come from the model's `least_seconds`, which no prediction undercuts; hours and dollars of a job rise with its
step time, so that theirs are bounded too. A row whose bound is worse than the cutoff is worse than the cutoff: rows are
predicted in order of their bounds until the next bound is beyond what was found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.workload import Goal, Workload
from ..job.duration import drawn_hours, expected_hours, least_startup
from .batch_split import StepModel
from .candidates import Candidates
from .enumeration import Refusal

# Rows looked at in one turn: fewer calls of the model against rows that need not have been looked at.
_TURN = 512
# Dollars and hours are sums in another order than those of `job_costs`: equal to rounding.
_SLACK = 1 + 1e-9

Accept = Callable[[IntArray], BoolArray]


def deciding(costs: CandidateCosts, goal: Goal, *, count: int) -> IntArray:
    """Rows that `ranking.recommend` needs for the goal: with them it answers as it would with all rows.

    These are the first `count` clusters by what is aimed at, of those that meet the constraint; the first `count` rows
    by what is limited, of those better than the winner, with all splits of their clusters; and where nothing meets the
    constraint, the first `count` by what it limits.
    """
    aim = goal.objective
    what, limit = goal.constraint, goal.limit
    usable = np.isfinite(costs.bound(aim))
    if what is None or limit is None:
        return first_rows(costs, aim, usable, by=costs.candidates.cluster, count=count)
    usable &= np.isfinite(costs.bound(what))
    everyone = np.arange(len(costs.candidates))

    def meets(rows: IntArray) -> BoolArray:
        met = ~costs.hopeless(rows, what, limit, goal.p_required)
        met[met] = costs.p_meets(rows[met], what, limit) >= goal.p_required
        return met

    hopeful = usable & ~costs.hopeless(everyone, what, limit, goal.p_required)
    met = first_rows(costs, aim, hopeful, by=costs.candidates.cluster, count=count, accept=meets)
    if not len(met):
        return first_rows(costs, what, usable, by=everyone, count=count)
    best = float(costs.expected(aim)[met].min())

    def better(rows: IntArray) -> BoolArray:
        return np.asarray(costs.expected(aim)[rows] < best, dtype=bool)

    tempting = first_rows(costs, what, usable & (costs.bound(aim) < best), by=everyone, count=count, accept=better)
    splits = np.flatnonzero(np.isin(costs.candidates.cluster, costs.candidates.cluster[tempting]))
    costs.look(splits)
    return np.union1d(met, splits[np.isfinite(costs.hours[splits])])


def first_rows(
    costs: CandidateCosts, aim: str, among: BoolArray, *, by: IntArray, count: int, accept: Accept | None = None
) -> IntArray:
    """Rows in order with the least expected `aim` until `count` different ones of `by` are met, and ties of the last.

    Only rows in `among` that `accept` says yes to; it is asked about rows that were looked at.
    """
    bound = np.where(among, costs.bound(aim), np.inf)
    left: IntArray = np.flatnonzero(np.isfinite(bound))
    found, cutoff = np.zeros(0, dtype=np.intp), np.inf
    while len(left):
        rows, left = _least(left, bound)
        rows, left = rows[bound[rows] <= cutoff], left if cutoff == np.inf else left[bound[left] <= cutoff]
        costs.look(rows)
        value = costs.expected(aim)[rows]
        rows = rows[np.isfinite(value) & (value <= cutoff)]
        found = np.concatenate([found, rows if accept is None else rows[accept(rows)]])
        cutoff = _cutoff(costs.expected(aim)[found], by[found], count)
        found = found[costs.expected(aim)[found] <= cutoff]
    return np.sort(found)


def frontier(costs: CandidateCosts) -> IntArray:
    """Rows that no other beats in both expected hours and dollars, by rising hours; of equal ones the first.

    The frontier of bounds where nobody has looked and of expectations elsewhere: once all on it were looked at, it is
    that of the expectations, since those of the others are no better than their bounds.
    """
    left = np.flatnonzero(np.isfinite(costs.bound("usd")))
    while True:
        looked = ~np.isnan(costs.hours[left])
        hours = np.where(looked, costs.hours[left], costs.least_hours[left])
        usd = costs.candidates.usd_per_hour[left] * hours
        seen = np.flatnonzero(looked)
        ahead = seen[undominated(hours[seen], usd[seen])]
        kept = np.flatnonzero(np.isfinite(hours) & ~_beaten(hours, usd, hours[ahead], usd[ahead]))
        left, looked, hours, usd = left[kept], looked[kept], hours[kept], usd[kept]
        here = undominated(hours, usd)
        if looked[here].all():
            return left[here]
        fresh = np.flatnonzero(~looked)
        costs.look(left[_layers(fresh, hours[fresh], usd[fresh])])


def _least(rows: IntArray, bound: FloatArray) -> tuple[IntArray, IntArray]:
    """A turn's worth of rows with the least bounds, and the others."""
    if len(rows) <= _TURN:
        return rows, rows[:0]
    order = np.argpartition(bound[rows], _TURN)
    return rows[order[:_TURN]], rows[order[_TURN:]]


def undominated(hours: FloatArray, usd: FloatArray) -> IntArray:
    """Positions that no other beats in both, by rising hours; infinite ones are never among them."""
    order = np.lexsort((np.arange(len(hours)), usd, hours))
    order = order[np.isfinite(hours[order]) & np.isfinite(usd[order])]
    least = np.minimum.accumulate(usd[order])
    before = np.concatenate([[np.inf], least[:-1]])[: len(order)]
    return order[usd[order] < before]


def _layers(positions: IntArray, hours: FloatArray, usd: FloatArray) -> IntArray:
    """The frontier of these, the frontier of the others, and so on until there is a turn's worth."""
    picked: list[IntArray] = []
    left = np.arange(len(positions))
    while len(left) and sum(len(one) for one in picked) < _TURN:
        here = undominated(hours[left], usd[left])
        picked.append(left[here])
        left = np.delete(left, here)
    return positions[np.concatenate(picked)]


def _beaten(hours: FloatArray, usd: FloatArray, front_hours: FloatArray, front_usd: FloatArray) -> BoolArray:
    """Is there one on the front (by rising hours) that is better in one and no worse in the other?"""
    if not len(front_hours):
        return np.zeros(len(hours), dtype=bool)
    at = np.searchsorted(front_hours, hours, side="right") - 1
    theirs, their_hours = front_usd[at.clip(0)], front_hours[at.clip(0)]
    return np.asarray((at >= 0) & (theirs <= usd) & ((theirs < usd) | (their_hours < hours)), dtype=bool)


def _cutoff(value: FloatArray, by: IntArray, count: int) -> float:
    """Value at which the `count`-th different one of `by` is first met; infinite where there are fewer."""
    order = np.argsort(value, kind="stable")
    firsts = np.sort(np.unique(by[order], return_index=True)[1])
    return float(value[order[firsts[count - 1]]]) * _SLACK if len(firsts) >= count else np.inf


class CandidateCosts:
    """Bounds of all rows at once; expectations and draws of those that are looked at, kept once known."""

    def __init__(
        self, workload: Workload, candidates: Candidates, *, fits: Refusal, model: StepModel, draws: int, seed: int
    ) -> None:
        """`draws` is even: a model's draws come in pairs about its prediction."""
        self.candidates = candidates
        self._fits, self._model, self._draws, self._seed = fits, model, draws, seed
        self._arrays = candidates.splits.arrays()
        self._step_hours = -(-workload.samples // np.maximum(candidates.splits.total, 1)) / 3600.0
        self._least_s = model.least_seconds(self._arrays) if len(candidates) else np.zeros(0)
        self._step_s = np.full(len(candidates.splits), np.nan)  # predicted, where one of a split's rows was looked at
        rows = slice(None)
        self.least_hours = expected_hours(self._work(rows, self._least_s), candidates.conditions(rows))
        self.hours = np.full(len(candidates), np.nan)  # expected, where they were looked at; infinite where refused
        self._drawn: dict[int, FloatArray] = {}
        self._refused: dict[int, bool] = {}

    def _work(self, rows: IntArray | slice, step_s: FloatArray) -> FloatArray:
        """(rows,) hours of work at so many seconds a step of each split."""
        split = self.candidates.split[rows]
        return np.asarray(step_s[split] * self._step_hours[split], dtype=float)

    def bound(self, what: str) -> FloatArray:
        """Expected "hours" or "usd" that no row undercuts; NaN where the price is unknown."""
        return self.least_hours if what == "hours" else self.candidates.usd_per_hour * self.least_hours

    def expected(self, what: str) -> FloatArray:
        """The same as predicted, NaN where nobody has looked."""
        return self.hours if what == "hours" else self.candidates.usd_per_hour * self.hours

    def look(self, rows: IntArray) -> None:
        """Ask the provider whether these can be had and the model how long they take."""
        fresh = rows[np.isnan(self.hours[rows])]
        splits = np.unique(self.candidates.split[fresh])
        wanted = splits[np.isnan(self._step_s[splits])]
        if len(wanted):
            self._step_s[wanted] = self._model.predict_arrays(self._arrays.take(wanted))["step_s"].to_numpy(float)
        self.hours[fresh] = expected_hours(self._work(fresh, self._step_s), self.candidates.conditions(fresh))
        self.hours[fresh[self._is_refused(fresh)]] = np.inf

    @property
    def drawn_for(self) -> int:
        """How many splits were drawn for."""
        return len(self._drawn)

    def predictions(self, rows: IntArray) -> pd.DataFrame:
        """What the model says of these rows, aligned with them."""
        return self._model.predict_arrays(self._arrays.take(self.candidates.split[rows])).reset_index(drop=True)

    def draws(self, rows: IntArray) -> FloatArray:
        """(rows, draws) step seconds."""
        splits = self.candidates.split[rows].tolist()
        wanted = np.array([one for one in dict.fromkeys(splits) if one not in self._drawn], dtype=np.intp)
        if len(wanted):
            drawn = self._model.draw_arrays(self._arrays.take(wanted), count=self._draws, seed=self._seed)
            self._drawn.update(zip(wanted.tolist(), drawn, strict=True))
        return np.array([self._drawn[one] for one in splits]).reshape(len(splits), self._draws)

    def p_meets(self, rows: IntArray, what: str, limit: float) -> FloatArray:
        """Share of joint draws of step times, start-up and interruptions that keep to the limit."""
        work = self.draws(rows) * self._step_hours[self.candidates.split[rows], None]
        expected = self._work(rows, self._step_s)
        hours = drawn_hours(work, expected, self.candidates.conditions(rows), seed=self._seed)
        value = hours if what == "hours" else self.candidates.usd_per_hour[rows, None] * hours
        return np.asarray(np.mean(value <= limit, axis=1), dtype=float)

    def hopeless(self, rows: IntArray, what: str, limit: float, p_required: float) -> BoolArray:
        """Which rows cannot keep to the limit with that probability, by what is known of their step time.

        Draws come in pairs about the prediction, and one of each pair takes no less work than predicted, whatever is
        drawn of start-up and interruptions: of those, too few start soon enough where a limit is exceeded by work and
        by the start-up that the part beyond a half keeps to.
        """
        work = self._work(rows, np.where(np.isnan(self._step_s), self._least_s, self._step_s))
        beyond = max(p_required - 0.5, 0.0)
        least = least_startup(self.candidates.conditions(rows), draws=self._draws, part=beyond) / 3600 + work
        value = least if what == "hours" else self.candidates.usd_per_hour[rows] * least
        return np.asarray((p_required > 0.5) & (value > limit * (1 + 1e-9)), dtype=bool)

    def _is_refused(self, rows: IntArray) -> BoolArray:
        clusters = self.candidates.cluster[rows].tolist()
        if self.candidates.all_fit:
            return np.zeros(len(rows), dtype=bool)
        for row, cluster in zip(rows.tolist(), clusters, strict=True):
            if cluster not in self._refused:
                self._refused[cluster] = bool(self._fits(self.candidates.setup(row).cluster))
        return np.array([self._refused[one] for one in clusters], dtype=bool)
