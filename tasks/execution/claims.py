"""Reserve a refresh's dollars in the shared warehouse, to keep a team within its monthly cap.

A claim is a row that reserves dollars. A refresh claims its dollar cap before it buys machines. The
refresh cannot use dollars that earlier claims reserve. When the records of all launches of the
refresh are in the warehouse, its claim is settled, which releases the dollars. A claim that is
never settled counts until the end of the month in which it expires (`may_cost_until`).
"""

import socket
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path

import pandas as pd

from models.domain.setup_table import rows_of
from warehouse import append

from ..reporting.progress import reporter
from ..workspace.locking import at_work
from ..workspace.workspace import Workspace
from .outcomes import Row

# A claim expires after three times the campaign's time limit, plus these two hours. The last launch
# may begin at the end of the campaign and take twice its estimate.
_AFTER = timedelta(hours=2)


def claim(workspace: Workspace, refresh_id: str, usd: float, now: datetime) -> None:
    """Reserve `usd` dollars of the team's monthly cap for the refresh `refresh_id`.

    Does nothing if `usd` is 0, if the provider is free, or if the warehouse is not shared.
    """
    if usd and _shares_a_month(workspace):
        until = now + 3 * timedelta(minutes=workspace.max_minutes) + _AFTER
        file = _folder(workspace) / refresh_id
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # before the row is added, because a claim without a file is never settled
        _note(workspace, "claimed", refresh_id, usd, until, now)


def settle(workspace: Workspace, now: datetime, *, over: str = "") -> None:
    """Release the dollars that this SRIFT_HOME reserved for ended refreshes.

    The dollars stay reserved until the records of all launches of a refresh are in the warehouse.
    Errors are printed, not raised, and the next `srift reap` tries again.

    over: id of an ended refresh, to release only its dollars. "" means all refreshes except the
        running refresh.
    """
    # The files are listed before the leases are read, so that a campaign that begins in between
    # keeps its claim.
    files = list(_folder(workspace).glob("*")) if _shares_a_month(workspace) else []
    busy = str((at_work(workspace.home) or {}).get("refresh_id", ""))
    files = [file for file in files if (file.name == over if over else file.name != busy)]
    if not files:
        return
    try:
        leases = [lease.lease_id for lease in workspace.provider.leases()]
        leases += [lease.lease_id for lease in workspace.provider.closed()]
        open_claims = {row["refresh_id"]: row for row in _open_claims(workspace)}
        for file in files:
            if any(lease_id.startswith(f"{file.name}-") for lease_id in leases):
                continue
            if row := open_claims.get(file.name):
                _note(workspace, "settled", file.name, row["usd"], row["may_cost_until"], now)
            file.unlink(missing_ok=True)
    except Exception as error:  # an error must not keep measurements from being loaded
        reporter().say(
            "note: dollars of this SRIFT_HOME stay reserved in the shared warehouse until you run"
            f" `srift reap`: {error}"
        )


def of_others(workspace: Workspace, month_start: datetime, *, before: str) -> list[Row]:
    """Return the dollar reservations made by other SRIFT_HOMEs, as rows of the mart `claims`.

    Reservations that expired before `month_start` are left out.

    before: id of a refresh. If the refresh has a reservation, only older reservations are returned.
    """
    if not _shares_a_month(workspace):
        return []
    home_claims = {file.name for file in _folder(workspace).glob("*")}
    start = pd.Timestamp(month_start).tz_localize(None)
    earlier = takewhile(lambda row: row["refresh_id"] != before, _open_claims(workspace))
    return [
        row
        for row in earlier
        if row["refresh_id"] not in home_claims and row["may_cost_until"] >= start
    ]


def _shares_a_month(workspace: Workspace) -> bool:
    """Return True if machines cost money and a team shares the warehouse and the monthly cap."""
    return workspace.spends_money and bool(workspace.settings.shared.host)


def _folder(workspace: Workspace) -> Path:
    """Return the folder that has an empty file for each claim of this SRIFT_HOME.

    The name of a file is the id of the refresh that made the claim.
    """
    # host names and paths do not identify a SRIFT_HOME: they may be changed or reused
    return workspace.home / "claims"


def _open_claims(workspace: Workspace) -> list[Row]:
    """Return the reservations of every SRIFT_HOME that are not released, oldest first."""
    claims = workspace.mart("claims")
    return rows_of(claims.sort_values("noted_order"))


def _note(
    workspace: Workspace, event: str, refresh_id: str, usd: float, until: datetime, now: datetime
) -> None:
    """Append a row to the table raw_claims.

    event: "claimed" or "settled".
    usd: the reserved dollars.
    until: the latest time at which the dollars may be spent.
    """
    row = {
        "event": event,
        "provider": workspace.provider.name,
        "place": f"{socket.gethostname()}:{workspace.home.resolve()}",
        "noted_at": now,
        "refresh_id": refresh_id,
        "usd": usd,
        "may_cost_until": until,
    }
    with workspace.warehouse.transact() as connection:
        append.append(connection, "raw_claims", [row])
