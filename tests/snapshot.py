"""Makes tasks/providers/ec2/snapshot.json.gz: `python -m tests.snapshot`.

From two packages of the extra `snapshot`, moto and apache-libcloud.
"""

import gzip
import json
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from tasks.providers.ec2.catalogue import described, facts_of
from tasks.providers.ec2.prices import known_price
from tasks.providers.ec2.snapshot import FILE

COLUMNS = ("devices", "device", "cores", "memory_gib", "device_memory_gib", "bandwidth_gbps",
           "device_tflops", "usd")  # fmt: skip
_REGION = re.compile(r"[a-z]{2}-[a-z]+-\d")  # no local zones, no partitions of governments
_SOURCES = {
    "moto": "instance types as DescribeInstanceTypes gave them, and which regions offer them",
    "apache-libcloud": "on-demand prices of Linux; 0.0 is unknown; some are of dedicated hardware "
    "(+10 %)",
}


def combined(answers, offered, list_prices):
    """`instance_types` of the file. `offered`: region -> types; `list_prices`: type -> region."""
    rows = {}
    for kind in described(answers):
        usd = {region: None for region, names in offered.items() if kind.name in names}
        for region, text in list_prices.get(kind.name, {}).items():
            if _REGION.fullmatch(region) and (known := known_price(text)):
                usd[region] = known
        values = [getattr(kind, column) for column in COLUMNS[:-1]]
        rows[kind.name] = [*values, dict(sorted(usd.items()))]
    return rows


def make(today):
    """The file's object from the installed packages. Raises PackageNotFoundError."""
    libcloud = metadata.distribution("apache-libcloud")
    prices = json.loads(Path(str(libcloud.locate_file("libcloud/data/pricing.json"))).read_text())
    offered = {
        region: {str(row["InstanceType"]) for row in rows}
        for region, rows in INSTANCE_TYPE_OFFERINGS["region"].items()
        if _REGION.fullmatch(region)
    }
    several = {
        name for name, answer in INSTANCE_TYPES.items() if facts_of(answer).several_interfaces
    }
    listed = prices["compute"]["ec2_linux"]
    return {
        "made_on": f"{today:%Y-%m-%d}",
        "prices_as_of": datetime.fromtimestamp(prices["updated"], UTC).isoformat(),
        "sources": [_source(package, what) for package, what in _SOURCES.items()],
        "columns": COLUMNS,
        "several_interfaces": sorted(several),
        "instance_types": combined(INSTANCE_TYPES.values(), offered, listed),
    }


def _source(package, what):
    """A source with its NOTICE, as the licence asks."""
    notices = [file.read_text() for file in metadata.files(package) or () if file.name == "NOTICE"]
    found = {
        "package": package,
        "version": metadata.version(package),
        "licence": "Apache-2.0",
        "what": what,
    }
    return found | ({"notice": notices[0].strip()} if notices else {})


if __name__ == "__main__":
    FILE.write_bytes(gzip.compress(json.dumps(make(datetime.now(UTC))).encode(), mtime=0))
