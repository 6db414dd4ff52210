"""Which setup a workload should get for each goal: hours, dollars, chances, order. Why it is so stands in explain.py.

p_meets = share of joint draws (of step times and of interruptions) that meet the constraint
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import explain, spot
from .conditions import Learned
from .outlook import Floats, Outlook, outlook
from .workload import GOALS, Goal, Setup, Workload, joined

Row = dict[str, Any]

# Goal -> what its constraint limits.
LIMITED_BY = {"cheapest_within_deadline": "hours", "fastest_within_budget": "usd"}
COLUMNS = (
    *("workload", "samples", "global_batch", "goal", "constraint_hours", "constraint_usd", "p_required", "rank"),
    *("status", "cluster", "cluster_offers", "layout", "batch_per_device", "accumulation_steps", "strategy"),
    *("precision", "region", "step_s", "step_low_s", "step_high_s", "samples_per_s", "hours", "hours_p90", "usd"),
    *("usd_p90", "usd_per_million_samples", "p_meets_constraint", "p_best", "bottleneck", "measured_runs", "reason"),
)


def recommend(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    step_draws: Floats,
    *,
    top: int = 5,
    measured_runs: Sequence[int] | None = None,
    startup_s: float = spot.STARTUP_S,
    replacement_s: float = spot.REPLACEMENT_S,
    checkpoint_s: float | None = None,
    learned: Learned | None = None,
    seed: int = 0,
) -> list[Row]:
    """Rows of the published table that planning decides, for each goal of `workload` and for "cheapest" and "fastest".

    `predictions` (columns of StepTimeModel.predict), `step_draws` (setups, draws; seconds, joint) and `measured_runs`
    are aligned with `setups` by position. Up to `top` clusters a goal, each with its best split, ranked from 1:
    "recommended", then "alternative", then "misses_constraint" for tempting ones. A goal that nothing meets has one
    row of status "infeasible", which names no cluster but says what would make it feasible. Unknown prices give None.
    `learned`, where given, says what start-up, checkpoints and interruptions each cluster meets; it then stands for the
    three seconds and the offers' hazards.
    Raises ValueError where the inputs are not aligned, a goal is unknown, or a goal lacks its constraint.
    """
    draws = np.asarray(step_draws, dtype=float)
    runs = list(measured_runs) if measured_runs is not None else [0] * len(setups)
    if not (len(setups) == len(predictions) == draws.shape[0] == len(runs)):
        raise ValueError(
            f"{len(setups)} setups, {len(predictions)} predictions, {draws.shape[0]} draws, {len(runs)} counts of runs:"
            " one of each a setup"
        )
    view = outlook(
        workload,
        setups,
        predictions.reset_index(drop=True),
        draws,
        measured_runs=runs,
        startup_s=startup_s,
        replacement_s=replacement_s,
        checkpoint_s=checkpoint_s,
        learned=learned,
        seed=seed,
    )
    return [row for goal in _goals(workload) for row in _rank(workload, goal, view, top)]


def _goals(workload: Workload) -> list[Goal]:
    """The workload's goals, and the two that every workload has. Raises ValueError on one that cannot be judged."""
    stated = list(workload.goals)
    for goal in stated:
        if goal.goal not in GOALS:
            raise ValueError(f"{workload.name}: goal {goal.goal!r} is none of {', '.join(GOALS)}")
        if goal.goal in LIMITED_BY and _limit(goal) is None:
            raise ValueError(f"{workload.name}: goal {goal.goal!r} needs {LIMITED_BY[goal.goal]}")
    names = {goal.goal for goal in stated}
    return stated + [Goal(goal=name) for name in ("cheapest", "fastest") if name not in names]


def _limit(goal: Goal) -> float | None:
    what = LIMITED_BY.get(goal.goal)
    return None if what is None else goal.hours if what == "hours" else goal.usd


def _rank(workload: Workload, goal: Goal, view: Outlook, top: int) -> list[Row]:
    """The rows of one goal."""
    aim = "usd" if goal.goal.startswith("cheapest") else "hours"
    other = "hours" if aim == "usd" else "usd"
    what, limit = LIMITED_BY.get(goal.goal), _limit(goal)
    usable = np.isfinite(view.hours) & (view.hours > 0) & np.isfinite(view.quantity(aim))
    p_meets: Floats | None = None
    if what is not None and limit is not None:
        usable &= np.isfinite(view.quantity(what))
        p_meets = np.mean(view.drawn(what) <= limit, axis=1)
    feasible = usable if p_meets is None else usable & (p_meets >= goal.p_required)
    order = np.lexsort((view.quantity(other), view.quantity(aim)))  # NaN sorts last
    meeting = _best_variants(order[feasible[order]], view.place)
    if not meeting:
        return [_infeasible(workload, goal, view, usable, what)]
    p_best = _chance_of_best(view.expected_by_draw(aim)[meeting])
    tempting: list[int] = []
    if p_meets is not None:
        better = usable & ~feasible & (view.quantity(aim) < view.quantity(aim)[meeting[0]])
        better &= ~np.isin(view.place, view.place[meeting])
        closest = np.lexsort((view.quantity(aim), -p_meets))
        tempting = _best_variants(closest[better[closest]], view.place)[: max(1, top // 4)]
    shown = meeting[: max(1, top - len(tempting))]
    comparison = explain.Comparison(goal=goal, aim=aim, what=what, limit=limit, contenders=len(meeting))
    rows = []
    for rank, index in enumerate([*shown, *tempting][: max(1, top)], start=1):
        status = "recommended" if rank == 1 else "alternative" if rank <= len(shown) else "misses_constraint"
        row = _row(workload, goal, view, index) | {"rank": rank, "status": status}
        row["p_meets_constraint"] = None if p_meets is None else float(p_meets[index])
        row["p_best"] = float(p_best[rank - 1]) if rank <= len(shown) else 0.0
        rows.append(row)
    for row in rows:
        rival = rows[1] if len(rows) > 1 and rows[1]["status"] == "alternative" else None
        row["reason"] = (
            explain.winner(row, rival, comparison) if row["rank"] == 1 else explain.loser(row, rows[0], comparison)
        )
    return rows


def _best_variants(order: NDArray[np.intp], place: NDArray[np.intp]) -> list[int]:
    """Of each cluster only its first setup in `order`: a reader chooses among clusters, the planner among splits."""
    _, firsts = np.unique(place[order], return_index=True)
    return [int(index) for index in order[np.sort(firsts)]]


def _chance_of_best(objective: Floats) -> Floats:
    """Share of draws (columns) in which each contender (row) has the least objective; ties go to the better ranked."""
    winners = np.argmin(objective, axis=0)
    share: Floats = np.bincount(winners, minlength=objective.shape[0]) / objective.shape[1]
    return share


def _infeasible(workload: Workload, goal: Goal, view: Outlook, usable: NDArray[np.bool_], what: str | None) -> Row:
    """One row that names no cluster to launch, but in its reason the nearest one and the constraint it would meet."""
    row: Row = dict.fromkeys(COLUMNS) | _asked(workload, goal) | {"rank": 1, "status": "infeasible"}
    row["global_batch"] = workload.global_batch_least if _fixed(workload) else None
    if what is None or not np.any(usable):
        row["reason"] = explain.nothing_to_choose(
            len(view.setups), bool(np.any(np.isfinite(view.hours) & (view.hours > 0)))
        )
        return row
    needed = np.quantile(view.drawn(what), goal.p_required, axis=1)
    nearest = int(np.argmin(np.where(usable, needed, np.inf)))
    cluster = view.setups[nearest].cluster
    row["reason"] = explain.infeasible(goal, what, explain.place(cluster), float(needed[nearest]))
    return row


def _fixed(workload: Workload) -> bool:
    return workload.global_batch_least == workload.global_batch_most


def _asked(workload: Workload, goal: Goal) -> Row:
    return {
        "workload": workload.name,
        "samples": workload.samples,
        "goal": goal.goal,
        "constraint_hours": goal.hours,
        "constraint_usd": goal.usd,
        "p_required": goal.p_required if goal.goal in LIMITED_BY else None,
    }


def _row(workload: Workload, goal: Goal, view: Outlook, index: int) -> Row:
    setup = view.setups[index]
    predicted = view.predictions.iloc[index]
    usd = _known(view.usd[index])
    members = setup.cluster.members
    return (
        dict.fromkeys(COLUMNS)
        | _asked(workload, goal)
        | {
            "global_batch": setup.global_batch,
            "cluster": setup.cluster.name,
            "cluster_offers": [
                {
                    "instance_type": offer.instance_type.name,
                    "count": count,
                    "market": offer.market,
                    "zone": offer.zone,
                    "usd_per_hour": offer.usd_per_hour,
                }
                for count, offer in setup.cluster.counted()
            ],
            "layout": joined(setup.layout),
            "batch_per_device": joined(setup.batch_per_device),
            "accumulation_steps": setup.accumulation_steps,
            "strategy": setup.strategy,
            "precision": setup.precision,
            "region": "+".join(sorted({offer.region for offer in members})),
            "step_s": float(view.step_s[index]),
            "step_low_s": float(predicted["step_low_s"]),
            "step_high_s": float(predicted["step_high_s"]),
            "samples_per_s": setup.global_batch / float(view.step_s[index]),
            "hours": float(view.hours[index]),
            "hours_p90": float(view.hours_p90[index]),
            "usd": usd,
            "usd_p90": _known(view.usd_p90[index]),
            "usd_per_million_samples": None if usd is None else usd / workload.samples * 1e6,
            "bottleneck": str(predicted["bottleneck"]),
            "measured_runs": int(view.measured_runs[index]),
        }
    )


def _known(dollars: float) -> float | None:
    return float(dollars) if np.isfinite(dollars) else None
