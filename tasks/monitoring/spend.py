"""What measuring has cost and what is committed to it, from the leases in the warehouse and those that are held now."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster
from warehouse.reads import lease_spend

from ..workspace.workspace import open_workspace

BY = ("day", "campaign", "workload", "type")


def spend_of(provider: str, by: str, *, days: int | None = None) -> dict[str, Any]:
    """Dollars of the leases that ended within the last `days` (UTC), or of all, a row a value of `by`, one of BY.

    `rows`: that value as `of`, `leases`, `runs`, and `usd`, None where the price of one is unknown. A lease's dollars
    are its workloads' in equal parts of their runs, those of runs of no workload under an empty name; those of a mixed
    cluster are of its types together. `held`: leases that are not over, with dollars so far, and at their deadline,
    which nothing outlives. `unreadable`: a sentence for each of which nothing is known. Raises WarehouseMissing where
    nothing was ever measured, or an older version of the warehouse does not tell.
    """
    workspace, now = open_workspace(provider), datetime.now(UTC)
    spent = lease_spend(workspace.warehouse, provider)
    ended = pd.to_datetime(spent["ended_at"])
    if days is not None:
        spent = spent[ended >= pd.Timestamp(now).tz_convert(None) - pd.Timedelta(days=days)]
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
        "rows": [
            {"of": str(name), **_summed(own)} for name, own in spent.groupby(of.loc[spent.index])
        ],
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
