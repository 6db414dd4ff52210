"""A job for acquired machines, and what became of it. `tasks.service` does it; nothing here but `write_rows` acts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.cloud import Cluster

from .node.record import Item, WorkloadFile, write_json

POLL_S = 0.1

Files = Sequence[tuple[WorkloadFile, Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch as the nodes will see it. `envelopes` tells for each run_id what the controller knows of its setup."""

    lease_id: str
    cluster: Cluster
    items: tuple[Item, ...]
    envelopes: Mapping[str, Mapping[str, Any]]
    files: Files
    seed: int
    deadline_s: float  # from acquisition; the machines end themselves then
    patience_s: float = 0.0  # for measuring again what was disturbed


@dataclass(slots=True, kw_only=True)
class Served:
    """What became of a launch. `rows` are the controller's: runs that have no record and why. `usd` None: unknown."""

    lease_id: str
    mailbox: Path | None = None
    outcome: str = ""
    recorded: set[str] = field(default_factory=set)
    usd: float | None = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where the seconds come from, so that a test need not wait for them."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


Watch = Callable[[str, int, float | None], None]
"""Called with the run under way, how many runs have a record, and the dollars of this launch so far."""


class Stopwatch:
    """Adds the seconds since the last lap to a named phase."""

    def __init__(self, seconds: dict[str, float], clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self.began_s = self._last = clock.monotonic()

    def lap(self, phase: str) -> None:
        """The time since the last one went to `phase`."""
        now = self._clock.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now


def write_rows(served: Served) -> None:
    """Put the rows that are not there yet into the mailbox. One that a full disk refuses stays in `served`."""
    if served.mailbox is None or not served.mailbox.is_dir():
        return
    for row in served.rows:
        file = served.mailbox / "controller" / "rows" / f"{row['run_id']}.json"
        if not file.exists():
            with suppress(OSError):
                write_json(file, row)
