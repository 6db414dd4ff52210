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

from prefect import task
from prefect.cache_policies import NO_CACHE

from warehouse import append

from .benchmark import Served
from .installation import Installation
from .load import load_mailbox
from .providers.base import EndedLease


@dataclass(slots=True, kw_only=True)
class Collected:
    """What came home: new rows, all rows by status, dollars, and sentences worth saying."""

    new: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0
    notes: list[str] = field(default_factory=list)


@task(cache_policy=NO_CACHE)
def collect(here: Installation, refresh_id: str, now: datetime) -> Collected:
    """Load every lease that is over, then forget it; one still held is left alone. Loading twice adds nothing."""
    collected = Collected()
    for lease in here.provider.ended():
        _collect_one(here, lease, refresh_id, now, collected)
        _keep_rejected(lease, here.home / "rejected" / lease.lease_id)
        here.provider.forget(lease.lease_id)
    return collected


@task(cache_policy=NO_CACHE)
def store_refusal(here: Installation, served: Served, refresh_id: str, now: datetime) -> None:
    """A launch that got no machines left no mailbox: its row goes straight into the warehouse."""
    with here.warehouse.transact() as connection:
        rows = [{"ended_unix": now.timestamp()} | row for row in served.rows]
        append.append_records(connection, rows, refresh_id=refresh_id, loaded_at=now)


def _collect_one(here: Installation, lease: EndedLease, refresh_id: str, now: datetime, into: Collected) -> None:
    envelopes = _read(lease.mailbox / "controller" / "envelopes.json")
    rows = [_read(file) for file in sorted(lease.mailbox.glob("controller/rows/*.json"))]
    if lease.outcome == "reaped":
        rows += _cut_short(lease, envelopes)
    row = asdict(lease) | {"provider": here.provider.name}
    del row["mailbox"]
    loaded = load_mailbox(
        here.warehouse, lease.mailbox, envelopes, rows=rows, lease=row, refresh_id=refresh_id, now=now
    )
    into.new += loaded.new
    into.by_status.update(loaded.by_status)
    into.usd += lease.usd or 0.0
    into.notes += loaded.rejected


def _cut_short(lease: EndedLease, envelopes: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of the run that was under way when a lease had to be reaped: the first one without a record."""
    recorded = {file.stem for file in lease.mailbox.glob("node-*/records/*.json")}
    under_way = next((run_id for run_id in envelopes if run_id not in recorded), None)
    plan = _read(lease.mailbox / "plan.json")
    kind = next((item["kind"] for item in plan.get("items", ()) if item["run_id"] == under_way), None)
    if under_way is None or kind is None:
        return []
    return [
        {
            "run_id": under_way,
            "lease_id": lease.lease_id,
            "kind": kind,
            "status": "interrupted",
            "reason": "its controller was killed or its deadline passed, and the machines were reaped",
            "setup": envelopes[under_way],
        }
    ]


def _keep_rejected(lease: EndedLease, folder: Path) -> None:
    """What could not be read was measured all the same: it outlives the lease, for a person to look at."""
    rejected = lease.mailbox / "rejected"
    if rejected.is_dir():
        shutil.copytree(rejected, folder, dirs_exist_ok=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return body
