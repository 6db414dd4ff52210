"""What this machine says, from its folder of the mailbox into the store: records first, and nothing lost by a fault.

The folder belongs to the user whose code is measured, and the courier is root: no link is followed, no pipe is waited
for, and nothing is read that is not that user's own file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}/){0,3}[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}")
_NOT_OURS = ("scratch",)
_MOST_FILES = 5000  # a request costs money: a workload that writes without end must not
_LARGEST_BYTES = 32 * 2**20
_LOG_BYTES = 2**20  # of a longer log, its end
CHANGED_EVERY_S = 2.0  # a file that changes goes up again no sooner; a log, which is longer, later still
LOG_EVERY_S = 10.0
_LONGEST_PAUSE_S = 10.0
_ORDER = ("records/", "notice", "finished", "armed", "ready", "heartbeat", "progress", "log")
Mark = tuple[int, int, int]  # by which a change is seen: inode, moment of the last write in ns, bytes


@dataclass(slots=True)
class Sent:
    """What the store has of one file, when it took it, and how often in a row it has refused since."""

    mark: Mark | None = None
    at: float = float("-inf")
    failures: int = 0
    not_before: float = float("-inf")


class Outbox:
    """Carries `folder`. `put(name, content)` raises OSError; `owner` is the user id whose files are carried."""

    def __init__(
        self, folder: Path, *, owner: int, put: Callable[[str, bytes], None], clock: Callable[[], float]
    ) -> None:
        self.folder, self._owner, self._put, self._clock = folder, owner, put, clock
        self.problem = ""  # what the last fault was
        self._sent: dict[str, Sent] = {}

    def carry(self) -> bool:
        """One pass over what is due, up to the first fault. Returns whether there was one; `problem` says which."""
        return not all(self._send(name) for name in self._waiting() if self._due(name))

    def flush(self, until: float) -> int:
        """One pass over everything, due or not, past faults and until `until`. Returns how many files did not go up."""
        waiting = self._waiting()
        return len(waiting) - sum(self._clock() < until and self._send(name) for name in waiting)

    def records_waiting(self) -> int:
        """How many records the store lacks."""
        return sum(name.startswith("records/") for name in self._waiting())

    def _waiting(self) -> list[str]:
        marks = dict(self._marks())
        sent = {name: self._sent.setdefault(name, Sent()) for name in marks}
        lacking = [name for name in marks if sent[name].mark != marks[name] and not self._final(name)]
        return sorted(lacking, key=_rank)

    def _final(self, name: str) -> bool:
        """A record is written once: what somebody makes of it after it went up is not it."""
        return name.startswith("records/") and self._sent[name].mark is not None

    def _due(self, name: str) -> bool:
        sent, now = self._sent[name], self._clock()
        every_s = LOG_EVERY_S if _is_log(name) else CHANGED_EVERY_S
        return now >= sent.not_before and now >= sent.at + every_s

    def _send(self, name: str) -> bool:
        sent = self._sent[name]
        try:
            read = self._read(name)
            if read is not None:
                content, mark = read
                self._put(name, content)
                sent.mark, sent.at, sent.failures = mark, self._clock(), 0
            return True
        except OSError as error:
            self.problem = str(error)
            sent.failures += 1
            sent.not_before = self._clock() + min(_LONGEST_PAUSE_S, 2.0 ** (sent.failures - 1))
            return False

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Every file that may go up. Directories are walked by descriptor, so that none can become a link meanwhile."""
        found = 0
        for folder, folders, files, descriptor in os.fwalk(self.folder, follow_symlinks=False):
            within = Path(folder).relative_to(self.folder).as_posix()
            prefix = "" if within == "." else f"{within}/"
            folders[:] = [one for one in folders if f"{prefix}{one}" not in _NOT_OURS]
            for file in files:
                name = f"{prefix}{file}"
                if _NAME.fullmatch(name) is None:
                    continue
                try:
                    status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                except OSError:
                    continue  # it was renamed meanwhile
                if self._may(name, status) and (name in self._sent or len(self._sent) + found < _MOST_FILES):
                    found += name not in self._sent
                    yield name, _mark(status)

    def _may(self, name: str, status: os.stat_result) -> bool:
        small = status.st_size <= _LARGEST_BYTES or _is_log(name)
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner and small

    def _read(self, name: str) -> tuple[bytes, Mark] | None:
        """The content and its mark; None if it is no longer a file that may go up. Raises OSError."""
        *folders, file = name.split("/")
        held = [os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)]
        try:
            for folder in folders:
                held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held[-1]))
            held.append(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=held[-1]))
            status = os.fstat(held[-1])
            if not self._may(name, status):
                return None
            most = _LOG_BYTES if _is_log(name) else _LARGEST_BYTES
            with os.fdopen(held.pop(), "rb") as opened:
                opened.seek(max(0, status.st_size - most))
                return opened.read(most), _mark(status)
        finally:
            for descriptor in held:
                os.close(descriptor)


def _rank(name: str) -> tuple[int, str]:
    return next((at for at, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER)), name


def _mark(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_log(name: str) -> bool:
    return name.startswith("log-") and name.endswith(".txt")
