"""Ask the champion: enumerate, predict, rank, and stamp the rows of the published table. The ranking is `models`'."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from models import identity, planner
from models.cloud import Offer
from models.places import worth_asking
from models.step_time import MOST_JOINT, StepTimeModel
from models.workload import Setup, Workload
from warehouse.database import WarehouseMissing
from warehouse.reads import mart

from .facts import told
from .installation import Installation
from .registry import Champion
from .settings import IMPORTED

DRAWS = 400
SEED = 7
NOT_MET = (
    "no step time can be predicted: this workload, or every instance type on offer, was never measured as it is defined"
    " now, or is not in the model yet; run `srift refresh`"
)
NOT_IMPORTED = (
    "no step time can be predicted: this workload has no entrypoint, and either no measurement of it on these machines"
    " was imported (`srift import`) or the model does not know it yet (`srift refresh`)"
)

Row = dict[str, Any]


@task(cache_policy=NO_CACHE)
def recommend_all(
    here: Installation, champion: Champion | None, offers: Sequence[Offer], runs: pd.DataFrame
) -> list[Row]:
    """Rows for every workload of srift.toml and each of its goals."""
    rows = []
    for workload in here.workloads:
        rows += recommend_one(here, champion, workload, offers, runs)
    return rows


def recommend_one(
    here: Installation,
    champion: Champion | None,
    workload: Workload,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    top: int = 5,
) -> list[Row]:
    """Published rows of one workload over `offers`, publication id and time still open.

    A workload or instance type that the champion has not met as it is defined now is not guessed at, nor is a kind of
    device that no run was ever measured on: it has no setups, and the rows say so.
    """
    workload = told(here, workload)
    setups: list[Setup] = []
    strangers: list[str] = []
    predictions, draws = pd.DataFrame(), np.empty((0, DRAWS))
    met = champion is not None and champion.model.met_workload(workload)
    if champion is not None and met:
        known, strangers = _on_met_devices(here, champion.model, offers)
        setups = _setups(here, champion.model, workload, worth_asking(known))
        met = bool(known) or not offers
    if champion is not None and setups:
        setups, predictions, draws = _predict(champion.model, setups)
    mine = runs[runs["workload"] == workload.name] if len(runs) else runs
    rows = planner.recommend(
        workload, setups, predictions, draws, top=top, measured_runs=identity.runs_of(setups, mine), seed=SEED
    )
    stamp = {
        "provider": here.provider.name,
        "newest_measurement_at": mine["measured_at"].max() if len(mine) and mine["measured_at"].notna().any() else None,
        "model_version": None if champion is None else str(champion.version),
    }
    unmet = NOT_IMPORTED if workload.digest == IMPORTED else NOT_MET
    return [
        row | stamp | {"reason": _reason(row, strangers) if met else unmet, "price_as_of": _price_as_of(row, offers)}
        for row in rows
    ]


def _reason(row: Row, strangers: Sequence[str]) -> str:
    """The row's own; the first of a goal also says which devices were left out of the comparison."""
    if row["rank"] > 1 or not strangers:
        return str(row["reason"])
    return f"{row['reason']}; not compared, since nothing was ever measured on them: {', '.join(strangers)}"


def _on_met_devices(here: Installation, model: StepTimeModel, offers: Sequence[Offer]) -> tuple[list[Offer], list[str]]:
    """Offers of types that the model has met, on devices that something was measured on; and the other devices' names.

    A GPU's data sheet says too little about how fast a network runs on it.
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
    return known, sorted({one.instance_type.device for one in offers} - met)


def _price_as_of(row: Row, offers: Sequence[Offer]) -> datetime | None:
    """When the oldest price of the row's own members was read; of all offers where it names no cluster."""
    named = {(one["instance_type"], one["market"], one["zone"]) for one in row["cluster_offers"] or ()}
    return min(
        (o.price_as_of for o in offers if not named or (o.instance_type.name, o.market, o.zone) in named), default=None
    )


def _setups(here: Installation, model: StepTimeModel, workload: Workload, offers: Sequence[Offer]) -> list[Setup]:
    return planner.candidates(
        workload,
        offers,
        max_hosts=here.settings.campaign.max_hosts,
        fits=here.fits,
        line=lambda name: model.compute_line(workload.name, name),
        peak_bytes=lambda name, batch: model.peak_bytes(workload.name, name, batch),
    )


def _predict(model: StepTimeModel, setups: Sequence[Setup]) -> tuple[list[Setup], pd.DataFrame, np.ndarray[Any, Any]]:
    """The setups that are drawn for, with predictions and joint draws; the same cluster in two markets counts once."""
    firsts, twins = planner.distinct(setups)
    frame = pd.DataFrame([setup.row() for setup in firsts])
    predicted = model.predict(frame)
    kept = _promising(firsts, predicted["samples_per_s"].to_numpy(float), MOST_JOINT)
    place = np.full(len(firsts), -1)
    place[kept] = np.arange(len(kept))
    twins = place[twins]
    drawn = model.draws(frame.iloc[kept], count=DRAWS, seed=SEED)
    chosen = [setup for setup, at in zip(setups, twins, strict=True) if at >= 0]
    twins = twins[twins >= 0]
    return chosen, predicted.iloc[kept].iloc[twins].reset_index(drop=True), drawn[twins]


def _promising(setups: Sequence[Setup], samples_per_s: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """Places of at most `most` setups: the fastest split of each cluster before any second one, and so on.

    Where not all of a turn fit, those come first that are high among the fastest or among the cheapest per sample.
    """
    if len(setups) <= most:
        return np.arange(len(setups))
    usd = np.array([np.inf if one.cluster.usd_per_hour is None else one.cluster.usd_per_hour for one in setups])
    by_speed = np.argsort(np.argsort(-samples_per_s, kind="stable"))
    by_price = np.argsort(np.argsort(usd / samples_per_s, kind="stable"))
    clusters = pd.Series([one.cluster.name for one in setups])
    turn = pd.Series(by_speed).groupby(clusters).rank(method="first").to_numpy()
    order = np.lexsort((np.minimum(by_speed, by_price), turn))
    return np.sort(order[:most])
