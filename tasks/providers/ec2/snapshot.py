"""Instance types and on-demand list prices that come with the package, and their generator.

`python -m tasks.providers.ec2.snapshot` makes snapshot.json.gz from two installed packages of the
extra `snapshot`, moto and apache-libcloud (Apache License 2.0), which are never imported:

    made_on, prices_as_of   day, and moment of the prices (UTC)
    sources                 package, version, licence, notice, and what was taken
    columns                 names of the values below, as in models.domain.cluster.InstanceType
    several_interfaces      types whose whole network takes several interfaces
    instance_types          name -> values; `usd`: region -> dollars an hour or null
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from models.domain.cluster import InstanceType, Offer
from tasks.providers.ec2.catalogue import described, efa_cards
from tasks.providers.ec2.prices import known_price, on_demand_offers

FILE = Path(__file__).with_name("snapshot.json.gz")
COLUMNS = (
    "devices",
    "device",
    "cores",
    "memory_gib",
    "device_memory_gib",
    "bandwidth_gbps",
    "device_tflops",
    "usd",
)
_REGION = re.compile(r"[a-z]{2}-[a-z]+-\d")  # no local zones, no partitions of governments
_LISTED = "on-demand prices of Linux; 0.0 is unknown; some are of dedicated hardware (+10 %)"
_OFFERINGS = "moto/ec2/resources/instance_type_offerings/region/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`usd`: region -> offered type -> dollars an hour on demand, None if unknown."""

    instance_types: tuple[InstanceType, ...]
    usd: Mapping[str, Mapping[str, float | None]]
    prices_as_of: datetime
    sources: str
    several_interfaces: frozenset[str]

    def offers(self, types: list[InstanceType], regions: tuple[str, ...]) -> list[Offer]:
        """`types` on demand in every region that offers them."""
        found: list[Offer] = []
        for region in regions:
            prices = self.usd.get(region, {})
            here = [kind for kind in types if kind.name in prices]
            found += on_demand_offers(here, prices, region=region, price_as_of=self.prices_as_of)
        return found


@cache
def packaged() -> Snapshot:
    """The snapshot beside this file."""
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
        sources=", ".join(f"{source['package']} {source['version']}" for source in body["sources"]),
        several_interfaces=frozenset(body["several_interfaces"]),
    )


def combined(
    answers: list[Mapping[str, Any]],
    offered: Mapping[str, set[str]],
    list_prices: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[Any]]:
    """`instance_types` of the file. `offered`: region -> types; `list_prices`: type -> region."""
    rows: dict[str, list[Any]] = {}
    for instance in described(answers):
        known = {
            region: known_price(usd) for region, usd in list_prices.get(instance.name, {}).items()
        }
        priced = {
            region: usd
            for region, usd in known.items()
            if usd is not None and _REGION.fullmatch(region)
        }
        unpriced = {region: None for region, names in offered.items() if instance.name in names}
        usd = dict(sorted({**unpriced, **priced}.items()))
        rows[instance.name] = [*(getattr(instance, column) for column in COLUMNS[:-1]), usd]
    return rows


def several_interfaces(answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Types whose whole network takes several interfaces."""
    return sorted(
        str(answer["InstanceType"]) for answer in answers if efa_cards(answer) not in ((), (0,))
    )


def make(today: datetime) -> dict[str, Any]:
    """The file's object from the installed packages. Raises PackageNotFoundError."""
    prices = json.loads(_file("apache-libcloud", "libcloud/data/pricing.json"))
    answers = json.loads(_file("moto", "moto/ec2/resources/instance_types.json.gz"))
    offered = {region: {str(row["InstanceType"]) for row in rows} for region, rows in _offerings()}
    return {
        "made_on": f"{today:%Y-%m-%d}",
        "prices_as_of": datetime.fromtimestamp(prices["updated"], UTC).isoformat(),
        "sources": [
            _source(
                "moto",
                "instance types as DescribeInstanceTypes gave them, and which regions offer them",
            ),
            _source("apache-libcloud", _LISTED),
        ],
        "columns": COLUMNS,
        "several_interfaces": several_interfaces(answers.values()),
        "instance_types": combined(list(answers.values()), offered, prices["compute"]["ec2_linux"]),
    }


def _source(package: str, what: str) -> dict[str, str]:
    """A source with its NOTICE, as the licence asks."""
    notices = [file.read_text() for file in metadata.files(package) or () if file.name == "NOTICE"]
    found = {
        "package": package,
        "version": metadata.version(package),
        "licence": "Apache-2.0",
        "what": what,
    }
    return found | ({"notice": notices[0].strip()} if notices else {})


def _file(package: str, path: str) -> str:
    content = Path(str(metadata.distribution(package).locate_file(path))).read_bytes()
    return (gzip.decompress(content) if path.endswith(".gz") else content).decode()


def _offerings() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(region, its rows of DescribeInstanceTypeOfferings)."""
    for file in metadata.files("moto") or ():
        region = file.name.partition(".")[0]
        if str(file).startswith(_OFFERINGS) and _REGION.fullmatch(region):
            yield region, json.loads(_file("moto", str(file)))


def main() -> None:
    body = make(datetime.now(UTC))
    text = json.dumps(body, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{FILE}: {len(body['instance_types'])} types, prices of {body['prices_as_of']}")


if __name__ == "__main__":
    main()
