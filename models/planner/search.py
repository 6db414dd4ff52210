"""Which candidates decide the answer: best-first by lower bounds of hours and dollars, with exact pruning.

Bounds come from the model's `least_seconds`, which no prediction undercuts; hours and dollars of a job rise with its
step time, so that theirs are bounded too. A row whose bound is worse than the cutoff is worse than the cutoff: rows are
predicted in order of their bounds until the next bound is beyond what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.setup_table import SetupArrays
from ..domain.workload import Goal, Workload
from ..job import duration as spot
from ..job.cost import drawn_hours_at, hours_at
from .candidates import Offered
from .enumeration import Refusal

# Rows looked at in one turn: fewer calls of the model against rows that need not have been looked at.
_TURN = 512
# Dollars and hours are sums in another order than those of `outlook`: equal to rounding.
_SLACK = 1 + 1e-9

Accept = Callable[[IntArray], BoolArray]


def deciding(known: Prospects, goal: Goal, *, count: int) -> IntArray:
    """Rows that `ranking.recommend` needs for the goal: with them it answers as it would with all rows.

    These are the first `count` clusters by what is aimed at, of those that meet the constraint; the first `count` rows
    by what is limited, of those better than the winner, with all splits of their clusters; and where nothing meets the
    constraint, the first `count` by what it limits.
    """
    aim = goal.objective
    what, limit = goal.constraint, goal.limit
    usable = np.isfinite(known.bound(aim))
    if what is None or limit is None:
        return first_rows(known, aim, usable, by=known.sold.cluster, count=count)
    usable &= np.isfinite(known.bound(what))
    everyone = np.arange(len(known.sold))

    def meets(rows: IntArray) -> BoolArray:
        met = ~known.hopeless(rows, what, limit, goal.p_required)
        met[met] = known.chance(rows[met], what, limit) >= goal.p_required
        return met

    hopeful = usable & ~known.hopeless(everyone, what, limit, goal.p_required)
    met = first_rows(known, aim, hopeful, by=known.sold.cluster, count=count, accept=meets)
    if not len(met):
        return first_rows(known, what, usable, by=everyone, count=count)
    best = float(known.expected(aim)[met].min())

    def better(rows: IntArray) -> BoolArray:
        return np.asarray(known.expected(aim)[rows] < best, dtype=bool)

    tempting = first_rows(known, what, usable & (known.bound(aim) < best), by=everyone, count=count, accept=better)
    splits = np.flatnonzero(np.isin(known.sold.cluster, known.sold.cluster[tempting]))
    known.look(splits)
    return np.union1d(met, splits[np.isfinite(known.hours[splits])])


def first_rows(
    known: Prospects, aim: str, among: BoolArray, *, by: IntArray, count: int, accept: Accept | None = None
) -> IntArray:
    """Rows in order with the least expected `aim` until `count` different ones of `by` are met, and ties of the last.

    Only rows in `among` that `accept` says yes to; it is asked about rows that were looked at.
    """
    bound = np.where(among, known.bound(aim), np.inf)
    left: IntArray = np.flatnonzero(np.isfinite(bound))
    found, cutoff = np.zeros(0, dtype=np.intp), np.inf
    while len(left):
        rows, left = _least(left, bound)
        rows, left = rows[bound[rows] <= cutoff], left if cutoff == np.inf else left[bound[left] <= cutoff]
        known.look(rows)
        value = known.expected(aim)[rows]
        rows = rows[np.isfinite(value) & (value <= cutoff)]
        found = np.concatenate([found, rows if accept is None else rows[accept(rows)]])
        cutoff = _cutoff(known.expected(aim)[found], by[found], count)
        found = found[known.expected(aim)[found] <= cutoff]
    return np.sort(found)


def frontier(known: Prospects) -> IntArray:
    """Rows that no other beats in both expected hours and dollars, by rising hours; of equal ones the first.

    The frontier of bounds where nobody has looked and of expectations elsewhere: once all on it were looked at, it is
    that of the expectations, since those of the others are no better than their bounds.
    """
    left = np.flatnonzero(np.isfinite(known.bound("usd")))
    while True:
        looked = ~np.isnan(known.hours[left])
        hours = np.where(looked, known.hours[left], known.least_hours[left])
        usd = known.sold.price[left] * hours
        seen = np.flatnonzero(looked)
        ahead = seen[undominated(hours[seen], usd[seen])]
        kept = np.flatnonzero(np.isfinite(hours) & ~_beaten(hours, usd, hours[ahead], usd[ahead]))
        left, looked, hours, usd = left[kept], looked[kept], hours[kept], usd[kept]
        here = undominated(hours, usd)
        if looked[here].all():
            return left[here]
        fresh = np.flatnonzero(~looked)
        known.look(left[_layers(fresh, hours[fresh], usd[fresh])])


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


class StepModel(Protocol):
    """What planning asks of a step-time model. Draws of a setup must not depend on what else is asked about."""

    def compute_line(self, workload: str, instance_type: str) -> tuple[float, float]:
        """(a, k): forward and backward of one device take about a + k * batch seconds."""

    def peak_bytes(self, workload: str, instance_type: str, batch: int) -> float:
        """Peak memory of one device, NaN where unknown."""

    def least_seconds(self, arrays: SetupArrays) -> FloatArray:
        """(rows,) seconds that no prediction of these setups undercuts."""

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """step_s, step_low_s, step_high_s and bottleneck by row."""

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """(rows, count) joint draws of step seconds, in pairs about the prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How many draws to take of step seconds and hours, and from which seed. Raises ValueError for an odd number."""

    draws: int
    seed: int

    def __post_init__(self) -> None:
        if self.draws % 2:
            raise ValueError(f"{self.draws} draws: they come in pairs")


class Prospects:
    """Bounds of all rows at once; expectations and draws of those that are looked at, kept once known."""

    def __init__(self, workload: Workload, sold: Offered, *, fits: Refusal, model: StepModel, job: Job) -> None:
        self.sold, self.job = sold, job
        self._fits, self._model = fits, model
        self._steps = -(-workload.samples // np.maximum(sold.shapes.total, 1))[sold.shape] / 3600.0
        self._arrays = sold.shapes.arrays()
        least = model.least_seconds(self._arrays)[sold.shape] if len(sold) else np.zeros(0)
        self._least_work, self._work = least * self._steps, np.full(len(sold), np.nan)
        self.least_hours = hours_at(self._least_work, sold.conditions(slice(None)))
        self.hours = np.full(len(sold), np.nan)  # expected, where they were looked at; infinite where refused
        self._predicted: dict[int, int] = {}  # shape -> row of `_predictions`
        self._predictions: list[pd.DataFrame] = []
        self._drawn: dict[int, FloatArray] = {}
        self._refused: dict[int, bool] = {}

    def bound(self, what: str) -> FloatArray:
        """Expected "hours" or "usd" that no row undercuts; NaN where the price is unknown."""
        return self.least_hours if what == "hours" else self.sold.price * self.least_hours

    def expected(self, what: str) -> FloatArray:
        """The same as predicted, NaN where nobody has looked."""
        return self.hours if what == "hours" else self.sold.price * self.hours

    def look(self, rows: IntArray) -> None:
        """Ask the provider whether these can be had and the model how long they take."""
        fresh = rows[np.isnan(self.hours[rows])]
        shapes = np.unique(self.sold.shape[fresh])
        wanted = shapes[[one not in self._predicted for one in shapes.tolist()]]
        if len(wanted):
            first = len(self._predicted)
            self._predicted.update({one: first + at for at, one in enumerate(wanted.tolist())})
            self._predictions.append(self._model.predict_arrays(self._arrays.take(wanted)))
        step_s = self.predictions(fresh)["step_s"].to_numpy(float) if len(fresh) else np.zeros(0)
        self._work[fresh] = step_s * self._steps[fresh]
        self.hours[fresh] = hours_at(self._work[fresh], self.sold.conditions(fresh))
        self.hours[fresh[self._is_refused(fresh)]] = np.inf

    @property
    def drawn_for(self) -> int:
        """How many shapes were drawn for."""
        return len(self._drawn)

    def predictions(self, rows: IntArray) -> pd.DataFrame:
        """What the model said of rows that were looked at, aligned with them."""
        if len(self._predictions) > 1:
            self._predictions = [pd.concat(self._predictions, ignore_index=True)]
        places = [self._predicted[one] for one in self.sold.shape[rows].tolist()]
        return self._predictions[0].iloc[places].reset_index(drop=True)

    def draws(self, rows: IntArray) -> FloatArray:
        """(rows, draws) step seconds."""
        shapes = self.sold.shape[rows].tolist()
        wanted = np.array([one for one in dict.fromkeys(shapes) if one not in self._drawn], dtype=np.intp)
        if len(wanted):
            drawn = self._model.draw_arrays(self._arrays.take(wanted), count=self.job.draws, seed=self.job.seed)
            self._drawn.update(zip(wanted.tolist(), drawn, strict=True))
        return np.array([self._drawn[one] for one in shapes]).reshape(len(shapes), self.job.draws)

    def chance(self, rows: IntArray, what: str, limit: float) -> FloatArray:
        """Share of joint draws of step times, start-up and interruptions that keep to the limit."""
        work = self.draws(rows) * self._steps[rows, None]
        hours = drawn_hours_at(work, self._work[rows], self.sold.conditions(rows), seed=self.job.seed)
        value = hours if what == "hours" else self.sold.price[rows, None] * hours
        return np.asarray(np.mean(value <= limit, axis=1), dtype=float)

    def hopeless(self, rows: IntArray, what: str, limit: float, p_required: float) -> BoolArray:
        """Which rows cannot keep to the limit with that probability, by what is known of their step time.

        Draws come in pairs about the prediction, and one of each pair takes no less work than predicted, whatever is
        drawn of start-up and interruptions: of those, too few start soon enough where a limit is exceeded by work and
        by the start-up that the part beyond a half keeps to.
        """
        work = np.where(np.isnan(self._work[rows]), self._least_work[rows], self._work[rows])
        conditions = self.sold.conditions(rows)
        beyond = max(p_required - 0.5, 0.0)
        startup_s = spot.drawn_startup(
            conditions.startup_s, conditions.startup_log_sd, draws=self.job.draws, part=beyond
        )
        least = startup_s / 3600 + work
        value = least if what == "hours" else self.sold.price[rows] * least
        return np.asarray((p_required > 0.5) & (value > limit * (1 + 1e-9)), dtype=bool)

    def _is_refused(self, rows: IntArray) -> BoolArray:
        if self.sold.all_fit:
            return np.zeros(len(rows), dtype=bool)
        for row, cluster in zip(rows.tolist(), self.sold.cluster[rows].tolist(), strict=True):
            if cluster not in self._refused:
                self._refused[cluster] = bool(self._fits(self.sold.setup(row).cluster))
        return np.array([self._refused[one] for one in self.sold.cluster[rows].tolist()], dtype=bool)
