"""What the emulated AWS sells, where and for how much: list prices and spot prices by zone.

List prices are those that came with the package; spot prices are drawn once from the world's seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from tasks.providers.ec2.snapshot import packaged

Prices = Mapping[
    str, Mapping[str, float | None]
]  # region -> instance type -> dollars, None: listed without a price


def product(name: str, region: str, usd: float | None) -> str:
    amount = "0.0000000000" if usd is None else f"{usd:.10f}"
    dimension = {
        "unit": "Hrs",
        "pricePerUnit": {"USD": amount},
        "description": f"${amount} per On Demand {name}",
    }
    return json.dumps(
        {
            "product": {
                "productFamily": "Compute Instance",
                "sku": f"{name}-{region}",
                "attributes": {
                    "instanceType": name,
                    "regionCode": region,
                    "operatingSystem": "Linux",
                },
            },
            "serviceCode": "AmazonEC2",
            "terms": {
                "OnDemand": {
                    "1.JRTCKXETXF": {"priceDimensions": {"1.JRTCKXETXF.6YS6EN2CT7": dimension}}
                },
                "Reserved": {
                    "1.R": {
                        "priceDimensions": {
                            "1.R.1": {"unit": "Hrs", "pricePerUnit": {"USD": "0.001"}}
                        }
                    }
                },
            },
            "publicationDate": "2026-11-19T00:00:00Z",
        }
    )


def products(prices: Prices, asked: Mapping[str, Any], size: int = 100) -> dict[str, Any]:
    """GetProducts' answer to `asked`: list prices of Linux in the region that its filters name, a
    page of them.
    """
    filters = {one["Field"]: one["Value"] for one in asked["Filters"]}
    assert (
        filters.items()
        >= {"operatingSystem": "Linux", "tenancy": "Shared", "capacitystatus": "Used"}.items()
    )
    region = filters["regionCode"]
    some, token = page(sorted(prices.get(region, {}).items()), asked.get("NextToken"), size)
    listed = [product(name, region, usd) for name, usd in some]
    return {"FormatVersion": "aws_v1", "PriceList": listed} | (
        {"NextToken": token} if token else {}
    )


def page(listed: Sequence[Any], token: str | None, size: int) -> tuple[Sequence[Any], str]:
    """Some of `listed` from `token` on, and the token of what follows; empty at the end."""
    first = int(token or 0)
    return listed[first : first + size], str(first + size) if first + size < len(listed) else ""


@cache
def zones_of(region: str) -> Mapping[str, frozenset[str]]:
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    found: dict[str, set[str]] = {}
    for row in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ()):
        found.setdefault(row["Location"], set()).add(row["InstanceType"])
    return {zone: frozenset(names) for zone, names in sorted(found.items())}


@dataclass(slots=True, kw_only=True)
class Market:
    """`usd` by region and type."""

    usd: Prices
    seed: int

    @classmethod
    def listed(cls, seed: int) -> Market:
        usd = {region: dict(prices) for region, prices in packaged().usd.items()}
        return cls(usd=usd, seed=seed)

    def on_demand(self, name: str, region: str) -> float | None:
        return self.usd.get(region, {}).get(name)

    def spot(self, name: str, region: str, zone: str) -> float | None:
        """Dollars an hour: between a quarter and three quarters of the list price, by type and
        zone.
        """
        usd = self.on_demand(name, region)
        if usd is None or name not in zones_of(region).get(zone, ()):
            return None
        drawn = random.Random(f"{self.seed} {name} {zone}").uniform(0.25, 0.75)
        return round(usd * drawn, 6)

    def spot_history(self, region: str, names: Sequence[str]) -> list[dict[str, Any]]:
        """A row of DescribeSpotPriceHistory for each type and zone that sells it, the price in
        force.
        """
        when = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        rows = [
            (name, zone, usd)
            for zone, offered in zones_of(region).items()
            for name in sorted(offered)
            if (not names or name in names) and (usd := self.spot(name, region, zone)) is not None
        ]
        return [
            {
                "InstanceType": name,
                "ProductDescription": "Linux/UNIX",
                "SpotPrice": f"{usd:.6f}",
                "Timestamp": when,
                "AvailabilityZone": zone,
            }
            for name, zone, usd in rows
        ]
