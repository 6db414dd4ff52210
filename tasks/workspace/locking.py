"""One refresh at a time in a home: a lease file says who is at work; the kernel lets go when that one dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from warehouse import append

from ..reporting.progress import reporter
from .workspace import Workspace

_PATIENCE_S = 6 * 3600.0  # of a run that a schedule started: longer than any refresh takes
_ASK_AGAIN_S = 2.0


class Busy(Exception):
    """Another refresh is at work; the message says which and what to do."""


@contextmanager
def refresh_lock(
    home: Path,
    refresh_id: str,
    *,
    patience_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Nothing has to be cleaned up after one that was killed.

    While another refresh of this home runs, waits for it for `patience_s`, saying so; then raises Busy.
    """
    home.mkdir(parents=True, exist_ok=True)
    left_s = patience_s
    with (home / "refresh.json").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                other = at_work(home)
                if other is None:
                    continue  # somebody only looked, as `at_work` does: that takes a moment, and is over
                if left_s <= 0:
                    raise _busy(other) from None
                if left_s == patience_s:
                    reporter().say(f"{_who(other)}; this one waits for it")
                sleep(_ASK_AGAIN_S)
                left_s -= _ASK_AGAIN_S
        file.truncate(0)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        json.dump({"refresh_id": refresh_id, "pid": os.getpid(), "started_at": started}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def refuse_if_at_work(home: Path) -> None:
    """Raises Busy if a refresh of this home runs: asked before Prefect, which takes long to start."""
    other = at_work(home)
    if other is not None:
        raise _busy(other)


def patience_s() -> float:
    """How long this run waits for the lock: a person is answered at once, a run that a schedule started has time."""
    from prefect.runtime import deployment

    return _PATIENCE_S if deployment.id else 0.0


def at_work(home: Path) -> dict[str, Any] | None:
    """`{refresh_id, pid, started_at}` of the refresh that runs now; None where none does."""
    try:
        with (home / "refresh.json").open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                body: dict[str, Any] = json.loads(file.read() or "{}")
                return body
    except FileNotFoundError:
        pass
    return None


def at_work_elsewhere(home: Path) -> dict[str, Any] | None:
    """As `at_work`, for another process than this one."""
    other = at_work(home)
    return None if other is None or other.get("pid") == os.getpid() else other


@contextmanager
def alone(home: Path, what: str) -> Iterator[None]:
    """Wait until nobody else in this home is at `what`, a matter of seconds; the kernel lets go of who dies."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / f".{what}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def store_timings(workspace: Workspace, refresh_id: str, seconds: Mapping[str, float]) -> None:
    """Keep the seconds by phase, so that `BENCHMARKS.md` and a slow night can be read from the warehouse."""
    rows = [{"phase": phase, "seconds": spent} for phase, spent in seconds.items()]
    with workspace.warehouse.transact() as connection:
        append.append(connection, "raw_timings", rows, refresh_id=refresh_id)


def _busy(other: Mapping[str, Any]) -> Busy:
    return Busy(f"{_who(other)}; nothing was started. Wait for it, or end it and run `srift reap`.")


def _who(other: Mapping[str, Any]) -> str:
    named = (
        "refresh {refresh_id} (process {pid}, since {started_at})".format_map(other)
        if other
        else "another refresh"
    )
    return f"{named} is at work in this home"
