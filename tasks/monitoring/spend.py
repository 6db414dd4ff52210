"""Report the cost of ended and running launches. A lease is the file that records a launch."""

from datetime import UTC, datetime, timedelta
from typing import Any

from warehouse.reads import lease_spend

from ..workspace.workspace import open_workspace

_MOST_DAYS = 36_500  # a century; Python's dates do not reach a million days back


def spend_of(provider: str, by: str, *, days: int | None = None) -> dict[str, Any]:
    """Return the cost of launches in dollars. A lease is the file that records a launch.

    by: how to group ended launches: a key of `warehouse.reads.SPEND_BY`, such as "workload" or
        "day" (in UTC).
    days: count only leases that ended within this number of days; None counts all ended leases.

    Keys of the result:

        rows: a row per group. `usd` is None if a price is unknown. The cost of a launch is divided
            equally among its runs.
        total: the sum over all groups.
        leases: the leases that have not ended, with their cost until now.
        unreadable: a sentence for each lease that cannot be read.
    """
    workspace, now = open_workspace(provider), datetime.now(UTC)
    since = datetime.min if days is None else now - timedelta(days=min(days, _MOST_DAYS))
    rows = lease_spend(workspace.warehouse, provider, by, since)
    leases = workspace.provider.leases()
    return {
        "provider": provider,
        "by": by,
        "rows": rows[1:],
        "total": rows[0],
        "held": [
            {
                "lease_id": lease.lease_id,
                "cluster": lease.cluster,
                "usd_so_far": lease.usd_until(now),
                "usd_at_deadline": lease.usd_until(lease.deadline_at),
                "deadline_at": lease.deadline_at,
            }
            for lease in leases
            if not lease.problem
        ],
        "unreadable": [
            f"lease {lease.lease_id}: {lease.problem}" for lease in leases if lease.problem
        ],
    }
