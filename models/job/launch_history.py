"""Build the training data of the start-up, interruption and availability models from launches.

In all functions, `machines` has the rows of the warehouse's mart of that name: a row per launched
machine.
"""

import pandas as pd

from ..domain.cluster import parse_cluster

_POOL = ["instance_type", "market", "zone"]


def launches(machines: pd.DataFrame) -> pd.DataFrame:
    """Return start-up seconds, with a row per launch and instance type.

    The columns are instance_type, market, machines and seconds. `machines` is the number of
    machines in the launch. `seconds` is the time from the request until the last machine of the
    type works. Replacements of lost machines are left out.
    """
    first = machines[machines["startup_s"].notna() & (machines["number"] == 0)]
    first = first.assign(machines=first.groupby("lease_id")["node"].transform("size"))
    by_type = first.groupby(["lease_id", "instance_type", "market", "machines"], sort=False)
    found = by_type["startup_s"].max().rename("seconds").reset_index()
    return found.drop(columns="lease_id")


def windows(machines: pd.DataFrame) -> pd.DataFrame:
    """Return spot machine-hours and interruptions, with a row per instance type, zone and day.

    A machine counts on the UTC day on which it was requested. The columns are instance_type, zone,
    hours and interruptions; the index is the day.
    """
    held = spot_held(machines)
    by_day = held.groupby(["instance_type", "zone", held["asked_at"].dt.floor("D")])
    found = by_day.agg(hours=("hours", "sum"), interruptions=("interrupted", "sum"))
    return found.reset_index(["instance_type", "zone"])


def together(machines: pd.DataFrame) -> pd.DataFrame:
    """Return how many spot machines each launch lost to interruptions, by pool.

    A pool is an instance type in a zone. The result has a row per launch and pool, with columns
    machines (number that ran) and lost. Pools without losses are left out.
    """
    pools = spot_held(machines).groupby(["lease_id", "instance_type", "zone"])["interrupted"]
    found = pools.agg(machines="size", lost="sum")
    lost: pd.DataFrame = found[found["lost"] > 0]
    return lost


def requests(machines: pd.DataFrame, refusals: pd.DataFrame) -> pd.DataFrame:
    """Return which requests for machines were granted, with a row per request and instance type.

    The columns are instance_type, market, zone and granted (True or False). `refusals` has a row
    per refused request, with columns cluster, market and zone.
    """
    granted = machines.drop_duplicates(["lease_id", *_POOL])
    types = refusals["cluster"].map(lambda name: sorted(set(parse_cluster(name))))
    refused = refusals.assign(instance_type=types).explode("instance_type")
    return pd.concat([granted[_POOL].assign(granted=True), refused[_POOL].assign(granted=False)])


def spot_held(machines: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `machines` for spot machines that ran for more than 0 hours."""
    held: pd.DataFrame = machines[(machines["market"] == "spot") & (machines["hours"] > 0)]
    return held
