"""Dollars of past and of held leases."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster
from warehouse.reads import lease_spend

from ..workspace.workspace import open_workspace

BY = ("day", "campaign", "workload", "type")


def spend_of(provider: str, by: str, *, days: int | None = None) -> dict[str, Any]:
    """Return the dollars of leases that ended within the last `days` (UTC), by one of BY.

    A lease's dollars are shared equally by its runs. `usd` is None if a price is unknown. `held`
    are leases that are not over, `unreadable` a sentence for each lease that cannot be read.
    Raises WarehouseMissing if nothing was ever measured.
    """
    workspace, now = open_workspace(provider), datetime.now(UTC)
    spent = lease_spend(workspace.warehouse, provider)
    ended = pd.to_datetime(spent["ended_at"])
    if days is not None:
        recent = ended >= pd.Timestamp(now).tz_localize(None) - pd.Timedelta(days=days)
        spent, ended = spent[recent], ended[recent]
    of = {
        "day": ended.dt.strftime("%Y-%m-%d"),
        "campaign": spent["refresh_id"],
        "workload": spent["workload"],
        "type": spent["cluster"].map(lambda name: "+".join(dict.fromkeys(parse_cluster(name)))),
    }[by]
    held = workspace.provider.leases()
    return {
        "provider": provider,
        "by": by,
        "rows": [{"of": str(name), **_summed(group)} for name, group in spent.groupby(of)],
        "total": _summed(spent),
        "held": [
            {
                "lease_id": one.lease_id,
                "cluster": one.cluster,
                "usd_so_far": one.usd_until(now),
                "usd_at_deadline": one.usd_until(one.deadline_at),
                "deadline_at": one.deadline_at,
            }
            for one in held
            if not one.problem
        ],
        "unreadable": [f"lease {one.lease_id}: {one.problem}" for one in held if one.problem],
    }


def _summed(spent: pd.DataFrame) -> dict[str, Any]:
    return {
        "leases": int(spent["lease_id"].nunique()),
        "runs": int(spent["runs"].sum()),
        "usd": None if spent["usd"].isna().any() else float(spent["usd"].sum()),
    }
