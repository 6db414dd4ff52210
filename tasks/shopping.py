"""Tonight's shopping list: hands the past, the offers and the caps to `models.campaign`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.campaign import Launch, shopping_list
from models.cloud import Offer
from models.step_time import StepTimeModel
from warehouse import reads
from warehouse.database import WarehouseMissing

from .installation import Installation, open_installation
from .registry import Champion, load_champion


@task(cache_policy=NO_CACHE)
def shop(
    here: Installation,
    offers: Sequence[Offer],
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    max_usd: float | None,
) -> list[Launch]:
    """Launches to make within the caps of srift.toml, or within `max_usd` where it is given."""
    campaign = here.settings.campaign
    return shopping_list(
        here.workloads,
        offers,
        frames["runs"],
        frames["profiles"],
        frames["probes"],
        max_usd=campaign.max_usd if max_usd is None else max_usd,
        max_seconds=campaign.max_minutes * 60.0,
        max_hosts=campaign.max_hosts,
        fits=here.fits,
        seed=campaign.seed,
        market=campaign.market,
        expected_step=None if champion is None else lambda setups: _expected(champion.model, setups),
        failures=_failures(here),
    )


def _failures(here: Installation) -> pd.DataFrame:
    """Failed runs of the workloads as their files are now: a mended file is tried again."""
    try:
        failed = reads.mart(here.warehouse, "failed_runs", provider=here.provider.name, status="failed")
    except WarehouseMissing:
        return pd.DataFrame()
    digests = {workload.digest for workload in here.workloads}
    return failed[failed["workload_digest"].isin(digests)]


def _expected(model: StepTimeModel, setups: pd.DataFrame) -> pd.DataFrame:
    """Predictions, and NaN for workloads that the champion has not met."""
    known = setups["workload"].isin(model.workloads)
    columns = ["step_s", "step_low_s", "step_high_s"]
    predicted = model.predict(setups[known])[columns] if known.any() else pd.DataFrame(columns=columns, dtype=float)
    return predicted.reindex(setups.index)


def launch_seed(seed: int, lease_id: str) -> int:
    """A seed of its own for each lease, the same wherever it is computed."""
    return zlib.crc32(f"{seed}/{lease_id}".encode())


def dry_run(provider: str, max_usd: float | None) -> list[Launch]:
    """What a refresh would buy now. Starts nothing and writes nothing; works before the first refresh too."""
    here = open_installation(provider)
    now = datetime.now(UTC)
    try:
        frames = reads.training_frames(here.warehouse, provider)
    except WarehouseMissing:
        frames = {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    champion = load_champion(here.home, provider)
    return shop.fn(here, here.provider.offers(now), frames, champion, max_usd)
