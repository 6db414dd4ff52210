"""Rank setups for each goal of a workload, and fill the planner's columns of the published table.

    p_meets_constraint = share of joint draws in which the setup keeps the goal's limit
    p_best             = share of step-time draws in which the setup would be the best choice

A joint draw has a step time, start-up, checkpoints and interruptions for every setup. For `p_best`,
only the step times are drawn.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..domain.cluster import Cluster
from ..domain.numeric import IntArray, to_rounding
from ..domain.setup_table import Row
from ..domain.workload import Goal, Workload
from ..job.cost import JobCosts
from ..step_time import field_terms
from . import explanations as explain
from .choice_rule import drawn_meeting, known_meeting, losses, misses

# p_best compares at most this many clusters that keep the limit, and as many near misses.
CLUSTERS_COMPARED = 50
_PARTS = ("compute_s", "communication_s", "exposed_communication_s", "input_s")
COLUMNS = (
    "workload",
    "samples",
    "global_batch",
    "goal",
    "constraint_hours",
    "constraint_usd",
    "p_required",
    "rank",
    "status",
    "cluster",
    "cluster_offers",
    "device",
    "layout",
    "batch_per_device",
    "accumulation_steps",
    "strategy",
    "precision",
    "switches",
    "region",
    "market",
    "step_s",
    "step_low_s",
    "step_high_s",
    "samples_per_s",
    *_PARTS,
    "bottleneck",
    "hours",
    "hours_p90",
    "usd",
    "usd_p90",
    "usd_machines",
    "usd_storage",
    "usd_other",
    "usd_per_million_samples",
    "p_meets_constraint",
    "p_best",
    "interruption_risk",
    "expected_interruptions",
    "measured_runs",
    "reason",
    *field_terms.COLUMNS,
)


def recommend(
    workload: Workload, costs: JobCosts, *, top: int = 5, clusters: str = "all clusters"
) -> list[Row]:
    """Return the planner's columns of the published table, for each goal of `workload`.

    Each row is a cluster with its best batch split. A goal's rows are numbered from rank 1, in this
    order:

    1. the cluster with the lowest loss, with the status "recommended"
    2. the clusters with the next lowest losses
    3. near misses: clusters with a better objective than rank 1 that miss the goal's limit
    4. for each kind of device that items 1 to 3 lack, the best cluster with this device

    The first three groups have at most `top` rows together. Rows after rank 1 have the status
    "misses_constraint" if they miss the limit, and "alternative" if they keep the limit.

    If no setup is possible for a goal, the goal has a single row with the status "infeasible" or
    "no_price". Its column `reason` says what would be feasible.

    The rows also have two columns that are not published: `setup`, and `offers` with the offers of
    the setup's machines.

    Args:
        workload: the training job with its goals.
        costs: hours and dollars of the setups to rank.
        top: the maximum number of rows per goal, without the rows of item 4.
        clusters: a phrase for the explanation that says how many clusters were compared.
    """
    return [row for goal in workload.goals for row in _rank(workload, goal, costs, top, clusters)]


def _rank(workload: Workload, goal: Goal, costs: JobCosts, top: int, clusters: str) -> list[Row]:
    """Return the rows of `recommend` for a single goal."""
    objective = costs.expected[goal.objective]
    used = costs.expected[goal.used]
    other = costs.expected["hours" if goal.objective == "usd" else "usd"]
    usable = np.isfinite(objective) & np.isfinite(used)
    meeting = drawn_meeting(costs.drawn[goal.used], goal.limit)
    missing = misses(goal, meeting.chance)
    loss = losses(goal, np.log(objective), meeting)  # not finite if a price is unknown
    order = np.lexsort((other, loss.round(9)))
    order = order[np.isfinite(loss[order])]
    best = best_of_each(costs.cluster, order)[:CLUSTERS_COMPARED]
    if not len(best):
        if goal.constraint is None or not usable.any():
            why = "no cluster on offer has a known price; a price would help"
            return [infeasible_row(workload, goal, why, "no_price")]
        why = explain.infeasible(goal, costs, np.flatnonzero(usable))
        return [infeasible_row(workload, goal, why)]
    tempted = usable & missing & (objective < objective[best[0]])
    tempted &= ~np.isin(costs.cluster, costs.cluster[usable & ~missing])
    closest = np.lexsort((objective, to_rounding(used), -meeting.chance))
    near_misses = best_of_each(costs.cluster, closest[tempted[closest]])[:CLUSTERS_COMPARED]
    # With `p_required`, a near miss is never chosen, even in draws in which it keeps the limit.
    rivals = best if goal.p_required else np.concatenate([best, near_misses])
    p_best = _chance_of_best(goal, costs, rivals)
    tempting = near_misses[: max(1, top // 4)].tolist()
    shown = best[: max(1, top - len(tempting))].tolist()
    ranked = [*shown, *tempting][:top]
    devices = np.array([_device(setup.cluster) for setup in costs.setups])
    compared = best_of_each(devices, np.concatenate([order, closest[usable[closest]]])).tolist()
    seen = set(devices[ranked])
    ranked += [at for at in compared if devices[at] not in seen and "+" not in devices[at]]
    rows = []
    for rank, at in enumerate(ranked, 1):
        row = _row(workload, goal, costs, at) | {"setup": costs.setups[at], "rank": rank}
        row["status"] = "misses_constraint" if missing[at] else "alternative"
        row["p_meets_constraint"] = float(meeting.chance[at]) if goal.constraint else None
        row["p_best"] = p_best.get(at, 0.0)
        rows.append(row)
    first, *rest = rows
    first["status"] = "recommended"
    rival = rest[0] if len(shown) > 1 else None
    predicted = costs.predictions.iloc[int(best[0])]
    first["reason"] = explain.winner(first, rival, goal, predicted, clusters=clusters)
    for row in rest:
        row["reason"] = explain.loser(row, first, goal)
    return rows


def _device(cluster: Cluster) -> str:
    """Return the name of the cluster's device, or several names joined by `+`."""
    return "+".join(sorted({offer.instance_type.device for offer in cluster.members}))


def best_of_each(group: NDArray[Any], order: IntArray) -> IntArray:
    """Return the position of the best setup of each group, the best group first.

    group: the number or name of each setup's group, such as its cluster.
    order: the positions of the setups, sorted from best to worst.
    """
    _, firsts = np.unique(group[order], return_index=True)
    return order[np.sort(firsts)]


def _chance_of_best(goal: Goal, costs: JobCosts, best: IntArray) -> dict[int, float]:
    """Return {position of a setup: p_best} for the setups at positions `best`.

    `p_best` is the share of draws in which the setup has the lowest loss. Only step times are
    drawn. Draws in which no setup keeps the limit are also counted, but no setup wins them.
    """
    meeting = known_meeting(costs.expected_by_draw[goal.used][best], goal.limit)
    loss = losses(goal, np.log(costs.expected_by_draw[goal.objective][best]), meeting)
    chosen = np.argmin(loss.round(9), axis=0)[np.isfinite(loss).any(axis=0)]
    share = np.bincount(chosen, minlength=len(loss)) / loss.shape[1]
    return dict(zip(best.tolist(), share.tolist(), strict=True))


def infeasible_row(workload: Workload, goal: Goal, why: str, status: str = "infeasible") -> Row:
    """Return the row of a goal for which no setup is possible. The row has no cluster.

    why: the reason, as a text for the user.
    """
    least = workload.global_batch_least
    batch = least if least == workload.global_batch_most else None
    row = _question(workload, goal) | {"rank": 1, "status": status, "global_batch": batch}
    return row | {"reason": why, "offers": ()}


def _question(workload: Workload, goal: Goal) -> Row:
    """Return a row of the published table with only the workload and the goal filled in."""
    return {
        **dict.fromkeys(COLUMNS),
        "workload": workload.name,
        "samples": workload.samples,
        "goal": goal.goal,
        "constraint_hours": goal.hours,
        "constraint_usd": goal.usd,
        "p_required": goal.p_required if goal.constraint is not None else None,
    }


def summary(costs: JobCosts, at: int) -> Row:
    """Return a row with the setup at position `at`, its offers, and its expected hours and dollars.

    The column `usd` is the exact sum of `usd_machines`, `usd_storage` and `usd_other`. `usd` and
    `usd_machines` are None if a price is unknown.
    """
    setup, hours = costs.setups[at], float(costs.expected["hours"][at])
    price, storage, other = setup.cluster.bill_per_hour
    other_usd = hours * other + float(costs.download_usd[at])
    items = {"usd_storage": hours * storage, "usd_other": other_usd}
    machines = None if price is None else hours * price
    usd = None if machines is None else sum(items.values(), machines)
    offers = [
        {
            "instance_type": offer.instance_type.name,
            "count": count,
            "market": offer.market,
            "zone": offer.zone,
            "usd_per_hour": offer.usd_per_hour,
        }
        for count, offer in setup.cluster.counted()
    ]
    return {
        **setup.row(),
        "market": setup.cluster.market,
        "device": _device(setup.cluster),
        "cluster_offers": offers,
        "global_batch": setup.global_batch,
        "hours": hours,
        "usd": usd,
        "usd_machines": machines,
        **items,
    }


def _row(workload: Workload, goal: Goal, costs: JobCosts, at: int) -> Row:
    """Return a row of the published table for the setup at position `at`.

    Columns that depend on the comparison with other setups, such as the rank, are left out.
    """
    setup, predicted = costs.setups[at], costs.predictions.iloc[at]
    shown = summary(costs, at)
    hours_p90, usd_p90 = (
        float(np.quantile(costs.drawn[name][at], 0.9)) for name in ("hours", "usd")
    )
    known = shown["usd"] is not None
    seconds = ("step_s", "step_low_s", "step_high_s", *_PARTS)
    return {
        **_question(workload, goal),
        **shown,
        **{name: float(predicted[name]) for name in seconds if name in predicted},
        "offers": tuple(dict.fromkeys(setup.cluster.members)),
        "region": setup.cluster.region,
        "samples_per_s": setup.global_batch / float(predicted["step_s"]),
        "hours_p90": hours_p90,
        "usd_p90": usd_p90 if known else None,
        "usd_per_million_samples": shown["usd"] / workload.samples * 1e6 if known else None,
        "bottleneck": str(predicted["bottleneck"]),
        "interruption_risk": float(costs.interruption_risk[at]),
        "expected_interruptions": float(costs.interruptions[at]),
    }
