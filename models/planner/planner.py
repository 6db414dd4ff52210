"""Choose the best setups for each goal of a workload.

Planning has three stages, each with fewer candidates:

1. All candidates are enumerated, and a fast formula estimates the step time of each.
2. The model predicts the step times of the best 2,000 candidates (LOOKED).
3. The best 400 candidates (DRAWN) are ranked, with joint draws of step times from the model.

A candidate is dropped before stage 3 if its cluster cannot be launched. It is also dropped if its
strategy must be faster than DDP, but is not (compression.py). If at most 400 candidates remain, all
of them reach stage 3.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray, IntArray, to_rounding
from ..domain.setup_table import Row, runs_by_key, setup_key
from ..domain.workload import UNPLANNED, Goal, Mode, Setup, Workload
from ..job.cost import JobCosts, job_costs
from ..step_time.model import StepTimeModel
from .candidates import Candidates, Supply, enumerate_candidates
from .choice_rule import drawn_meeting, losses, normal_meeting
from .compression import strategy_notes, unproven
from .explanations import too_small
from .ranking import infeasible_row, recommend, summary

DRAWS = 400  # must be even: draws come in pairs that are symmetric about the prediction
LOOKED, DRAWN = 2000, 400
# Assumed standard deviations of log hours or log dollars. The uncertainty decides how far below a
# limit the best candidate should be, so the shortlist keeps the best candidates for each value.
_SPREADS = (0.03, 0.1, 0.3)
_OF_A_GROUP = 2  # maximum candidates of a cluster and mode for each criterion of a shortlist


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The planner's answer: the best setups for each goal, and the Pareto frontier.

    Attributes:
        rows: rows of the published table for each goal.
        frontier: rows on the Pareto frontier of expected hours and dollars, with the probability
            of keeping the first goal's limit.
        ranked: the shortlist of at most about 400 setups (DRAWN), which were ranked with joint
            draws of step times. The order is arbitrary.
        candidates: the number of setups that were compared.
    """

    rows: list[Row]
    frontier: Sequence[Row] = ()
    ranked: Sequence[Setup] = ()
    candidates: int = 0


def plan(
    workload: Workload,
    supply: Supply,
    model: StepTimeModel,
    *,
    runs: pd.DataFrame | None = None,
    top: int = 5,
    seed: int = 0,
) -> Recommendation:
    """Return the best setups for each goal of `workload` among all clusters of the supply.

    Args:
        workload: the training job with its goals and allowed modes.
        supply: the offers of machines, the maximum size of a cluster, and the modes that must
            not be chosen.
        model: predicts step times.
        runs: measurement rows, used to count how often each setup was measured.
        top: the maximum number of rows per goal. If these rows lack a kind of device, the best
            cluster of this kind gets an additional row.
        seed: the random seed of the joint draws.
    """
    goals, found = workload.goals, allowed_candidates(workload, supply, model)
    if found is None:
        why = "no cluster on offer can be launched here; more instance types would help"
        return no_answer(workload, "; ".join(supply.vetoes.values()) if supply.offers else why)
    if len(found):
        formula_s = model.formula_seconds(found.splits.arrays())
        found, best = _that_fit(found.with_hours(formula_s, workload.samples), goals, supply)
    if not len(found):
        why = f"no cluster on offer can train this workload: {found.compared()}"
        return no_answer(workload, why + too_small(workload, supply, model))
    looked = replace(found, frame=found.frame.iloc[best])
    splits = np.unique(looked.column("split"))
    arrays = found.splits.arrays(splits)
    predictions = model.predict_arrays(arrays).set_axis(splits)
    barred = unproven(model, arrays, predictions, found.splits.modes)
    step_s = np.full(len(found.splits), np.nan)  # NaN: not predicted, or may not be chosen
    step_s[splits] = predictions["step_s"].where(~barred)
    looked = looked.with_hours(step_s, workload.samples)
    drawn = shortlist(looked, goals, DRAWN)
    front = pareto_front(*(to_rounding(looked.column(name)) for name in ("hours", "usd")))
    rows = np.union1d(drawn, front)
    setups = list(looked.setups(rows))
    judged, place = np.unique(looked.column("split", rows), return_inverse=True)
    draws = model.draw_arrays(found.splits.arrays(judged), count=DRAWS, seed=seed)
    costs = job_costs(
        workload,
        setups,
        predictions.loc[looked.column("split", rows)],
        draws[place],
        job_conditions=supply.job_conditions,
        seed=seed,
    )
    published = recommend(workload, costs, top=top, clusters=found.compared())
    shown = [row for row in published if row["cluster"]]
    if shown:
        _complete(shown, workload, supply, model, pd.DataFrame() if runs is None else runs)
    return Recommendation(
        rows=published,
        frontier=_frontier(costs, np.searchsorted(rows, front), goals[0]),
        ranked=[setups[at] for at in np.searchsorted(rows, drawn).tolist()],
        candidates=len(found),
    )


def _complete(
    rows: list[Row], workload: Workload, supply: Supply, model: StepTimeModel, runs: pd.DataFrame
) -> None:
    """Add the remaining columns of the published table to the planner's `rows`, in place.

    The added columns are the number of measured runs, throughput, utilisation and memory, as far as
    they are known. A text about strategies that could replace DDP is added to the column `reason`.
    The column `setup`, which is not published, is removed.
    """
    setups = [row.pop("setup") for row in rows]
    types = (offer.instance_type for setup in setups for offer in setup.cluster.members)
    measured = runs_by_key(types, runs)
    notes = strategy_notes(setups, workload, model, supply.vetoes)
    frame = pd.DataFrame(rows)
    terms = model.field_terms(frame, frame["step_s"].to_numpy(float)).to_dict("records")
    for row, setup, note, known in zip(rows, setups, notes, terms, strict=True):
        row["measured_runs"] = measured[setup_key(setup)]
        row["reason"] = "; ".join(filter(None, [row["reason"], note]))
        row |= {str(name): value for name, value in known.items() if not math.isnan(value)}


def choosable(workload: Workload, vetoes: Collection[Mode]) -> Workload:
    """Return the workload with only the modes from which the planner chooses.

    Modes in `vetoes` are always left out. Modes with Adasum, or with a strategy in UNPLANNED (such
    as PowerSGD), are left out if the workload has other modes without a veto.
    """
    modes = [mode for mode in workload.modes if mode not in vetoes]
    # It is unknown how many steps Adasum needs to converge.
    planned = [mode for mode in modes if mode.strategy not in UNPLANNED and not mode.combined]
    return replace(workload, modes=tuple(planned or modes))


def no_answer(workload: Workload, why: str, status: str = "infeasible") -> Recommendation:
    """Return the answer if there is no candidate: a row for each goal, with the reason `why`."""
    return Recommendation(
        rows=[infeasible_row(workload, goal, why, status) for goal in workload.goals]
    )


def allowed_candidates(
    workload: Workload, supply: Supply, model: StepTimeModel
) -> Candidates | None:
    """Return every candidate of the workload in the modes from which the planner chooses.

    Returns None if the supply has no offers, or if `supply.vetoes` forbids all modes.
    """
    workload = choosable(workload, supply.vetoes)
    if not supply.offers or not workload.modes:
        return None
    return enumerate_candidates(workload, supply, model)


def candidates(workload: Workload, supply: Supply, model: StepTimeModel) -> list[Setup]:
    """Return all candidates of the workload whose clusters can be launched, as setups."""
    found = allowed_candidates(workload, supply, model)
    return [] if found is None else list(found.setups(np.arange(len(found)), supply.fits))


def _that_fit(
    found: Candidates, goals: Sequence[Goal], supply: Supply
) -> tuple[Candidates, IntArray]:
    """Select the best 2,000 candidates (LOOKED), and drop those that cannot be launched.

    `supply.fits` checks if the clusters of the selected candidates can be launched. Candidates
    whose cluster fails the check are dropped. Selection is repeated until no cluster fails.

    Returns all candidates that were not dropped, and the positions of the selected candidates.

    found: all candidates, with hours and dollars that the step-time formula estimates.
    """
    refused = 0
    while True:
        best = shortlist(found, goals, LOOKED)
        clusters, first = np.unique(found.column("cluster", best), return_index=True)
        setups = found.setups(best[first])
        unfit = [
            cluster
            for cluster, setup in zip(clusters.tolist(), setups, strict=True)
            if supply.fits(setup.cluster)
        ]
        if not unfit:
            left_out = {**found.left_out, "that cannot be launched": refused}
            return replace(found, left_out=left_out), best
        refused += len(unfit)
        found = replace(found, frame=found.frame[~found.frame["cluster"].isin(unfit)])


def shortlist(found: Candidates, goals: Sequence[Goal], count: int) -> IntArray:
    """Return the positions of about `count` candidates to look at more closely.

    If at most `count` candidates have finite hours, all of these candidates are returned. If there
    are more, the result combines the following lists:

    1. the candidates that are nearest to the Pareto frontier of hours and dollars
    2. for each goal, the candidates with the lowest loss. If the goal has a limit, the loss depends
       on the standard deviation of log hours or log dollars, which is not known yet. There is then
       one list for each of several assumed standard deviations (_SPREADS).
    3. for each goal with a limit, the near misses, which explanations mention. A near miss exceeds
       the limit, but has a better objective than every candidate that keeps the limit.
    4. for each goal and kind of device, the candidate with the lowest loss, and the candidate that
       uses the least hours or dollars

    Each of lists 1 to 3 has at most two candidates with the same cluster and mode.
    """
    by = {name: found.column(name) for name in ("hours", "usd")}
    usable = np.flatnonzero(np.isfinite(by["hours"]))
    if len(usable) <= count:
        return usable
    split = found.column("split")
    group = found.column("cluster") * len(found.splits.modes) + found.splits.mode[split]
    device = found.splits.device[split]
    share = count // (len(goals) + 1)
    picked: list[IntArray] = [_first(_above_frontier(by["hours"], by["usd"]), group, share)]
    for goal in goals:
        aim = np.log(by[goal.objective])
        scores: list[FloatArray] = [aim]
        if goal.constraint is not None:
            used = np.log(by[goal.used])
            scores = [losses(goal, aim, normal_meeting(used, sd, goal.limit)) for sd in _SPREADS]
            best = np.nanmin(np.where(np.isfinite(scores[0]), aim, np.inf))
            scores.append(np.where(aim < best, used, np.inf))
        picked += [_first(score, group, share // len(scores)) for score in scores]
        for score in (by[goal.used], scores[len(scores) // 2]):
            known = np.isfinite(score)
            best_of_kind = pd.Series(score)[known].groupby(device[known]).idxmin()
            picked.append(best_of_kind.to_numpy(np.intp))
    return np.unique(np.concatenate(picked))


def _first(score: FloatArray, group: IntArray, count: int) -> IntArray:
    """Return the positions of the lowest finite scores, the lowest first.

    At most `count` positions are returned, and at most two with the same value in `group`.
    """
    left: IntArray = np.flatnonzero(np.isfinite(score))
    if len(left) > 8 * count:
        left = left[np.argpartition(score[left], 8 * count)[: 8 * count]]
    order = left[np.argsort(score[left], kind="stable")]
    place = pd.Series(order).groupby(group[order]).cumcount().to_numpy()
    return order[place < _OF_A_GROUP][:count]


def _above_frontier(hours: FloatArray, usd: FloatArray) -> FloatArray:
    """Return a (rows,) array: how far each row is above the Pareto frontier of hours and dollars.

    The distance is log(dollars of the row / dollars of the cheapest row that is at least as fast).
    Rows on the frontier have the distance 0. If the frontier is empty, all distances are infinite.
    """
    front = pareto_front(hours, usd)
    if not len(front):
        return np.full(len(hours), np.inf)
    at = np.searchsorted(hours[front], hours, side="right") - 1
    return np.log(usd) - np.log(usd[front][at])


def pareto_front(hours: FloatArray, usd: FloatArray) -> IntArray:
    """Return the positions of the rows on the Pareto frontier, sorted by hours.

    A row is not on the frontier if another row is at least as good in both hours and dollars. Of
    equal rows, one is returned. Rows whose hours or dollars are not finite are left out.
    """
    order = np.flatnonzero(np.isfinite(hours) & np.isfinite(usd))
    order = order[np.lexsort((usd[order], hours[order]))]
    before = np.minimum.accumulate(np.append(np.inf, usd[order]))[:-1]
    return order[usd[order] < before]


def _frontier(costs: JobCosts, front: IntArray, goal: Goal) -> list[Row]:
    """Return a row for each setup on the Pareto frontier. `front` has their positions in `costs`.

    Each row has the probability of keeping the limit of `goal`, or None if `goal` has no limit.
    """
    chances = drawn_meeting(costs.drawn[goal.used][front], goal.limit).chance.tolist()
    return [
        summary(costs, at) | {"p_meets_constraint": chance if goal.constraint else None}
        for at, chance in zip(front.tolist(), chances, strict=True)
    ]
