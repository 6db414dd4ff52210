"""Load the instance types and on-demand prices that ship with Srift.

`python -m tests.snapshot` makes snapshot.json.gz from moto, apache-libcloud and tables of Karpenter
(Apache License 2.0). Prices in us-east-1 (LISTED_REGION) are AWS's list prices. Prices in other
regions are estimates. The keys of the file are:

    made_on, prices_as_of   day of creation, and time of the list prices (UTC)
    sources                 for each source: package, version, licence, notice, and data used
    columns                 column names of instance_types: fields of `InstanceType`, and `usd`
    several_interfaces      types that need several interfaces to reach their full network rate
    instance_types          type name -> list of values, one for each column. The value of `usd` is
                            {region: dollars per hour}, with null for an unknown price
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from models.domain.cluster import InstanceType

LISTED_REGION = "us-east-1"
FILE = Path(__file__).with_name("snapshot.json.gz")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The instance types and on-demand prices that ship with Srift.

    usd: {region: {instance type: on-demand price in dollars per hour, or None if unknown}}. A type
        that is not for sale in a region is missing.
    several_interfaces: types that need several network interfaces to reach their full network rate.
    """

    instance_types: tuple[InstanceType, ...]
    usd: Mapping[str, Mapping[str, float | None]]
    prices_as_of: datetime
    several_interfaces: frozenset[str]


@cache
def read_snapshot() -> Snapshot:
    """Return the content of snapshot.json.gz."""
    body = json.loads(gzip.decompress(FILE.read_bytes()))
    types: list[InstanceType] = []
    usd: dict[str, dict[str, float | None]] = {}
    for name, values in body["instance_types"].items():
        fields = dict(zip(body["columns"], values, strict=True))
        for region, price in fields.pop("usd").items():
            usd.setdefault(region, {})[name] = price
        types.append(InstanceType(name=name, provider="ec2", **fields))
    return Snapshot(
        instance_types=tuple(types),
        usd=usd,
        prices_as_of=datetime.fromisoformat(body["prices_as_of"]),
        several_interfaces=frozenset(body["several_interfaces"]),
    )
