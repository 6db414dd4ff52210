"""Ask the champion: enumerate, predict, rank, and stamp the rows of the published table. The ranking is `models`'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models import planner
from models.cloud import Offer
from models.contenders import Contenders, contenders_of
from models.newcomer import introduced
from models.places import worth_asking
from models.step_time import StepTimeModel
from models.workload import Workload
from warehouse.database import WarehouseMissing
from warehouse.reads import mart

from .circumstances import circumstances
from .facts import told
from .installation import Installation
from .registry import Champion
from .settings import IMPORTED
from .step import Step
from .threads import one_thread

SEED = 7
NOT_MET = (
    "no step time can be predicted: nothing is known of this workload on {provider} machines, where it was never"
    " measured as it is defined now, or the model has not learned from it yet; `{measure}` measures it there"
)
NO_TYPE_MET = (
    "no step time can be predicted: no {provider} machine on offer was ever measured as it is defined now, or the model"
    " has not learned from it yet; `{measure}` measures them"
)
NOT_IMPORTED = (
    "no step time can be predicted: this workload has no entrypoint, and either no measurement of it on {provider}"
    " machines was imported (`srift import FILE`) or the model does not know it yet (`{learn}`); where a device's peak"
    " rate is known, its flops_per_sample (`srift import FILE --workloads FILE`) would give a first guess"
)

GUESSED = "a first guess from its FLOPs, since nothing of it was ever measured on these machines"

Row = dict[str, Any]


@Step
def recommend_all(
    here: Installation, champion: Champion | None, offers: Sequence[Offer], runs: pd.DataFrame
) -> list[Row]:
    """Rows for every workload of srift.toml and each of its goals."""
    with one_thread():
        return [row for workload in here.workloads for row in recommend_one(here, champion, workload, offers, runs)]


def recommend_one(
    here: Installation,
    champion: Champion | None,
    workload: Workload,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    top: int = 5,
) -> list[Row]:
    """Published rows of one workload over `offers`, publication id and time still open; `plan_one` without its rest."""
    return plan_one(here, champion, workload, offers, runs, top=top).rows


def plan_one(
    here: Installation,
    champion: Champion | None,
    workload: Workload,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    top: int = 5,
) -> planner.Plan:
    """The planner's answer for one workload over `offers`, its rows stamped as they are published.

    An instance type that the champion has not met as it is defined now is not guessed at, nor is a kind of device that
    no run was ever measured on: it has no setups, and the rows say so. Of a workload that the champion has not met
    there is a first guess where its FLOPs and the devices' peak rates are known, and the rows say that too.
    """
    workload = told(here, workload)
    mine = runs[runs["workload"] == workload.name] if len(runs) else runs
    model, guessed = model_of(champion, workload)
    known, strangers = ([], []) if model is None else on_met_devices(here, model, offers, guessed=guessed)
    if model is None or not known:
        found = planner.nothing(workload)
    else:
        found = planned(here, model, workload, known, runs=mine, top=top)
    stamp = {
        "provider": here.provider.name,
        "newest_measurement_at": _newest(mine),
        "model_version": None if champion is None else str(champion.version),
    }
    answered = model is not None and not (guessed and not known)
    unmet = _unmet(here, workload, met=answered, offered=bool(known) or not offers)
    rows = [
        row | stamp | {"reason": unmet or _reason(row, strangers, guessed), "price_as_of": _price_as_of(row, offers)}
        for row in found.rows
    ]
    return replace(found, rows=rows)


def model_of(champion: Champion | None, workload: Workload) -> tuple[StepTimeModel | None, bool]:
    """The model that answers for the workload, and whether that is a guess; none where it cannot even be guessed at."""
    if champion is None or champion.model.met_workload(workload):
        return (None if champion is None else champion.model), False
    return introduced(champion.model, workload), True


def planned(
    here: Installation,
    model: StepTimeModel,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    runs: pd.DataFrame | None = None,
    top: int = 5,
) -> planner.Plan:
    """What the planner makes of `offers`, all of types that `model` has met, with what this installation knows."""
    return planner.plan(
        workload,
        worth_asking(offers),
        model,
        max_hosts=here.max_hosts,
        fits=here.fits,
        runs=runs,
        top=top,
        seed=SEED,
        met=circumstances(here),
    )


def contending(here: Installation, model: StepTimeModel, workload: Workload, found: planner.Plan) -> Contenders:
    """Of what the planner `found`, who may yet be chosen once more is measured: nobody where nothing can be ranked."""
    rows = pd.DataFrame([setup.row() for setup in found.ranked])
    predicted = model.predict(rows) if found.ranked else rows
    return contenders_of(workload, found.ranked, predicted, met=circumstances(here))


def _unmet(here: Installation, workload: Workload, *, met: bool, offered: bool) -> str:
    """Why nothing can be predicted, and the command that changes it; empty where the planner could answer."""
    if met and offered:
        return ""
    name = here.provider.name
    refresh = "srift refresh" if name == "local" else f"srift refresh --provider {name} --max-usd"
    learn, measure = (refresh, refresh) if name == "local" else (f"{refresh} 0", f"{refresh} 25")
    why = NO_TYPE_MET if met else NOT_IMPORTED if workload.digest == IMPORTED else NOT_MET
    return why.format(provider=name, learn=learn, measure=measure)


def _newest(runs: pd.DataFrame) -> datetime | None:
    """When the last of `runs` was measured; the warehouse's times are UTC without saying so."""
    if not len(runs) or runs["measured_at"].isna().all():
        return None
    newest: datetime = pd.Timestamp(runs["measured_at"].max()).tz_localize(UTC).to_pydatetime()
    return newest


def _reason(row: Row, strangers: Sequence[str], guessed: bool) -> str:
    """The row's own; the first of a goal also says that it is a guess, and which devices were not compared."""
    if row["rank"] > 1:
        return str(row["reason"])
    said = f"{GUESSED}: {row['reason']}" if guessed else str(row["reason"])
    if not strangers:
        return said
    return f"{said}; not compared, since nothing was ever measured on them: {', '.join(strangers)}"


def on_met_devices(
    here: Installation, model: StepTimeModel, offers: Sequence[Offer], *, guessed: bool = False
) -> tuple[list[Offer], list[str]]:
    """Offers of types that the model has met, on devices that something was measured on; and the other devices' names.

    A GPU's data sheet says too little about how fast a network runs on it. Where the workload is `guessed` at, offers
    of types on which no guess can be made are left out too.
    """
    measured = {name for _, name in model.physics.compute.curves}
    devices = {offer.instance_type.name: offer.instance_type.device for offer in offers}
    try:
        kinds = mart(here.warehouse, "instance_types", provider=here.provider.name)
        devices |= dict(zip(kinds["name"], kinds["device"], strict=True))
    except WarehouseMissing:
        pass  # nothing was ever noted
    met = {device for name, device in devices.items() if name in measured}
    known = [one for one in offers if one.instance_type.device in met and model.met_type(one.instance_type)]
    if guessed:
        known = [one for one in known if model.physics.compute.can_guess(one.instance_type.name)]
    return known, sorted({one.instance_type.device for one in offers} - met)


def _price_as_of(row: Row, offers: Sequence[Offer]) -> datetime | None:
    """When the oldest price of the row's own members was read; of all offers where it names no cluster."""
    named = {(one["instance_type"], one["market"], one["zone"]) for one in row["cluster_offers"] or ()}
    return min(
        (o.price_as_of for o in offers if not named or (o.instance_type.name, o.market, o.zone) in named), default=None
    )
