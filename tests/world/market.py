"""What the emulated AWS sells: the packaged list prices, and spot prices drawn from a seed."""

import json
import random
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache

from tasks.providers.ec2.snapshot import packaged

# Answers about all 1,395 types would cost seconds.
SOLD = ("g4dn.*", "g5.*", "g6.*", "p3.*", "p4d.*", "m5.large", "c5.large")


def product(name, region, usd):
    """A product of GetProducts; without a price, AWS lists it at 0."""
    amount = f"{usd or 0.0:.10f}"
    dimension = {
        "unit": "Hrs",
        "pricePerUnit": {"USD": amount},
        "description": f"${amount} per On Demand {name}",
    }
    yearly = {"unit": "Hrs", "pricePerUnit": {"USD": "0.001"}}
    body = {
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
            "Reserved": {"1.R": {"priceDimensions": {"1.R.1": yearly}}},
        },
        "publicationDate": "2026-11-19T00:00:00Z",
    }
    return json.dumps(body)


class Market:
    """`usd`: region -> instance type -> list price; None is listed without a price."""

    def __init__(self, seed):
        self._seed = seed
        self.usd = {
            region: {
                name: usd
                for name, usd in prices.items()
                if any(fnmatchcase(name, pattern) for pattern in SOLD)
            }
            for region, prices in packaged().usd.items()
        }

    def products(self, filters):
        """The answer of GetProducts: list prices of Linux in the region that the filters name."""
        named = {one["Field"]: one["Value"] for one in filters}
        expected = {"operatingSystem": "Linux", "tenancy": "Shared", "capacitystatus": "Used"}
        assert named.items() >= expected.items()
        region = named["regionCode"]
        prices = sorted(self.usd.get(region, {}).items())
        listed = [product(name, region, usd) for name, usd in prices]
        return {"FormatVersion": "aws_v1", "PriceList": listed}

    def spot(self, name, region, zone):
        """Dollars an hour, from a quarter to three quarters of the list price."""
        usd = self.usd.get(region, {}).get(name)
        if usd is None or name not in _zones(region).get(zone, ()):
            return None
        return round(usd * random.Random(f"{self._seed} {name} {zone}").uniform(0.25, 0.75), 6)

    def spot_history(self, region, names):
        """Rows of DescribeSpotPriceHistory: the current price in each zone that sells a type."""
        when = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        return [
            {
                "InstanceType": name,
                "ProductDescription": "Linux/UNIX",
                "SpotPrice": f"{usd:.6f}",
                "Timestamp": when,
                "AvailabilityZone": zone,
            }
            for zone, offered in _zones(region).items()
            for name in sorted(offered)
            if (not names or name in names) and (usd := self.spot(name, region, zone)) is not None
        ]


@cache
def _zones(region):
    """Instance types that moto offers, by zone."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    found = {}
    for row in INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ()):
        found.setdefault(row["Location"], set()).add(row["InstanceType"])
    return dict(sorted(found.items()))
