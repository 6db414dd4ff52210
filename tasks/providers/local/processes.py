"""Find and kill the processes of launches, even if the process that started a launch has crashed.

- `started_from` finds processes whose PYTHONPATH is inside a folder, such as the folder of a lease
  (the record of a launch).
- `hosts` finds the first processes of the hosts of all users. Each such process has a `HostMark`
  among its command-line arguments.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_MARK = "srift-host"
_ENDED_S = 5.0  # maximum wait until killed processes have ended


@dataclass(frozen=True)
class HostMark:
    """A command-line argument that identifies a host. Every user can read the argument.

    home: hash that identifies the SRIFT_HOME that started the host.
    index: the host's index in its cluster.
    cores: number of cores that the host may use.
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


def started_from(folder: Path) -> Iterator[psutil.Process]:
    """Yield each process whose PYTHONPATH is inside `folder`.

    Processes of other users are skipped unless this process is root.
    """
    for found in psutil.process_iter(["environ"]):
        path = Path((found.info["environ"] or {}).get("PYTHONPATH", ""))
        if path.is_relative_to(folder):
            yield found


def hosts() -> dict[HostMark, list[int]]:
    """Return {mark: PIDs of the host's first processes} for every local host on this computer.

    The hosts of every SRIFT_HOME and user are included.
    """
    marks: dict[HostMark, list[int]] = {}
    for found in psutil.process_iter(["cmdline"]):
        for mark in map(HostMark.parse, found.info["cmdline"] or ()):
            if mark is not None:
                marks.setdefault(mark, []).append(found.pid)
    return marks


def end(processes: Collection[psutil.Process]) -> list[psutil.Process]:
    """Kill `processes`. Return the processes that ended within _ENDED_S seconds."""
    killed = []
    for process in processes:
        with suppress(psutil.Error):
            process.kill()  # psutil does not kill a newer process with the same PID
            killed.append(process)
    until = time.monotonic() + _ENDED_S
    while not all(map(_has_ended, killed)) and time.monotonic() < until:
        time.sleep(0.01)
    return list(filter(_has_ended, killed))


def _has_ended(process: psutil.Process) -> bool:
    """Return True if `process` is gone, or a zombie that its parent has not yet waited for."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
