"""Name the runs that would settle an open choice, with their cost. Buys nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pandas as pd

from models.campaign.campaign import CampaignLimits, shopping_list
from models.campaign.candidates import Costs, training_run
from models.campaign.pilots import Pilots, choose_pilots
from models.campaign.run_value import Past
from models.campaign.value_of_information import ChoiceSet
from models.domain.cluster import Cluster, Offer
from models.domain.setup_table import Key, runs_by_key, setup_key
from models.domain.workload import Setup
from models.planner import planner
from models.planner.candidates import Supply, without_beaten_zones
from models.planner.enumeration import sold_together
from models.planner.learning import vetoes
from models.planner.planner import Recommendation
from models.step_time.model import StepTimeModel
from warehouse import reads

from ..market.job_conditions import costs_of
from ..market.offers import with_facts
from ..workspace.blas_threads import one_thread
from ..workspace.workspace import Workspace
from .recommend import SEED, Case, comparable, contending, guessable

# Four machines show how a workload communicates.
_MOST_HOSTS, _MOST_CANDIDATES = 4, 300
SETTLED = 0.01  # expected regret below which no measurement pays
_HELPS = 0.02  # least share of the regret that named pilots save

Found = dict[str, Any]


def pilots_for(case: Case, plan: Recommendation, *, buyable: Sequence[Offer], count: int) -> Found:
    """Return `settled`, the expected `regret` of choosing now, `runs` to measure, and `reason`.

    A run has its cluster, layout, batch, seconds, dollars, `planned` (cluster, PlannedRun), and
    `regret_after` it. If no cluster
    meets a required probability, `assured_after` is the chance that one then does. `settled` is
    None if no few runs would settle the choice, or if none can be named: `reason` says why.
    Runs are bought from `buyable` in the campaign's market, or, without a price there, in another.
    A workload without a model gets its profiles first.
    """
    workspace, workload, model = case.workspace, case.workload, case.model
    sold = for_sale(workspace, buyable)
    if not sold:
        return _no_runs("nothing on offer has a price")
    with one_thread():
        if model is None or not case.known:
            if workload.name in {one.name for one in workspace.measurable}:
                return _profiles(case, sold, count)
            return _no_runs("nothing tells how long this workload takes; an import of its"
                            " flops_per_sample or of measurements would")  # fmt: skip
        known, _, _ = comparable(model, sold)
        buying = without_beaten_zones(guessable(model, known) if case.guessed else known)
        choice_set = contending(model, workload, plan, conditions=case.conditions)
        candidates = _candidates(case, model, buying, choice_set) if buying else []
        if not candidates and plan.rows[0]["status"] != "infeasible":
            return _no_runs("no machine on sale would show anything new")
        frame = pd.DataFrame([setup.row() for setup in candidates])
        goal = workload.goals[0].goal
        found = choose_pilots(choice_set, frame, model.joint, goal=goal, count=count, seed=SEED)
        chosen = [candidates[at] for at in found.chosen]
        seconds = model.predict(frame.iloc[list(found.chosen)])["step_s"] if chosen else ()
        costs = costs_of(workspace)
        pairs = zip(chosen, map(float, seconds), strict=True)
        return _judged(plan.rows[0], found, [_run(costs, *pair) for pair in pairs])


def _no_runs(why: str) -> Found:
    reason = f"no pilots can be named: {why}"
    return {"settled": None, "regret": None, "runs": [], "reason": reason}


def for_sale(workspace: Workspace, offers: Sequence[Offer]) -> list[Offer]:
    """Return offers with a price in the campaign's market; if there is none, in any."""
    priced = [one for one in offers if one.usd_per_hour is not None]
    return [one for one in priced if one.market == workspace.settings.campaign.market] or priced


def _judged(first: Mapping[str, Any], found: Pilots, runs: Sequence[Found]) -> Found:
    """Say whether the choice is settled, and which of `runs` help."""
    infeasible = first["status"] == "infeasible"
    in_doubt = infeasible and max(found.assured, default=0.0) >= _HELPS
    if infeasible and not in_doubt and found.regret < SETTLED:
        return _no_runs(str(first["reason"]))
    chance = first["p_meets_constraint"]
    if not found.chosen and chance is not None and chance < _HELPS:
        return _no_runs("no cluster may meet the constraint, whatever a run shows")
    found_runs = {"regret": found.regret, "runs": [], "reason": ""}
    if not found.chosen:
        return {"settled": True, **found_runs}
    helps = min(found.after) < (1 - _HELPS) * found.regret
    if not in_doubt and found.regret >= SETTLED and not helps:
        return {"settled": None, **found_runs}
    assured = found.assured or [None] * len(runs)
    named = [
        run | {"regret_after": after, "assured_after": sure}
        for run, after, sure in zip(runs, found.after, assured, strict=True)
    ]
    return found_runs | {"settled": found.regret < SETTLED and not in_doubt, "runs": named}


def _candidates(
    case: Case, model: StepTimeModel, sold: Sequence[Offer], choice_set: ChoiceSet
) -> list[Setup]:
    """Return unmeasured setups of few machines: the choice set, then the cheapest an hour.

    For a guessed workload those of one device come first: it doubts computing most.
    """
    workspace, workload = case.workspace, case.workload
    learned = reads.learning(workspace.warehouse, workspace.provider.name)
    hosts = min(_MOST_HOSTS, workspace.settings.campaign.max_hosts)
    supply = Supply(
        offers=sold, max_hosts=hosts, fits=workspace.launches, vetoes=vetoes(learned, workload)
    )
    found = planner.allowed(workload, supply, model)
    if found is None:
        return []
    cheapest = found.by_price()
    setups = chain(_bought(choice_set, supply), found.setups(cheapest, supply.fits))
    if case.guessed:
        count = found.splits.count.sum(axis=1)[found.column("split", cheapest)]
        singles = found.setups(cheapest[count == 1], supply.fits)
        one_device = (replace(one, layout=(1,), accumulation_steps=1) for one in singles)
        setups = chain(list({setup_key(one): one for one in one_device}.values()), setups)
    runs = reads.measured_setups(workspace.warehouse, workspace.provider.name, [workload.name])
    measured = runs_by_key({workload.name}, (offer.instance_type for offer in sold), runs)
    new: dict[Key, Setup] = {}
    for setup in setups:
        key = setup_key(setup)
        if not measured[key]:
            new.setdefault(key, setup)
        if len(new) == _MOST_CANDIDATES:
            break
    return list(new.values())


def _bought(choice_set: ChoiceSet, supply: Supply) -> Iterator[Setup]:
    """Yield the setups of the choice set on machines of the supply."""
    groups = [
        {one.instance_type.name: one for one in group} for group in sold_together(supply.offers)
    ]
    for setup in choice_set.setups:
        names = [one.instance_type.name for one in setup.cluster.members]
        group = next((one for one in groups if one.keys() >= set(names)), None)
        if group is None or len(names) > supply.max_hosts:
            continue
        cluster = Cluster(members=tuple(group[name] for name in names))
        if not supply.fits(cluster):
            yield replace(setup, cluster=cluster)


def _run(costs: Costs, setup: Setup, step_s: float) -> Found:
    row = setup.row()
    del row["workload"], row["provider"]
    run_s = costs.run_s(step_s) + costs.compiling_s(setup.mode)
    return {
        "kind": "train",
        **row,
        "market": setup.cluster.members[0].market,
        **_billed(costs, setup.cluster, run_s),
        "planned": (setup.cluster, training_run(setup, step_s, costs)),
    }


def _billed(costs: Costs, cluster: Cluster, run_s: float) -> Found:
    seconds = costs.billed_s(run_s)
    return {"seconds": seconds, "usd": seconds * (cluster.total_usd_per_hour or 0.0) / 3600}


def _profiles(case: Case, sold: Sequence[Offer], count: int) -> Found:
    """Return what a campaign for this workload alone would buy: profiles, then runs."""
    workspace = case.workspace
    frames = reads.training_frames(workspace.warehouse, workspace.provider.name)
    settings, costs = workspace.settings.campaign, costs_of(workspace)
    campaign = CampaignLimits(
        max_usd=float("inf"),
        max_seconds=workspace.max_minutes * 60,
        max_hosts=settings.max_hosts,
        fits=workspace.launches,
        seed=settings.seed,
        market=sold[0].market,
        costs=costs,
    )
    past = Past(runs=frames["runs"], profiles=frames["profiles"], probes=frames["probes"])
    workloads = with_facts([case.workload], frames["workloads"])
    items = [
        (launch.cluster, item)
        for launch in shopping_list(campaign, workloads, sold, past)
        for item in launch.items
        if item.kind != "probe"
    ]
    runs = []
    for launched, item in sorted(items, key=lambda pair: pair[1].kind != "profile")[:count]:
        cluster = Cluster(members=tuple(launched.members[node] for node in item.nodes))
        row = item.row()
        del row["workload"]
        runs.append(
            {
                "kind": item.kind,
                **row,
                "market": cluster.members[0].market,
                **_billed(costs, cluster, item.est_s),
                "regret_after": None,
                "assured_after": None,
                "planned": (cluster, item),
            }
        )
    if not runs:
        return _no_runs("no machine on sale would show anything new")
    return {"settled": False, "regret": None, "runs": runs, "reason": ""}
