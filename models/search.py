"""Which rows decide the answer: best-first by their bounds, so that what is left out could not have been in it.

A row whose bound is worse than the cutoff is worse than the cutoff: rows are looked at in order of their bounds until
the next bound is beyond what was found. Nothing is judged by a bound alone, and nothing by chance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray
from .prospects import Prospects
from .ranking import LIMITED_BY, limit_of
from .workload import Goal

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
    aim = "usd" if goal.goal.startswith("cheapest") else "hours"
    what, limit = LIMITED_BY.get(goal.goal), limit_of(goal)
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
