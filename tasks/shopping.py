"""Tonight's shopping list: hands the past, the offers and the caps to `models.campaign`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from models import campaign as pure
from models.campaign import STOPS, Launch, shopping_list
from models.cloud import InstanceType, Offer, parse_cluster
from models.contenders import Contenders
from models.learning import valid_runs
from models.step_time import StepTimeModel
from models.wants import EC2_COSTS, Costs
from models.workload import Workload
from warehouse import reads
from warehouse.database import WarehouseMissing

from .caps import allowance
from .circumstances import seconds_to_work
from .drift import drifting_types
from .facts import with_facts
from .installation import Installation, open_installation
from .prices import current_offers, nothing_to_buy, offers_now
from .recommend import contending, planned
from .registry import Champion, load_champion
from .report import reporter
from .step import Step
from .tally import Tally

MOST_LISTS = 4  # of one campaign, with a champion those without a run: always refused, asking on is no use


def costs_of(here: Installation) -> Costs:
    """Seconds that a campaign expects to pay; anywhere but on this machine a launch is billed for a minute at least."""
    stated = Costs() if here.provider.name == "local" else EC2_COSTS
    launch_s = seconds_to_work(here, here.settings.campaign.market)
    return stated if launch_s is None else replace(stated, launch_s=launch_s)


@Step
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
        max_seconds=here.max_minutes * 60.0 if max_seconds is None else max_seconds,
        max_hosts=campaign.max_hosts,
        fits=here.fits,
        seed=campaign.seed,
        market=campaign.market,
        stale_before=datetime.now(UTC) - timedelta(days=campaign.stale_after_days),
        expected_step=None if champion is None else lambda setups: _expected(champion.model, workloads, types, setups),
        failures=_failures(here),
        drifting=drifting_types(here),
        costs=costs_of(here),
        model=None if champion is None else _model(here, champion.model, workloads, offers, frames["runs"]),
    )


def within(here: Installation, champion: Champion | None, tally: Tally) -> Iterator[Launch]:
    """Launches within what `tally` has left, list after list, each made with what came home from the last.

    So a cluster that was taken away by the market or refused is not the end of what it was to measure. With a champion
    every launch is chosen anew, since what the one before it measured says what is still worth measuring.
    """
    lists = 0
    while lists < MOST_LISTS:
        frames = reads.training_frames(here.warehouse, here.provider.name)
        offers = current_offers(here)
        launches = shop(here, offers, frames, champion, tally.left_usd, tally.left_s)
        reporter().start(tally.runs + sum(len(launch.items) for launch in launches))
        before, bought, refusal = tally.runs, False, ""
        for launch in launches:
            if not tally.affords(launch):
                continue
            why = allowance(here, launch, tally, datetime.now(UTC), offers).refusal
            if why:  # a smaller one may still be paid for
                refusal = refusal or why
                continue
            yield launch
            bought = True
            if champion is not None:
                break
        if not launches:
            _say_why(champion, tally.left_usd)
            break
        if refusal and not bought:
            reporter().say(f"not launched: {refusal}")
            break
        lists += champion is None or tally.runs == before  # a champion's lists end by themselves
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


def _model(
    here: Installation,
    model: StepTimeModel,
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    runs: pd.DataFrame,
) -> pure.Model:
    """What the champion says of the workloads and types that it has met as they are defined now."""
    known = [offer for offer in offers if model.met_type(offer.instance_type)]
    contenders: dict[str, Contenders] = {}
    for workload in workloads:
        if not known or not model.met_workload(workload):
            continue
        found = planned(here, model, workload, known)
        if found.ranked:
            contenders[workload.name] = contending(here, model, workload, found)
    fresh = runs[~runs["run_id"].isin(model.trained_on)] if "run_id" in runs else runs.iloc[:0]
    return pure.Model(
        contenders=contenders,
        joint=model.joint,
        types=frozenset(offer.instance_type.name for offer in known),
        fresh=valid_runs(fresh),
    )


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
    return list_of(here, offers_now(here, now), max_usd)


def list_of(here: Installation, offers: Sequence[Offer], max_usd: float | None) -> list[Launch]:
    """What would be bought of `offers`; as `dry_run`."""
    provider = here.provider.name
    try:
        frames = reads.training_frames(here.warehouse, provider)
    except WarehouseMissing:
        frames = {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    champion = load_champion(here.home, provider)
    for sentence in filter(None, [nothing_to_buy(offers, here.settings.campaign.market)]):
        reporter().say(sentence)
    launches = shop.fn(here, offers, _of_today(frames, here.measurable), champion, max_usd)
    if not launches:
        _say_why(champion, here.settings.campaign.max_usd if max_usd is None else max_usd)
    return launches


def _say_why(champion: Champion | None, left_usd: float) -> None:
    """Why a list is empty though there is money: with a champion, since nothing more would change a choice."""
    if champion is not None and left_usd > 0:
        reporter().say(STOPS)


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
