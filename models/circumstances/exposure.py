"""From machines that were held to what start-up, hazard and availability are learned from. Learns nothing itself.

Frames in: `machines`, one row a machine (lease_id, instance_type, market, zone, asked_at, startup_s, hours,
interrupted), and `refusals`, one row a request (cluster, market, zone), as the marts of these names document.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..cloud import parse_cluster
from ..identity import rows_of

MARKETS = ("on-demand", "spot")
_POOL = ["instance_type", "market", "zone"]


def launches(machines: pd.DataFrame) -> pd.DataFrame:
    """instance_type, market, seconds of every machine that came to work."""
    columns = ["instance_type", "market", "seconds"]
    if not len(machines):
        return pd.DataFrame(columns=columns).astype({"seconds": float})
    started = machines[machines["startup_s"].notna() & machines["market"].isin(MARKETS)]
    return started.rename(columns={"startup_s": "seconds"})[columns]


def windows(machines: pd.DataFrame) -> pd.DataFrame:
    """instance_type, zone, hours and interruptions of spot machines, one row a day (UTC) of each."""
    columns = ["instance_type", "zone", "hours", "interruptions"]
    held = _spot(machines)
    if not len(held):
        return pd.DataFrame(columns=columns).astype({"hours": float, "interruptions": float})
    days = held.assign(
        day=pd.to_datetime(held["asked_at"]).dt.floor("D"), interruptions=held["interrupted"].astype(int)
    )
    found = days.groupby(["instance_type", "zone", "day"], sort=True)[["hours", "interruptions"]].sum().reset_index()
    return found[columns]


def by_hour(machines: pd.DataFrame) -> pd.DataFrame:
    """hour of the day (0 to 23 UTC), hours that spot machines were held in it, interruptions in it."""
    hours, count = np.zeros(24), np.zeros(24)
    for row in rows_of(_spot(machines)):
        asked = pd.Timestamp(row["asked_at"])
        first = asked.hour + asked.minute / 60 + asked.second / 3600
        edges = np.unique([first, *np.arange(np.ceil(first), first + row["hours"]), first + row["hours"]])
        np.add.at(hours, np.floor((edges[1:] + edges[:-1]) / 2).astype(int) % 24, np.diff(edges))
        count[int(first + row["hours"]) % 24] += bool(row["interrupted"])
    return pd.DataFrame({"hour": np.arange(24), "hours": hours, "interruptions": count})


def together(machines: pd.DataFrame) -> pd.DataFrame:
    """Of each launch and pool that lost spot machines: how many it had, and how many of them were lost."""
    held = _spot(machines)
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
        rows += [(str(row["instance_type"]), str(row["market"]), str(row["zone"]), True) for row in rows_of(granted)]
    for row in rows_of(refusals) if len(refusals) else ():
        if row["market"] in MARKETS:
            names = dict.fromkeys(parse_cluster(str(row["cluster"])))
            rows += [(name, str(row["market"]), str(row["zone"]), False) for name in names]
    return pd.DataFrame(rows, columns=[*_POOL, "granted"])


def _spot(machines: pd.DataFrame) -> pd.DataFrame:
    if not len(machines):
        return machines
    picked: pd.DataFrame = machines[(machines["market"] == "spot") & (machines["hours"] > 0)]
    return picked
