"""What becomes of each machine of a launch: how soon it was at work, how long it ran, whether the market took it.

The controller writes it into the mailbox as it happens; whoever brings the launch home makes rows of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from models.cloud import Cluster, Offer

from .mailbox import Mailbox
from .node.record import write_json
from .providers.base import EndedLease

_FILE = Path("controller") / "machines.json"


class MachineLog:
    """The machines of one launch in rank order, each since it was asked for. A full disk is nobody's concern here."""

    def __init__(self, mailbox: Mailbox, cluster: Cluster) -> None:
        self._mailbox = mailbox
        self._rows = [_row(node, 0, offer) for node, offer in enumerate(cluster.members)]

    def write(self) -> None:
        """Put what is known on disk, so that a controller that dies has told it."""
        with suppress(OSError):
            write_json(self._mailbox.path / _FILE, {"machines": self._rows})

    def at_work(self, seconds: Mapping[str, float]) -> None:
        """All are armed for the first time, `seconds` by phase after they were asked for.

        Which of them reported itself how long before the last is told by the store's clock; torchrun starts on all.
        """
        reported = self._mailbox.ready_at()
        last = max(reported, default=0.0)
        for row, moment in zip(self._rows, reported, strict=False):
            startup_s = sum(seconds.values()) - (last - moment)
            row["startup_s"] = startup_s if startup_s > 0 else None
        self.write()

    def lost(self, node: int, after_s: float, *, interrupted: bool) -> None:
        """The machine in the place `node` is gone, so many seconds after the launch began; or taken back."""
        row = self._newest(node)
        if row["after_s"] is None:
            row |= {"interrupted": interrupted, "after_s": after_s}
            self.write()

    def ordered(self, node: int, offer: Offer, after_s: float) -> None:
        """Another machine was asked for in that place, so many seconds after the launch began."""
        before = self._newest(node)
        if before["after_s"] is None:  # silent, and let go now
            before["after_s"] = after_s
        self._rows.append(_row(node, int(before["number"]) + 1, offer) | {"from_s": after_s})
        self.write()

    def replaced(self, node: int, startup_s: float) -> None:
        """The machine that was asked for last in that place is at work."""
        self._newest(node)["startup_s"] = startup_s if startup_s > 0 else None
        self.write()

    def _newest(self, node: int) -> dict[str, Any]:
        return next(row for row in reversed(self._rows) if row["node"] == node)


def machine_rows(lease: EndedLease, provider: str) -> list[dict[str, Any]]:
    """Columns of raw_machines of a lease that is over, refresh_id still open; none where nothing readable is there."""
    try:
        rows = json.loads((lease.mailbox / _FILE).read_text())["machines"]
        return [_ended(row, lease.started_at, lease.ended_at, lease.lease_id, provider) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _row(node: int, number: int, offer: Offer) -> dict[str, Any]:
    return {
        "node": node,
        "number": number,
        "instance_type": offer.instance_type.name,
        "market": offer.market,
        "zone": offer.zone,
        "from_s": 0.0,
        "startup_s": None,
        "after_s": None,
        "interrupted": False,
    }


def _ended(
    row: Mapping[str, Any], started_at: datetime, ended_at: datetime, lease_id: str, provider: str
) -> dict[str, Any]:
    whole_s = (ended_at - started_at).total_seconds()
    until_s = whole_s if row["after_s"] is None else min(float(row["after_s"]), whole_s)
    started = row["startup_s"]
    return {name: row[name] for name in ("node", "number", "instance_type", "market", "zone")} | {
        "startup_s": float(started) if started is not None and started > 0 else None,
        "interrupted": bool(row["interrupted"]),
        "lease_id": lease_id,
        "provider": provider,
        "asked_at": started_at + timedelta(seconds=float(row["from_s"])),
        "hours": max(until_s - float(row["from_s"]), 0.0) / 3600,
    }
