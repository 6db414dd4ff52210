"""Recommend clusters for a workload with the model in use, as rows of the published table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC
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
from models.planner.learning import vetoes
from models.planner.planner import Recommendation
from models.step_time.model import StepTimeModel, introduce, with_compressed

from ..data_files.public import ORIGIN, only_public
from ..market.job_conditions import Experience, experience_of
from ..providers.ec2.prices import NAT_USD_PER_GB, download_usd
from ..reporting.tables import as_caution
from ..training.registry import Champion
from ..workspace.workspace import Workspace, refresh_command

SEED = 7

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload with all inputs of its recommendation.

    Attributes:
        champion: the registered model in use, or None.
        workload: the workload. `Case.of` keeps only the modes that the model can predict.
        offers: the offers of the machines to compare.
        runs: one row for each measured setup of the workload.
        experience: models and results of earlier launches.
        model: the model that predicts the workload; None if it cannot be predicted.
        guessed: True if the workload was never measured, so that the model predicts it from its
            FLOPs or from the shape of its transformer.
        known: the offers for which the model can predict step times.
        by_data_sheet: devices that were never measured. The model knows only their data sheets.
        notes: sentences for the user about the data behind the answer.
    """

    workspace: Workspace
    champion: Champion | None
    workload: Workload
    offers: Sequence[Offer]
    runs: pd.DataFrame
    experience: Experience
    model: StepTimeModel | None = None
    guessed: bool = False
    known: Sequence[Offer] = ()
    by_data_sheet: Set[str] = frozenset()
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        champion: Champion | None,
        workload: Workload,
        offers: Sequence[Offer],
        runs: pd.DataFrame,
        experience: Experience | None = None,
    ) -> Case:
        """Return the case of `workload`.

        workload: the job, with its facts from the warehouse (`with_facts`).
        runs: one row for each measured setup. Rows of other workloads are ignored.
        experience: models and results of earlier launches. None means that they are read from the
            warehouse.
        """
        case = cls(
            workspace=workspace,
            champion=champion,
            workload=workload,
            offers=offers,
            runs=runs[runs["workload"] == workload.name],
            experience=experience or experience_of(workspace),
        )
        return case if champion is None else case._for_model(champion.model)

    @property
    def is_outdated(self) -> bool:
        """Return True if the workload has runs, but the model in use has not learned from them."""
        if self.champion is None or not len(self.runs):
            return False
        return not self.champion.model.met_workload(self.workload)

    def _for_model(self, champion: StepTimeModel) -> Case:
        """Return a copy of the case for the model `champion`.

        The copy has new values of model, guessed, known, by_data_sheet, notes and workload. If the
        workload was measured, the copy keeps only the modes that the model can predict.
        """
        workload, notes = self.workload, []
        known_offers = comparable(champion, self.offers)
        able = with_compressed(champion, workload)
        model: StepTimeModel | None = able
        guessed = not able.met_workload(workload)
        if guessed:
            # A transformer's shape suffices to predict all modes. FLOPs suffice for DDP in fp32.
            predictable = workload.layers is not None or workload.modes == (Mode(),)
            new = predictable and not able.modes_of(workload.name)
            model = introduce(able, workload) if new else None
            basis = "FLOPs" if workload.layers is None else "shape"
            why = "because the workload was never measured"
            if self.is_outdated:
                command = refresh_command(self.workspace.provider.name, "0")
                why = f"because the model is older than the workload's runs: `{command}` updates it"
            notes.append(f"a first guess from the workload's {basis}, {why}")
        else:
            workload = able.as_measured(workload)
        if only_public(self.workspace, workload.name):
            notes.append(
                f"predicted from {ORIGIN}: no run of this workload was measured or imported"
            )
        unmeasured = [str(mode) for mode in self.workload.modes if mode not in workload.modes]
        devices = devices_of(known_offers)
        sheets = devices - devices_of(
            workload for workload in known_offers if _is_measured(champion, workload)
        )
        left_out = sorted(devices_of(self.offers) - devices)
        for what, names in (
            ("modes left out because they were never measured:", unmeasured),
            ("devices left out because they have neither a run nor a data sheet:", left_out),
        ):
            notes += [f"{what} {', '.join(names)}"] if names else []
        known_offers = [] if model is None else comparable(model, known_offers, guessed=guessed)
        return replace(
            self,
            workload=workload,
            model=model,
            guessed=guessed,
            known=known_offers,
            by_data_sheet=sheets,
            notes=notes if known_offers else [],
        )

    def plan(self, *, top: int = 5) -> Recommendation:
        """Run the planner, and return its recommendations as rows of the published table.

        If nothing can be predicted, each goal has a row with the status "unknown" and the reason.

        top: maximum number of clusters for each goal.
        """
        return self.with_columns(self.planning(top)())

    def planning(self, top: int = 5) -> partial[Recommendation]:
        """Return a picklable function without arguments that runs the planner.

        top: maximum number of clusters for each goal.
        """
        if self.model is None or not self.known:
            return partial(planner.no_answer, self.workload, _unpredictable(self), "unknown")
        supply = supply_of(self.workspace, self.workload, self.known, self.experience)
        return partial(
            planner.plan, self.workload, supply, self.model, runs=self.runs, top=top, seed=SEED
        )

    def with_columns(self, plan: Recommendation) -> Recommendation:
        """Return `plan` with the columns of the published table that the planner does not fill.

        These columns include the provider, the model version and the time of the prices. The case's
        notes and warnings are added to the column `reason`.
        """
        newest = self.runs["measured_at"].max()  # in UTC
        measured_at = None if pd.isna(newest) else newest.tz_localize(UTC).to_pydatetime()
        interruption_texts, rows = self.experience.interruptions, []
        for row in plan.rows:
            offers = row.pop("offers")
            # A rate that was learned from earlier launches replaces the offer's rate.
            sources = dict.fromkeys(
                interruption_texts.get(offer.instance_type.name) or offer.interruption_source
                for offer in offers
                if offer.market == "spot"
            )
            prices = (offer.price_as_of for offer in offers or self.offers)
            more = {
                "provider": self.workspace.provider.name,
                "newest_measurement_at": measured_at,
                "model_version": None if self.champion is None else str(self.champion.version),
                "placement_score": None,
                "price_as_of": min(prices, default=None),
                "interruption_source": "; ".join(filter(None, sources)) or None,
                "reason": _reason(row, offers, self),
            }
            rows.append(row | more)
        return replace(plan, rows=rows)


def devices_of(offers: Iterable[Offer]) -> set[str]:
    """Return the kinds of device of the offered machines."""
    return {offer.instance_type.device for offer in offers}


def comparable(
    model: StepTimeModel, offers: Sequence[Offer], *, guessed: bool = False
) -> list[Offer]:
    """Return the offers whose instance type the model can predict.

    The type's definition must be the same as when the model was fitted. One of these conditions
    must also be true:

    - The type has an accelerator with a known peak rate.
    - The type's device was measured, and `guessed` is False.

    guessed: True if the workload was never measured.
    """
    return [
        offer
        for offer in offers
        if model.met_type(offer.instance_type)
        and (
            model.can_guess(offer.instance_type.name)
            or (not guessed and _is_measured(model, offer))
        )
    ]


def _is_measured(model: StepTimeModel, offer: Offer) -> bool:
    """Return True if any instance type with the offer's device was measured."""
    # Offers may have several names for a device. The model has one name for each device.
    device = model.machines[offer.instance_type.name].device
    return any(model.machines[name].device == device for name in model.measured_types)


def supply_of(
    workspace: Workspace, workload: Workload, offers: Sequence[Offer], experience: Experience
) -> Supply:
    """Return the clusters and modes from which the planner can choose for `workload`.

    A mode with compressed gradients is excluded unless runs have shown that it converges like DDP.
    If machines cost money, the cost to download the workload's data is added to the offers.
    """
    if workspace.spends_money:
        downloads = experience.downloads
        same = downloads["workload_digest"] == workload.digest
        rows = downloads[same & (downloads["workload"] == workload.name)]
        # The newest row has the present size of the data.
        for row in rows.sort_values("planned_at").tail(1).to_dict("records"):
            start_usd = partial(
                download_usd,
                row["bytes"],
                row["files"],
                source=row["region"],
                public=workspace.settings.ec2.public,
                nat_usd_per_gb=NAT_USD_PER_GB,
            )
            offers = [replace(offer, start_usd=start_usd(region=offer.region)) for offer in offers]
    return Supply(
        offers=without_beaten_zones(offers),
        max_hosts=workspace.max_hosts,
        fits=workspace.provider.fits,
        job_conditions=experience.conditions,
        vetoes=vetoes(experience.learning, workload),
    )


def contenders(
    model: StepTimeModel, workload: Workload, plan: Recommendation, conditions: JobConditions
) -> ChoiceSet:
    """Return the ranked setups of `plan` that may turn out to be the best when measured."""
    if not plan.ranked:
        return ChoiceSet(setups=(), questions=())
    predictions = model.predict(pd.DataFrame([setup.row() for setup in plan.ranked]))
    return choice_set_of(workload, plan.ranked, predictions, conditions=conditions)


def _caution(case: Case) -> str:
    """Return a warning if the model's error is large or its intervals are too narrow, else ""."""
    champion = case.champion
    if champion is None or champion.scoreboard is None:
        return ""
    error = caution(champion.scoreboard)
    return as_caution(f"model version {champion.version}: {error}") if error else ""


def _unpredictable(case: Case) -> str:
    """Return the reason why no step time can be predicted, and the command that would help."""
    name = case.workspace.provider.name
    remedy = f"`srift import FILE` and `{refresh_command(name, '0')}`"
    # EC2 machines need an S3 bucket, to which they write their records.
    if not case.workspace.spends_money or case.workspace.settings.ec2.bucket:
        remedy = f"`{refresh_command(name, '25')}`"
    if not case.offers:
        return f"no machine is on offer; `srift doctor --provider {name}` says why"
    what = "no machine on offer was" if case.model else "this workload was not"
    return (
        f"no step time can be predicted: {what} measured on {name} in an allowed mode since its"
        f" definition last changed; run {remedy}"
    )


def _reason(row: Row, offers: Sequence[Offer], case: Case) -> str:
    """Return the planner's reason for `row`, with notes on the devices and prices of `offers`.

    If the rank of `row` is 1, the case's notes and warnings follow.
    """
    sheets = sorted(devices_of(offers) & case.by_data_sheet)
    texts = [f"{device} predicted from its data sheet alone" for device in sheets]
    notes = (note for offer in offers for note in (offer.price_note, offer.price_source))
    texts += [row["reason"], *dict.fromkeys(filter(None, notes))]
    if row["rank"] > 1:
        return "; ".join(texts)
    return "; ".join([*texts, *case.notes]) + _caution(case)


def with_usual_goals(workload: Workload) -> Workload:
    """Return the workload with the goals "cheapest" and "fastest" added if they are missing."""
    goal_names = {goal.goal for goal in workload.goals}
    usual = (Goal(goal=name) for name in ("cheapest", "fastest") if name not in goal_names)
    return replace(workload, goals=(*workload.goals, *usual))
