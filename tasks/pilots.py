"""For a choice that is open: which runs tell most, what they cost, how far they would settle it. Buys nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from models import identity, planner
from models.campaign import Wanted, shopping_list
from models.cloud import Offer, cluster_name
from models.pilots import choose_pilots
from models.places import worth_asking
from models.planner import Plan
from models.workload import Setup, Workload, joined
from warehouse import reads

from .facts import told, with_facts
from .installation import Installation
from .recommend import SEED, contending, on_met_devices, planned
from .registry import Champion
from .shopping import costs_of
from .threads import one_thread

# A pilot runs on few machines: four of them show all that more would of how a workload communicates.
_MOST_HOSTS, _MOST_CANDIDATES = 4, 300
# Expected regret below which measuring more is not worth the trouble.
SETTLED = 0.01
# Part of the regret that pilots must be expected to save, to be worth naming.
_HELPS = 0.02

Found = dict[str, Any]


def pilots_for(
    here: Installation,
    champion: Champion,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    buyable: Sequence[Offer],
    count: int,
    found: Plan | None = None,
) -> Found | None:
    """`settled`, the `regret` expected of choosing now (in logs, a miss of the constraint counting 1), and `runs`: what
    to measure, in order, each with its cluster, batch, seconds, dollars and `regret_after` it.

    `settled` is None where the choice is open and no few runs would settle it. None instead of all that where nothing
    could be bought, or nothing meets the constraint.

    The choice is among `offers`; runs are bought from `buyable` in the campaign's market, or where it has no price in
    the other. `found` is the planner's answer over `offers`, where somebody has it. For a workload that the champion
    has not met regrets are None: its profiles come first, as a campaign buys them.
    """
    workload, model = told(here, workload), champion.model
    sold = _for_sale(here, buyable)
    known, _ = on_met_devices(here, model, offers)
    with one_thread():
        if not model.met_workload(workload) or not known:
            runs_here = workload.name in {one.name for one in here.measurable}
            return _profiles(here, workload, sold, count) if sold and runs_here else None
        met = worth_asking(on_met_devices(here, model, sold)[0])
        if not met:
            return None
        return _runs(here, champion, workload, found or planned(here, model, workload, known), met, count)


def _for_sale(here: Installation, offers: Sequence[Offer]) -> list[Offer]:
    """Offers with a price in the campaign's market; where it has none at all, in the other."""
    priced = [one for one in offers if one.usd_per_hour is not None]
    return [one for one in priced if one.market == here.settings.campaign.market] or priced


def _runs(
    here: Installation,
    champion: Champion,
    workload: Workload,
    plan: Plan,
    sold: Sequence[Offer],
    count: int,
) -> Found | None:
    model, goal = champion.model, workload.goals[0].goal
    if not plan.ranked or plan.rows[0]["status"] == "infeasible":
        return None
    contenders = contending(here, model, workload, plan)
    candidates = _candidates(here, champion, workload, sold)
    frame = pd.DataFrame([setup.row() for setup in candidates])
    found = choose_pilots(contenders, frame, model.joint, goal=goal, count=count, seed=SEED)
    if not found.chosen:
        return {"settled": True, "regret": found.regret, "runs": []}
    if found.regret >= SETTLED and min(found.after) >= (1 - _HELPS) * found.regret:
        return {"settled": None, "regret": found.regret, "runs": []}
    picked = [candidates[at] for at in found.chosen]
    step_s = model.predict(frame.iloc[list(found.chosen)])["step_s"].to_numpy(float)
    runs = [
        _run(here, setup, float(seconds)) | {"regret_after": after}
        for setup, seconds, after in zip(picked, step_s, found.after, strict=True)
    ]
    return {"settled": found.regret < SETTLED, "regret": found.regret, "runs": runs}


def _candidates(here: Installation, champion: Champion, workload: Workload, sold: Sequence[Offer]) -> list[Setup]:
    """Setups on few machines that were never measured, the cheapest an hour first."""
    setups = planner.candidates(
        workload,
        sold,
        max_hosts=min(_MOST_HOSTS, here.settings.campaign.max_hosts),
        fits=here.fits,
        line=lambda name: champion.model.compute_line(workload.name, name),
        peak_bytes=lambda name, batch: champion.model.peak_bytes(workload.name, name, batch),
    )
    runs = reads.mart(here.warehouse, "runs", provider=here.provider.name)
    new = [setup for setup, times in zip(setups, identity.runs_of(setups, runs), strict=True) if not times]
    order = np.argsort([setup.cluster.usd_per_hour or 0.0 for setup in new], kind="stable")
    return [new[at] for at in order[:_MOST_CANDIDATES]]


def _run(here: Installation, setup: Setup, step_s: float) -> Found:
    costs = costs_of(here)
    billed_s = costs.billed_s(costs.run_s(step_s))
    return {
        "kind": "train",
        "cluster": setup.cluster.name,
        "market": setup.cluster.members[0].market,
        "batch_per_device": joined(setup.batch_per_device),
        "accumulation_steps": setup.accumulation_steps,
        "seconds": billed_s,
        "usd": billed_s * (setup.cluster.usd_per_hour or 0.0) / 3600,
    }


def _profiles(here: Installation, workload: Workload, sold: Sequence[Offer], count: int) -> Found | None:
    """What a campaign for this workload alone would buy: its profiles, and then its first runs."""
    frames = reads.training_frames(here.warehouse, here.provider.name)
    launches = shopping_list(
        with_facts([workload], frames["workloads"]),
        sold,
        frames["runs"],
        frames["profiles"],
        frames["probes"],
        max_usd=float("inf"),
        max_seconds=here.max_minutes * 60,
        max_hosts=here.settings.campaign.max_hosts,
        fits=here.fits,
        seed=here.settings.campaign.seed,
        market=sold[0].market,
        costs=costs_of(here),
    )
    items = [(launch.cluster, item) for launch in launches for item in launch.items if item.kind != "probe"]
    items = sorted(items, key=lambda pair: pair[1].kind != "profile")[:count]
    if not items:
        return None
    costs = costs_of(here)
    runs = []
    for cluster, item in items:
        members = [cluster.members[node] for node in item.nodes]
        billed_s = costs.billed_s(item.est_s)
        runs.append(
            {
                "kind": item.kind,
                "cluster": cluster_name(one.instance_type.name for one in members),
                "market": members[0].market,
                "batch_per_device": _batches(item),
                "accumulation_steps": item.accumulation_steps,
                "seconds": billed_s,
                "usd": billed_s * sum(one.usd_per_hour or 0.0 for one in members) / 3600,
                "regret_after": None,
            }
        )
    return {"settled": False, "regret": None, "runs": runs}


def _batches(item: Wanted) -> str:
    return joined(item.batches) if item.kind == "train" else ", ".join(map(str, item.batches))
