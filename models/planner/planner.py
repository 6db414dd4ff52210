"""Which setups answer a workload's goals, out of all that can be had: enumerate, bound, look at the best, draw, rank.

The answer is that of `ranking.recommend` over every row enumerated, found without predicting every row: `search` keeps
all that could be in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..domain import setup_table
from ..domain.cluster import Offer
from ..domain.numeric import IntArray
from ..domain.workload import Goal, Setup, Workload
from ..job.job_conditions import Circumstances, Stated
from .batch_split import Line, global_batches
from .candidates import offered
from .enumeration import Refusal
from .explanations import obstacle
from .ranking import Row, contenders, goals_of, recommend, summary
from .search import Job, Prospects, StepModel, deciding, frontier

__all__ = ["Plan", "StepModel", "candidates", "plan", "recommend"]

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
    offers: Sequence[Offer],
    model: StepModel,
    *,
    max_hosts: int,
    fits: Refusal,
    runs: pd.DataFrame | None = None,
    top: int = 5,
    conditions: Circumstances | None = None,
    seed: int = 0,
) -> Plan:
    """What to train `workload` on, over every cluster of up to `max_hosts` machines (`compositions` says which).

    `fits` says why a cluster can never be had ("" where it can); `runs` are measurement rows, for how often each setup
    was measured; `conditions` says what start-up, checkpoints and interruptions clusters meet (None: `Stated()`).
    Exact: rows and frontier are those of all candidates. Raises ValueError where the workload's range of batches is
    empty or a goal cannot be judged.
    """
    job, goals, circumstances = Job(draws=DRAWS, seed=seed), goals_of(workload), conditions or Stated()
    totals = global_batches(workload.global_batch_least, workload.global_batch_most)

    def peak_bytes(name: str, batch: int) -> float:
        return model.peak_bytes(workload.name, name, batch)

    sold = offered(
        workload,
        offers,
        max_hosts=max_hosts,
        fits=fits,
        line=lambda name: model.compute_line(workload.name, name),
        peak_bytes=peak_bytes,
        totals=totals,
        conditions=circumstances,
    )
    if not len(sold):
        return nothing(workload, obstacle(totals, offers, fits=fits, peak_bytes=peak_bytes))
    known = Prospects(workload, sold, fits=fits, model=model, job=job)
    kept, front = _deciding(known, goals, top), _frontier(known, goals)
    setups = [sold.setup(row) for row in kept.tolist()]
    rows = recommend(
        workload,
        setups,
        known.predictions(kept),
        known.draws(kept),
        top=top,
        measured_runs=setup_table.runs_of(setups, pd.DataFrame() if runs is None else runs),
        conditions=circumstances,
        seed=seed,
        considered=sold.clusters,
    )
    return Plan(
        rows=rows,
        frontier=front,
        candidates=len(sold),
        clusters=sold.clusters,
        looked_at=int((~np.isnan(known.expected("hours"))).sum()),
        drawn_for=known.drawn_for,
        ranked=setups,
    )


def nothing(workload: Workload, why: str = "") -> Plan:
    """The plan where there is nothing to choose from: each goal says so, and `why` where that is known."""
    rows = recommend(workload, [], pd.DataFrame({"step_s": []}), np.empty((0, DRAWS)))
    rows = [row | {"reason": why or row["reason"]} for row in rows]
    return Plan(rows=rows, frontier=[], candidates=0, clusters=0, looked_at=0, drawn_for=0, ranked=[])


def candidates(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Refusal,
    line: Callable[[str], Line],
    peak_bytes: Callable[[str, int], float] | None = None,
) -> list[Setup]:
    """Every setup that `plan` considers, one by one: each cluster, global batch and number of micro-steps.

    `line` gives (a, k) of one device of an instance type; `peak_bytes` of (instance type, batch) is compared with the
    device's memory, NaN meaning unknown and allowed. Raises ValueError where the range of batches is empty.
    """
    if not offers:
        return []
    sold = offered(
        workload,
        offers,
        max_hosts=max_hosts,
        fits=fits,
        line=line,
        peak_bytes=peak_bytes,
        totals=global_batches(workload.global_batch_least, workload.global_batch_most),
    )
    setups = [sold.setup(row) for row in range(len(sold))]
    return setups if sold.all_fit else [one for one in setups if not fits(one.cluster)]


def _deciding(known: Prospects, goals: Sequence[Goal], top: int) -> IntArray:
    """What could be shown for any goal."""
    kept = np.zeros(0, dtype=np.intp)
    for goal in goals:
        kept = np.union1d(kept, deciding(known, goal, count=contenders(top)))
    return kept


def _frontier(known: Prospects, goals: Sequence[Goal]) -> list[Row]:
    """What no other beats in both expected hours and dollars; where one goal alone has a constraint, with the chance
    that it is met."""
    rows = frontier(known)
    hours, usd = known.expected("hours"), known.expected("usd")
    found = [
        summary(known.sold.setup(row), float(hours[row]), float(usd[row])) | {"p_meets_constraint": None}
        for row in rows.tolist()
    ]
    limits = [(goal.constraint, goal.limit) for goal in goals if goal.constraint is not None]
    if len(limits) == 1 and found:
        (what, limit), *_ = limits
        for row, chance in zip(found, known.chance(rows, what, limit or 0.0).tolist(), strict=True):
            row["p_meets_constraint"] = chance
    return found
