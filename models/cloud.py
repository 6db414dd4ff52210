"""Machines as values: instance types, offers, clusters, and the text that names them. Never talks to a cloud."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby

ANY_ZONE = "any"  # of a price that holds in every zone of its region

_PART = re.compile(r"^(?P<count>[1-9]\d*)x(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)$")


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
    """An instance type in one market and zone, at a price, at a moment. `usd_per_hour` None is unknown, never free."""

    instance_type: InstanceType
    market: str  # "on-demand" or "spot"
    zone: str
    region: str
    usd_per_hour: float | None
    interruptions_per_hour: float
    price_as_of: datetime


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
        """Dollars an hour of the whole cluster; None as soon as one price is unknown."""
        prices = [offer.usd_per_hour for offer in self.members]
        return None if any(price is None for price in prices) else sum(price for price in prices if price is not None)

    @property
    def mixed(self) -> bool:
        """Are its machines of more than one market?"""
        return len({offer.market for offer in self.members}) > 1

    def counted(self) -> Iterator[tuple[int, Offer]]:
        """Runs of equal offers, in order."""
        for offer, run in groupby(self.members):
            yield len(list(run)), offer


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
