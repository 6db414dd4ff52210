"""Carries the mailbox between a rented machine's disk and the store.

Inbox: the files that the controller's manifest names. Outbox: this node's folder, records first.
The folder belongs to the user whose code is measured, and the courier is root: it follows no link,
waits for no pipe, and reads nothing but that user's regular files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..record import write_file

_INCOMING = re.compile(r"(?:workloads/)?[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_PLACED_LAST = ("plan", "go", "done")  # a plan needs its workloads, a go its plan; done ends it all


class BadManifest(OSError):
    """The controller's manifest, or the place that it gives this node, is not valid."""


class Inbox:
    """Fetches into `directory`. `get(name)` raises OSError, also for an object that is not there
    yet.
    """

    def __init__(self, directory: Path, get: Callable[[str], bytes]) -> None:
        self._directory, self._get = directory, get
        self._placed: dict[str, str] = {}

    def rank(self) -> int:
        """Return this machine's place in the cluster. Raises OSError while there is none."""
        try:
            return int(json.loads(self._get("node.json"))["node"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadManifest(f"node.json gives no place in a cluster: {error!r}") from None

    def fetch(self) -> bool:
        """Put in place what is new or changed; whether anything was. Raises OSError."""
        try:
            files = dict(json.loads(self._get("manifest.json"))["files"])
            names = sorted(files, key=_placing_order)
            if not all(map(_INCOMING.fullmatch, names)):
                raise ValueError("a name is no file of a mailbox")
        except (ValueError, KeyError, TypeError) as error:
            raise BadManifest(f"manifest.json cannot be used: {error!r}") from None
        changed = False
        for name in names:
            if self._placed.get(name) == files[name]:
                continue
            content = self._get(name)
            if hashlib.sha256(content).hexdigest() != files[name]:
                break  # it was replaced since; what depends on it waits for the next manifest
            write_file(self._directory / name, content)
            self._placed[name] = files[name]
            changed = True
        return changed


def _placing_order(name: str) -> tuple[int, str]:
    kind = re.split(r"[-.]", name, maxsplit=1)[0]
    return (_PLACED_LAST.index(kind) + 1 if kind in _PLACED_LAST else 0), name


_WORD = r"[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}"
_OUTGOING = re.compile(rf"(?:{_WORD}/){{0,3}}{_WORD}")
_SCRATCH = "scratch"
_MOST_FILES = 5000  # records, and as many other files: a request costs money
_LARGEST_BYTES = 32 * 2**20
_LOG_BYTES = 2**20  # of a longer log, its end
CHANGED_EVERY_S = 2.0  # a file that changes is uploaded again no sooner
STEADY_EVERY_S = 5.0  # a node is silent after thirty seconds without a heartbeat
LOG_EVERY_S = 10.0
# Records, and all other files: most bytes that one machine may lay on the controller's disk. Small
# files, as every record and heartbeat of ours is, come beside: together less than 1.2 GiB.
_MOST_BYTES = 256 * 2**20
_SMALL_BYTES = 64 * 2**10
LONGEST_PAUSE_S = 10.0
# Uploads cost money, and user code decides how many files it rewrites. The budget holds for all but
# heartbeats; files over it wait, records least. The caps count it (tasks/providers/ec2/prices.py).
UPLOADS_AT_ONCE = 150
UPLOADS_PER_HOUR = 1800.0
_HEARTBEAT = "heartbeat.json"
_STEADY = (_HEARTBEAT, "progress.json")
_UPLOADED_FIRST = (
    "records/",
    "notice",
    "finished",
    "armed",
    "ready",
    "heartbeat",
    "progress",
    "log",
)
Mark = tuple[int, int, int]  # inode, last write in ns, bytes: they differ when a file has changed


@dataclass(slots=True)
class UploadState:
    """What the store has of one file, and how often in a row it has refused the file since."""

    mark: Mark | None = None
    size: int = 0
    too_large: Mark | None = None
    at: float = float("-inf")
    failures: int = 0
    not_before: float = float("-inf")


class Outbox:
    """Carries `folder`. `put(name, content)` raises OSError; files of other users than `owner`
    stay.
    """

    def __init__(self, folder: Path, *, owner: int, put: Callable[[str, bytes], None]) -> None:
        self.folder, self._owner, self._put = folder, owner, put
        self.problem = ""  # the last fault
        self.news_at = float("-inf")  # when a file was uploaded that the controller may answer
        self.refused = ""  # why files stay behind
        self._sent: dict[str, UploadState] = {}
        self._budget, self._budget_at = float(UPLOADS_AT_ONCE), time.monotonic()

    def carry(self) -> bool:
        """Upload what is due, up to the first fault; whether there was one."""
        for name in self._waiting():
            if self._due(name) and self._may_upload(name) and not self._send(name):
                return True
        return False

    def flush(self, until: float) -> int:
        """Upload everything, past faults, until the moment `until`; how many files are left."""
        left = 0
        for name in self._waiting():
            in_time = time.monotonic() < until and self._may_upload(name)
            left += not (in_time and self._send(name))
        return left

    def records_waiting(self) -> int:
        """Count the records that the store lacks."""
        return sum(map(_is_record, self._waiting()))

    def _waiting(self) -> list[str]:
        lacking = []
        for name, mark in self._marks():
            sent = self._sent.setdefault(name, UploadState())
            final = _is_record(name) and sent.mark is not None  # no record is rewritten
            if mark not in (sent.mark, sent.too_large) and not final:
                lacking.append(name)
        return sorted(lacking, key=_upload_order)

    def _due(self, name: str) -> bool:
        every_s = STEADY_EVERY_S if name in _STEADY else CHANGED_EVERY_S
        every_s = LOG_EVERY_S if _is_log(name) else every_s
        sent, now = self._sent[name], time.monotonic()
        return now >= sent.not_before and now >= sent.at + every_s

    def _may_upload(self, name: str) -> bool:
        """Take one upload from the budget, if there is any. A heartbeat needs none."""
        if name == _HEARTBEAT:
            return True
        now = time.monotonic()
        earned = (now - self._budget_at) * UPLOADS_PER_HOUR / 3600.0
        self._budget = min(float(UPLOADS_AT_ONCE), self._budget + earned)
        self._budget_at = now
        if self._budget < 1.0:
            self.problem = f"more than {UPLOADS_PER_HOUR:.0f} uploads an hour: the rest waits"
            return False
        self._budget -= 1.0
        return True

    def _send(self, name: str) -> bool:
        sent = self._sent[name]
        try:
            read = self._read(name)
            if read is None:
                return True
            content, mark = read
            if not self._has_room(name, len(content)):
                sent.too_large = mark
                return True
            self._put(name, content)
        except OSError as error:
            self.problem = str(error)
            sent.failures += 1
            sent.not_before = time.monotonic() + min(LONGEST_PAUSE_S, 2.0 ** (sent.failures - 1))
            return False
        sent.mark, sent.size, sent.failures, sent.at = mark, len(content), 0, time.monotonic()
        if name not in _STEADY and not _is_log(name):
            self.news_at = sent.at
        return True

    def _has_room(self, name: str, size: int) -> bool:
        """Whether the file is within the bytes of its kind: nothing else takes the room of
        records.
        """
        others = sum(
            sent.size
            for one, sent in self._sent.items()
            if one != name and _is_record(one) == _is_record(name)
        )
        fits = size <= _SMALL_BYTES or size + others <= _MOST_BYTES
        if not fits:
            self.refused = f"{name} ({size} bytes): a machine sends {_MOST_BYTES >> 20} MiB at most"
        return fits

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Every file that may be uploaded. os.fwalk opens folders by descriptor, so no link is
        followed.
        """
        count = Counter(map(_is_record, self._sent))  # no flood of other files keeps records here
        for folder, folders, files, descriptor in os.fwalk(self.folder, follow_symlinks=False):
            within = Path(folder).relative_to(self.folder)
            if within == Path():
                folders[:] = [one for one in folders if one != _SCRATCH]
            for file in files:
                name = (within / file).as_posix()
                if _OUTGOING.fullmatch(name) is None:
                    continue
                try:
                    status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                except OSError:
                    continue  # it was renamed meanwhile
                known = name in self._sent
                if self._may(name, status) and (known or count[_is_record(name)] < _MOST_FILES):
                    count[_is_record(name)] += not known
                    yield name, _mark(status)

    def _may(self, name: str, status: os.stat_result) -> bool:
        small = status.st_size <= _LARGEST_BYTES or _is_log(name)
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner and small

    def _read(self, name: str) -> tuple[bytes, Mark] | None:
        """Open the file folder by folder. None if it is no longer one that may be uploaded. Raises
        OSError.
        """
        *folders, file = name.split("/")
        with ExitStack() as stack:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            for folder in folders:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                descriptor = os.open(folder, flags, dir_fd=descriptor)
                stack.callback(os.close, descriptor)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            opened = stack.enter_context(os.fdopen(os.open(file, flags, dir_fd=descriptor), "rb"))
            status = os.fstat(opened.fileno())
            if not self._may(name, status):
                return None
            most = _LOG_BYTES if _is_log(name) else _LARGEST_BYTES
            opened.seek(max(0, status.st_size - most))
            return opened.read(most), _mark(status)


def _upload_order(name: str) -> tuple[int, str]:
    places = (place for place, start in enumerate(_UPLOADED_FIRST) if name.startswith(start))
    return next(places, len(_UPLOADED_FIRST)), name


def _mark(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_record(name: str) -> bool:
    return name.startswith("records/")


def _is_log(name: str) -> bool:
    return name.startswith("log-") and name.endswith(".txt")
