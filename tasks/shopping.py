"""Tonight's shopping list: hands the past, the offers and the caps to `models.campaign`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.campaign import Launch, shopping_list
from models.cloud import InstanceType, Offer, parse_cluster
from models.step_time import StepTimeModel
from models.workload import Workload
from warehouse import reads
from warehouse.database import WarehouseMissing

from .facts import with_facts
from .installation import Installation, open_installation
from .prices import current_offers, nothing_to_buy, offers_now
from .registry import Champion, load_champion
from .report import reporter
from .tally import Tally

MOST_LISTS = 4  # of one campaign: where machines are always refused, asking on is no use


@task(cache_policy=NO_CACHE)
def shop(
    here: Installation,
    offers: Sequence[Offer],
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    max_usd: float | None,
    max_seconds: float | None = None,
) -> list[Launch]:
    """Launches to make within the caps of srift.toml, or within `max_usd` and `max_seconds` where they are given."""
    campaign = here.settings.campaign
    workloads = with_facts(here.measurable, frames["workloads"])
    types = [offer.instance_type for offer in offers]
    return shopping_list(
        workloads,
        offers,
        frames["runs"],
        frames["profiles"],
        frames["probes"],
        max_usd=campaign.max_usd if max_usd is None else max_usd,
        max_seconds=campaign.max_minutes * 60.0 if max_seconds is None else max_seconds,
        max_hosts=campaign.max_hosts,
        fits=here.fits,
        seed=campaign.seed,
        market=campaign.market,
        stale_before=datetime.now(UTC) - timedelta(days=campaign.stale_after_days),
        expected_step=None if champion is None else lambda setups: _expected(champion.model, workloads, types, setups),
        failures=_failures(here),
    )


def within(here: Installation, champion: Champion | None, tally: Tally) -> Iterator[Launch]:
    """Launches within what `tally` has left, list after list, each made with what came home from the last.

    So a cluster that was taken away by the market or refused is not the end of what it was to measure.
    """
    for _ in range(MOST_LISTS):
        frames = reads.training_frames(here.warehouse, here.provider.name)
        launches = shop(here, current_offers(here), frames, champion, tally.left_usd, tally.left_s)
        reporter().start(tally.runs + sum(len(launch.items) for launch in launches))
        for launch in launches:
            if not tally.affords(launch):
                break
            yield launch
        if not launches:
            break
    reporter().stop()


def _failures(here: Installation) -> pd.DataFrame:
    """What nodes told of as failed, of the workloads as their files are now: a mended file is tried again.

    What the controller had to tell (a full mailbox, a silent node) is no fault of what was to be measured.
    """
    try:
        failed = reads.mart(here.warehouse, "failed_runs", provider=here.provider.name, status="failed", told_by="node")
    except WarehouseMissing:
        return pd.DataFrame()
    digests = {workload.digest for workload in here.measurable}
    return failed[(failed["kind"] == "probe") | failed["workload_digest"].isin(digests)]


def _expected(
    model: StepTimeModel, workloads: Sequence[Workload], types: Sequence[InstanceType], setups: pd.DataFrame
) -> pd.DataFrame:
    """Predictions, and NaN where the champion has not met the workload or an instance type as it is defined now."""
    met = {one.name for one in types if model.met_type(one)}
    known = setups["workload"].isin([one.name for one in workloads if model.met_workload(one)])
    known &= np.array([met.issuperset(parse_cluster(str(one))) for one in setups["cluster"]], dtype=bool)
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
    offers = offers_now(here, now)
    for sentence in filter(None, [nothing_to_buy(offers, here.settings.campaign.market)]):
        reporter().say(sentence)
    return shop.fn(here, offers, _of_today(frames, here.measurable), champion, max_usd)


def _of_today(frames: Mapping[str, pd.DataFrame], workloads: Sequence[Workload]) -> dict[str, pd.DataFrame]:
    """Without what was measured here under a definition that has changed: until a refresh notes it, marts hold it."""
    current, noted = dict(frames), frames["workloads"]
    if len(noted):
        digests = dict(zip(noted["workload"], noted["digest"], strict=True))
        changed = [one.name for one in workloads if digests.get(one.name) != one.digest]
        runs, profiles = frames["runs"], frames["profiles"]
        current["runs"] = runs[~runs["workload"].isin(changed) | (runs["source"] != "srift")]
        current["profiles"] = profiles[~profiles["workload"].isin(changed)]
    return current
