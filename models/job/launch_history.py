"""From machines that were held to the rows that start-up, hazard and availability are learned from.

Frames in: `machines`, one row a machine (lease_id, node, number, instance_type, market, zone, asked_at, startup_s,
hours, interrupted), and `refusals`, one row a request (cluster, market, zone), as the marts of these names document.
"""

from __future__ import annotations

import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.setup_table import rows_of

MARKETS = ("on-demand", "spot")
FIRST = 0  # the number of a node's machine that was not put in the place of another
_POOL = ["instance_type", "market", "zone"]


def launches(machines: pd.DataFrame) -> pd.DataFrame:
    """One row a launch and type that came to work: instance_type, market, machines of the whole launch, and seconds
    until the last of that type was at work. A machine that came in the place of a lost one is no part of a launch.
    """
    columns = ["instance_type", "market", "machines", "seconds"]
    if not len(machines):
        return pd.DataFrame(columns=columns).astype({"seconds": float, "machines": float})
    started = machines[
        machines["startup_s"].notna()
        & machines["market"].isin(MARKETS)
        & (machines["number"] == FIRST)
    ]
    many = started.groupby("lease_id")["node"].transform("size")
    rows = started.assign(machines=many).groupby(
        ["lease_id", "instance_type", "market"], sort=False, as_index=False
    )
    return rows.agg(machines=("machines", "first"), seconds=("startup_s", "max"))[columns]


def windows(machines: pd.DataFrame) -> pd.DataFrame:
    """instance_type, zone, hours and interruptions of spot machines, one row a day (UTC) of each."""
    columns = ["instance_type", "zone", "hours", "interruptions"]
    held = spot_held(machines)
    if not len(held):
        return pd.DataFrame(columns=columns).astype({"hours": float, "interruptions": float})
    days = held.assign(
        day=pd.to_datetime(held["asked_at"]).dt.floor("D"),
        interruptions=held["interrupted"].astype(int),
    )
    found = (
        days.groupby(["instance_type", "zone", "day"], sort=True)[["hours", "interruptions"]]
        .sum()
        .reset_index()
    )
    return found[columns]


def together(machines: pd.DataFrame) -> pd.DataFrame:
    """Of each launch and pool that lost spot machines: how many it had, and how many of them were lost."""
    held = spot_held(machines)
    if not len(held):
        return pd.DataFrame({"machines": [], "lost": []})
    taken = held.groupby(["lease_id", "instance_type", "zone"])["interrupted"]
    found = pd.DataFrame({"machines": taken.size(), "lost": taken.sum()})
    lost: pd.DataFrame = found[found["lost"] > 0].reset_index(drop=True)
    return lost


def requests(machines: pd.DataFrame, refusals: pd.DataFrame) -> pd.DataFrame:
    """instance_type, market, zone, granted: one row a type of each request, however many machines it was for."""
    rows: list[tuple[str, str, str, bool]] = []
    if len(machines):
        granted = machines[machines["market"].isin(MARKETS)].drop_duplicates(["lease_id", *_POOL])
        rows += [
            (str(row["instance_type"]), str(row["market"]), str(row["zone"]), True)
            for row in rows_of(granted)
        ]
    for row in rows_of(refusals) if len(refusals) else ():
        if row["market"] in MARKETS:
            names = dict.fromkeys(parse_cluster(str(row["cluster"])))
            rows += [(name, str(row["market"]), str(row["zone"]), False) for name in names]
    return pd.DataFrame(rows, columns=[*_POOL, "granted"])


def spot_held(machines: pd.DataFrame) -> pd.DataFrame:
    """Spot machines that ran for any time."""
    if not len(machines):
        return machines
    picked: pd.DataFrame = machines[(machines["market"] == "spot") & (machines["hours"] > 0)]
    return picked
