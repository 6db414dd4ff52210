"""Find and kill processes by PID and start time, because the kernel reuses PIDs.

Every process of a launch has a PYTHONPATH inside the folder of its lease, the record of the launch.
The command line of a host's first processes has an argument that identifies the host, a `HostMark`.
If the process that made a launch has crashed, Srift finds the processes of the launch by their
PYTHONPATH. It finds all hosts on this computer, also those of other users, by their marks.
"""

import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_PROC = Path("/proc")
_MARK = "srift-host"
_ENDED_S = 5.0  # maximum wait until killed processes have ended
_GONE = (ProcessLookupError, FileNotFoundError, PermissionError)


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process. `start_ticks` is its start time in clock ticks since boot (see `man proc`)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class HostMark:
    """An argument in a host's command line that identifies the host. Every user can read it.

    `home` is a hash of the path of the SRIFT_HOME that started the host. `index` is the host's
    index in its cluster. `cores` is the number of cores that the host may use.
    """

    home: str
    lease_id: str
    index: int
    cores: float

    def __str__(self) -> str:
        return f"{_MARK}:{self.home}:{self.lease_id}:{self.index}:{self.cores:g}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Convert a command-line argument to a `HostMark`; None if it is not a mark."""
        try:
            mark, home, lease_id, index, cores = text.split(":")
            return cls(home, lease_id, int(index), float(cores)) if mark == _MARK else None
        except ValueError:
            return None


def identify(pid: int) -> Process | None:
    """Return the process that has this PID now; None if there is none or it is a zombie."""
    try:
        # The name before the last parenthesis may hold spaces.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except _GONE:
        return None
    return None if fields[0] in "ZX" else Process(pid=pid, start_ticks=int(fields[19]))


def is_running(process: Process) -> bool:
    """Return True if this process still runs. A new process with the same PID does not count."""
    return identify(process.pid) == process


def started_from(folder: Path) -> Iterator[tuple[Process, Path]]:
    """Yield (process, PYTHONPATH) for each process whose PYTHONPATH is inside `folder`.

    Processes of other users are skipped unless this process is root.
    """
    for found in psutil.process_iter(["environ"]):
        path = Path((found.info["environ"] or {}).get("PYTHONPATH", ""))
        if path.is_relative_to(folder) and (process := identify(found.pid)) is not None:
            yield process, path


def hosts() -> dict[HostMark, list[int]]:
    """Return {mark: PIDs} for every local host on this computer, of every SRIFT_HOME and user.

    A mark is an argument that identifies the host in the command lines of its first processes. The
    PIDs are those of these processes. Processes that the host's agent starts have no mark.
    """
    marks: dict[HostMark, list[int]] = {}
    for found in psutil.process_iter(["cmdline"]):
        for mark in map(HostMark.parse, found.info["cmdline"] or ()):
            if mark is not None:
                marks.setdefault(mark, []).append(found.pid)
    return marks


def end(processes: Collection[Process]) -> list[Process]:
    """Kill `processes`, and return those that ended within _ENDED_S seconds.

    A new process that has the PID of one of `processes` is not killed.
    """
    killed: list[tuple[Process, int]] = []
    with ExitStack() as handles:
        for process in processes:
            with suppress(*_GONE):
                handle = os.pidfd_open(process.pid)
                handles.callback(os.close, handle)
                # An open handle refers to one process: exactly the identified process is killed.
                if is_running(process):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed.append((process, handle))
        until = time.monotonic() + _ENDED_S
        ended = []
        for process, handle in killed:
            poll = select.poll()
            poll.register(handle, select.POLLIN)  # readable once the process has ended
            if poll.poll(max(0.0, until - time.monotonic()) * 1000):
                ended.append(process)
        return ended
