"""Snapshots of instance types, workloads and prices: what is on offer now, or what was on offer last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from models.cloud import InstanceType, Offer
from models.identity import rows_of
from warehouse import append, reads

from .installation import Installation
from .providers.base import ProviderError


@task(cache_policy=NO_CACHE)
def note_definitions(here: Installation, now: datetime) -> None:
    """Write down today's definitions of workloads and instance types: what measured others is history."""
    types = here.provider.instance_types()
    with here.warehouse.transact() as connection:
        append.note_workloads(
            connection,
            [{"workload": w.name, "digest": w.digest, "samples": w.samples} for w in here.workloads],
            provider=here.provider.name,
            noted_at=now,
        )
        append.note_instance_types(connection, [asdict(t) | {"digest": t.digest} for t in types], noted_at=now)


@task(cache_policy=NO_CACHE)
def snapshot_offers(here: Installation, refresh_id: str, now: datetime) -> str:
    """Store the offers of this moment; says what was done. Without an answer the last snapshot stays in use."""
    try:
        offers = here.provider.offers(now)
    except ProviderError as error:
        return f"prices: {error}; the last snapshot stays in use"
    rows = [
        {
            "provider": offer.instance_type.provider,
            "instance_type": offer.instance_type.name,
            "market": offer.market,
            "zone": offer.zone,
            "region": offer.region,
            "usd_per_hour": offer.usd_per_hour,
            "interruptions_per_hour": offer.interruptions_per_hour,
            "price_as_of": offer.price_as_of,
        }
        for offer in offers
    ]
    with here.warehouse.transact() as connection:
        append.append_offers(connection, rows, snapshot_id=refresh_id, as_of=now)
    unpriced = sum(offer.usd_per_hour is None for offer in offers)
    types = len({offer.instance_type.name for offer in offers})
    said = f"prices: {len(offers)} offers of {types} instance types" + (f", {unpriced} unpriced" if unpriced else "")
    return "; ".join(filter(None, [said, nothing_to_buy(offers, here.settings.campaign.market)]))


def nothing_to_buy(offers: Sequence[Offer], market: str) -> str:
    """Why a campaign can measure nothing, where no offer of its market has a price; else empty."""
    if any(offer.market == market and offer.usd_per_hour is not None for offer in offers):
        return ""
    key, other = ("spot_usd_per_hour", "on-demand") if market == "spot" else ("usd_per_hour", "spot")
    return (
        f"no instance type has a price on the {market} market, so nothing can be measured:"
        f' give one a {key}, or set market = "{other}" under [campaign]'
    )


def current_offers(here: Installation) -> list[Offer]:
    """The newest snapshot as offers of known instance types."""
    kinds = reads.mart(here.warehouse, "instance_types", provider=here.provider.name)
    types = {row["name"]: row for row in rows_of(kinds)}
    rows = rows_of(reads.offers(here.warehouse, here.provider.name))
    return [_offer(row, types[row["instance_type"]]) for row in rows if row["instance_type"] in types]


def _offer(row: dict[str, Any], kind: dict[str, Any]) -> Offer:
    fields = {name: kind[name] for name in InstanceType.__dataclass_fields__}
    fields = {name: None if value is None or value != value else value for name, value in fields.items()}
    price = row["usd_per_hour"]
    as_of = pd.Timestamp(str(row["price_as_of"])).to_pydatetime()
    return Offer(
        instance_type=InstanceType(**fields),
        market=str(row["market"]),
        zone=str(row["zone"]),
        region=str(row["region"]),
        usd_per_hour=None if price is None or price != price else float(price),
        interruptions_per_hour=float(row["interruptions_per_hour"] or 0.0),
        price_as_of=as_of if as_of.tzinfo else as_of.replace(tzinfo=UTC),
    )
