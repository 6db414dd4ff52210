"""Suggest runs (pilots) that would reduce the uncertainty of a choice. Nothing is launched."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import pandas as pd

from models.campaign.candidates import training_run
from models.campaign.pilots import choose_pilots
from models.campaign.value_of_information import ChoiceSet
from models.domain.cluster import Offer
from models.domain.setup_table import Key, runs_by_key, setup_key
from models.domain.workload import Setup
from models.job.compilation import prior_s
from models.planner import planner
from models.planner.candidates import Supply
from models.planner.enumeration import cheapest_cluster
from models.planner.explanations import amount, describe_setup
from models.planner.planner import Recommendation
from models.step_time.model import StepTimeModel

from ..reporting.tables import share
from ..workspace.workspace import Workspace, refresh_command
from .case import SEED, Case, Row, comparable, contenders, supply_of

# Four machines suffice to show how a workload communicates.
_MOST_HOSTS, _MOST_CANDIDATES = 4, 300
SETTLED = 0.01  # with less expected regret, no measurement is worth its cost
# A first choice should be measured before it is used if its expected regret is at least _UNSURE
# and its probability of being the best is below _DOUBTFUL.
_UNSURE, _DOUBTFUL = 0.05, 0.5
_HELPS = 0.02  # pilots are suggested only if they remove at least this share of the regret


def pilots_for(case: Case, plan: Recommendation, *, buyable: Sequence[Offer], count: int) -> Row:
    """Return suggested runs (pilots) for the first goal of the case's workload.

    The keys of the result are:

        settled: True if `regret` is below SETTLED, so that no run is needed. False if runs are
            suggested. None in all other cases. `reason` then says why no run is suggested.
        regret: the expected regret of choosing now, or None if it is unknown. Regret is the loss
            of a choice minus the loss of the best setup. A loss is the natural log of hours or
            dollars, plus a penalty for missing the deadline or budget.
        runs: at most `count` dictionaries, each with a run's setup and four other keys. `seconds`
            and `usd` are the duration and cost of a launch with only this run. `planned` is a pair
            (cluster, PlannedRun). `regret_after` is the expected regret after this run and all
            earlier runs of the list.
        reason: a sentence on the regret, or on why no run is suggested.

    plan: the recommendation whose first choice the runs would make more certain.
    buyable: offers of machines to measure on. Offers without a price are ignored.
    """
    offers = for_sale(case.workspace, buyable)
    if not offers:
        return _no_runs("no offer has a price")
    if case.is_outdated:
        command = refresh_command(case.workspace.provider.name, "0")
        return _no_runs(f"the workload's runs are newer than the model: run `{command}`")
    if case.model is None or not case.known:
        why = "import its flops_per_sample or measurements with `srift import FILE`"
        if case.workload.name in {workload.name for workload in case.workspace.measurable}:
            why = f"run `{refresh_command(case.workspace.provider.name, 'N')}`"
        return _no_runs(f"the workload was never measured in its present definition: {why}")
    return _pilots(case, case.model, plan, offers, count)


def is_doubtful(row: Row) -> bool:
    """Return True if the first choice `row` is probably not the best."""
    return bool(row["status"] == "recommended" and row["p_best"] < _DOUBTFUL)


def measure_first(row: Row, pilots: Row) -> Row:
    """Return the first choice `row`, with the status "measure_first" if it is too uncertain.

    The choice is too uncertain if it is probably not the best, `pilots` suggests a run, and the
    expected regret is at least _UNSURE. The reason then names the first suggested run.

    pilots: the result of `pilots_for`.
    """
    runs, regret = pilots["runs"], pilots["regret"]
    if not is_doubtful(row) or not runs or regret is None or regret < _UNSURE:
        return row
    run = runs[0]
    reason = (
        f"measure {describe_setup(run)} for {amount(run['usd'], 'usd')} first: choosing now is"
        f" expected to be {share(regret)} worse than the best choice; {row['reason']}"
    )
    return row | {"status": "measure_first", "reason": reason}


def for_sale(workspace: Workspace, offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers with known prices in the market that [campaign] of srift.toml sets.

    If there are none, return the offers with known prices in all markets.
    """
    priced_offers = [offer for offer in offers if offer.usd_per_hour is not None]
    return [
        offer for offer in priced_offers if offer.market == workspace.settings.campaign.market
    ] or priced_offers


def launched_supply(case: Case, offers: Sequence[Offer], max_hosts: int) -> Supply:
    """Return the clusters of `offers` that can be launched, with at most `max_hosts` machines."""
    supply = supply_of(case.workspace, case.workload, offers, case.experience)
    return replace(supply, max_hosts=max_hosts, fits=case.workspace.provider.launches)


def _no_runs(why: str) -> Row:
    """Return an answer that suggests no runs. `why` is the reason for the user."""
    reason = f"no measurement can be suggested: {why}"
    return {"settled": None, "regret": None, "runs": [], "reason": reason}


def _pilots(
    case: Case, model: StepTimeModel, plan: Recommendation, offers: Sequence[Offer], count: int
) -> Row:
    """Return suggested runs for a workload that `model` can predict.

    The result has the keys that `pilots_for` describes.
    plan: the recommendation that the runs would make more certain.
    offers: the offers of machines to measure on.
    count: the maximum number of runs.
    """
    choice_set = contenders(model, case.workload, plan, case.experience.conditions)
    candidates = _candidates(
        case, model, comparable(model, offers, guessed=case.guessed), choice_set
    )
    first = plan.rows[0]
    infeasible, chance = first["cluster"] is None, first["p_meets_constraint"]
    if not candidates and not infeasible:
        return _no_runs("a run on any machine on offer would show nothing new")
    frame = pd.DataFrame([setup.row() for setup in candidates])
    goal = case.workload.goals[0].goal
    choice = choose_pilots(choice_set, frame, model.joint, goal=goal, count=count, seed=SEED)
    if infeasible and choice.regret < SETTLED:
        return _no_runs(first["reason"])
    if not choice.chosen and chance is not None and chance < _HELPS:
        return _no_runs("no cluster is likely to meet the constraint, whatever a run shows")
    is_settled = choice.regret < SETTLED
    reason = f"choosing now is expected to be {share(choice.regret)} worse than the best choice"
    reason = f"settled: {reason}" if is_settled else f"open: {reason}"
    answer: Row = {"settled": is_settled, "regret": choice.regret, "runs": [], "reason": reason}
    if is_settled or not choice.chosen:
        return answer
    if min(choice.after) >= (1 - _HELPS) * choice.regret:
        reason += "; a few runs would not settle the choice"
        return answer | {"settled": None, "reason": reason}
    costs = case.experience.costs
    runs: list[Row] = []
    seconds = model.predict(frame.iloc[list(choice.chosen)])["step_s"]
    for place, regret, step_s in zip(choice.chosen, choice.after, map(float, seconds), strict=True):
        setup = candidates[place]
        run, cluster = training_run(setup, step_s, costs), setup.cluster
        billed_s = costs.billed_s(costs.run_s(step_s) + prior_s(setup.mode))
        runs.append(
            {
                **run.row(),
                "market": cluster.market,
                "seconds": billed_s,
                "usd": billed_s * (cluster.total_usd_per_hour or 0.0) / 3600,
                "planned": (cluster, run),
                "regret_after": regret,
            }
        )
    saved_usd = math.expm1(choice.regret) * (first["usd"] or math.inf)
    if runs[0]["usd"] > saved_usd:
        reason = f"measuring costs {amount(runs[0]['usd'], 'usd')} and is expected to save"
        return answer | {"settled": None, "reason": f"{reason} {amount(saved_usd, 'usd')}"}
    return answer | {"runs": runs}


def _candidates(
    case: Case, model: StepTimeModel, offers: Sequence[Offer], choice_set: ChoiceSet
) -> list[Setup]:
    """Return the unmeasured setups from which the suggested runs are chosen, in this order:

    1. Setups with a single device, if the workload was never measured.
    2. Setups of the choice set: the setups that might turn out to be the best.
    3. Other setups, cheapest per hour first. Their modes occur in the choice set. If the choice
       set is empty, every mode of the workload is used.

    A setup has at most _MOST_HOSTS machines, and at most `max_hosts` of srift.toml.
    """
    hosts = min(_MOST_HOSTS, case.workspace.settings.campaign.max_hosts)
    # Clusters of several instance types are included only if they might be recommended.
    supply = replace(launched_supply(case, offers, hosts), most_mixed=0)
    modes = dict.fromkeys(setup.mode for setup in choice_set.setups)
    workload = replace(case.workload, modes=tuple(modes) or case.workload.modes)
    space = planner.allowed_candidates(workload, supply, model)
    if space is None:
        return []
    cheapest = space.by_price()
    setups = chain(_launchable(choice_set, supply), space.setups(cheapest, supply.fits))
    if case.guessed:  # then the compute time is most uncertain, and a single device shows it
        count = space.splits.count.sum(axis=1)[space.column("split", cheapest)]
        singles = space.setups(cheapest[count == 1], supply.fits)
        on_single_device = (replace(setup, layout=(1,), accumulation_steps=1) for setup in singles)
        setups = chain(on_single_device, setups)
    types = (offer.instance_type for offer in offers)
    known_runs = runs_by_key(types, case.runs)
    new: dict[Key, Setup] = {}
    for setup in setups:
        key = setup_key(setup)
        if not known_runs[key]:
            new.setdefault(key, setup)
        if len(new) == _MOST_CANDIDATES:
            break
    return list(new.values())


def _launchable(choice_set: ChoiceSet, supply: Supply) -> Iterator[Setup]:
    """Yield the setups of `choice_set` that can be launched on machines of `supply`."""
    for setup in choice_set.setups:
        cluster = cheapest_cluster(setup.cluster.type_names, supply.offers)
        if cluster and len(cluster.members) <= supply.max_hosts and not supply.fits(cluster):
            yield replace(setup, cluster=cluster)
