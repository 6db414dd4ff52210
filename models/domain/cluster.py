"""Machines as values: instance types, offers, clusters, and the text that names them. Never talks to a cloud."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby

ANY_ZONE = "any"  # of a price that holds in every zone of its region

# Spot Advisor tells in five ranges which part of a type's machines were interrupted in a month: below 5 %, 5 to 10, 10
# to 15, 15 to 20, above 20 %. Taken at their middles; the last one is open, and 30 % a guess. A type that it does not
# list is taken as its worst: mostly those are new or scarce, and a job that is warned of too much risk loses less than
# one that is warned of too little.
ADVISED_MONTHLY_SHARE = (0.025, 0.075, 0.125, 0.175, 0.30)
_MONTH_HOURS = 730.5  # a twelfth of 365.25 days

MOST_INSTANCES = 10_000  # of one cluster, so that a slip of the finger is no list of millions
_PART = re.compile(r"^(?P<count>[1-9]\d*)x(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)$")


def bucket_hazard(bucket: int | None) -> float:
    """Interruptions an hour of one machine whose type is in Spot Advisor's `bucket`, 0 to 4; any other is as the worst.

    -log(1 - share a month) / hours a month.
    """
    listed = bucket is not None and 0 <= bucket < len(ADVISED_MONTHLY_SHARE)
    share = ADVISED_MONTHLY_SHARE[bucket if listed and bucket is not None else -1]
    return -math.log1p(-share) / _MONTH_HOURS


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """One kind of machine, as its provider describes it.

    `cores` is the CPU share of a local host or the vCPUs of an EC2 instance; `bandwidth_gbps` the sustained network
    rate in gigabit/s; `device_tflops` the peak fp32 rate of one device where somebody knows it.
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
        """Twelve hex digits of the definition: measurements of another definition are history."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An instance type in one market and zone, at a price, at a moment. `usd_per_hour` None is unknown, never free.

    `usd_per_hour` is of the machine alone, as this installation pays for it: where `own_price` says why that is not
    what everybody pays, `public_usd_per_hour` is. `storage_usd_per_hour` is of its volume, `other_usd_per_hour` of
    its address and of requests; 0 where there is none, as on a local host. `interruption_source`: who says how often
    it is interrupted, and when.
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
    public_usd_per_hour: float | None = None
    own_price: str = ""
    interruption_source: str = ""

    @property
    def list_usd_per_hour(self) -> float | None:
        """What everybody pays, which is what a market compares a bid with; the own price where that is not known."""
        return self.usd_per_hour if self.public_usd_per_hour is None else self.public_usd_per_hour

    @property
    def worst_usd_per_hour(self) -> float | None:
        """The greater of the own price and everybody's: a discount may be used up. None where neither is known."""
        known = [usd for usd in (self.usd_per_hour, self.public_usd_per_hour) if usd is not None]
        return max(known, default=None)

    @property
    def total_usd_per_hour(self) -> float | None:
        """Dollars an hour of the machine with its volume, address and requests; None where its price is unknown."""
        beside = self.storage_usd_per_hour + self.other_usd_per_hour
        return None if self.usd_per_hour is None else self.usd_per_hour + beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Offers taken together, one an instance, in rank order. The cost model, planner and launcher all read this."""

    members: tuple[Offer, ...]

    @classmethod
    def of(cls, *counted: tuple[int, Offer]) -> Cluster:
        """`Cluster.of((2, a), (1, b))` is two of a and one of b."""
        return cls(members=tuple(offer for count, offer in counted for _ in range(count)))

    @property
    def name(self) -> str:
        """As in the measurement rows: `2xg5.12xlarge+1xg4dn.12xlarge`."""
        return cluster_name(offer.instance_type.name for offer in self.members)

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars an hour of its machines alone; None as soon as one price is unknown."""
        return _sum(offer.usd_per_hour for offer in self.members)

    @property
    def total_usd_per_hour(self) -> float | None:
        """Dollars an hour with volumes, addresses and requests; None as soon as one price is unknown."""
        return _sum(offer.total_usd_per_hour for offer in self.members)

    @property
    def market(self) -> str:
        """ "on-demand" or "spot"; "mixed" where its machines are of both."""
        markets = {offer.market for offer in self.members}
        return markets.pop() if len(markets) == 1 else "mixed"

    @property
    def mixed(self) -> bool:
        """Are its machines of more than one market?"""
        return len({offer.market for offer in self.members}) > 1

    def counted(self) -> Iterator[tuple[int, Offer]]:
        """Runs of equal offers, in order."""
        for offer, run in groupby(self.members):
            yield len(list(run)), offer


def _sum(prices: Iterable[float | None]) -> float | None:
    total = 0.0
    for price in prices:
        if price is None:
            return None
        total += price
    return total


def cluster_name(instance_types: Iterable[str]) -> str:
    """Name of instances in rank order: `["a", "a", "b"]` is `2xa+1xb`."""
    return "+".join(f"{len(list(run))}x{name}" for name, run in groupby(instance_types))


def parse_cluster(text: str) -> tuple[str, ...]:
    """Instance type of each instance, in order: `2xa+1xb` is `("a", "a", "b")`.

    Raises ValueError where the text is not of that form.
    """
    names: list[str] = []
    for part in text.strip().split("+"):
        match = _PART.match(part.strip())
        if match is None:
            raise ValueError(f"cluster {text!r}: {part!r} is not of the form 4xNAME")
        if len(names) + int(match["count"]) > MOST_INSTANCES:
            raise ValueError(f"cluster {text!r}: more than {MOST_INSTANCES:,} instances")
        names += [match["name"]] * int(match["count"])
    return tuple(names)


def parse_numbers(text: str | int | float, count: int, what: str) -> tuple[int, ...]:
    """Whole numbers joined by `+`, one an instance; a single one stands for all `count`.

    Raises ValueError where a part is no positive whole number or their count is not `count`.
    """
    parts = str(text).strip().split("+")
    try:
        numbers = tuple(int(float(part)) for part in parts)
        exact = all(float(part) == number for part, number in zip(parts, numbers, strict=True))
    except (ValueError, OverflowError):
        raise ValueError(f"{what} {text!r}: not whole numbers joined by '+'") from None
    if not exact or min(numbers) < 1:
        raise ValueError(f"{what} {text!r}: every number must be a whole one of at least 1")
    if len(numbers) == 1:
        return numbers * count
    if len(numbers) != count:
        raise ValueError(f"{what} {text!r}: {len(numbers)} numbers for {count} instances")
    return numbers
