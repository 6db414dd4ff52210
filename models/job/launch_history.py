"""Training rows of start-up, hazard and availability from the marts `machines` and `refusals`."""

from __future__ import annotations

import pandas as pd

from ..domain.cluster import parse_cluster

_POOL = ["instance_type", "market", "zone"]
_MACHINE = ["lease_id", "node", "number", *_POOL, "asked_at", "startup_s", "hours", "interrupted"]


def launches(machines: pd.DataFrame) -> pd.DataFrame:
    """Return instance_type, market, machines of the launch and seconds until the type's last was
    at work.

    Grain: launch and type. Leaves out replacements of lost machines.
    """
    rows = machines.reindex(columns=_MACHINE)
    first = rows[rows["startup_s"].notna() & (rows["number"] == 0)]
    first = first.assign(machines=first.groupby("lease_id")["node"].transform("size"))
    found = first.groupby(["lease_id", "instance_type", "market"], sort=False, as_index=False).agg(
        machines=("machines", "first"), seconds=("startup_s", "max")
    )
    columns = ["instance_type", "market", "machines", "seconds"]
    return found[columns].astype({"seconds": float})


def windows(machines: pd.DataFrame) -> pd.DataFrame:
    """Return instance_type, zone, hours and interruptions of spot machines by UTC day."""
    held = spot_held(machines)
    days = held.assign(
        day=pd.to_datetime(held["asked_at"]).dt.floor("D"),
        interruptions=held["interrupted"].astype(int),
        hours=held["hours"].astype(float),
    )
    found = days.groupby(["instance_type", "zone", "day"])[["hours", "interruptions"]].sum()
    return found.reset_index().drop(columns="day")


def together(machines: pd.DataFrame) -> pd.DataFrame:
    """Return `machines` and `lost` of each launch and pool that lost spot machines."""
    pools = spot_held(machines).groupby(["lease_id", "instance_type", "zone"])["interrupted"]
    found = pd.DataFrame({"machines": pools.size(), "lost": pools.sum().astype(int)})
    lost: pd.DataFrame = found[found["lost"] > 0].reset_index(drop=True)
    return lost


def requests(machines: pd.DataFrame, refusals: pd.DataFrame) -> pd.DataFrame:
    """Return instance_type, market, zone, granted: one row a type of each request."""
    granted = machines.reindex(columns=_MACHINE).drop_duplicates(["lease_id", *_POOL])
    refused = refusals.reindex(columns=["cluster", "market", "zone"])
    types = refused["cluster"].map(lambda name: list(dict.fromkeys(parse_cluster(str(name)))))
    refused = refused.assign(instance_type=types).explode("instance_type")
    rows = pd.concat([granted[_POOL].assign(granted=True), refused[_POOL].assign(granted=False)])
    return rows.astype({"granted": bool})


def spot_held(machines: pd.DataFrame) -> pd.DataFrame:
    """Return the spot machines that ran for any time."""
    rows = machines.reindex(columns=_MACHINE)
    held: pd.DataFrame = rows[(rows["market"] == "spot") & (rows["hours"] > 0)]
    return held
