"""Instance types and list prices that came with the package, for who has no AWS account; read here and made here.

`python -m tasks.providers.ec2.snapshot` makes it anew from two installed packages, both under the Apache License 2.0:
moto (what DescribeInstanceTypes and DescribeInstanceTypeOfferings answered) and apache-libcloud (on-demand list prices,
Linux). They are in the extra `snapshot` and never imported. The file, snapshot.json.gz, is one JSON object:

    made_on, prices_as_of   day, and moment of the prices (UTC)
    sources                 package, version, licence, its notice, and what was taken from each
    columns                 names of the values below; units are those of models.domain.cluster.InstanceType
    several_interfaces      names of types whose whole network takes more than one interface
    instance_types          name -> values; `usd` is region -> dollars an hour on demand, null where it is unknown
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
RENEW = "python -m tasks.providers.ec2.snapshot"
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
_REGION = re.compile(
    r"[a-z]{2}-[a-z]+-\d"
)  # neither local zones nor the partitions of governments and China
_LISTED = "on-demand prices of Linux, dollars an hour; 0.0 is unknown; some are of dedicated hardware, up to 10 % more"
_OFFERINGS = "moto/ec2/resources/instance_type_offerings/region/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`usd`: region -> type -> dollars an hour on demand, None unknown; a type that is not there is not offered."""

    instance_types: tuple[InstanceType, ...]
    usd: Mapping[str, Mapping[str, float | None]]
    prices_as_of: datetime
    sources: str
    several_interfaces: frozenset[str]

    def offers(self, types: list[InstanceType], regions: tuple[str, ...]) -> list[Offer]:
        """`types` on demand wherever `regions` offer them. Spot prices are nobody's list price: there are none."""
        found: list[Offer] = []
        for region in regions:
            prices = self.usd.get(region, {})
            here = [one for one in types if one.name in prices]
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
        sources=", ".join(f"{one['package']} {one['version']}" for one in body["sources"]),
        several_interfaces=frozenset(body["several_interfaces"]),
    )


def combined(
    answers: list[Mapping[str, Any]],
    offered: Mapping[str, set[str]],
    list_prices: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[Any]]:
    """The object `instance_types` of the file. `offered`: region -> types; `list_prices`: type -> region -> dollars."""
    rows: dict[str, list[Any]] = {}
    for one in described(answers):
        known = {region: known_price(usd) for region, usd in list_prices.get(one.name, {}).items()}
        priced = {
            region: usd
            for region, usd in known.items()
            if usd is not None and _REGION.fullmatch(region)
        }
        unpriced = {region: None for region, names in offered.items() if one.name in names}
        usd = dict(sorted({**unpriced, **priced}.items()))
        rows[one.name] = [*(getattr(one, column) for column in COLUMNS[:-1]), usd]
    return rows


def several_interfaces(answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the types whose whole network takes more than one interface."""
    return sorted(str(one["InstanceType"]) for one in answers if efa_cards(one) not in ((), (0,)))


def make(today: datetime) -> dict[str, Any]:
    """The whole object, from the installed packages. Raises PackageNotFoundError where one is missing."""
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
    """Where a part of the file comes from; the licence asks that a package's NOTICE goes with what is made of it."""
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
    """Write the file and say what it holds."""
    body = make(datetime.now(UTC))
    text = json.dumps(body, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    rows = [usd for *_, prices in body["instance_types"].values() for usd in prices.values()]
    unpriced = sum(usd is None for usd in rows)
    print(
        f"{FILE}: {len(body['instance_types'])} instance types, {len(rows)} offers, {unpriced} of them unpriced"
    )
    print(f"prices as of {body['prices_as_of']}; {FILE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    try:
        main()
    except metadata.PackageNotFoundError as error:
        raise SystemExit(
            f"the package {error.name} is not installed: pip install -e '.[snapshot]'"
        ) from None
