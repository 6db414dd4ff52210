"""Suggest runs (pilots) that would reduce the uncertainty of a choice. Nothing is launched."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pandas as pd

from models.campaign.candidates import Costs, PlannedRun, training_run
from models.campaign.pilots import choose_pilots
from models.campaign.run_value import Past
from models.campaign.shopping_list import CampaignLimits, shopping_list
from models.campaign.value_of_information import ChoiceSet
from models.domain.cluster import Cluster, Offer
from models.domain.setup_table import Key, runs_by_key, setup_key
from models.domain.workload import Setup
from models.job.compilation import prior_s
from models.planner import planner
from models.planner.candidates import Supply
from models.planner.enumeration import sold_together
from models.planner.explanations import amount, named
from models.planner.planner import Recommendation
from models.step_time.model import StepTimeModel
from warehouse import reads

from ..reporting.tables import share
from ..workspace.workspace import Workspace, refresh_command
from .case import SEED, Case, Row, comparable, contending, supply_of

# Four machines suffice to show how a workload communicates.
_MOST_HOSTS, _MOST_CANDIDATES = 4, 300
SETTLED = 0.01  # with less expected regret, no measurement is worth its cost
# A first choice should be measured before it is used if its expected regret is at least _UNSURE
# and its probability of being the best is below _DOUBTFUL.
_UNSURE, _DOUBTFUL = 0.05, 0.5
_HELPS = 0.02  # pilots are suggested only if they remove at least this share of the regret

Found = dict[str, Any]


def pilots_for(case: Case, plan: Recommendation, *, buyable: Sequence[Offer], count: int) -> Found:
    """Return suggested runs (pilots) for the first goal of the case's workload.

    Regret is how much worse a choice is than the best setup: the difference of the natural logs of
    their hours or dollars. If the model cannot predict the workload, the suggested runs are the
    next refresh's runs. Keys of the result:

        settled: True if the expected regret is below SETTLED, so that no run is needed. False if
            the suggested runs would reduce the regret. None if there is no useful run.
        regret: the expected regret of choosing now, or None if it is unknown.
        runs: at most `count` dictionaries with a run's setup, `seconds`, `usd` and `planned` (a
            pair of cluster and PlannedRun). `regret_after` is the expected regret after this run
            and all earlier runs of the list.
        reason: why no run is suggested, else "".

    buyable: offers of machines to measure on. Offers without a price are ignored.
    """
    sold = for_sale(case.workspace, buyable)
    if not sold:
        return _no_runs("no offer has a price")
    if case.is_outdated:
        command = refresh_command(case.workspace.provider.name, "0")
        return _no_runs(f"the workload's runs are newer than the model: run `{command}`")
    if case.model is None or not case.known:
        return _profiles(case, sold, count)
    return _pilots(case, case.model, plan, sold, count)


def is_doubtful(row: Row) -> bool:
    """Return True if the first choice `row` is probably not the best."""
    return bool(row["status"] == "recommended" and row["p_best"] < _DOUBTFUL)


def measure_first(row: Row, pilots: Found) -> Row:
    """Return the first choice `row`, with the status "measure_first" if it is too uncertain.

    The reason then names the run to measure first.
    pilots: the result of `pilots_for`.
    """
    runs, regret = pilots["runs"], pilots["regret"]
    if not is_doubtful(row) or not runs or regret is None or regret < _UNSURE:
        return row
    run = runs[0]
    reason = (
        f"measure {named(run)} for {amount(run['usd'], 'usd')} first: choosing now is expected to"
        f" be {share(regret)} worse than the best choice; {row['reason']}"
    )
    return row | {"status": "measure_first", "reason": reason}


def for_sale(workspace: Workspace, offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers with known prices in the market that [campaign] of srift.toml sets.

    If there are none, returns the offers with known prices in any market.
    """
    priced = [one for one in offers if one.usd_per_hour is not None]
    return [one for one in priced if one.market == workspace.settings.campaign.market] or priced


def launched_supply(case: Case, offers: Sequence[Offer], max_hosts: int) -> Supply:
    """Return the clusters of `offers` that can be launched, with at most `max_hosts` machines."""
    supply = supply_of(case.workspace, case.workload, offers, case.experience.conditions)
    return replace(supply, max_hosts=max_hosts, fits=case.workspace.provider.launches)


def _no_runs(why: str) -> Found:
    """Return the result of `pilots_for` without runs, for the reason `why`."""
    reason = f"no measurement can be suggested: {why}"
    return {"settled": None, "regret": None, "runs": [], "reason": reason}


def _pilots(
    case: Case, model: StepTimeModel, plan: Recommendation, sold: Sequence[Offer], count: int
) -> Found:
    """Return the result of `pilots_for` for a workload that `model` can predict.

    sold: the offers of machines to measure on.
    count: the maximum number of runs.
    """
    choice_set = contending(model, case.workload, plan, case.experience.conditions)
    candidates = _candidates(case, model, comparable(model, sold, guessed=case.guessed), choice_set)
    first = plan.rows[0]
    infeasible, chance = first["cluster"] is None, first["p_meets_constraint"]
    if not candidates and not infeasible:
        return _no_runs("a run on any machine on offer would show nothing new")
    frame = pd.DataFrame([setup.row() for setup in candidates])
    goal = case.workload.goals[0].goal
    found = choose_pilots(choice_set, frame, model.joint, goal=goal, count=count, seed=SEED)
    if infeasible and found.regret < SETTLED:
        return _no_runs(first["reason"])
    if not found.chosen and chance is not None and chance < _HELPS:
        return _no_runs("no cluster is likely to meet the constraint, whatever a run shows")
    answer: Found = {"settled": True, "regret": found.regret, "runs": [], "reason": ""}
    if not found.chosen:
        return answer
    settled = found.regret < SETTLED
    if not settled and min(found.after) >= (1 - _HELPS) * found.regret:
        return answer | {"settled": None}
    costs, runs = case.experience.costs, []
    seconds = model.predict(frame.iloc[list(found.chosen)])["step_s"]
    for place, step_s in enumerate(map(float, seconds)):
        setup = candidates[found.chosen[place]]
        run_s = costs.run_s(step_s) + prior_s(setup.mode)
        run = _billed(training_run(setup, step_s, costs), setup.cluster, run_s, costs)
        runs.append(run | {"regret_after": found.after[place]})
    saved_usd = math.expm1(found.regret) * (first["usd"] or math.inf)
    if runs[0]["usd"] > saved_usd:
        reason = f"measuring costs {amount(runs[0]['usd'], 'usd')} and is expected to save"
        return answer | {"settled": None, "reason": f"{reason} {amount(saved_usd, 'usd')}"}
    return answer | {"settled": settled, "runs": runs}


def _candidates(
    case: Case, model: StepTimeModel, sold: Sequence[Offer], choice_set: ChoiceSet
) -> list[Setup]:
    """Return the unmeasured setups from which the suggested runs are chosen, in this order:

    1. Setups with a single device, if the workload was never measured.
    2. Setups of the choice set (those that might be recommended).
    3. Other setups in the same modes, by dollars per hour.

    A setup has at most _MOST_HOSTS machines, and no more than srift.toml allows.
    """
    hosts = min(_MOST_HOSTS, case.workspace.settings.campaign.max_hosts)
    # Clusters of several instance types are included only if they might be recommended.
    supply = replace(launched_supply(case, sold, hosts), most_mixed=0)
    modes = dict.fromkeys(setup.mode for setup in choice_set.setups)
    workload = replace(case.workload, modes=tuple(modes) or case.workload.modes)
    found = planner.allowed(workload, supply, model)
    if found is None:
        return []
    cheapest = found.by_price()
    setups = chain(_bought(choice_set, supply), found.setups(cheapest, supply.fits))
    if case.guessed:  # then the compute time is most uncertain, and a single device shows it
        count = found.splits.count.sum(axis=1)[found.column("split", cheapest)]
        singles = found.setups(cheapest[count == 1], supply.fits)
        one_device = (replace(one, layout=(1,), accumulation_steps=1) for one in singles)
        setups = chain(list({setup_key(one): one for one in one_device}.values()), setups)
    types = (offer.instance_type for offer in sold)
    measured = runs_by_key(types, case.runs)
    new: dict[Key, Setup] = {}
    for setup in setups:
        key = setup_key(setup)
        if not measured[key]:
            new.setdefault(key, setup)
        if len(new) == _MOST_CANDIDATES:
            break
    return list(new.values())


def _bought(choice_set: ChoiceSet, supply: Supply) -> Iterator[Setup]:
    """Yield the setups of `choice_set` that can be launched on machines of `supply`."""
    groups = sold_together(supply.offers)
    for setup in choice_set.setups:
        names = setup.cluster.type_names
        group = next((one for one in groups if one.keys() >= set(names)), None)
        if group is None or len(names) > supply.max_hosts:
            continue
        cluster = Cluster(members=tuple(group[name] for name in names))
        if not supply.fits(cluster):
            yield replace(setup, cluster=cluster)


def _billed(run: PlannedRun, cluster: Cluster, run_s: float, costs: Costs) -> Found:
    """Return `run` as an entry of `runs` in the result of `pilots_for`.

    The seconds and dollars are those of a launch with no other run.
    run_s: duration of the run on `cluster` in seconds.
    """
    seconds, row = costs.billed_s(run_s), run.row()
    del row["workload"]
    return {
        **row,
        "market": cluster.market,
        "seconds": seconds,
        "usd": seconds * (cluster.total_usd_per_hour or 0.0) / 3600,
        "planned": (cluster, run),
    }


def _profiles(case: Case, sold: Sequence[Offer], count: int) -> Found:
    """Return the result of `pilots_for` for a workload that the model cannot predict.

    The result has at most `count` runs of the next refresh. Profiles come first. A profile measures
    the compute time of one device.
    """
    workspace, costs = case.workspace, case.experience.costs
    if case.workload.name not in {one.name for one in workspace.measurable}:
        return _no_runs(
            "the speed of this workload is unknown; import its flops_per_sample or measurements"
            " with `srift import FILE`"
        )
    frames = reads.training_frames(workspace.warehouse, workspace.provider.name)
    settings = workspace.settings.campaign
    campaign = CampaignLimits(
        max_usd=math.inf,
        max_seconds=workspace.max_minutes * 60,
        max_hosts=settings.max_hosts,
        fits=workspace.provider.launches,
        market=sold[0].market,
        costs=costs,
    )
    past = Past(runs=frames["runs"], profiles=frames["profiles"], probes=frames["probes"])
    items = [
        (Cluster(members=tuple(launch.cluster.members[node] for node in run.nodes)), run)
        for launch in shopping_list(campaign, [case.workload], sold, past)
        for run in launch.items
        if run.kind != "probe"
    ]
    items.sort(key=lambda pair: pair[1].kind != "profile")
    runs = [
        _billed(run, cluster, run.est_s, costs) | {"regret_after": None}
        for cluster, run in items[:count]
    ]
    if not runs:
        return _no_runs("a run on any machine on offer would show nothing new")
    return {"settled": False, "regret": None, "runs": runs, "reason": ""}
