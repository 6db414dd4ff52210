"""Makes tasks/providers/ec2/snapshot.json.gz: `python -m tests.snapshot`.

From two installed packages of the extra `snapshot`, moto and apache-libcloud, which are never
imported.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.providers.ec2.catalogue import described, facts_of
from tasks.providers.ec2.prices import known_price
from tasks.providers.ec2.snapshot import FILE

COLUMNS = ("devices", "device", "cores", "memory_gib", "device_memory_gib", "bandwidth_gbps",
           "device_tflops", "usd")  # fmt: skip
_REGION = re.compile(r"[a-z]{2}-[a-z]+-\d")  # no local zones, no partitions of governments
_LISTED = "on-demand prices of Linux; 0.0 is unknown; some are of dedicated hardware (+10 %)"
_OFFERINGS = "moto/ec2/resources/instance_type_offerings/region/"


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
        "several_interfaces": sorted(
            name for name, answer in answers.items() if facts_of(answer).several_interfaces
        ),
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
