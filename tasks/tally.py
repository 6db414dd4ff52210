"""What a campaign has done and spent so far, and whether it may go on: the cap is checked before every launch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.campaign import Launch

from .benchmark import Served
from .collect import Collected

RELEASE_S = 2.0  # machines are paid for until they are gone, which is a little after they were told to stop


@dataclass(slots=True, kw_only=True)
class Tally:
    """Rows by status, dollars, and seconds by phase of one campaign. `stop_at` is on `time.monotonic`.

    The ids of its leases begin with `refresh_id`.
    """

    cap_usd: float
    stop_at: float
    refresh_id: str = ""
    usd: float = 0.0
    runs: int = 0
    launches: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def left_usd(self) -> float:
        """Dollars under the cap."""
        return max(0.0, self.cap_usd - self.usd)

    @property
    def left_s(self) -> float:
        """Seconds to the campaign's end."""
        return max(0.0, self.stop_at - time.monotonic())

    def affords(self, launch: Launch) -> bool:
        """Whether `launch` may still start within dollars and minutes by its estimate; `tasks.caps` has the worst."""
        return time.monotonic() < self.stop_at and self.usd + launch.est_usd <= self.cap_usd

    def stop_of(self, launch: Launch) -> float:
        """When `launch` must end at the latest: the campaign's end, or when it has spent what is left."""
        price = launch.cluster.usd_per_hour
        if not price:
            return self.stop_at
        left_s = (self.cap_usd - self.usd) / price * 3600.0 - RELEASE_S
        return min(self.stop_at, time.monotonic() + max(left_s, 0.0))

    def add(self, served: Served, collected: Collected, *, load_s: float) -> None:
        """Count what one launch brought home."""
        self.launches += 1
        self.usd += collected.usd
        self.runs += len(served.recorded)
        self.by_status.update(collected.by_status)
        if served.mailbox is None:
            self.by_status.update(row["status"] for row in served.rows)
        self.spend(served.seconds | {"load records": load_s})
        self.notes += collected.notes

    def spend(self, seconds: Mapping[str, float]) -> None:
        """Add seconds to phases."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def summary(self) -> dict[str, Any]:
        """As a flow returns it."""
        return {
            "launches": self.launches,
            "runs": dict(self.by_status),
            "usd": round(self.usd, 6),
            "seconds": {phase: round(spent, 2) for phase, spent in self.seconds.items()},
            "notes": list(self.notes),
        }
