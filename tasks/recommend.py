"""Ask the champion: enumerate, predict, rank, and stamp the rows of the published table. The ranking is `models`'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from models import planner
from models.cloud import Offer
from models.workload import Workload

from .facts import told
from .installation import Installation
from .registry import Champion
from .threads import one_thread

SEED = 7
NOT_MET = (
    "no step time can be predicted: this workload, or every instance type on offer, was never measured as it is defined"
    " now, or is not in the model yet; run `srift refresh`"
)

Row = dict[str, Any]


@task(cache_policy=NO_CACHE)
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

    A workload or instance type that the champion has not met as it is defined now is not guessed at: it has no setups,
    and the rows say so.
    """
    workload = told(here, workload)
    mine = runs[runs["workload"] == workload.name] if len(runs) else runs
    met = champion is not None and champion.model.met_workload(workload)
    known = [offer for offer in offers if champion is not None and champion.model.met_type(offer.instance_type)]
    if champion is None or not met or not known:
        found, met = planner.nothing(workload), met and not offers
    else:
        found = planner.plan(
            workload,
            known,
            champion.model,
            max_hosts=here.settings.campaign.max_hosts,
            fits=here.fits,
            runs=mine,
            top=top,
            seed=SEED,
        )
    stamp = {
        "provider": here.provider.name,
        "newest_measurement_at": mine["measured_at"].max() if len(mine) and mine["measured_at"].notna().any() else None,
        "model_version": None if champion is None else str(champion.version),
    }
    own = {} if met else {"reason": NOT_MET}
    rows = [row | stamp | own | {"price_as_of": _price_as_of(row, offers)} for row in found.rows]
    return replace(found, rows=rows)


def _price_as_of(row: Row, offers: Sequence[Offer]) -> datetime | None:
    """When the oldest price of the row's own members was read; of all offers where it names no cluster."""
    named = {(one["instance_type"], one["market"], one["zone"]) for one in row["cluster_offers"] or ()}
    return min(
        (o.price_as_of for o in offers if not named or (o.instance_type.name, o.market, o.zone) in named), default=None
    )
