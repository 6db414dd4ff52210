"""Processes of this machine by number and start time, so that a recycled number is never mistaken
for ours.

Everything that a lease starts carries `PYTHONPATH=<lease>/code`, and every host's first process a
readable mark in its command line: what a crash left unrecorded is found by these. Signals only what
it has just identified.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_MARK = "srift-host"
_GONE = (ProcessLookupError, FileNotFoundError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process for good: its number, and its start in clock ticks since boot (field 22 of
    /proc/PID/stat).
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMark:
    """A host's mark in its command line, which every user can read. `cores` is its CPU share."""

    home: str
    lease_id: str
    index: int
    cores: float

    def __str__(self) -> str:
        return f"{_MARK}:{self.home}:{self.lease_id}:{self.index}:{self.cores:g}"

    @classmethod
    def parse(cls, text: str) -> HostMark | None:
        """Parse one argument of a command line; None if it is no mark."""
        parts = text.split(":")
        if len(parts) != 5 or parts[0] != _MARK:
            return None
        try:
            return cls(home=parts[1], lease_id=parts[2], index=int(parts[3]), cores=float(parts[4]))
        except ValueError:
            return None


def boot_id() -> str:
    """Return the id of this boot: process numbers of another boot mean nothing."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Process | None:
    """Return the process that has this number now; None for none or a zombie."""
    fields = _stat(pid)
    return (
        None
        if fields is None or fields[0] in "ZX"
        else Process(pid=pid, start_ticks=int(fields[19]))
    )


def myself() -> Process:
    found = identify(os.getpid())
    assert found is not None
    return found


def is_running(process: Process) -> bool:
    """True if this process, not a later one of the same number, still runs."""
    return identify(process.pid) == process


def children(pid: int) -> list[int]:
    return [
        other for other in _pids() if (fields := _stat(other)) is not None and int(fields[1]) == pid
    ]


def of_environment(name: str, under: Path) -> Iterator[tuple[Process, Path]]:
    """Yield processes of this user whose variable `name` is a path below `under`."""
    for pid in _pids():
        process = identify(pid)
        with suppress(OSError):
            for entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                key, _, value = entry.partition(b"=")
                path = Path(os.fsdecode(value))
                if process is not None and key == name.encode() and path.is_relative_to(under):
                    yield process, path


def hosts() -> dict[HostMark, list[int]]:
    """Every host on this machine, of any home and user, with the numbers of its first processes."""
    found: dict[HostMark, list[int]] = {}
    for pid in _pids():
        with suppress(OSError):
            for argument in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0"):
                mark = HostMark.parse(os.fsdecode(argument))
                if mark is not None:
                    found.setdefault(mark, []).append(pid)
    return found


def end(processes: Collection[Process], *, within_s: float = 5.0) -> list[Process]:
    """Kill these, wait, and return those that ran. A recycled number is left alone."""
    killed: list[tuple[Process, int]] = []
    try:
        for process in processes:
            with suppress(*_GONE, PermissionError):
                handle = os.pidfd_open(process.pid)
                killed.append((process, handle))
                # The handle is fixed to one process, so what is identified after it was opened is
                # what is killed.
                if not is_running(process):
                    os.close(killed.pop()[1])
                else:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        until = time.monotonic() + within_s
        return [process for process, handle in killed if _exits(handle, until - time.monotonic())]
    finally:
        for _, handle in killed:
            os.close(handle)


def _exits(handle: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(max(0.0, within_s) * 1000))


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before it may hold spaces."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (*_GONE, PermissionError):
        return None
