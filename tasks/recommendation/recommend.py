"""Ask the champion: enumerate, predict, rank, and stamp the rows of the published table. The ranking is `models`'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pandas as pd

from models.campaign.value_of_information import ChoiceSet, choice_set_of
from models.domain.cluster import Offer
from models.domain.workload import Mode, Workload
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
from ..workspace.settings import IMPORTED
from ..workspace.workspace import Workspace, refresh_command

SEED = 7
NOT_MET = (
    "no step time can be predicted: nothing is known of this workload on {provider} machines, where it was never"
    " measured as it is defined now, or the model has not learned from it yet; {remedy}"
)
OTHER_PRECISION = (
    "no step time can be predicted: on {provider} machines this workload was measured in {measured} alone, and it"
    " tolerates {wanted}; `precisions`, `strategies` and `switches` under [workloads.{workload}] in"
    " srift.toml say which it does,"
    " and {remedy}"
)
NO_TYPE_MET = (
    "no step time can be predicted: no {provider} machine on offer was ever measured as it is defined now, or the model"
    " has not learned from it yet; {remedy}"
)
NOT_IMPORTED = (
    "no step time can be predicted: this workload has no entrypoint, and either no measurement of it on {provider}"
    " machines was imported (`srift import FILE`) or the model does not know it yet (`{learn}`); where a device's peak"
    " rate is known, its flops_per_sample (`srift import FILE --workloads FILE`) would give a first guess"
)

UNPRICED_SHARE = 0.25  # of the instance types: where more have no price, a reader is warned
ON_DATA_SHEET = "by its data sheet alone, since nothing was ever measured on"
LEFT_OUT = "not compared, since neither a run on them nor their data sheet is known"
GUESSED = "a first guess from its FLOPs, since nothing of it was ever measured on these machines"

MOST_SCORES = 20  # different questions for spot placement scores in one publication

Row = dict[str, Any]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def recommend_all(
    workspace: Workspace,
    champion: Champion | None,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    each: Each = map,
) -> list[Row]:
    """Rows for every workload of srift.toml and each of its goals; `each` maps over workloads."""
    cases: list[Case] = []

    def asked() -> Iterator[_Asked | None]:
        for workload in workloads:
            cases.append(Case.of(workspace, champion, workload, offers, conditions))
            yield _asked_of(cases[-1], runs, learning, shared=model)

    workloads = workspace.workloads
    model = None if champion is None else champion.model
    with one_thread():
        conditions, experience = job_conditions(workspace), spot_experience(workspace)
        learning = reads.learning(workspace.warehouse, workspace.provider.name)
        plans = list(each(partial(_planned, shared=model), asked()))
        rows = [
            row
            for case, found in zip(cases, plans, strict=True)
            for row in _stamped(
                case, found or planner.nothing(case.workload), runs, experience
            ).rows
        ]
    return with_placement_scores(workspace, rows)


def with_placement_scores(workspace: Workspace, rows: Sequence[Row]) -> list[Row]:
    """`rows` with what the provider says of the chance to get their spot machines; as they are where it does not say.

    Only of clusters whose spot machines are of one type: a score is of a request that any of its types may serve.
    """
    scores: dict[tuple[str, str, int], Mapping[str, int]] = {}
    scored = []
    for row in rows:
        wanted = [one for one in row["cluster_offers"] or () if one["market"] == "spot"]
        score = None
        if (
            len({one["instance_type"] for one in wanted}) == 1
            and len({one["zone"] for one in wanted}) == 1
        ):
            asked = (
                str(row["region"]),
                str(wanted[0]["instance_type"]),
                sum(int(one["count"]) for one in wanted),
            )
            if asked not in scores:
                if len(scores) >= MOST_SCORES:
                    scored.append(row)
                    continue
                try:
                    scores[asked] = workspace.provider.placement_scores(
                        asked[0], [asked[1]], asked[2]
                    )
                except (
                    ProviderError
                ):  # it may not be asked for, or was too often: nothing depends on it
                    return [*scored, *rows[len(scored) :]]
            score = scores[asked].get(str(wanted[0]["zone"]))
        scored.append(row | {"placement_score": score})
    return scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload that is asked about, with all that its answer rests on.

    `model` is None where not even a guess can be made of it, and `guessed` says that it can only be guessed at. `known`
    are the `offers` that can be predicted, those on the devices `by_data_sheet` although nothing was measured on them;
    `left_out` are the devices of which nobody knows any figure. `workload` is in the modes that it was measured
    in; it tolerates those `unmeasured` too. `public`: its step times came with the package.
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
        """With what the warehouse knows of the workload; `conditions` where somebody has what `job_conditions` says."""
        workload = with_known_facts(workspace, workload)
        model, guessed = (
            None if champion is None else with_compressed(champion.model, workload),
            False,
        )
        unmeasured: tuple[Mode, ...] = ()
        if model is not None and model.met_workload(workload):
            asked, workload = workload.modes, model.as_measured(workload)
            unmeasured = tuple(one for one in asked if one not in workload.modes)
        elif model is not None:
            model, guessed = _guessing(model, workload), True
        known, by_data_sheet, left_out = (
            ([], [], []) if champion is None else comparable(champion.model, offers)
        )
        return cls(
            workspace=workspace,
            champion=champion,
            workload=workload,
            offers=offers,
            conditions=conditions or job_conditions(workspace),
            model=model,
            guessed=guessed,
            known=[] if model is None else guessable(model, known) if guessed else known,
            by_data_sheet=by_data_sheet,
            left_out=left_out,
            unmeasured=unmeasured,
            public=only_public(workspace.warehouse, workspace.provider.name, workload.name),
        )


def _guessing(model: StepTimeModel, workload: Workload) -> StepTimeModel | None:
    """As `introduced`, for one that tolerates nothing but fp32 and was measured in nothing else.

    A guess goes by rates of fp32, and no other mode is taken silently instead of the wanted one.
    """
    plain = workload.modes == (Mode(),) and not model.modes_of(workload.name)
    return introduced(model, workload) if plain else None


def recommend_one(
    workspace: Workspace,
    champion: Champion | None,
    workload: Workload,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    top: int = 5,
) -> list[Row]:
    """Published rows of one workload over `offers`, publication id and time still open."""
    return plan_one(Case.of(workspace, champion, workload, offers), runs, top=top).rows


def plan_one(case: Case, runs: pd.DataFrame, *, top: int = 5) -> planner.Plan:
    """The planner's answer, its rows stamped as they are published.

    What the champion has not met as it is defined now has no setups, and the rows say so. Of a workload that it has not
    met there is a first guess where its FLOPs and the devices' peak rates are known, and of a device that no run was
    ever measured on where its data sheet is; the rows say that too.
    """
    learning = reads.learning(case.workspace.warehouse, case.workspace.provider.name)
    model = None if case.champion is None else case.champion.model
    found = _planned(_asked_of(case, runs, learning, shared=model, top=top), shared=model)
    return _stamped(
        case, found or planner.nothing(case.workload), runs, spot_experience(case.workspace)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """All that the planner needs of a case, wherever it works; `model` is None where it is the one that all share."""

    workload: Workload
    supply: Supply
    model: StepTimeModel | None
    runs: pd.DataFrame
    top: int


def _asked_of(
    case: Case,
    runs: pd.DataFrame,
    learning: pd.DataFrame,
    *,
    shared: StepTimeModel | None,
    top: int = 5,
) -> _Asked | None:
    """None where nothing can be predicted."""
    if case.model is None or not case.known:
        return None
    return _Asked(
        workload=case.workload,
        supply=supply_of(case.workspace, case.workload, case.known, case.conditions, learning),
        model=None if case.model is shared else case.model,
        runs=_own(runs, case.workload),
        top=top,
    )


def _planned(asked: _Asked | None, shared: StepTimeModel | None) -> planner.Plan | None:
    model = shared if asked is None else asked.model or shared
    if asked is None or model is None:
        return None
    return planner.plan(
        asked.workload, asked.supply, model, runs=asked.runs, top=asked.top, seed=SEED
    )


def _own(runs: pd.DataFrame, workload: Workload) -> pd.DataFrame:
    return runs[runs["workload"] == workload.name] if len(runs) else runs


def _stamped(
    case: Case, found: planner.Plan, runs: pd.DataFrame, experience: Mapping[str, str]
) -> planner.Plan:
    workspace, offers = case.workspace, case.offers
    stamp = {
        "provider": workspace.provider.name,
        "newest_measurement_at": _newest(_own(runs, case.workload)),
        "model_version": None if case.champion is None else str(case.champion.version),
        "placement_score": None,
    }
    answered = case.model is not None and not (case.guessed and not case.known)
    unmet = _unmet(case, met=answered, offered=bool(case.known) or not offers)
    cautions = cautions_of(case.champion, offers)
    rows = [
        row
        | stamp
        | _of_members(row, offers, experience)
        | {"reason": unmet or _reason(row, case) + _cautioned(row, cautions)}
        for row in found.rows
    ]
    return replace(found, rows=rows)


def _cautioned(row: Row, cautions: Sequence[str]) -> str:
    """What the first row of a goal is to be read with."""
    return "" if row["rank"] > 1 else "".join(map(as_caution, [*unlikely(row), *cautions]))


def unlikely(row: Row) -> list[str]:
    """That a first choice, which nobody required a probability of, sooner misses its constraint than meets it."""
    chance = row["p_meets_constraint"]
    if row["p_required"] is not None or chance is None or chance >= EVEN_ODDS:
        return []
    what = "usd" if row["constraint_hours"] is None else "hours"
    return [
        f"{row['workload']}: the choice for {amount(float(row[f'constraint_{what}']), what)} meets it with {chance:.0%}"
        " probability only, and where that is too little, state p_required"
    ]


def cautions_of(champion: Champion | None, offers: Sequence[Offer]) -> list[str]:
    """What is to be known of every answer of `champion` over `offers`: a large error, and many unknown prices."""
    known = {one.instance_type.name for one in offers if one.usd_per_hour is not None}
    types = {one.instance_type.name for one in offers}
    found = []
    if (
        champion is not None
        and champion.scoreboard is not None
        and (said := caution(champion.scoreboard))
    ):
        found.append(
            f"model version {champion.version}: {said}, so take hours and dollars as a first guess"
        )
    if len(types - known) > UNPRICED_SHARE * len(types):
        found.append(
            f"{len(types - known)} of {len(types)} instance types on offer have no known price"
        )
    return found


def planned(
    workspace: Workspace,
    model: StepTimeModel,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    conditions: JobConditions,
) -> planner.Plan:
    """What the planner makes of `offers`, all of types that `model` has met, with what this installation knows."""
    learning = reads.learning(workspace.warehouse, workspace.provider.name)
    supply = supply_of(workspace, workload, offers, conditions, learning)
    return planner.plan(workload, supply, model, seed=SEED)


def supply_of(
    workspace: Workspace,
    workload: Workload,
    offers: Sequence[Offer],
    conditions: JobConditions,
    learning: pd.DataFrame,
) -> Supply:
    """What clusters of `offers` the workload may be planned on; `learning` are rows of that mart."""
    return Supply(
        offers=without_beaten_zones(offers),
        max_hosts=workspace.max_hosts,
        fits=workspace.provider.fits,
        job_conditions=conditions,
        vetoes=vetoes(learning, workload),
    )


def contending(
    model: StepTimeModel, workload: Workload, found: planner.Plan, *, conditions: JobConditions
) -> ChoiceSet:
    """Of what the planner `found`, who may yet be chosen once more is measured: nobody where nothing can be ranked."""
    rows = pd.DataFrame([setup.row() for setup in found.ranked])
    predicted = model.predict(rows) if found.ranked else rows
    return choice_set_of(workload, found.ranked, predicted, conditions=conditions)


def _unmet(case: Case, *, met: bool, offered: bool) -> str:
    """Why nothing can be predicted, and the command that changes it; empty where the planner could answer."""
    if met and offered:
        return ""
    workspace, workload = case.workspace, case.workload
    name = workspace.provider.name
    learn, measure = refresh_command(name, "0"), refresh_command(name, "25")
    remedy = f"`{measure}` measures {'them' if met else 'it there'}"
    if not workspace.can_launch:  # nothing can be bought yet
        remedy = f"measurements made elsewhere tell of it: `srift import FILE`, then `{learn}`"
    others = () if met or case.champion is None else case.champion.model.modes_of(workload.name)
    if others and not set(others) & set(workload.modes):
        measured, wanted = (", ".join(map(str, modes)) for modes in (others, workload.modes))
        return OTHER_PRECISION.format(
            provider=name, measured=measured, wanted=wanted, workload=workload.name, remedy=remedy
        )
    why = NO_TYPE_MET if met else NOT_IMPORTED if workload.digest == IMPORTED else NOT_MET
    return why.format(provider=name, learn=learn, remedy=remedy)


def _newest(runs: pd.DataFrame) -> datetime | None:
    """When the last of `runs` was measured; the warehouse's times are UTC without saying so."""
    if not len(runs) or runs["measured_at"].isna().all():
        return None
    newest: datetime = pd.Timestamp(runs["measured_at"].max()).tz_localize(UTC).to_pydatetime()
    return newest


def _reason(row: Row, case: Case) -> str:
    """The row's own, with the prices in it that are not everybody's.

    What rests on a data sheet alone says so. The first of a goal also says that it is a guess, which devices were
    compared by their data sheets, and which were not compared.
    """
    own = dict.fromkeys(one.own_price for one in _members(row, case.offers) if one.own_price)
    devices = dict.fromkeys(one.instance_type.device for one in _members(row, case.offers))
    guessed = [f"{ON_DATA_SHEET} {one}" for one in devices if one in case.by_data_sheet]
    reason = "; ".join([*guessed, str(row["reason"]), *own])
    if row["rank"] > 1:
        return reason
    said = [f"{GUESSED}: {reason}" if case.guessed else reason]
    if case.public:
        said.append(f"predicted from {ORIGIN}: nothing of it was measured or imported here")
    if case.unmeasured:
        said.append(
            f"never measured in {', '.join(map(str, case.unmeasured))}, and not compared in it"
        )
    if case.by_data_sheet:
        said.append(f"compared by data sheet alone: {', '.join(case.by_data_sheet)}")
    if case.left_out:
        said.append(
            f"not compared, since neither a run on them nor their data sheet is known: {', '.join(case.left_out)}"
        )
    return "; ".join(said)


def comparable(
    model: StepTimeModel, offers: Sequence[Offer]
) -> tuple[list[Offer], list[str], list[str]]:
    """Offers that can be predicted; of these the devices that only a data sheet tells of; devices that nobody knows.

    An offer is of a type that the model has met as it is defined now. Its device was measured on, or its rate is known.
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
    """Those of types on which a guess can be made."""
    return [one for one in offers if model.can_guess(one.instance_type.name)]


def _of_members(row: Row, offers: Sequence[Offer], experience: Mapping[str, str]) -> Row:
    """When the oldest price of the row's own members was read (of all offers, where it names no cluster), and what is
    known of their interruptions from where: own launches come before what is advised.
    """
    members = _members(row, offers)
    sources = {
        one.instance_type.name: experience.get(one.instance_type.name) or one.interruption_source
        for one in members
        if one.market == "spot"
    }
    said = [
        text if len(sources) == 1 else f"{name}: {text}" for name, text in sources.items() if text
    ]
    return {
        "price_as_of": min((one.price_as_of for one in members or offers), default=None),
        "interruption_source": "; ".join(said) or None,
    }


def _members(row: Row, offers: Sequence[Offer]) -> list[Offer]:
    """The offers that the row's cluster is made of; none where it names none."""
    named = {
        (one["instance_type"], one["market"], one["zone"]) for one in row["cluster_offers"] or ()
    }
    return [
        one for one in offers if named and (one.instance_type.name, one.market, one.zone) in named
    ]
