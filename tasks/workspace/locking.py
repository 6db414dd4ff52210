"""Lock SRIFT_HOME (the folder of all state), so that only one refresh runs at a time.

A refresh is one run of the pipeline: it measures, fits a model and publishes recommendations.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from ..reporting.progress import reporter

_PATIENCE_S = 6 * 3600.0  # maximum wait in a run of a deployment; no refresh takes so long
_POLL_S = 2.0


class Busy(Exception):
    """Another refresh is already running in this SRIFT_HOME.

    other: the refresh_id, pid and started_at of the other refresh.
    """

    exit_code = 1

    def __init__(self, other: Mapping[str, Any]) -> None:
        super().__init__(
            f"refresh {other.get('refresh_id')} (process {other.get('pid')}, since"
            f" {other.get('started_at')}) is already running in this SRIFT_HOME, so nothing was"
            " started: wait, or stop that process and run `srift reap`"
        )


@contextmanager
def refresh_lock(home: Path, refresh_id: str, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of SRIFT_HOME during the block, so that no other refresh runs.

    Raises Busy if another refresh does not end within `patience_s` seconds.
    """
    home.mkdir(parents=True, exist_ok=True)
    left_s = patience_s
    with (home / "refresh.json").open("a+") as file:
        while not _lock(file, fcntl.LOCK_EX):
            other = at_work(home)
            if other is None:
                continue  # not a refresh: `at_work` held the lock for a moment
            if left_s <= 0:
                raise Busy(other)
            if left_s == patience_s:
                reporter().say(f"waiting: {Busy(other)}")
            time.sleep(_POLL_S)
            left_s -= _POLL_S
        file.truncate(0)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        json.dump({"refresh_id": refresh_id, "pid": os.getpid(), "started_at": started_at}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _lock(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def patience_s() -> float:
    """Return the seconds to wait for another refresh.

    The wait is six hours in a flow run of a Prefect deployment, else 0.
    """
    from prefect.runtime import deployment

    return _PATIENCE_S if deployment.id else 0.0


def at_work(home: Path) -> dict[str, Any] | None:
    """Return the refresh that is running in `home`, or None if there is none.

    The result has the keys `refresh_id`, `pid` and `started_at`.
    """
    path = home / "refresh.json"
    if not path.exists():
        return None
    with path.open() as file:
        free = _lock(file, fcntl.LOCK_SH)
        refresh: dict[str, Any] | None = None if free else json.loads(file.read() or "{}")
    return refresh


def at_work_elsewhere(home: Path) -> dict[str, Any] | None:
    """Return the refresh that another process runs in `home`, or None.

    The result has the keys `refresh_id`, `pid` and `started_at`.
    """
    other = at_work(home)
    return None if other is None or other.get("pid") == os.getpid() else other


@contextmanager
def alone(home: Path, name: str) -> Iterator[None]:
    """Wait for the lock `name` of the folder `home`, and hold the lock during the block."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / f".{name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
