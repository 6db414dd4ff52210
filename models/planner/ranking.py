"""Which setup a workload should get for each goal: hours, dollars, chances, order. `explanations` says why.

p_meets = share of joint draws (of step times and of interruptions) that meet the constraint
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..domain.workload import GOALS, Goal, Setup, Workload, joined
from ..job.cost import Floats, Outlook, outlook
from ..job.job_conditions import Circumstances, Stated
from . import explanations as explain

Row = dict[str, Any]

# Clusters compared draw by draw for the chance of the best, and setups looked through for a near miss.
CONTENDERS = 50
COLUMNS = (
    *("workload", "samples", "global_batch", "goal", "constraint_hours", "constraint_usd", "p_required", "rank"),
    *("status", "cluster", "cluster_offers", "layout", "batch_per_device", "accumulation_steps", "strategy"),
    *("precision", "region", "step_s", "step_low_s", "step_high_s", "samples_per_s", "hours", "hours_p90", "usd"),
    *("usd_p90", "usd_per_million_samples", "p_meets_constraint", "p_best", "bottleneck", "measured_runs", "reason"),
    *("market", "usd_machines", "usd_storage", "usd_other", "interruption_risk", "expected_interruptions"),
)


def recommend(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    step_draws: Floats,
    *,
    top: int = 5,
    measured_runs: Sequence[int] | None = None,
    conditions: Circumstances | None = None,
    seed: int = 0,
    considered: int | None = None,
) -> list[Row]:
    """Rows of the published table that planning decides, for each goal of `workload` and for "cheapest" and "fastest".

    `predictions` (columns of StepTimeModel.predict), `step_draws` (setups, draws; seconds, joint) and `measured_runs`
    are aligned with `setups` by position. Up to `top` clusters a goal, each with its best split, ranked from 1:
    "recommended", then "alternative", then "misses_constraint" for tempting ones. A goal that nothing meets has one
    row of status "infeasible", which names no cluster but says what would make it feasible. Unknown prices give None.
    p_best is the share of draws in which a cluster is the best of the CONTENDERS best in expectation. `considered` is
    the number of clusters that `setups` were chosen from, by default those they are of.
    `conditions` says what start-up, checkpoints and interruptions each cluster meets (None: `Stated()`).
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
        conditions=conditions or Stated(),
        seed=seed,
    )
    clusters = len(np.unique(view.place)) if considered is None else considered
    return [row for goal in goals_of(workload) for row in _rank(workload, goal, view, top, clusters)]


def goals_of(workload: Workload) -> list[Goal]:
    """The workload's goals, and the two that every workload has. Raises ValueError on one that cannot be judged."""
    stated = list(workload.goals)
    for goal in stated:
        if goal.goal not in GOALS:
            raise ValueError(f"{workload.name}: goal {goal.goal!r} is none of {', '.join(GOALS)}")
        if goal.constraint is not None and goal.limit is None:
            raise ValueError(f"{workload.name}: goal {goal.goal!r} needs {goal.constraint}")
    names = {goal.goal for goal in stated}
    return stated + [Goal(goal=name) for name in ("cheapest", "fastest") if name not in names]


def contenders(top: int) -> int:
    """How many clusters are compared where `top` are shown."""
    return max(CONTENDERS, top)


def _rank(workload: Workload, goal: Goal, view: Outlook, top: int, clusters: int) -> list[Row]:
    """The rows of one goal."""
    aim = goal.objective
    other = "hours" if aim == "usd" else "usd"
    what, limit = goal.constraint, goal.limit
    usable = np.isfinite(view.hours) & (view.hours > 0) & np.isfinite(view.quantity(aim))
    p_meets: Floats | None = None
    if what is not None and limit is not None:
        usable &= np.isfinite(view.quantity(what))
        p_meets = np.mean(view.drawn(what) <= limit, axis=1)
    feasible = usable if p_meets is None else usable & (p_meets >= goal.p_required)
    order = np.lexsort((view.quantity(other), view.quantity(aim)))  # NaN sorts last
    meeting = _best_variants(order[feasible[order]], view.place)
    if not meeting:
        return [_infeasible(workload, goal, view, usable, what, contenders(top))]
    many = contenders(top)
    named = _without_idle_mixtures(meeting[:many], view.setups)
    chances = _chance_of_best(view.expected_by_draw(aim)[named])
    p_best = dict(zip(named, chances.tolist(), strict=True))
    tempting: list[int] = []
    if p_meets is not None and what is not None:
        better = np.flatnonzero(usable & (view.quantity(aim) < view.quantity(aim)[meeting[0]]))
        nearest = better[np.lexsort((view.quantity(aim)[better], view.quantity(what)[better]))][:many]
        nearest = nearest[~np.isin(view.place[nearest], view.place[meeting])]
        closest = nearest[np.argsort(-p_meets[nearest], kind="stable")]
        tempting = _best_variants(closest, view.place)[: max(1, top // 4)]
    shown = named[: max(1, top - len(tempting))]
    comparison = explain.Comparison(goal=goal, aim=aim, what=what, limit=limit, clusters=clusters)
    rows = []
    for rank, index in enumerate([*shown, *tempting][: max(1, top)], start=1):
        status = "recommended" if rank == 1 else "alternative" if rank <= len(shown) else "misses_constraint"
        row = _row(workload, goal, view, index) | {"rank": rank, "status": status}
        row["p_meets_constraint"] = None if p_meets is None else float(p_meets[index])
        row["p_best"] = p_best.get(index, 0.0) if rank <= len(shown) else 0.0
        rows.append(row)
    for row in rows:
        rival = rows[1] if len(rows) > 1 and rows[1]["status"] == "alternative" else None
        row["reason"] = (
            explain.winner(row, rival, comparison, _nearest(view, meeting[0]))
            if row["rank"] == 1
            else explain.loser(row, rows[0], comparison)
        )
    return rows


def _nearest(view: Outlook, index: int) -> float | None:
    """Doublings to the nearest measurement; None where the model does not say, or nothing of the workload ever ran."""
    doublings = float(view.predictions.get("nearest_doublings", pd.Series(np.nan, view.predictions.index))[index])
    return doublings if np.isfinite(doublings) else None


def _best_variants(order: NDArray[np.intp], place: NDArray[np.intp]) -> list[int]:
    """Of each cluster only its first setup in `order`: a reader chooses among clusters, the planner among splits."""
    _, firsts = np.unique(place[order], return_index=True)
    return [int(index) for index in order[np.sort(firsts)]]


def _without_idle_mixtures(order: Sequence[int], setups: Sequence[Setup]) -> list[int]:
    """Without the clusters of two markets that the same machines in one market beat: those serve no goal."""
    kept, pure = [], set[str]()
    for index in order:
        cluster = setups[index].cluster
        if not cluster.mixed:
            pure.add(cluster.name)
        if not (cluster.mixed and cluster.name in pure):
            kept.append(index)
    return kept


def _chance_of_best(objective: Floats) -> Floats:
    """Share of draws (columns) in which each contender (row) has the least objective; ties go to the better ranked."""
    winners = np.argmin(objective, axis=0)
    share: Floats = np.bincount(winners, minlength=objective.shape[0]) / objective.shape[1]
    return share


def _infeasible(
    workload: Workload, goal: Goal, view: Outlook, usable: NDArray[np.bool_], what: str | None, many: int
) -> Row:
    """One row that names no cluster to launch, but in its reason the nearest one and the constraint it would meet."""
    row: Row = dict.fromkeys(COLUMNS) | _asked(workload, goal) | {"rank": 1, "status": "infeasible"}
    row["global_batch"] = workload.global_batch_least if _fixed(workload) else None
    if what is None or not np.any(usable):
        row["reason"] = explain.nothing_to_choose(
            len(view.setups), bool(np.any(np.isfinite(view.hours) & (view.hours > 0)))
        )
        return row
    limit = goal.limit or 0.0
    order = np.argsort(np.where(usable, view.quantity(what), np.inf), kind="stable")
    nearest = order[usable[order]][:many]
    drawn = view.drawn(what)[nearest]
    needed, chance = np.quantile(drawn, goal.p_required, axis=1), np.mean(drawn <= limit, axis=1)
    cluster = view.setups[nearest[int(np.argmin(needed))]].cluster
    likeliest = int(nearest[np.argmax(chance)])  # of equals the nearest
    bet = explain.BestBet(
        cluster=view.setups[likeliest].cluster,
        chance=float(chance.max()),
        hours=float(view.hours[likeliest]),
        usd=float(view.usd[likeliest]),
    )
    row["reason"] = explain.infeasible(goal, what, explain.place(cluster), float(needed.min()), bet)
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
        "p_required": goal.p_required if goal.constraint is not None else None,
    }


def summary(setup: Setup, hours: float, usd: float) -> Row:
    """What names a setup and its place between hours and dollars: an entry of the frontier."""
    return {
        "cluster": setup.cluster.name,
        "market": setup.cluster.market,
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
        "global_batch": setup.global_batch,
        "hours": hours,
        "usd": _known(usd),
    }


def _row(workload: Workload, goal: Goal, view: Outlook, index: int) -> Row:
    setup = view.setups[index]
    predicted = view.predictions.iloc[index]
    bill = _bill(view, index)
    usd = bill["usd"]
    return (
        dict.fromkeys(COLUMNS)
        | _asked(workload, goal)
        | summary(setup, float(view.hours[index]), float(view.usd[index]))
        | {
            "region": "+".join(sorted({offer.region for offer in setup.cluster.members})),
            "step_s": float(view.step_s[index]),
            "step_low_s": float(predicted["step_low_s"]),
            "step_high_s": float(predicted["step_high_s"]),
            "samples_per_s": setup.global_batch / float(view.step_s[index]),
            "hours_p90": float(view.hours_p90[index]),
            "usd_p90": _known(view.usd_p90[index]),
            "usd_per_million_samples": None if usd is None else usd / workload.samples * 1e6,
            "bottleneck": str(predicted["bottleneck"]),
            "measured_runs": int(view.measured_runs[index]),
            "interruption_risk": float(view.interruption_risk[index]),
            "expected_interruptions": float(view.interruptions[index]),
        }
        | bill
    )


def _bill(view: Outlook, index: int) -> Row:
    """Expected dollars by what they are paid for; `usd` is the sum of the others, to the last digit and in this order.

    What is beside the machines is known where their price is not.
    """
    hours = float(view.hours[index])
    machines = _known(hours * view.machine_price[index])
    storage, other = (hours * float(one[index]) for one in (view.storage_price, view.other_price))
    usd = None if machines is None else machines + storage + other
    return {"usd": usd, "usd_machines": machines, "usd_storage": storage, "usd_other": other}


def _known(dollars: float) -> float | None:
    return float(dollars) if np.isfinite(dollars) else None
