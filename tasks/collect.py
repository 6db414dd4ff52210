"""Bring home what leases left in their mailboxes: load it, write down what it cost, forget the lease.

Used after every launch and, before the next campaign, for launches whose controller died: what a node recorded is
loaded once, whoever asks.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from warehouse import append

from .benchmark import Served
from .installation import Installation
from .load import load_mailbox
from .machines import machine_rows
from .node.record import Item
from .outcomes import Ended, item_row, launch_row
from .providers.base import EndedLease
from .step import Step
from .turn import alone, at_work_elsewhere


@dataclass(slots=True, kw_only=True)
class Collected:
    """What came home: new rows, all rows by status, dollars, and sentences worth saying."""

    new: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0
    notes: list[str] = field(default_factory=list)


@Step
def collect(here: Installation, refresh_id: str, now: datetime) -> Collected:
    """Load every lease that is over, then forget it; one still held is left alone. Loading twice adds nothing.

    Leases of a refresh that is at work in another process are left to it: it counts what they cost.
    """
    collected = Collected()
    with alone(here.home, "collect"):
        other = at_work_elsewhere(here.home)
        for lease in here.provider.ended():
            if other is not None and lease.lease_id.startswith(str(other.get("refresh_id", ""))):
                continue
            _collect_one(here, lease, refresh_id, now, collected)
            _keep_rejected(lease, here.home / "rejected" / lease.lease_id)
            here.provider.forget(lease.lease_id)
    return collected


@Step
def bring_home(here: Installation, served: Served, refresh_id: str, now: datetime) -> Collected:
    """What one launch measured; where it got no machines it left no mailbox, and its rows go straight in."""
    if served.mailbox is None:
        store_rows(here, served, refresh_id, now)
    return collect.fn(here, refresh_id, now)


def store_rows(here: Installation, served: Served, refresh_id: str, now: datetime) -> None:
    """The controller's rows of a launch without a mailbox."""
    with here.warehouse.transact() as connection:
        rows = [{"ended_unix": now.timestamp()} | row for row in served.rows]
        append.append_records(connection, rows, refresh_id=refresh_id, loaded_at=now)


def _collect_one(here: Installation, lease: EndedLease, refresh_id: str, now: datetime, into: Collected) -> None:
    envelopes = _read(lease.mailbox / "controller" / "envelopes.json")
    found = {file: _read(file) for file in sorted(lease.mailbox.glob("controller/rows/*.json"))}
    rows = [row for row in found.values() if row]
    if lease.outcome == "reaped":
        rows += _cut_short(lease, envelopes)  # where the controller told of that run itself, its row comes first
    rows += _refused(lease, envelopes or {"": {"provider": here.provider.name, "market": lease.market}})
    row = asdict(lease) | {"provider": here.provider.name}
    del row["mailbox"], row["refusals"]
    bought_by = lease.lease_id.rpartition("-")[0] or refresh_id  # whoever brings it home
    loaded = load_mailbox(
        here.warehouse,
        lease.mailbox,
        envelopes,
        rows=rows,
        lease=None if lease.outcome == "refused" else row,
        machines=machine_rows(lease, here.provider.name),
        refresh_id=bought_by,
        now=now,
    )
    into.new += loaded.new
    into.by_status.update(loaded.by_status)
    into.usd += lease.usd or 0.0
    into.notes += loaded.rejected
    into.notes += [f"{file} could not be read, and its row is lost" for file, row in found.items() if not row]


def _cut_short(lease: EndedLease, envelopes: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of the run that was under way when a lease had to be reaped: the first of its plan without a record."""
    recorded = {file.stem for file in lease.mailbox.glob("node-*/records/*.json")}
    planned = (Item(**item) for item in _read(lease.mailbox / "plan.json").get("items", ()))
    under_way = next((item for item in planned if item.run_id not in recorded and item.run_id in envelopes), None)
    if under_way is None:
        return []
    reason = "its controller was killed or its deadline passed, and the machines were reaped"
    return [item_row(lease.lease_id, under_way, envelopes, Ended(how="lost", reason=reason, interrupted=True))]


def _refused(lease: EndedLease, envelopes: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each way of having the machines that was refused before the one that was had, if any was."""
    return [
        launch_row(lease.lease_id, lease.cluster, envelopes, "refused", reason)
        | {"run_id": f"{lease.lease_id}-refused-{number}"}
        for number, reason in enumerate(lease.refusals, 1)
    ]


def _keep_rejected(lease: EndedLease, folder: Path) -> None:
    """What could not be read was measured all the same: it outlives the lease, for a person to look at."""
    rejected = lease.mailbox / "rejected"
    if rejected.is_dir():
        shutil.copytree(rejected, folder, dirs_exist_ok=True)


def _read(file: Path) -> dict[str, Any]:
    """A JSON object of the controller's; empty where it is not there, or is torn as after a power cut."""
    try:
        body = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
