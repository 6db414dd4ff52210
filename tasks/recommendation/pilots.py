"""For a choice that is open: which runs tell most, what they cost, how far they would settle it. Buys nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from models.campaign.campaign import CampaignLimits, shopping_list
from models.campaign.candidates import Costs
from models.campaign.pilots import Pilots, choose_pilots, runs_by_kind
from models.campaign.run_value import Past
from models.campaign.value_of_information import ChoiceSet
from models.domain import setup_table
from models.domain.cluster import Cluster, Offer
from models.domain.workload import Setup, Workload, joined
from models.planner import planner
from models.planner.candidates import Supply, without_beaten_zones
from models.planner.learning import vetoes
from models.planner.planner import Plan
from models.step_time.model import StepTimeModel
from warehouse import reads

from ..market.job_conditions import costs_of
from ..market.offers import with_facts
from ..workspace.blas_threads import one_thread
from ..workspace.workspace import Workspace
from .recommend import SEED, Case, comparable, contending, guessable

# A pilot runs on few machines: four of them show all that more would of how a workload communicates.
_MOST_HOSTS, _MOST_CANDIDATES = 4, 300
# Expected regret below which measuring more is not worth the trouble.
SETTLED = 0.01
# Part of the regret that pilots must be expected to save, to be named.
_HELPS = 0.02
NO_PRICE = "nothing on offer has a price; a price would change that"
NOT_SOLD = "no machine with a price is one whose step time can be predicted; the price of one would change that"
UNKNOWN = (
    "nothing that the model in force knows tells how long this workload takes; its flops_per_sample (`srift import FILE"
    " --workloads FILE`), measurements of it (`srift import FILE`, then a `srift refresh`) or an entrypoint under"
    " [workloads.{name}] in srift.toml would"
)
NO_PEAK = (
    "its flops_per_sample is known, but the peak rate of no measured device on offer is; an entrypoint under"
    " [workloads.{name}] in srift.toml, or measurements of it (`srift import FILE`), would change that"
)
NOT_LEARNED = "the model in force can say nothing of it on the machines on offer; after a `srift refresh` one may"
BEYOND_HOPE = "neither the cluster named nor anything else on offer may meet the constraint, whatever a run tells"
NOTHING_NEW = "all that up to {hosts} machines could tell of it was measured, or cannot be had"

Found = dict[str, Any]


def pilots_for(case: Case, plan: Plan, *, buyable: Sequence[Offer], count: int) -> Found:
    """`settled`, the `regret` expected of choosing now (in logs of its loss by the rule of choice), and `runs`: what
    to measure, in order, each with its cluster, layout, batch, seconds, dollars, `regret_after` it, and, where no
    cluster meets the constraint surely enough, `assured_after`: the chance that one is then known to.

    `kinds` are the devices that nothing was ever measured on and that may be the best, each with one run on it.
    `settled` is None where the choice is open and no few runs would settle it, and where no runs can be named at all:
    then `reason`, elsewhere empty, says why and what would help.

    The choice is that of `plan`, the planner's answer to `case`; runs are bought from `buyable` in the campaign's
    market, or where it has no price in the other. A workload that the champion has not met goes by the first guess at
    it; where none can be made regrets are None: its profiles come first, as a campaign buys them.
    """
    workspace, workload, model = case.workspace, case.workload, case.model
    sold = for_sale(workspace, buyable)
    if not sold:
        return _no_runs(NO_PRICE)
    with one_thread():
        if model is None or not case.known:
            if workload.name in {one.name for one in workspace.measurable}:
                return _profiles(workspace, workload, sold, count)
            return _no_runs(_unknown(case))
        known, _, _ = comparable(model, sold)
        buying = without_beaten_zones(guessable(model, known) if case.guessed else known)
        if not buying:
            return _no_runs(NOT_SOLD)
        choice_set = contending(model, workload, plan, conditions=case.conditions)
        candidates = _candidates(case, model, buying, choice_set)
        if not candidates and plan.rows[0]["status"] != "infeasible":
            return _no_runs(NOTHING_NEW.format(hosts=_most_hosts(workspace)))
        frame = pd.DataFrame([setup.row() for setup in candidates])
        found = choose_pilots(
            choice_set, frame, model.joint, goal=workload.goals[0].goal, count=count, seed=SEED
        )
        step_s = (
            model.predict(frame.iloc[list(found.chosen)])["step_s"].to_numpy(float)
            if found.chosen
            else ()
        )
        costs = costs_of(workspace)
        runs = [
            _run(costs, candidates[at], float(one))
            for at, one in zip(found.chosen, step_s, strict=True)
        ]
        return _judged(plan.rows[0], found, runs) | {
            "kinds": _kinds(case, model, choice_set, candidates)
        }


def _kinds(
    case: Case, model: StepTimeModel, choice_set: ChoiceSet, candidates: Sequence[Setup]
) -> list[Found]:
    """For each device that only its data sheet tells of and that may be the best: one run on it, as `_run` has it, with
    its `device`, the chance `p_best` and the `regret_after` it.
    """
    if not case.by_data_sheet:
        return []
    goal = case.workload.goals[0].goal
    runs = runs_by_kind(
        choice_set, candidates, model.joint, goal=goal, kinds=case.by_data_sheet, seed=SEED
    )
    if not runs:
        return []
    setups = [candidates[one.candidate] for one in runs]
    step_s = model.predict(pd.DataFrame([setup.row() for setup in setups]))["step_s"].to_numpy(
        float
    )
    costs = costs_of(case.workspace)
    return [
        {"device": one.kind}
        | _run(costs, setup, float(step))
        | {"p_best": one.p_best, "regret_after": one.after}
        for one, setup, step in zip(runs, setups, step_s, strict=True)
    ]


def _no_runs(why: str) -> Found:
    return {
        "settled": None,
        "regret": None,
        "runs": [],
        "kinds": [],
        "reason": f"no pilots can be named: {why}",
    }


def _unknown(case: Case) -> str:
    """Why nothing can be said of a workload that does not run here."""
    if case.guessed and case.workload.flops_per_sample is None:
        return UNKNOWN.format(name=case.workload.name)
    return (
        NO_PEAK.format(name=case.workload.name)
        if case.guessed and case.model is not None
        else NOT_LEARNED
    )


def for_sale(workspace: Workspace, offers: Sequence[Offer]) -> list[Offer]:
    """Offers with a price in the campaign's market; where it has none at all, in the other."""
    priced = [one for one in offers if one.usd_per_hour is not None]
    return [one for one in priced if one.market == workspace.settings.campaign.market] or priced


def _judged(first: Mapping[str, Any], found: Pilots, runs: Sequence[Found]) -> Found:
    """Is the choice whose `first` row is published settled, and which of the `runs` are to be named?"""
    infeasible = first["status"] == "infeasible"
    # a run may show that what is doubted meets the constraint after all
    in_doubt = infeasible and max(found.assured, default=0.0) >= _HELPS
    if infeasible and not in_doubt and found.regret < SETTLED:
        return _no_runs(str(first["reason"]))
    chance = first["p_meets_constraint"]
    if not found.chosen and chance is not None and chance < _HELPS:
        return _no_runs(BEYOND_HOPE)
    if not found.chosen:
        return {"settled": True, "regret": found.regret, "runs": [], "reason": ""}
    if not in_doubt and found.regret >= SETTLED and min(found.after) >= (1 - _HELPS) * found.regret:
        return {"settled": None, "regret": found.regret, "runs": [], "reason": ""}
    named = [
        run | {"regret_after": after, "assured_after": assured}
        for run, after, assured in zip(
            runs, found.after, found.assured or [None] * len(runs), strict=True
        )
    ]
    return {
        "settled": found.regret < SETTLED and not in_doubt,
        "regret": found.regret,
        "runs": named,
        "reason": "",
    }


def _most_hosts(workspace: Workspace) -> int:
    return min(_MOST_HOSTS, workspace.settings.campaign.max_hosts)


def _candidates(
    case: Case, model: StepTimeModel, sold: Sequence[Offer], choice_set: ChoiceSet
) -> list[Setup]:
    """Setups on few machines that were never measured: the choice set, then the cheapest an hour; where the workload is
    guessed at, one device's before all.
    """
    workspace, workload = case.workspace, case.workload
    shown = reads.learning(workspace.warehouse, workspace.provider.name)
    supply = Supply(
        offers=sold,
        max_hosts=_most_hosts(workspace),
        fits=workspace.launches,
        vetoes=vetoes(shown, workload),
    )
    found = planner.allowed(workload, supply, model)
    if found is None:
        return []
    # a fast cluster is dear by the hour, and the run that tells most of it may be one on itself
    chosen = {setup_table.setup_key(one) for one in choice_set.setups}
    rows = found.of_keys_first(found.by_price(np.arange(len(found))), chosen)
    # few as those on a data sheet alone are, they must not fall behind the others
    sheets = found.cheapest_of_each(case.by_data_sheet, rows, workspace.launches)
    setups = chain(sheets, found.setups(rows, workspace.launches))
    if case.guessed:
        single = chain(sheets, found.setups(rows[found.machines[rows] == 1], workspace.launches))
        setups = chain(_on_one_device(single), setups)
    runs = reads.measured_setups(workspace.warehouse, workspace.provider.name, workload.name)
    measured = setup_table.runs_by_key(
        {workload.name}, (offer.instance_type for offer in sold), runs
    )
    new: dict[setup_table.Key, Setup] = {}
    for setup in setups:
        key = setup_table.setup_key(setup)
        if not measured[key]:
            new.setdefault(key, setup)
        if len(new) == _MOST_CANDIDATES:
            break
    return list(new.values())


def _on_one_device(setups: Iterable[Setup]) -> list[Setup]:
    """Each micro-step of a single machine on one of its devices, where it is cheapest: all of it is compute, which is
    what a first guess doubts most.
    """
    found: dict[setup_table.Key, Setup] = {}
    for setup in setups:
        if len(setup.layout) == 1:
            one = replace(setup, layout=(1,), accumulation_steps=1)
            found.setdefault(setup_table.setup_key(one), one)
    return list(found.values())


def _run(costs: Costs, setup: Setup, step_s: float) -> Found:
    return {
        "kind": "train",
        "cluster": setup.cluster.name,
        "layout": joined(setup.layout),
        "market": setup.cluster.members[0].market,
        "batch_per_device": joined(setup.batch_per_device),
        "accumulation_steps": setup.accumulation_steps,
        **setup.mode._asdict(),
    } | _billed(costs, setup.cluster, costs.run_s(step_s) + costs.compiling_s(setup.mode))


def _billed(costs: Costs, cluster: Cluster, run_s: float) -> Found:
    seconds = costs.billed_s(run_s)
    return {"seconds": seconds, "usd": seconds * (cluster.total_usd_per_hour or 0.0) / 3600}


def _profiles(workspace: Workspace, workload: Workload, sold: Sequence[Offer], count: int) -> Found:
    """What a campaign for this workload alone would buy: its profiles, and then its first runs."""
    frames = reads.training_frames(workspace.warehouse, workspace.provider.name)
    costs = costs_of(workspace)
    settings = workspace.settings.campaign
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
    launches = shopping_list(campaign, with_facts([workload], frames["workloads"]), sold, past)
    items = [
        (launch.cluster, item)
        for launch in launches
        for item in launch.items
        if item.kind != "probe"
    ]
    items = sorted(items, key=lambda pair: pair[1].kind != "profile")[:count]
    if not items:
        return _no_runs(NOTHING_NEW.format(hosts=settings.max_hosts))
    runs = []
    for launched, item in items:
        cluster = Cluster(members=tuple(launched.members[node] for node in item.nodes))
        batches = (
            joined(item.batches) if item.kind == "train" else ", ".join(map(str, item.batches))
        )
        run = {
            "kind": item.kind,
            "cluster": cluster.name,
            "layout": joined(item.layout),
            "market": cluster.members[0].market,
            "batch_per_device": batches,
            "accumulation_steps": item.accumulation_steps,
            **item.trained[1]._asdict(),
        }
        runs.append(
            run
            | _billed(costs, cluster, item.est_s)
            | {"regret_after": None, "assured_after": None}
        )
    return {"settled": False, "regret": None, "runs": runs, "kinds": [], "reason": ""}
