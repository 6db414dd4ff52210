"""The dollars that other machines of a team may still spend.

Each campaign claims its cap in the shared warehouse before it buys, and leaves to earlier claims
what they have not spent. A home settles its claim once the campaign is over and holds no lease. The
claim of a home that never comes back counts in its month, and in the next if it may reach into it.
"""

from __future__ import annotations

import socket
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path

import pandas as pd

from models.domain.setup_table import rows_of
from warehouse import append
from warehouse.database import WarehouseMissing
from warehouse.reads import mart

from ..reporting.progress import reporter
from ..workspace.locking import at_work
from ..workspace.workspace import Workspace
from .outcomes import Row

# Beside three times the campaign's minutes, expected to suffice: its last launch may begin as it
# ends, and wish for twice its estimate.
_AFTER = timedelta(hours=2)


def claim(workspace: Workspace, refresh_id: str, usd: float, now: datetime) -> None:
    """Claim `usd` for campaign `refresh_id`. Does nothing where no money is spent or shared."""
    if usd and _shares_a_month(workspace):
        until = now + 3 * timedelta(minutes=workspace.max_minutes) + _AFTER
        file = _folder(workspace) / refresh_id
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # first: a claim without its file is settled by no home
        row = {"refresh_id": refresh_id, "usd": usd, "may_cost_until": until}
        _note(workspace, "claimed", row, now)


def settle(workspace: Workspace, now: datetime, *, over: str = "") -> None:
    """Settle this home's claims of campaigns without leases, or only that of the campaign that is
    `over`.

    If that fails, prints a note; the next reaping settles them.
    """
    try:
        _settle(workspace, now, over)
    except Exception as error:  # nothing that was measured is to be lost for it
        reporter().say(
            f"note: this home's claim on the month's dollars stays until `srift reap` runs: {error}"
        )


def _settle(workspace: Workspace, now: datetime, over: str) -> None:
    # listed before anything is read: a campaign that begins meanwhile keeps its claim
    files = list(_folder(workspace).glob("*")) if _shares_a_month(workspace) else []
    busy = str((at_work(workspace.home) or {}).get("refresh_id", ""))
    files = [file for file in files if (file.name == over if over else file.name != busy)]
    if not files:
        return
    leases = [lease.lease_id for lease in workspace.provider.leases()]
    leases += [lease.lease_id for lease in workspace.provider.closed()]
    unsettled = {row["refresh_id"]: row for row in _unsettled(workspace)}
    for file in files:
        if any(lease_id.startswith(f"{file.name}-") for lease_id in leases):
            continue
        if row := unsettled.get(file.name):
            columns = ("refresh_id", "usd", "may_cost_until")
            _note(workspace, "settled", {column: row[column] for column in columns}, now)
        file.unlink(missing_ok=True)


def of_others(workspace: Workspace, month_start: datetime, *, before: str) -> list[Row]:
    """Rows of the mart `claims` of other homes that may still cost something since `month_start`.

    Only claims made before that of campaign `before`, or all if it has none.
    """
    if not _shares_a_month(workspace):
        return []
    home_claims = {file.name for file in _folder(workspace).glob("*")}
    start = pd.Timestamp(month_start).tz_localize(None)
    earlier = takewhile(lambda row: row["refresh_id"] != before, _unsettled(workspace))
    return [
        row
        for row in earlier
        if row["refresh_id"] not in home_claims and row["may_cost_until"] >= start
    ]


def _shares_a_month(workspace: Workspace) -> bool:
    return workspace.spends_money and bool(workspace.settings.shared.host)


def _folder(workspace: Workspace) -> Path:
    """A file for each claim of this home: host names and folders may be renamed or reused."""
    return workspace.home / "claims"


def _unsettled(workspace: Workspace) -> list[Row]:
    """Claims in the order in which they were made."""
    try:
        found = mart(workspace.warehouse, "claims", provider=workspace.provider.name)
    except WarehouseMissing:
        return []
    return rows_of(found.sort_values("noted_order")) if len(found) else []


def _note(workspace: Workspace, event: str, row: Row, now: datetime) -> None:
    place = f"{socket.gethostname()}:{workspace.home.resolve()}"
    stamp = {"event": event, "provider": workspace.provider.name, "place": place, "noted_at": now}
    with workspace.warehouse.transact() as connection:
        append.append(connection, "raw_claims", [row | stamp])
