"""Ask the champion: enumerate, predict, rank, and stamp the rows of the published table. The ranking is `models`'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from models import identity, planner
from models.cloud import Offer
from models.step_time import StepTimeModel
from models.workload import Setup, Workload

from .installation import Installation
from .registry import Champion

DRAWS = 400
SEED = 7

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

    A workload or instance type that the champion has not met is not guessed at: it has no setups, and the rows say so.
    """
    setups: list[Setup] = []
    predictions, draws = pd.DataFrame(), np.empty((0, DRAWS))
    if champion is not None and workload.name in champion.model.workloads:
        known = [offer for offer in offers if offer.instance_type.name in champion.model.instance_types]
        setups = _setups(here, champion.model, workload, known)
    if champion is not None and setups:
        predictions, draws = _predict(champion.model, setups)
    mine = runs[runs["workload"] == workload.name] if len(runs) else runs
    rows = planner.recommend(
        workload, setups, predictions, draws, top=top, measured_runs=identity.runs_of(setups, mine), seed=SEED
    )
    stamp = {
        "provider": here.provider.name,
        "price_as_of": max((offer.price_as_of for offer in offers), default=None),
        "newest_measurement_at": mine["measured_at"].max() if len(mine) else None,
        "model_version": None if champion is None else str(champion.version),
    }
    return [row | stamp for row in rows]


def _setups(here: Installation, model: StepTimeModel, workload: Workload, offers: Sequence[Offer]) -> list[Setup]:
    return planner.candidates(
        workload,
        offers,
        max_hosts=here.settings.campaign.max_hosts,
        fits=here.fits,
        line=lambda name: model.compute_line(workload.name, name),
        peak_bytes=lambda name, batch: model.peak_bytes(workload.name, name, batch),
    )


def _predict(model: StepTimeModel, setups: Sequence[Setup]) -> tuple[pd.DataFrame, np.ndarray[Any, Any]]:
    """Predictions and joint draws aligned with `setups`: the same cluster in two markets is predicted once."""
    firsts, twins = planner.distinct(setups)
    frame = pd.DataFrame([setup.row() for setup in firsts])
    predicted = model.predict(frame).iloc[twins].reset_index(drop=True)
    return predicted, model.draws(frame, count=DRAWS, seed=SEED)[twins]
