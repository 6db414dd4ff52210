"""Which candidates decide the answer: best-first by lower bounds of hours and dollars, with exact pruning.

Bounds come from the model's `least_seconds`, which no prediction undercuts; hours and dollars of a job rise with its
step time, so that theirs are bounded too. A row whose bound is worse than the cutoff is worse than the cutoff: rows are
predicted in order of their bounds until the next bound is beyond what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.workload import Goal, Workload
from ..job.duration import drawn_hours, expected_hours, least_startup
from .batch_split import StepModel
from .candidates import Candidates
from .choice_rule import Meeting, drawn_meeting, known_meeting, losses
from .compression import unproven
from .enumeration import Refusal

# Rows looked at in one round, and drawn for at once: fewer calls of the model against rows that need not have been.
_TURN, _AT_ONCE = 512, 128
# Dollars and hours are sums in another order than those of `job_costs`: equal to rounding.
_SLACK = 1e-9

Value = Callable[[IntArray], FloatArray]  # of rows


def deciding(costs: CandidateCosts, goal: Goal, *, count: int) -> IntArray:
    """Rows that `ranking.recommend` needs for the goal: with them it answers as it would with all rows.

    These are the first `count` clusters by what they lose; the first `count` rows by what is limited, of those with
    less of what is aimed at than the winner, with all splits of their clusters; and where none may be chosen, the first
    `count` by what it limits.
    """
    aim, what = goal.objective, goal.constraint
    chosen, loss = first_rows(
        costs,
        partial(costs.least_loss, goal),
        partial(costs.loss, goal),
        by=costs.candidates.cluster,
        count=count,
    )
    if what is None or goal.limit is None:
        return np.sort(chosen)
    usable = np.isfinite(costs.bound(aim)) & np.isfinite(costs.bound(what))
    best = float(costs.expected(aim)[chosen[np.argmin(loss)]]) if len(chosen) else np.inf

    bound = np.where(usable & (costs.bound(aim) < best), costs.bound(what), np.inf)

    def limited(rows: IntArray) -> FloatArray:
        return np.where(costs.expected(aim)[rows] < best, costs.expected(what)[rows], np.inf)

    tempting, _ = first_rows(
        costs, lambda rows: bound[rows], limited, by=np.arange(len(bound)), count=count
    )
    if not len(chosen):
        return np.sort(tempting)
    splits = np.flatnonzero(np.isin(costs.candidates.cluster, costs.candidates.cluster[tempting]))
    costs.look(splits)
    return np.union1d(chosen, splits[np.isfinite(costs.hours[splits])])


def first_rows(
    costs: CandidateCosts, least: Value, value: Value, *, by: IntArray, count: int
) -> tuple[IntArray, FloatArray]:
    """Rows with the least values until `count` different ones of `by` are met, and ties of the last; their values.

    `value` is asked about rows that were looked at, and is never below `least`, which may be asked about any and rises
    with a look. Rows without a finite one are left out.
    """
    bound = least(np.arange(len(costs.candidates)))
    left: IntArray = np.flatnonzero(np.isfinite(bound))
    found, values, cutoff = np.zeros(0, dtype=np.intp), np.zeros(0), np.inf
    while len(left):
        rows, left = _least(left, bound)
        rows, left = (
            rows[bound[rows] <= cutoff],
            left if cutoff == np.inf else left[bound[left] <= cutoff],
        )
        costs.look(rows)
        bound[rows] = least(rows)
        rows = rows[np.argsort(bound[rows], kind="stable")]
        for part in np.split(rows, range(_AT_ONCE, len(rows), _AT_ONCE)):
            near = part[np.isfinite(bound[part]) & (bound[part] <= cutoff)]
            if not len(near):
                break
            found, values = np.concatenate([found, near]), np.concatenate([values, value(near)])
            found, values = found[np.isfinite(values)], values[np.isfinite(values)]
            cutoff = _cutoff(values, by[found], count)
            found, values = found[values <= cutoff], values[values <= cutoff]
    return found, values


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
    """As many rows as one round takes, with the least bounds, and the others."""
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
    """The frontier of these, the frontier of the others, and so on until there are as many as one round takes."""
    picked: list[IntArray] = []
    left = np.arange(len(positions))
    while len(left) and sum(len(one) for one in picked) < _TURN:
        here = undominated(hours[left], usd[left])
        picked.append(left[here])
        left = np.delete(left, here)
    return positions[np.concatenate(picked)]


def _beaten(
    hours: FloatArray, usd: FloatArray, front_hours: FloatArray, front_usd: FloatArray
) -> BoolArray:
    """Is there one on the front (by rising hours) that is better in one and no worse in the other?"""
    if not len(front_hours):
        return np.zeros(len(hours), dtype=bool)
    at = np.searchsorted(front_hours, hours, side="right") - 1
    theirs, their_hours = front_usd[at.clip(0)], front_hours[at.clip(0)]
    return np.asarray(
        (at >= 0) & (theirs <= usd) & ((theirs < usd) | (their_hours < hours)), dtype=bool
    )


def _cutoff(value: FloatArray, by: IntArray, count: int) -> float:
    """Value at which the `count`-th different one of `by` is first met; infinite where there are fewer."""
    order = np.argsort(value, kind="stable")
    firsts = np.sort(np.unique(by[order], return_index=True)[1])
    if len(firsts) < count:
        return np.inf
    last = float(value[order[firsts[count - 1]]])
    return last + _SLACK * (1 + abs(last))


class CandidateCosts:
    """Bounds of all rows at once; expectations and draws of those that are looked at, kept once known."""

    def __init__(
        self,
        workload: Workload,
        candidates: Candidates,
        *,
        fits: Refusal,
        model: StepModel,
        draws: int,
        seed: int,
    ) -> None:
        """`draws` is even: a model's draws come in pairs about its prediction."""
        self.candidates = candidates
        self._fits, self._model, self._draws, self._seed = fits, model, draws, seed
        self._arrays = candidates.splits.arrays()
        self._step_hours = -(-workload.samples // np.maximum(candidates.splits.total, 1)) / 3600.0
        self._least_s = model.least_seconds(self._arrays) if len(candidates) else np.zeros(0)
        self._step_s = np.full(
            len(candidates.splits), np.nan
        )  # predicted, where one of a split's rows was looked at
        self._unproven = np.zeros(len(candidates.splits), dtype=bool)
        self._tolerated = workload.modes
        rows = slice(None)
        self.least_hours = expected_hours(
            self._work(rows, self._least_s), candidates.conditions(rows)
        )
        self.hours = np.full(
            len(candidates), np.nan
        )  # expected, where they were looked at; infinite where refused
        self._drawn: dict[int, FloatArray] = {}
        self._refused: dict[int, bool] = {}

    def _work(self, rows: IntArray | slice, step_s: FloatArray) -> FloatArray:
        """(rows,) hours of work at so many seconds a step of each split."""
        split = self.candidates.split[rows]
        return np.asarray(step_s[split] * self._step_hours[split], dtype=float)

    def bound(self, what: str) -> FloatArray:
        """Expected "hours" or "usd" that no row undercuts; NaN where the price is unknown."""
        return (
            self.least_hours if what == "hours" else self.candidates.usd_per_hour * self.least_hours
        )

    def expected(self, what: str) -> FloatArray:
        """The same as predicted, NaN where nobody has looked."""
        return self.hours if what == "hours" else self.candidates.usd_per_hour * self.hours

    def look(self, rows: IntArray) -> None:
        """Ask the provider whether these can be had and the model how long they take."""
        fresh = rows[np.isnan(self.hours[rows])]
        splits = np.unique(self.candidates.split[fresh])
        wanted = splits[np.isnan(self._step_s[splits])]
        if len(wanted):
            asked = self._arrays.take(wanted)
            predicted = self._model.predict_arrays(asked)
            self._step_s[wanted] = predicted["step_s"].to_numpy(float)
            self._unproven[wanted] = unproven(self._model, asked, predicted, self._tolerated)
        self.hours[fresh] = expected_hours(
            self._work(fresh, self._step_s), self.candidates.conditions(fresh)
        )
        self.hours[
            fresh[self._is_refused(fresh) | self._unproven[self.candidates.split[fresh]]]
        ] = np.inf

    @property
    def drawn_for(self) -> int:
        """How many splits were drawn for."""
        return len(self._drawn)

    def predictions(self, rows: IntArray) -> pd.DataFrame:
        """What the model says of these rows, aligned with them."""
        return self._model.predict_arrays(
            self._arrays.take(self.candidates.split[rows])
        ).reset_index(drop=True)

    def draws(self, rows: IntArray) -> FloatArray:
        """(rows, draws) step seconds."""
        splits = self.candidates.split[rows].tolist()
        wanted = np.array(
            [one for one in dict.fromkeys(splits) if one not in self._drawn], dtype=np.intp
        )
        if len(wanted):
            drawn = self._model.draw_arrays(
                self._arrays.take(wanted), count=self._draws, seed=self._seed
            )
            self._drawn.update(zip(wanted.tolist(), drawn, strict=True))
        return np.array([self._drawn[one] for one in splits]).reshape(len(splits), self._draws)

    def meeting(self, rows: IntArray, what: str, limit: float) -> Meeting:
        """Of joint draws of step times, start-up and interruptions: (rows,) chance to keep to the limit, overshoot."""
        work = self.draws(rows) * self._step_hours[self.candidates.split[rows], None]
        expected = self._work(rows, self._step_s)
        hours = drawn_hours(work, expected, self.candidates.conditions(rows), seed=self._seed)
        return drawn_meeting(
            hours if what == "hours" else self.candidates.usd_per_hour[rows, None] * hours, limit
        )

    def loss(self, goal: Goal, rows: IntArray) -> FloatArray:
        """(rows,) what these lose by the rule; they were looked at."""
        log_aim = np.log(self.expected(goal.objective)[rows])
        if goal.constraint is None or goal.limit is None:
            return losses(goal, log_aim, None)
        return losses(goal, log_aim, self.meeting(rows, goal.constraint, goal.limit))

    def least_loss(self, goal: Goal, rows: IntArray) -> FloatArray:
        """(rows,) what their loss does not undercut, by what is known of their step time; NaN without a price."""
        seen = self.hours[rows]
        hours = np.where(np.isnan(seen), self.least_hours[rows], seen)
        usd_per_hour = self.candidates.usd_per_hour[rows]
        log_aim = np.log(hours if goal.objective == "hours" else usd_per_hour * hours)
        if goal.constraint is None or goal.limit is None:
            return losses(goal, log_aim, None)
        if goal.p_required is None:
            least = self._least_geometric_hours(rows)
            meeting = known_meeting(
                least if goal.constraint == "hours" else usd_per_hour * least, goal.limit
            )
        else:
            hopeless = self.hopeless(rows, goal.constraint, goal.limit, goal.p_required)
            meeting = Meeting((~hopeless).astype(float), np.zeros(len(rows)))
        unpriced = np.isnan(usd_per_hour) & (goal.constraint == "usd")
        return np.where(unpriced, np.nan, losses(goal, log_aim, meeting))

    def _least_geometric_hours(self, rows: IntArray) -> FloatArray:
        """(rows,) hours above which the geometric mean of a row's draws lies.

        A job takes start-up and work at least. Draws of work come in pairs about the prediction in logs, those of
        start-up in strata about its median, and log(start-up + work) is convex in the logs of both: so is what a limit
        is overshot by, and Jensen's inequality holds for the draws themselves.
        """
        conditions = self.candidates.conditions(rows)
        startup = conditions.startup_s * np.exp(-(conditions.startup_log_sd**2) / 2) / 3600
        return np.asarray((startup + self._known_work(rows)) * (1 - _SLACK), dtype=float)

    def _known_work(self, rows: IntArray) -> FloatArray:
        """(rows,) hours of work as predicted, or the least there may be where nobody has looked."""
        return self._work(rows, np.where(np.isnan(self._step_s), self._least_s, self._step_s))

    def hopeless(self, rows: IntArray, what: str, limit: float, p_required: float) -> BoolArray:
        """Which rows cannot keep to the limit with that probability, by what is known of their step time.

        Draws come in pairs about the prediction, and one of each pair takes no less work than predicted, whatever is
        drawn of start-up and interruptions: of those, too few start soon enough where a limit is exceeded by work and
        by the start-up that the part beyond a half keeps to.
        """
        beyond = max(p_required - 0.5, 0.0)
        startup = (
            least_startup(self.candidates.conditions(rows), draws=self._draws, part=beyond) / 3600
        )
        least = startup + self._known_work(rows)
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
