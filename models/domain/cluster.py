"""Define instance types, offers and clusters, and parse the names of clusters."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

ANY_ZONE = "any"  # the price holds in every zone of its region

# EC2's Spot Advisor publishes the share of a type's machines that are interrupted within a month.
# The share is one of five ranges: below 5 %, 5 to 10, 10 to 15, 15 to 20 and above 20 %. The values
# are the midpoints of the ranges. The last range is open, and 30 % is a guess.
ADVISED_MONTHLY_SHARE = (0.025, 0.075, 0.125, 0.175, 0.30)
_MONTH_HOURS = 730.5  # a twelfth of 365.25 days

MOST_INSTANCES = 10_000  # upper bound for a cluster that a user types
_WHOLE = re.compile(r"\s*0*[1-9]\d*(\.0*)?\s*")  # pandas may write 8 as 8.0
_MEMBERS = re.compile(r"^(?P<count>[1-9]\d*)x(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)$")


def bucket_hazard(bucket: int | None) -> float:
    """Return the expected number of interruptions per hour of a spot machine.

    EC2's Spot Advisor sorts instance types into five ranges of interruption rates. `bucket` is the
    number of the range, from 0 to 4 (the highest rates). None and larger numbers count as 4:
    a type without a range is usually new or scarce.
    """
    share = ADVISED_MONTHLY_SHARE[4 if bucket is None else min(bucket, 4)]
    return -math.log1p(-share) / _MONTH_HOURS


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A kind of machine, as its provider ("ec2" or "local") describes it.

    - `devices`: the number of GPUs; 1 for a local host, whose device is its CPU
    - `device`: the name of the device
    - `cores`: the number of vCPUs of an EC2 instance, or the CPU quota of a local host
    - `bandwidth_gbps`: the sustained network rate in Gbit/s
    - `device_tflops`: the peak fp32 rate of one device in TFLOP/s; None means unknown
    """

    name: str
    provider: str
    devices: int
    device: str
    cores: float
    memory_gib: float
    device_memory_gib: float
    bandwidth_gbps: float
    device_tflops: float | None = None

    @property
    def digest(self) -> str:
        """Return a hash of all fields of the instance type, as twelve hex digits.

        The model ignores runs that were measured when the type had a different hash.
        """
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An instance type at a price in one market (on-demand or spot) and zone.

    - `usd_per_hour`: the price that the user's account pays for the machine; None means unknown
    - `price_source`: a note for the user if `usd_per_hour` is an estimate, else empty
    - `public_usd_per_hour`: the public price, if it differs from `usd_per_hour`; else None
    - `price_note`: a note for the user that says why the two prices differ, else empty
    - `storage_usd_per_hour`: the price of the machine's volume
    - `other_usd_per_hour`: the price of the public IP address and of requests to S3
    - `start_usd`: the cost to download the workload's data each time the machine starts
    """

    instance_type: InstanceType
    market: str  # "on-demand" or "spot"
    zone: str
    region: str
    usd_per_hour: float | None
    interruptions_per_hour: float
    price_as_of: datetime
    storage_usd_per_hour: float = 0.0
    other_usd_per_hour: float = 0.0
    start_usd: float = 0.0
    public_usd_per_hour: float | None = None
    price_note: str = ""
    price_source: str = ""
    interruption_source: str = ""

    @property
    def list_usd_per_hour(self) -> float | None:
        """Return the public price per hour, before any discount of the user's account.

        Spot bids are computed from this price, because such a discount does not change spot prices.
        """
        return self.usd_per_hour if self.public_usd_per_hour is None else self.public_usd_per_hour

    @property
    def worst_usd_per_hour(self) -> float | None:
        """Return an upper bound of the price: the higher of `usd_per_hour` and the public price.

        The public price counts because the account's discount may end. Returns None if the public
        price is unknown, even if srift.toml states the account's price.
        """
        public = self.public_usd_per_hour if self.price_note else self.list_usd_per_hour
        return None if public is None else max(public, self.usd_per_hour or 0.0)

    @property
    def total_usd_per_hour(self) -> float | None:
        """Return the total price per hour: machine, volume, IP address and S3 requests.

        Returns None if the price of the machine is unknown.
        """
        extra = self.storage_usd_per_hour + self.other_usd_per_hour
        return None if self.usd_per_hour is None else self.usd_per_hour + extra


class Pool(NamedTuple):
    """An instance type in a market and zone, with its expected interruptions per machine-hour."""

    instance_type: str
    market: str
    zone: str
    interruptions_per_hour: float

    @classmethod
    def of(cls, offer: Offer) -> Pool:
        return cls(offer.instance_type.name, offer.market, offer.zone, offer.interruptions_per_hour)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of one training job.

    `members` has an offer for each machine, in the order of torchrun's node ranks.
    """

    members: tuple[Offer, ...]

    @classmethod
    def of(cls, *counted: tuple[int, Offer]) -> Cluster:
        """Build a cluster from (number of machines, offer) pairs, in the order of node ranks."""
        return cls(members=tuple(offer for count, offer in counted for _ in range(count)))

    @property
    def name(self) -> str:
        """Return the cluster's name in measurements, such as `2xg5.12xlarge+1xg4dn.12xlarge`."""
        return cluster_name(self.type_names)

    @property
    def type_names(self) -> tuple[str, ...]:
        return tuple(offer.instance_type.name for offer in self.members)

    @property
    def region(self) -> str:
        return self.members[0].region

    @property
    def bill_per_hour(self) -> tuple[float | None, float, float]:
        """Return three sums in dollars per hour: machines, volumes, and other costs.

        The other costs are IP addresses and requests to S3. The sum of the machines is None if the
        price of any machine is unknown.
        """
        known = [offer.usd_per_hour for offer in self.members if offer.usd_per_hour is not None]
        storage = sum(offer.storage_usd_per_hour for offer in self.members)
        other = sum(offer.other_usd_per_hour for offer in self.members)
        return sum(known) if len(known) == len(self.members) else None, storage, other

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price of all machines, without volumes; None if a price is unknown."""
        return self.bill_per_hour[0]

    @property
    def total_usd_per_hour(self) -> float | None:
        """Return the price of machines, volumes, IP addresses and S3 requests together.

        Returns None if the price of any machine is unknown.
        """
        machines, storage, other = self.bill_per_hour
        return None if machines is None else machines + storage + other

    @property
    def start_usd(self) -> float:
        """Return the dollars for the data that all machines download when the job starts."""
        return sum(offer.start_usd for offer in self.members)

    @property
    def market(self) -> str:
        """Return "on-demand" or "spot", or "mixed" if the machines' markets differ."""
        markets = {offer.market for offer in self.members}
        return markets.pop() if len(markets) == 1 else "mixed"

    def counted(self) -> Iterator[tuple[int, Offer]]:
        """Yield (number of machines, offer) for each group of consecutive equal offers."""
        for offer, run in groupby(self.members):
            yield len(list(run)), offer


def cluster_name(instance_types: Iterable[str]) -> str:
    """Return the name of a cluster: instance types `["a", "a", "b"]` give `2xa+1xb`."""
    return "+".join(f"{len(list(run))}x{name}" for name, run in groupby(instance_types))


def parse_cluster(text: str) -> tuple[str, ...]:
    """Return the instance type of each machine, by node rank: `2xa+1xb` gives `("a", "a", "b")`.

    Raises:
        ValueError: if the text does not have this form, or names more than 10,000 machines.
    """
    names: list[str] = []
    for run in text.split("+"):
        match = _MEMBERS.match(run.strip())
        if match is None:
            raise ValueError(f"cluster {text!r}: {run!r} is not of the form 4xNAME")
        if len(names) + int(match["count"]) > MOST_INSTANCES:
            raise ValueError(f"cluster {text!r}: more than {MOST_INSTANCES:,} instances")
        names += [match["name"]] * int(match["count"])
    return tuple(names)


def parse_numbers(text: str | int | float, count: int, what: str) -> tuple[int, ...]:
    """Parse a text such as `4+8` into whole numbers, one for each of `count` instances.

    A single number applies to all instances. `what` is the name of the value in error messages, for
    example "layout".

    Raises:
        ValueError: if a number is not whole and positive, or if the text has neither 1 nor `count`
            numbers.
    """
    parts = str(text).split("+")
    if not all(map(_WHOLE.fullmatch, parts)):
        raise ValueError(f"{what} {text!r}: must be whole numbers of at least 1, joined by '+'")
    numbers = tuple(int(float(text)) for text in parts)
    if len(numbers) == 1:
        return numbers * count
    if len(numbers) != count:
        raise ValueError(f"{what} {text!r}: {len(numbers)} numbers for {count} machines")
    return numbers
