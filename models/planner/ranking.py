"""Which setup a workload should get for each goal: hours, dollars, chances, order. `choice_rule` says by what, and
`explanations` why.

p_meets = share of joint draws (of step times and of interruptions) that meet the constraint
p_best  = share of draws of the step times in which the rule would choose it if they were known
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray, IntArray, to_rounding
from ..domain.setup_table import runs_of
from ..domain.workload import GOALS, Goal, Setup, Workload, joined
from ..job.cost import JobCosts
from . import explanations as explain
from .choice_rule import Meeting, drawn_meeting, known_meeting, losses, misses

Row = dict[str, Any]

# Clusters compared draw by draw for the chance of the best, and setups looked through for a near miss.
CLUSTERS_COMPARED = 50
COLUMNS = (
    *(
        "workload",
        "samples",
        "global_batch",
        "goal",
        "constraint_hours",
        "constraint_usd",
        "p_required",
        "rank",
    ),
    *(
        "status",
        "cluster",
        "cluster_offers",
        "layout",
        "batch_per_device",
        "accumulation_steps",
        "strategy",
    ),
    *("precision", "switches", "region", "step_s", "step_low_s", "step_high_s", "samples_per_s"),
    *("hours", "hours_p90", "usd"),
    *(
        "usd_p90",
        "usd_per_million_samples",
        "p_meets_constraint",
        "p_best",
        "bottleneck",
        "measured_runs",
        "reason",
    ),
    *(
        "market",
        "usd_machines",
        "usd_storage",
        "usd_other",
        "interruption_risk",
        "expected_interruptions",
    ),
    *("compute_s", "communication_s", "exposed_communication_s", "input_s"),
)
_PARTS = COLUMNS[
    -4:
]  # of a step, where the model says them: the first, the third and the last make it up


def recommend(
    workload: Workload,
    costs: JobCosts,
    *,
    runs: pd.DataFrame | None = None,
    top: int = 5,
    clusters: int | None = None,
    more: Callable[[Setup], str] = lambda _: "",
) -> list[Row]:
    """Rows of the published table that planning decides, for each goal of `workload` and for "cheapest" and "fastest".

    Up to `top` clusters a goal, each with its best split, ranked from 1 by what they lose: "recommended", then
    "alternative", or "misses_constraint" where that is likelier than required, the last place for a tempting one. Where
    a probability is required that nothing meets, the goal has one row of status "infeasible", which names no cluster
    but says what would make it feasible; elsewhere only where nothing can be ranked. Unknown prices give None. p_best
    compares the CLUSTERS_COMPARED that lose least. `runs` are measurement rows, for how often each
    setup was measured; `clusters` is how many the setups were chosen from, by default those they are of; `more` is what
    else there is to say of a setup, if anything.
    Raises ValueError where a goal is unknown or lacks its constraint.
    """
    known = pd.DataFrame() if runs is None else runs
    measured = runs_of(costs.setups, known)
    many = len(np.unique(costs.cluster)) if clusters is None else clusters

    @cache
    def about(index: int) -> tuple[int, str]:
        return measured[index], more(costs.setups[index])

    return [
        row for goal in goals_of(workload) for row in _rank(workload, goal, costs, about, top, many)
    ]


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


def clusters_compared(top: int) -> int:
    """How many clusters are compared where `top` are shown."""
    return max(CLUSTERS_COMPARED, top)


def _rank(
    workload: Workload,
    goal: Goal,
    costs: JobCosts,
    about: Callable[[int], tuple[int, str]],
    top: int,
    clusters: int,
) -> list[Row]:
    """The rows of one goal; `about` a setup says how often it was measured, and what else there is to say."""
    aim, what, limit = goal.objective, goal.constraint, goal.limit
    aimed, other = costs.expected(aim), costs.expected("hours" if aim == "usd" else "usd")
    usable = np.isfinite(costs.hours) & (costs.hours > 0) & np.isfinite(aimed)
    meeting: Meeting | None = None
    if what is not None and limit is not None:
        usable &= np.isfinite(costs.expected(what))
        meeting = drawn_meeting(costs.drawn(what), limit)
    log_aim = np.log(aimed, out=np.full(len(aimed), np.nan), where=usable)
    loss = np.where(usable, losses(goal, log_aim, meeting), np.inf)
    order = np.lexsort(
        (other, loss.round(9))
    )  # what differs by rounding is equal; `search` keeps as much
    best = _best_splits(order[np.isfinite(loss[order])], costs.cluster)
    many = clusters_compared(top)
    if not best:
        return [_infeasible(workload, goal, costs, usable, many)]
    named = _without_idle_mixtures(best[:many], costs.setups)
    p_best = dict(zip(named, _chance_of_best(goal, costs, named), strict=True))
    tempting: list[int] = []
    if meeting is not None and what is not None:
        missing = misses(goal, meeting.chance)
        better = np.flatnonzero(usable & (aimed < aimed[best[0]]))
        nearest = better[np.lexsort((aimed[better], to_rounding(costs.expected(what)[better])))][
            :many
        ]
        met = costs.cluster[np.concatenate([np.flatnonzero(usable & ~missing), named[:top]])]
        nearest = nearest[missing[nearest] & ~np.isin(costs.cluster[nearest], met)]
        closest = nearest[np.argsort(-meeting.chance[nearest], kind="stable")]
        tempting = _best_splits(closest, costs.cluster)[: max(1, top // 4)]
    shown = named[: max(1, top - len(tempting))]
    rows: list[Row] = []
    listed = [*shown, *tempting][: max(1, top)]
    for rank, index in enumerate(listed, start=1):
        row = _row(workload, goal, costs, index) | {"rank": rank, "status": "alternative"}
        if meeting is not None:
            row["p_meets_constraint"] = float(meeting.chance[index])
            if missing[index]:
                row["status"] = "misses_constraint"
        row["measured_runs"] = about(index)[0]
        row["p_best"] = p_best.get(index, 0.0)
        rows.append(row)
    first, *rest = rows
    first["status"] = "recommended"
    rival = rest[0] if rest and len(shown) > 1 else None
    first["reason"] = explain.winner(
        first,
        rival,
        goal,
        clusters=clusters,
        nearest=_nearest(costs, best[0]),
        input_by=str(costs.predictions["input_by"][best[0]])
        if "input_by" in costs.predictions
        else "",
    )
    for row in rest:
        row["reason"] = explain.loser(row, first, goal)
    for row, index in zip(rows, listed, strict=True):
        row["reason"] = "; ".join(one for one in (row["reason"], about(index)[1]) if one)
    return rows


def _nearest(costs: JobCosts, index: int) -> float | None:
    """Doublings to the nearest measurement; None where the model does not say, or nothing of the workload ever ran."""
    doublings = (
        float(costs.predictions["nearest_doublings"][index])
        if "nearest_doublings" in costs.predictions
        else np.nan
    )
    return doublings if np.isfinite(doublings) else None


def _best_splits(order: IntArray, cluster: IntArray) -> list[int]:
    """Of each cluster only its first setup in `order`: a reader chooses among clusters, the planner among splits."""
    _, firsts = np.unique(cluster[order], return_index=True)
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


def _chance_of_best(goal: Goal, costs: JobCosts, named: Sequence[int]) -> list[float]:
    """Share of draws in which each setup loses least by step times that are known; ties go to the better ranked."""
    meeting = None
    if goal.constraint is not None and goal.limit is not None:
        meeting = known_meeting(costs.expected_by_draw(goal.constraint)[named], goal.limit)
    lost = losses(goal, np.log(costs.expected_by_draw(goal.objective)[named]), meeting)
    return [
        float(one)
        for one in np.bincount(np.argmin(lost.round(9), axis=0), minlength=len(lost))
        / lost.shape[1]
    ]


def _infeasible(
    workload: Workload, goal: Goal, costs: JobCosts, usable: BoolArray, many: int
) -> Row:
    """One row that names no cluster to launch, but in its reason the nearest one and the constraint it would meet."""
    row: Row = dict.fromkeys(COLUMNS) | _asked(workload, goal) | {"rank": 1, "status": "infeasible"}
    fixed = workload.global_batch_least == workload.global_batch_most
    row["global_batch"] = workload.global_batch_least if fixed else None
    if goal.constraint is None or not np.any(usable):
        predicted = bool(np.any(np.isfinite(costs.hours) & (costs.hours > 0)))
        row["reason"] = explain.nothing_to_choose(len(costs.setups), predicted)
    else:
        order = np.argsort(np.where(usable, costs.expected(goal.constraint), np.inf), kind="stable")
        row["reason"] = explain.infeasible(goal, costs, order[usable[order]][:many])
    return row


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
    """What names a setup, its hours and its dollars: an entry of the frontier."""
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
        "switches": setup.switches,
        "global_batch": setup.global_batch,
        "hours": hours,
        "usd": _known(usd),
    }


def _row(workload: Workload, goal: Goal, costs: JobCosts, index: int) -> Row:
    setup, predicted = costs.setups[index], costs.predictions.iloc[index]
    hours, step_s = float(costs.hours[index]), float(predicted["step_s"])
    hours_p90 = float(np.quantile(costs.sampled_hours[index], 0.9))
    bill = _bill(setup, hours)
    usd = bill["usd"]
    return (
        dict.fromkeys(COLUMNS)
        | _asked(workload, goal)
        | summary(setup, hours, float(costs.expected("usd")[index]))
        | {
            "region": "+".join(sorted({offer.region for offer in setup.cluster.members})),
            "step_s": step_s,
            "step_low_s": float(predicted["step_low_s"]),
            "step_high_s": float(predicted["step_high_s"]),
            "samples_per_s": setup.global_batch / step_s,
            "hours_p90": hours_p90,
            "usd_p90": _known(costs.usd_per_hour[index] * hours_p90),
            "usd_per_million_samples": None if usd is None else usd / workload.samples * 1e6,
            "bottleneck": str(predicted["bottleneck"]),
            **(
                {name: float(predicted[name]) for name in _PARTS}
                if set(_PARTS) <= {*predicted.index}
                else {}
            ),
            "interruption_risk": float(costs.interruption_risk[index]),
            "expected_interruptions": float(costs.interruptions[index]),
        }
        | bill
    )


def _bill(setup: Setup, hours: float) -> Row:
    """Expected dollars by what they are paid for; `usd` is the sum of the others, to the last digit and in this order.

    What is beside the machines is known where their price is not.
    """
    price, members = setup.cluster.usd_per_hour, setup.cluster.members
    machines = None if price is None else hours * price
    storage, other = (
        hours * sum(getattr(one, part) for one in members)
        for part in ("storage_usd_per_hour", "other_usd_per_hour")
    )
    usd = None if machines is None else machines + storage + other
    return {"usd": usd, "usd_machines": machines, "usd_storage": storage, "usd_other": other}


def _known(dollars: float) -> float | None:
    return float(dollars) if np.isfinite(dollars) else None
