"""Parse AWS prices, and add the cost of volumes, public IP addresses and S3 requests to offers.

The prices of volumes, addresses and requests are AWS's list prices of November 2025. Spending caps
use the prices of the most expensive region. This module does not call AWS.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatchcase

from models.domain.cluster import ANY_ZONE, InstanceType, Offer, bucket_hazard

from .catalogue import Answer
from .settings import Ec2
from .snapshot import LISTED_REGION, read_snapshot

ESTIMATED = f"packaged prices outside {LISTED_REGION} are estimates"


def known_price(value: object) -> float | None:
    """Return a price from AWS as a float; None unless it is a positive, finite number."""
    try:
        usd = float(str(value))
    except ValueError:
        return None
    return usd if math.isfinite(usd) and usd > 0 else None


def on_demand_prices(products: Iterable[Answer]) -> dict[str, float]:
    """Return {instance type: dollars per hour} from products of the Price List API.

    If a type has several prices, the highest price is used.
    """
    prices: dict[str, float] = {}
    for product in products:
        name = product["product"]["attributes"].get("instanceType")
        for term in product["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = known_price(dimension["pricePerUnit"].get("USD"))
                if name and usd is not None and dimension["unit"] == "Hrs":
                    prices[name] = max(usd, prices.get(name, 0.0))
    return prices


def newest_spot_prices(rows: Iterable[Answer]) -> dict[tuple[str, str], float | None]:
    """Return {(instance type, zone): newest spot price in dollars per hour}.

    `rows` are rows of DescribeSpotPriceHistory. An unknown price is None.
    """
    return {
        (row["InstanceType"], row["AvailabilityZone"]): known_price(row.get("SpotPrice"))
        for row in sorted(rows, key=lambda row: row["Timestamp"])
    }


def on_demand_offers(
    types: Iterable[InstanceType],
    prices: Mapping[str, float | None],
    *,
    region: str,
    price_as_of: datetime,
) -> list[Offer]:
    """Return an on-demand offer for each type.

    prices: {name of a type: dollars per hour}. A type without an entry gets the price None.
    """
    return [
        Offer(
            instance_type=kind,
            market="on-demand",
            zone=ANY_ZONE,
            region=region,
            usd_per_hour=prices.get(kind.name),
            interruptions_per_hour=0.0,
            price_as_of=price_as_of,
        )
        for kind in types
    ]


def spot_offers(
    types: Iterable[InstanceType],
    prices: Mapping[tuple[str, str], float | None],
    advisor: Answer,
    *,
    region: str,
    price_as_of: datetime,
) -> list[Offer]:
    """Return a spot offer for each (type name, zone) in `prices` whose type is in `types`.

    prices: dollars per hour; None if unknown.
    advisor: the content of AWS's Spot Advisor file, which sorts types into ranges of interruption
        rates. A type that the file lacks gets the highest range.
    """
    advised = advisor.get("spot_advisor", {}).get(region, {}).get("Linux", {})
    kinds, offers = {kind.name: kind for kind in types}, []
    for (name, zone), usd in sorted(prices.items()):
        if name not in kinds:
            continue
        bucket = advised.get(name, {}).get("r")
        prior = "prior: worst range of " if bucket is None else ""
        offers.append(
            Offer(
                instance_type=kinds[name],
                market="spot",
                zone=zone,
                region=region,
                usd_per_hour=usd,
                interruptions_per_hour=bucket_hazard(bucket),
                interruption_source=f"{prior}Spot Advisor, read {price_as_of:%Y-%m-%d}",
                price_as_of=price_as_of,
            )
        )
    return offers


HOURS_A_MONTH = 730.0  # AWS bills volumes by months of 730 hours
# Dollars per GiB and month of gp3 volumes (https://aws.amazon.com/ebs/pricing/). Other regions get
# the price of the most expensive region, Sao Paulo. Srift buys no additional IOPS or throughput.
GP3_USD_PER_GIB_MONTH = {
    "us-east-1": 0.08,
    "us-east-2": 0.08,
    "us-west-2": 0.08,
    "eu-west-1": 0.088,
    "eu-central-1": 0.0952,
    "ap-northeast-1": 0.096,
    "ap-southeast-2": 0.096,
}
WORST_GP3_USD_PER_GIB_MONTH = 0.152
ADDRESS_USD_PER_HOUR = 0.005  # a public IPv4 address (https://aws.amazon.com/vpc/pricing/)
# Dollars per request to S3 Standard (https://aws.amazon.com/s3/pricing/), in us-east-1 and in the
# most expensive region. A LIST costs as much as a PUT.
PUT_USD, GET_USD = 0.005 / 1000, 0.0004 / 1000
WORST_PUT_USD, WORST_GET_USD = 0.007 / 1000, 0.00056 / 1000
# Expected requests per hour for one machine (mailbox_s3.py, node/on_ec2/sync.py). The machine PUTs
# 720 heartbeats, 360 logs and 60 records. The controller LISTs 720 times, and GETs each upload. The
# machine GETs the manifest every 2 s.
PUTS_PER_HOUR = 1860.0  # 720 + 360 + 60 + 720
GETS_PER_HOUR = 2940.0  # 720 + 360 + 60 + 1800
# Upper bound of the PUTs per hour, and of the GETs. The machine may upload as much as
# node/on_ec2/sync.py allows: 720 heartbeats, UPLOADS_PER_HOUR (1800), and three times
# UPLOADS_AT_ONCE (150), because the caps count at least twenty minutes of a machine. The remaining
# 3600 are LISTs with several pages, or GETs of the manifest every second.
_MOST_UPLOADS_PER_HOUR, _MOST_POLLS_PER_HOUR = 2970, 3600
MOST_EACH_PER_HOUR = _MOST_UPLOADS_PER_HOUR + _MOST_POLLS_PER_HOUR
# Upper bound of the bytes that a machine exchanges with the bucket per hour: uploads of 512 KiB
# (node/on_ec2/sync.py), and manifests of 20 KB. The controller downloads as much.
MOST_BYTES_PER_HOUR = _MOST_UPLOADS_PER_HOUR * 2**19 + _MOST_POLLS_PER_HOUR * 20_000

REQUESTS_USD_PER_HOUR = PUTS_PER_HOUR * PUT_USD + GETS_PER_HOUR * GET_USD
MOST_REQUESTS_USD_PER_HOUR = MOST_EACH_PER_HOUR * (WORST_PUT_USD + WORST_GET_USD)

# A transfer between S3 and a machine is free inside a region. Otherwise, the price depends on the
# sender's region (https://aws.amazon.com/s3/pricing/): for the regions below, 0.02 dollars per GB
# to another region, and 0.09 to the internet. Other regions get the prices of the most expensive
# region, Cape Town. NAT gateways get the price of the most expensive region, Sao Paulo
# (https://aws.amazon.com/vpc/pricing/).
_USUALLY_PRICED = (
    "us-east-1 us-east-2 us-west-1 us-west-2 ca-central-1"
    " eu-west-1 eu-west-2 eu-west-3 eu-central-1 eu-north-1"
)
WORST_REGION_USD_PER_GB, WORST_INTERNET_USD_PER_GB, WORST_NAT_USD_PER_GB = 0.147, 0.154, 0.093
NAT_USD_PER_GB = 0.045  # in us-east-1; recommendations assume this price in all regions
WORST_STORED_USD_PER_GB_MONTH = 0.0405  # S3 Standard in Sao Paulo
CHUNK_BYTES = 8 * 2**20  # boto3 splits larger objects into parts of this size


def download_usd(
    size: int,
    files: int,
    *,
    source: str,
    region: str,
    public: bool,
    nat_usd_per_gb: float = WORST_NAT_USD_PER_GB,
) -> float:
    """Return an upper bound in dollars on the cost of one machine's downloads from S3.

    size: the number of bytes of all objects together.
    files: the number of objects.
    source: the bucket's region; "" if unknown.
    region: the machine's region; "" if unknown.
    public: True if machines have public IP addresses. If False, a NAT gateway's fees are included.
    nat_usd_per_gb: fee of the NAT gateway in dollars per GB.
    """
    rate = 0.0 if public else nat_usd_per_gb
    if source != region or not source:
        rate += 0.02 if source in _USUALLY_PRICED.split() else WORST_REGION_USD_PER_GB
    # each object needs a LIST, a HEAD and a GET; each further part needs a GET
    return rate * size / 1e9 + (3 * files + size / CHUNK_BYTES) * WORST_GET_USD


def upload_usd(size: int, files: int) -> float:
    """Return an upper bound in dollars on the cost to upload objects and store them for a month.

    size: the number of bytes of all objects together.
    files: the number of objects.
    """
    # A large object needs a request to begin, a request for each part, and a request to complete. A
    # LIST returns 1,000 objects.
    requests = 3 * files + size / CHUNK_BYTES + files / 1000 + 1
    return requests * WORST_PUT_USD + size / 1e9 * WORST_STORED_USD_PER_GB_MONTH


def storage_usd_per_hour(region: str, gib: float) -> float:
    """Return the cost of a gp3 volume of `gib` GiB in `region`, in dollars per hour.

    Unknown regions get the price of the most expensive region.
    """
    return gib * GP3_USD_PER_GIB_MONTH.get(region, WORST_GP3_USD_PER_GIB_MONTH) / HOURS_A_MONTH


def other_usd_per_hour(*, public: bool) -> float:
    """Return the expected dollars per hour of one machine's S3 requests and public IP address.

    `public` is True if the machine has a public address.
    """
    return REQUESTS_USD_PER_HOUR + (ADDRESS_USD_PER_HOUR if public else 0.0)


def most_usd_per_hour_beside(terms: Ec2, region: str = "", bucket_region: str = "") -> float:
    """Return an upper bound in dollars per hour on one machine's cost besides its instance price.

    The cost includes the volume, a public IP address, and S3 requests, at the prices of the most
    expensive region. It also includes data transfer from the machine to the bucket, and from the
    bucket over the internet to the controller.

    region: the machine's region; "" if unknown.
    bucket_region: the region of [ec2] `bucket`; "" if unknown.
    """
    size = MOST_BYTES_PER_HOUR
    internet = 0.09 if bucket_region in _USUALLY_PRICED.split() else WORST_INTERNET_USD_PER_GB
    return (
        terms.volume_gib * WORST_GP3_USD_PER_GIB_MONTH / HOURS_A_MONTH
        + ADDRESS_USD_PER_HOUR
        + MOST_REQUESTS_USD_PER_HOUR
        + download_usd(size, 0, source=region, region=bucket_region, public=terms.public)
        + internet * size / 1e9
    )


def apply_terms(offers: Iterable[Offer], terms: Ec2) -> list[Offer]:
    """Return `offers` with this account's prices.

    The prices cover the machine, its volume, its public IP address and its S3 requests. The
    function is idempotent.

    terms: the section [ec2] of srift.toml, which has the account's prices and discounts.
    """
    found = []
    for offer in offers:
        public = offer.public_usd_per_hour if offer.price_note else offer.usd_per_hour
        usd, why = _customer_price(offer, public, terms)
        is_packaged = offer.price_as_of == read_snapshot().prices_as_of
        estimated = is_packaged and offer.region != LISTED_REGION
        offer = replace(
            offer,
            usd_per_hour=usd,
            public_usd_per_hour=public if why else None,
            price_note=why,
            price_source=ESTIMATED if estimated else "",
            storage_usd_per_hour=storage_usd_per_hour(offer.region, terms.volume_gib),
            other_usd_per_hour=other_usd_per_hour(public=terms.public),
        )
        found.append(offer)
    return found


def _customer_price(offer: Offer, public: float | None, terms: Ec2) -> tuple[float | None, str]:
    """Return this account's price in dollars per hour, and why it differs from the public price.

    A price in [ec2.prices] takes precedence over a discount in [ec2.discounts]. The reason is "" if
    the account pays the public price.

    public: the public price; None if unknown.
    """
    name, key = offer.instance_type.name, offer.market.replace("-", "_")
    if fixed := getattr(terms.prices.get(name), f"{key}_usd_per_hour", None):
        return fixed, f"account price of {name} {offer.market} ([ec2.prices])"
    matching = (found for pattern, found in terms.discounts.items() if fnmatchcase(name, pattern))
    share = getattr(next(matching, None), key, 0.0)
    if public is None or not share:
        return public, ""
    why = f"account discount of {share:.3g} on {name} {offer.market} ([ec2.discounts])"
    return public * (1 - share), why
