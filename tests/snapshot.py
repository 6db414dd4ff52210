"""Makes tasks/providers/ec2/snapshot.json.gz: `python -m tests.snapshot [CATALOGUE]`.

Types come from moto, and prices of March 2025 from apache-libcloud (extra `snapshot`). List prices
of us-east-1 come from CATALOGUE, by default ../shared/data/ec2_catalogue.csv. It needs no network.
"""

import gzip
import json
import re
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pandas as pd
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from tasks.providers.ec2.catalogue import family, instance_types_of, several_interfaces
from tasks.providers.ec2.prices import known_price
from tasks.providers.ec2.snapshot import FILE, LISTED_REGION

COLUMNS = ("devices", "device", "cores", "memory_gib", "device_memory_gib", "bandwidth_gbps",
           "device_tflops", "usd")  # fmt: skip
CATALOGUE = Path("../shared/data/ec2_catalogue.csv")
_REGION = re.compile(r"^[a-z]{2}-[a-z]+-\d$")  # no local zones, no partitions of governments
_TWINS = [LISTED_REGION, "us-east-2", "us-west-2"]  # regions with the same list prices
_SOURCES = {
    "moto": "instance types as DescribeInstanceTypes gave them, and which regions offer them",
    "apache-libcloud": "on-demand prices of Linux in March 2025; 0.0 is unknown; some are of "
    "dedicated hardware. Their ratios to us-east-1 give the estimates for other regions",
}
_KARPENTER = {
    "package": "karpenter-provider-aws",
    "version": "generated tables of 2026-07-20",
    "licence": "Apache-2.0",
    "what": "on-demand prices of Linux in us-east-1",
    "notice": "Karpenter\nCopyright Amazon.com, Inc. or its affiliates. All Rights Reserved.",
}


def estimated(listed, new):
    """Type -> region -> dollars: `new` in us-east-1, estimates elsewhere.

    `listed` maps type -> region -> earlier price. An estimate is `new` times a ratio: the earlier
    price in its region over that in us-east-1, both without surcharges on dedicated hardware. A
    ratio has a surcharge if it exceeds the least ratio of its family and region by exactly that.
    """
    old = pd.DataFrame(listed).T.filter(regex=_REGION).map(known_price).astype(float)
    ratios = old.div(_undedicated(old[_TWINS].min(axis=1), new), axis=0)
    least = ratios.groupby(family).transform("min")
    least[_TWINS] = 1.0
    usd = _undedicated(ratios, least).mul(new, axis=0).round(5).assign(**{LISTED_REGION: new})
    return {name: row.dropna().to_dict() for name, row in usd.iterrows()}


def _undedicated(price, least):
    """`least` where `price` is `least` with a surcharge on dedicated hardware, else `price`."""
    return price.mask((price / least).round(2).isin([1.06, 1.1]), least)


def combined(answers, offered, prices):
    """`instance_types` of the file. `offered`: region -> types; `prices`: type -> region -> usd."""
    rows = {}
    for kind in instance_types_of(answers):
        usd = {region: None for region, names in offered.items() if kind.name in names}
        usd |= prices.get(kind.name, {})
        values = (getattr(kind, column) for column in COLUMNS[:-1])
        rows[kind.name] = [*values, dict(sorted(usd.items()))]
    return rows


def make(today, catalogue=CATALOGUE):
    """The file's object from the installed packages. Raises PackageNotFoundError."""
    libcloud = metadata.distribution("apache-libcloud")
    prices = json.loads(libcloud.locate_file("libcloud/data/pricing.json").read_text())
    offered = {
        region: {row["InstanceType"] for row in rows}
        for region, rows in INSTANCE_TYPE_OFFERINGS["region"].items()
        if _REGION.fullmatch(region)
    }
    several = (
        name for name, instance_type in INSTANCE_TYPES.items() if several_interfaces(instance_type)
    )
    new = pd.read_csv(catalogue, index_col="instance_type")["on_demand_usd_per_h_us_east_1"]
    usd = estimated(prices["compute"]["ec2_linux"], new.dropna())
    return {
        "made_on": f"{today:%Y-%m-%d}",
        "prices_as_of": "2026-07-20T00:00:00+00:00",
        "sources": [*(_source(package, what) for package, what in _SOURCES.items()), _KARPENTER],
        "columns": COLUMNS,
        "several_interfaces": sorted(several),
        "instance_types": combined(INSTANCE_TYPES.values(), offered, usd),
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
    made = make(datetime.now(UTC), *map(Path, sys.argv[1:]))
    FILE.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))
