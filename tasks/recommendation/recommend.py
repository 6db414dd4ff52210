"""Ask the champion: plan each workload and add what the warehouse knows to the planner's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pandas as pd

from models.campaign.value_of_information import ChoiceSet, choice_set_of
from models.domain.cluster import Offer
from models.domain.workload import Goal, Mode, Workload
from models.job.job_conditions import JobConditions
from models.monitoring.promotion import caution
from models.planner import planner
from models.planner.candidates import Supply, without_beaten_zones
from models.planner.choice_rule import EVEN_ODDS
from models.planner.explanations import amount
from models.planner.learning import vetoes
from models.step_time.model import StepTimeModel, introduced
from models.step_time.unmeasured import with_compressed
from warehouse import reads

from ..data_files.public import ORIGIN, only_public
from ..market.job_conditions import job_conditions, spot_experience
from ..market.offers import with_known_facts
from ..providers.base import ProviderError
from ..reporting.tables import as_caution
from ..training.registry import Champion
from ..workspace.blas_threads import one_thread
from ..workspace.workspace import Workspace, refresh_command

SEED = 7
UNPRICED_SHARE = 0.25  # of the instance types: readers are warned above it
MOST_SCORES = 20  # requests for spot placement scores in one publication

Row = dict[str, Any]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload in its measured modes, and all that its answer rests on.

    `model` is None if not even a guess can be made; `guessed` is True for a first guess. `known`
    are the `offers` that can be predicted, also those on devices known `by_data_sheet` alone;
    nothing is known of the devices `left_out`. `unmeasured` are tolerated modes without data;
    `public` step times came with the package.
    """

    workspace: Workspace
    champion: Champion | None
    workload: Workload
    offers: Sequence[Offer]
    conditions: JobConditions
    model: StepTimeModel | None
    guessed: bool
    known: Sequence[Offer]
    by_data_sheet: Sequence[str]
    left_out: Sequence[str]
    unmeasured: Sequence[Mode] = ()
    public: bool = False

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        champion: Champion | None,
        workload: Workload,
        offers: Sequence[Offer],
        conditions: JobConditions | None = None,
    ) -> Case:
        """Add what the warehouse and the champion know of the workload."""
        workload = with_known_facts(workspace, workload)
        model, guessed, tolerated = None, False, workload.modes
        known: Sequence[Offer] = ()
        by_data_sheet: Sequence[str] = ()
        left_out: Sequence[str] = ()
        if champion is not None:
            known, by_data_sheet, left_out = comparable(champion.model, offers)
            model = with_compressed(champion.model, workload)
            if model.met_workload(workload):
                workload = model.as_measured(workload)
            else:  # a guess rests on fp32 rates and replaces no other mode
                plain = workload.modes == (Mode(),) and not model.modes_of(workload.name)
                model, guessed = introduced(model, workload) if plain else None, True
                known = [] if model is None else guessable(model, known)
        return cls(
            workspace=workspace,
            champion=champion,
            workload=workload,
            offers=offers,
            conditions=conditions or job_conditions(workspace),
            model=model,
            guessed=guessed,
            known=known,
            by_data_sheet=by_data_sheet,
            left_out=left_out,
            unmeasured=[mode for mode in tolerated if mode not in workload.modes],
            public=only_public(workspace.warehouse, workspace.provider.name, workload.name),
        )


def comparable(
    model: StepTimeModel, offers: Sequence[Offer]
) -> tuple[list[Offer], list[str], list[str]]:
    """Return predictable offers, their devices known by data sheet alone, and unknown devices.

    A predictable type is defined as it was measured; its device was measured or its rate is known.
    """
    measured = {model.machines[name].device for name in model.measured_types}
    found: list[Offer] = []
    guessed: set[str] = set()
    for offer in offers:
        kind = offer.instance_type
        if not model.met_type(kind):
            continue
        if model.machines[kind.name].device in measured:
            found.append(offer)
        elif model.can_guess(kind.name):
            found.append(offer)
            guessed.add(kind.device)
    known = {one.instance_type.device for one in found}
    return found, sorted(guessed), sorted({one.instance_type.device for one in offers} - known)


def guessable(model: StepTimeModel, offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers of types on which an unmeasured workload can be predicted."""
    return [one for one in offers if model.can_guess(one.instance_type.name)]


def recommend_all(
    workspace: Workspace,
    champion: Champion | None,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    each: Each = map,
) -> list[Row]:
    """Return the rows of every workload and goal; `each` maps over workloads."""
    with one_thread():
        conditions, experience = job_conditions(workspace), spot_experience(workspace)
        cases = [
            Case.of(workspace, champion, workload, offers, conditions)
            for workload in map(with_usual_goals, workspace.workloads)
        ]
        plans = each(_called, [_planning_of(case, runs) for case in cases])
        rows = [
            row
            for case, found in zip(cases, plans, strict=True)
            for row in _stamped(case, found, runs, experience)
        ]
    return with_placement_scores(workspace, rows)


def with_placement_scores(workspace: Workspace, rows: Sequence[Row]) -> list[Row]:
    """Add the provider's score of the chance to get a row's spot machines, if it has scores.

    Only for spot machines of one type and zone: a request may be served by any of its types.
    """
    scores: dict[tuple[str, str, int], Mapping[str, int]] = {}
    scored: list[Row] = []
    for row in rows:
        spot = [one for one in row["cluster_offers"] or () if one["market"] == "spot"]
        score = None
        if len({(one["instance_type"], one["zone"]) for one in spot}) == 1:
            count = sum(int(one["count"]) for one in spot)
            request = str(row["region"]), str(spot[0]["instance_type"]), count
            if request not in scores and len(scores) < MOST_SCORES:
                try:
                    scores[request] = workspace.provider.placement_scores(
                        request[0], [request[1]], count
                    )
                except ProviderError:  # not allowed, or too often: nothing depends on it
                    return [*scored, *rows[len(scored) :]]
            score = scores.get(request, {}).get(str(spot[0]["zone"]))
        scored.append(row | {"placement_score": score})
    return scored


def plan_one(case: Case, runs: pd.DataFrame, *, top: int = 5) -> planner.Recommendation:
    """Return the planner's answer with complete rows; without a prediction they say why."""
    found = _called(_planning_of(case, runs, top=top))
    rows = _stamped(case, found, runs, spot_experience(case.workspace))
    return replace(found or planner.nothing(case.workload), rows=rows)


Planning = Callable[[], planner.Recommendation]


def _planning_of(case: Case, runs: pd.DataFrame, *, top: int = 5) -> Planning | None:
    """Return a call of the planner, which may travel; None if nothing can be predicted."""
    if case.model is None or not case.known:
        return None
    known = _of_workload(runs, case.workload)
    call = _planning(case.workspace, case.model, case.workload, case.known, case.conditions)
    return partial(call, runs=known, top=top)


def _called(planning: Planning | None) -> planner.Recommendation | None:
    return None if planning is None else planning()


def planned(
    workspace: Workspace,
    model: StepTimeModel,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    conditions: JobConditions,
) -> planner.Recommendation:
    """Plan over `offers`, all of types that `model` knows."""
    return _planning(workspace, model, workload, offers, conditions)()


def _planning(
    workspace: Workspace,
    model: StepTimeModel,
    workload: Workload,
    offers: Sequence[Offer],
    conditions: JobConditions,
) -> partial[planner.Recommendation]:
    learning = reads.learning(workspace.warehouse, workspace.provider.name)
    supply = Supply(
        offers=without_beaten_zones(offers),
        max_hosts=workspace.max_hosts,
        fits=workspace.provider.fits,
        job_conditions=conditions,
        vetoes=vetoes(learning, workload),
    )
    return partial(planner.plan, workload, supply, model, seed=SEED)


def contending(
    model: StepTimeModel,
    workload: Workload,
    found: planner.Recommendation,
    *,
    conditions: JobConditions,
) -> ChoiceSet:
    """Return the setups of a plan that may be chosen once more is measured."""
    rows = pd.DataFrame([setup.row() for setup in found.ranked])
    predicted = model.predict(rows) if found.ranked else rows
    return choice_set_of(workload, found.ranked, predicted, conditions=conditions)


def _of_workload(runs: pd.DataFrame, workload: Workload) -> pd.DataFrame:
    return runs[runs["workload"] == workload.name] if len(runs) else runs


def _stamped(
    case: Case,
    found: planner.Recommendation | None,
    runs: pd.DataFrame,
    experience: Mapping[str, str],
) -> list[Row]:
    """Add provider, ages, sources and cautions to the planner's rows."""
    why = "" if found is not None else _unpredictable(case)
    plan = found or planner.nothing(case.workload, why)
    measured = _of_workload(runs, case.workload)
    newest: datetime | None = None
    if len(measured) and measured["measured_at"].notna().any():  # the warehouse's times are UTC
        newest = pd.Timestamp(measured["measured_at"].max()).tz_localize(UTC).to_pydatetime()
    cautions = cautions_of(case.champion, case.offers)
    rows = []
    for row in plan.rows:
        offers = row.pop("offers")
        reason = why or _reason(row, offers, case)
        if row["rank"] == 1:
            reason += "".join(map(as_caution, [*unlikely(row), *cautions]))
        ages = [offer.price_as_of for offer in offers or case.offers]
        rows.append(
            row
            | {
                "provider": case.workspace.provider.name,
                "newest_measurement_at": newest,
                "model_version": None if case.champion is None else str(case.champion.version),
                "placement_score": None,
                "price_as_of": min(ages, default=None),
                "interruption_source": _interruption_source(offers, experience),
                "reason": reason,
            }
        )
    return rows


def _interruption_source(offers: Sequence[Offer], experience: Mapping[str, str]) -> str | None:
    """Say where a row's interruption rates come from: launches before the advisor."""
    sources = {}
    for offer in offers:
        name = offer.instance_type.name
        source = experience.get(name) or offer.interruption_source
        if offer.market == "spot" and source:
            sources[name] = source
    if len(sources) == 1:
        return next(iter(sources.values()))
    return "; ".join(f"{name}: {source}" for name, source in sources.items()) or None


def unlikely(row: Row) -> list[str]:
    """Warn of a first choice that more probably misses its constraint, if none is required."""
    chance = row["p_meets_constraint"]
    if row["p_required"] is not None or chance is None or chance >= EVEN_ODDS:
        return []
    what = "usd" if row["constraint_hours"] is None else "hours"
    limit = amount(float(row[f"constraint_{what}"]), what)
    said = f"the choice for {limit} meets it with {chance:.0%} probability only"
    return [f"{row['workload']}: {said}; state p_required to ask for more"]


def cautions_of(champion: Champion | None, offers: Sequence[Offer]) -> list[str]:
    """Warn of a model with a large error, and of many unknown prices."""
    known = {one.instance_type.name for one in offers if one.usd_per_hour is not None}
    types = {one.instance_type.name for one in offers}
    found = []
    if champion is not None and champion.scoreboard is not None:
        said = caution(champion.scoreboard)
        if said:
            found.append(f"model version {champion.version}: {said}")
    if len(types - known) > UNPRICED_SHARE * len(types):
        count = len(types - known)
        found.append(f"{count} of {len(types)} instance types on offer have no known price")
    return found


def _unpredictable(case: Case) -> str:
    """Say why no step time can be predicted, and which command changes it."""
    workspace, workload, champion = case.workspace, case.workload, case.champion
    name = workspace.provider.name
    remedy = f"`srift import FILE`, then `{refresh_command(name, '0')}`"
    if workspace.can_launch:
        remedy = f"`{refresh_command(name, '25')}`"
    what = f"this workload was not measured on {name} machines as it is defined now"
    modes = () if champion is None else champion.model.modes_of(workload.name)
    if modes and not set(modes) & set(workload.modes):
        what = f"this workload was measured in {', '.join(map(str, modes))} alone"
    elif case.model is not None:
        what = f"no {name} machine on offer was measured as it is defined now"
    return f"no step time can be predicted: {what}; {remedy} would help"


def _reason(row: Row, offers: Sequence[Offer], case: Case) -> str:
    """Add prices that are not public and missing data to the planner's reason."""
    devices = dict.fromkeys(offer.instance_type.device for offer in offers)
    sheets = [
        f"{device} by its data sheet alone" for device in devices if device in case.by_data_sheet
    ]
    prices = dict.fromkeys(offer.own_price for offer in offers if offer.own_price)
    said = [*sheets, str(row["reason"]), *prices]
    if row["rank"] > 1:
        return "; ".join(said)
    if case.guessed:
        said = ["a first guess from its FLOPs: it was never measured here", *said]
    if case.public:
        said.append(f"predicted from {ORIGIN}: nothing of it was measured or imported here")
    if case.unmeasured:
        modes = ", ".join(map(str, case.unmeasured))
        said.append(f"never measured in {modes}, and not compared in it")
    if case.by_data_sheet:
        said.append(f"compared by data sheet alone: {', '.join(case.by_data_sheet)}")
    if case.left_out:
        said.append(f"not compared, without run or data sheet: {', '.join(case.left_out)}")
    return "; ".join(said)


def with_usual_goals(workload: Workload) -> Workload:
    """Add "cheapest" and "fastest" to the workload's goals."""
    stated = {goal.goal for goal in workload.goals}
    usual = (Goal(goal=name) for name in ("cheapest", "fastest") if name not in stated)
    return replace(workload, goals=(*workload.goals, *usual))
