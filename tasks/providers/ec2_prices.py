"""Prices as AWS tells them, read and turned into offers. Pure. A price of 0 or none is unknown, never free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from models.cloud import ANY_ZONE, InstanceType, Offer

Answer = Mapping[str, Any]
ByType = Mapping[str, float]

# Spot Advisor: part of a type's machines that were interrupted in the last month, in five ranges (below 5 %, 5 to 10,
# 10 to 15, 15 to 20, above 20 %). Taken at their middles; the last one is open, and 30 % a guess.
MONTHLY_PART = (0.025, 0.075, 0.125, 0.175, 0.30)
HOURS_A_MONTH = 730.0


def interruptions_per_hour(bucket: int | None) -> float:
    """Prior hazard of one spot machine: -log(1 - part) / 730 h. What the Advisor does not know is as its worst."""
    known = bucket is not None and 0 <= bucket < len(MONTHLY_PART)
    part = MONTHLY_PART[bucket if known and bucket is not None else -1]
    return -math.log1p(-part) / HOURS_A_MONTH


def advised_buckets(advisor: Answer, region: str) -> dict[str, int]:
    """Bucket by instance type in Spot Advisor's file, Linux; empty where it does not say."""
    rows = advisor.get("spot_advisor", {}).get(region, {}).get("Linux", {})
    return {str(name): int(row["r"]) for name, row in rows.items() if "r" in row}


def known_price(value: object) -> float | None:
    """Dollars, or None for nothing, zero, less than zero and text that is no number."""
    try:
        usd = float(str(value))
    except ValueError:
        return None
    return usd if math.isfinite(usd) and usd > 0 else None


def on_demand_prices(products: Iterable[Answer]) -> dict[str, float]:
    """Dollars an hour by instance type from products of the Price List API. Unknown ones are absent.

    Only terms by the hour count. Several prices of one type are not expected; the highest is kept: a budget holds.
    """
    prices: dict[str, float] = {}
    for product in products:
        name = product.get("product", {}).get("attributes", {}).get("instanceType")
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term.get("priceDimensions", {}).values():
                usd = known_price(dimension.get("pricePerUnit", {}).get("USD"))
                if name and usd is not None and dimension.get("unit") == "Hrs":
                    prices[str(name)] = max(usd, prices.get(str(name), 0.0))
    return prices


def newest_spot_prices(rows: Iterable[Answer]) -> dict[tuple[str, str], float | None]:
    """Dollars an hour by (instance type, zone): the newest row of each. None where that one tells no price."""
    newest: dict[tuple[str, str], tuple[datetime, float | None]] = {}
    for row in rows:
        key = (str(row["InstanceType"]), str(row["AvailabilityZone"]))
        when: datetime = row["Timestamp"]
        if key not in newest or when > newest[key][0]:
            newest[key] = (when, known_price(row.get("SpotPrice")))
    return {key: usd for key, (_, usd) in newest.items()}


def on_demand_offers(
    types: Iterable[InstanceType], prices: ByType, *, region: str, price_as_of: datetime
) -> list[Offer]:
    """One offer a type of `types`, with its price or none."""
    return [
        Offer(
            instance_type=one,
            market="on-demand",
            zone=ANY_ZONE,
            region=region,
            usd_per_hour=prices.get(one.name),
            interruptions_per_hour=0.0,
            price_as_of=price_as_of,
        )
        for one in types
    ]


def spot_offers(
    types: Sequence[InstanceType],
    prices: Mapping[tuple[str, str], float | None],
    buckets: Mapping[str, int],
    *,
    region: str,
    price_as_of: datetime,
) -> list[Offer]:
    """One offer a type and zone that has a spot market; a zone without a row has none."""
    known = {one.name: one for one in types}
    return [
        Offer(
            instance_type=known[name],
            market="spot",
            zone=zone,
            region=region,
            usd_per_hour=usd,
            interruptions_per_hour=interruptions_per_hour(buckets.get(name)),
            price_as_of=price_as_of,
        )
        for (name, zone), usd in sorted(prices.items())
        if name in known
    ]
