"""Snapshots of instance types, workloads and prices: what is on offer now, or what was on offer last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.cloud import InstanceType, Offer
from models.identity import rows_of
from warehouse import append, reads

from .installation import Installation
from .providers.base import PackagedPrices, ProviderError
from .step import Step


@Step
def note_definitions(here: Installation, now: datetime) -> None:
    """Write down today's definitions of workloads and instance types: what measured others is history.

    Where the provider does not answer, those noted before stay: another source of the same facts would make history of
    every measurement. The package's fill in what was never noted.
    """
    try:
        types = here.provider.instance_types()
    except ProviderError:
        noted = set(reads.mart(here.warehouse, "instance_types", provider=here.provider.name)["name"])
        types = [one for one in _packaged_types(here) if one.name not in noted]
    with here.warehouse.transact() as connection:
        append.note_workloads(
            connection,
            [{"workload": w.name, "digest": w.digest, "samples": w.samples} for w in here.workloads],
            provider=here.provider.name,
            noted_at=now,
        )
        append.note_instance_types(connection, [asdict(t) | {"digest": t.digest} for t in types], noted_at=now)


@Step
def snapshot_offers(here: Installation, refresh_id: str, now: datetime) -> str:
    """Store the offers of this moment; says what was done. Without an answer the last snapshot stays in use.

    One that came with the package takes its place where it is no older.
    """
    try:
        offers, source = here.provider.offers(now), ""
    except ProviderError as error:
        offers = _worth_storing(here)
        if not offers:
            last = current_offers(here)
            kept = f"the last snapshot stays in use{_as_of(last)}" if last else "and none were ever known"
            return f"prices: {error}; {kept}"
        source = f"; {error}, so they are those that came with the package{_as_of(offers)}"
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
    return "; ".join(filter(None, [said + source, nothing_to_buy(offers, here.settings.campaign.market)]))


def nothing_to_buy(offers: Sequence[Offer], market: str) -> str:
    """Why a campaign can measure nothing, where no offer of its market has a price; else empty."""
    if any(offer.market == market and offer.usd_per_hour is not None for offer in offers):
        return ""
    key, other = ("spot_usd_per_hour", "on-demand") if market == "spot" else ("usd_per_hour", "spot")
    stated = all(offer.instance_type.provider == "local" for offer in offers)  # elsewhere nobody states prices
    return (
        f"no instance type has a price on the {market} market, so nothing can be measured: "
        + (f"give one a {key}, or " if stated else "")
        + f'set market = "{other}" under [campaign]'
    )


def offers_now(here: Installation, now: datetime) -> list[Offer]:
    """The provider's offers; where it does not answer, those of the last snapshot or of the package. Stores nothing.

    Raises ProviderError where none of them knows any.
    """
    try:
        return here.provider.offers(now)
    except ProviderError:
        offers = _worth_storing(here) or (current_offers(here) if here.warehouse.path.exists() else [])
        if not offers:
            raise
        return offers


def current_offers(here: Installation) -> list[Offer]:
    """The newest snapshot as offers of known instance types; none before the first."""
    kinds = reads.mart(here.warehouse, "instance_types", provider=here.provider.name)
    types = {str(row["name"]): _instance_type(row) for row in rows_of(kinds)}
    frame = reads.offers(here.warehouse, here.provider.name)
    moments = {moment: _moment(moment) for moment in frame["price_as_of"].unique()}
    rows = rows_of(frame)
    return [
        _offer(row, types[row["instance_type"]], moments[row["price_as_of"]])
        for row in rows
        if row["instance_type"] in types
    ]


def _packaged_types(here: Installation) -> list[InstanceType]:
    return here.provider.packaged_types() if isinstance(here.provider, PackagedPrices) else []


def _worth_storing(here: Installation) -> list[Offer]:
    """Offers that came with the package, where they are no older than the last snapshot and differ from it."""
    offers = here.provider.packaged_offers() if isinstance(here.provider, PackagedPrices) else []
    if not offers or not here.warehouse.path.exists():
        return offers
    last = current_offers(here)
    newest = max((offer.price_as_of for offer in last), default=None)
    if newest is not None and max(offer.price_as_of for offer in offers) < newest:
        return []
    return [] if {_key(offer) for offer in last} == {_key(offer) for offer in offers} else offers


def _key(offer: Offer) -> tuple[object, ...]:
    return offer.instance_type.name, offer.market, offer.region, offer.zone, offer.usd_per_hour


def _as_of(offers: Sequence[Offer]) -> str:
    return f" (prices of {max(offer.price_as_of for offer in offers):%Y-%m-%d})" if offers else ""


def _instance_type(row: Mapping[str, Any]) -> InstanceType:
    return InstanceType(**{name: _known(row[name]) for name in InstanceType.__dataclass_fields__})


def _known(value: Any) -> Any:
    """None for what a frame holds where nothing is known."""
    return None if value is None or value != value else value


def _moment(value: object) -> datetime:
    as_of = pd.Timestamp(str(value)).to_pydatetime()
    return as_of if as_of.tzinfo else as_of.replace(tzinfo=UTC)


def _offer(row: Mapping[str, Any], kind: InstanceType, price_as_of: datetime) -> Offer:
    price = row["usd_per_hour"]
    return Offer(
        instance_type=kind,
        market=str(row["market"]),
        zone=str(row["zone"]),
        region=str(row["region"]),
        usd_per_hour=None if price is None or price != price else float(price),
        interruptions_per_hour=float(row["interruptions_per_hour"] or 0.0),
        price_as_of=price_as_of,
    )
