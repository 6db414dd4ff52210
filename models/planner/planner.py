"""Which setups answer a workload's goals, out of all that can be had: enumerate, bound, look at the best, draw, rank.

The answer is that of `ranking.recommend` over every row enumerated, found without predicting every row: `search` keeps
all that could be in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from ..domain.numeric import IntArray, to_rounding
from ..domain.workload import Goal, Mode, Setup, Workload
from ..job.cost import job_costs
from .batch_split import StepModel
from .candidates import Candidates, Supply, enumerate_candidates
from .compression import compared
from .explanations import made_to_fit, obstacle
from .ranking import Row, clusters_compared, goals_of, recommend, summary
from .search import CandidateCosts, deciding, frontier, undominated

DRAWS = 400  # even: draws come in pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows of each goal, the frontier of expected hours and dollars, and how many were considered for it.

    `candidates` setups of `clusters` clusters were enumerated, `looked_at` predicted, `drawn_for` drawn for, `ranked`
    in the end: the setups that could decide any goal.
    """

    rows: list[Row]
    frontier: list[Row]
    ranked: list[Setup]
    candidates: int
    clusters: int
    looked_at: int
    drawn_for: int


def plan(
    workload: Workload,
    supply: Supply,
    model: StepModel,
    *,
    runs: pd.DataFrame | None = None,
    top: int = 5,
    seed: int = 0,
) -> Plan:
    """What to train `workload` on, over every cluster of the supply (`compositions` says which).

    `runs` are measurement rows, for how often each setup was measured. Exact: rows and frontier are those of all
    candidates. Modes that the supply vetoes are never chosen; rows say why. Raises ValueError where the workload's
    range of batches is empty or a goal cannot be judged.
    """
    asked = workload
    workload = replace(asked, modes=tuple(one for one in asked.modes if one not in supply.vetoes))
    if not workload.modes:
        return nothing(asked, "; ".join(supply.vetoes[one] for one in asked.modes))
    goals, found = goals_of(workload), enumerate_candidates(_choosable(workload), supply, model)
    if not len(found):
        return nothing(workload, obstacle(workload, supply, model))
    costs = CandidateCosts(workload, found, fits=supply.fits, model=model, draws=DRAWS, seed=seed)
    count = clusters_compared(top)
    kept = np.unique(np.concatenate([deciding(costs, goal, count=count) for goal in goals]))
    front = _frontier(costs, goals)
    setups = [found.setup(row) for row in kept.tolist()]
    ranked = job_costs(
        workload,
        setups,
        costs.predictions(kept),
        costs.draws(kept),
        job_conditions=supply.job_conditions,
        seed=seed,
    )
    clusters = len(np.unique(found.cluster))
    rows = recommend(
        workload,
        ranked,
        runs=runs,
        top=top,
        clusters=clusters,
        more=partial(_more, workload=workload, model=model, vetoes=supply.vetoes),
    )
    if any(row["status"] == "infeasible" for row in rows):
        rows = _with_what_is_not_allowed(rows, asked, supply, model)
    return Plan(
        rows=rows,
        frontier=front,
        candidates=len(found),
        clusters=clusters,
        looked_at=int((~np.isnan(costs.hours)).sum()),
        drawn_for=costs.drawn_for,
        ranked=setups,
    )


def _choosable(workload: Workload) -> Workload:
    """Without the modes of Adasum, which are never chosen beside others (`compression.unproven`)."""
    averaging = tuple(one for one in workload.modes if not one.combined)
    return replace(workload, modes=averaging) if averaging else workload


def _more(setup: Setup, *, workload: Workload, model: StepModel, vetoes: Mapping[Mode, str]) -> str:
    """What else there is to say of a setup: what makes it fit, and whether to send something else."""
    counts = (len(setup.layout), min(setup.layout), max(setup.layout), sum(setup.layout))
    sizes = [np.array([one]) for one in counts]
    vetoed = [
        why
        for mode, why in vetoes.items()
        if mode.dense == setup.mode.dense and mode.runs_on(*sizes)[0]
    ]
    return "; ".join(
        filter(None, [*(one(setup, workload, model) for one in (made_to_fit, compared)), *vetoed])
    )


def _with_what_is_not_allowed(
    rows: Sequence[Row], workload: Workload, supply: Supply, model: StepModel
) -> list[Row]:
    """`rows`, where a goal is infeasible with the setup that would meet it and may not be chosen, and why not.

    Such are setups of modes that have to be faster than plain data parallelism: vetoed, or not surely faster.
    """
    changing = tuple(
        one for one in workload.modes if one.has_to_be_faster and one.dense in workload.modes
    )
    if not changing:
        return list(rows)
    others = plan(replace(workload, modes=changing), replace(supply, vetoes={}), model, top=1).rows
    best = {_goal_of(row): row for row in others if row["status"] == "recommended"}
    told = []
    for row in rows:
        one = best.get(_goal_of(row)) if row["status"] == "infeasible" else None
        if one is not None:
            mode = Mode(one["precision"], one["strategy"], one["switches"])
            by_seconds = f"no faster than {mode.dense.strategy} by more than its uncertainty on the same machines"
            why = supply.vetoes.get(mode, f"{mode.strategy}: {by_seconds}")
            beside = f"{one['cluster']} in {mode} would meet it and is not allowed: {why}"
            row = row | {"reason": f"{row['reason']}; {beside}"}
        told.append(row)
    return told


def _goal_of(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("goal", "constraint_hours", "constraint_usd", "p_required"))


def nothing(workload: Workload, why: str = "") -> Plan:
    """The plan where there is nothing to choose from: each goal says so, and `why` where that is known."""
    rows = recommend(
        workload, job_costs(workload, [], pd.DataFrame({"step_s": []}), np.empty((0, DRAWS)))
    )
    rows = [row | {"reason": why or row["reason"]} for row in rows]
    return Plan(
        rows=rows, frontier=[], candidates=0, clusters=0, looked_at=0, drawn_for=0, ranked=[]
    )


def candidates(workload: Workload, supply: Supply, model: StepModel) -> list[Setup]:
    """Every setup that `plan` may choose, one by one: each cluster, global batch and number of micro-steps.

    Raises ValueError where the range of batches is empty.
    """
    found = allowed(workload, supply, model)
    return [] if found is None else list(found.setups(np.arange(len(found)), supply.fits))


def allowed(workload: Workload, supply: Supply, model: StepModel) -> Candidates | None:
    """The same as arrays, clusters that do not fit among them where there are many; None where nothing is on offer or
    every mode is vetoed. Raises as `candidates`.
    """
    workload = replace(
        workload, modes=tuple(one for one in workload.modes if one not in supply.vetoes)
    )
    return (
        enumerate_candidates(workload, supply, model) if supply.offers and workload.modes else None
    )


def _frontier(costs: CandidateCosts, goals: Sequence[Goal]) -> list[Row]:
    """What no other beats in both expected hours and dollars, but for rounding; where one goal alone has a constraint,
    with the chance that it is met."""
    rows: IntArray = frontier(costs)
    rows = rows[
        undominated(to_rounding(costs.hours[rows]), to_rounding(costs.expected("usd")[rows]))
    ]
    limits = [(goal.constraint, goal.limit or 0.0) for goal in goals if goal.constraint is not None]
    chances: list[float | None] = [None] * len(rows)
    if len(limits) == 1 and len(rows):
        chances = costs.meeting(rows, *limits[0]).chance.tolist()
    figures = zip(
        rows.tolist(), costs.hours[rows], costs.expected("usd")[rows], chances, strict=True
    )
    return [
        summary(costs.candidates.setup(row), float(hours), float(usd))
        | {"p_meets_constraint": chance}
        for row, hours, usd, chance in figures
    ]
