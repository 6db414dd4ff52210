"""Carries the mailbox between a rented machine's disk and the store.

Inbox: the files that the controller's manifest names. Outbox: this node's folder, records first.
The folder belongs to the user whose code is measured, and the courier is root: it follows no link,
waits for no pipe, and reads nothing but that user's regular files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..record import write_file

_INCOMING = re.compile(r"(?:workloads/)?[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_PLACED_LAST = ("plan", "go", "done")  # a plan needs its workloads, a go its plan; done ends it all


class Inbox:
    """Fetches into `directory`. `get(name)` raises FAULTS, also for an object that is not there
    yet.
    """

    def __init__(self, directory: Path, get: Callable[[str], bytes]) -> None:
        self._directory, self._get = directory, get
        self._placed: dict[str, str] = {}

    def rank(self) -> int:
        """Return this machine's place in the cluster. Raises FAULTS while there is none."""
        return int(json.loads(self._get("node.json"))["node"])

    def fetch(self) -> bool:
        """Put in place what is new or changed; whether anything was. Raises FAULTS."""
        files = dict(json.loads(self._get("manifest.json"))["files"])
        changed = False
        for name in sorted(files, key=_placing_order):
            if _INCOMING.fullmatch(name) is None:
                raise OSError(f"manifest.json names {name!r}, which is no file of a mailbox")
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


_OUTGOING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}")
_RECORDS = "records"
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
_UPLOADED_FIRST = ("records/", "finished", "armed", "ready", "heartbeat", "progress", "log")
Mark = tuple[int, int, int]  # inode, last write in ns, bytes: they differ when a file has changed


@dataclass(slots=True)
class UploadState:
    """What the store has of one file."""

    mark: Mark | None = None
    size: int = 0
    at: float = -math.inf


class Outbox:
    """Carries files of `folder` and its `records`. `put(name, content)` raises FAULTS.

    Files of other users than `owner` stay.
    """

    def __init__(self, folder: Path, *, owner: int, put: Callable[[str, bytes], None]) -> None:
        self.folder, self._owner, self._put = folder, owner, put
        self._sent: dict[str, UploadState] = {}
        self._budget, self._budget_at = float(UPLOADS_AT_ONCE), time.monotonic()
        self._failures, self._not_before = 0, -math.inf

    def carry(self, *, until: float = math.inf, due_only: bool = True) -> bool:
        """Upload files, unless `due_only` also before their turn; raise the store's first fault.

        Return whether one was uploaded that the controller may answer.
        """
        is_news = False
        if due_only and time.monotonic() < self._not_before:
            return is_news
        for name in self.waiting():
            now = time.monotonic()
            early = now < self._sent[name].at + _every_s(name)
            if now >= until:
                break
            if not (due_only and early) and self._may_upload(name):
                self._upload(name)
                is_news |= name not in _STEADY and not _is_log(name)
        return is_news

    def waiting(self) -> list[str]:
        """Return what the store lacks, records first."""
        count = Counter(map(_is_record, self._sent))  # no flood of other files keeps records here
        lacking = []
        for name, mark in self._marks():
            is_record = _is_record(name)
            if name not in self._sent and count[is_record] < _MOST_FILES:
                count[is_record] += 1
                self._sent[name] = UploadState()
            sent = self._sent.get(name)
            if sent and sent.mark != mark and not (is_record and sent.mark):  # records are final
                lacking.append(name)
        return sorted(lacking, key=_upload_order)

    def records_wait(self) -> bool:
        return any(map(_is_record, self.waiting()))

    def _may_upload(self, name: str) -> bool:
        """Take one upload from the budget, if there is any. A heartbeat needs none."""
        if name == _HEARTBEAT:
            return True
        now = time.monotonic()
        earned = (now - self._budget_at) * UPLOADS_PER_HOUR / 3600.0
        self._budget = min(float(UPLOADS_AT_ONCE), self._budget + earned)
        self._budget_at = now
        allowed = self._budget >= 1.0
        self._budget -= allowed
        return allowed

    def _upload(self, name: str) -> None:
        """Upload the file, if it still may be; or why it stays, if its kind has no room left.

        Nothing else takes the room of records.
        """
        read = self._read(name)
        if read is None:
            return
        content, mark = read
        size, kind = len(content), _is_record(name)
        same = [sent for other, sent in self._sent.items() if _is_record(other) == kind]
        total = size - self._sent[name].size + sum(sent.size for sent in same)
        fits = size <= _SMALL_BYTES or total <= _MOST_BYTES
        why = f"{name} ({size} bytes): a machine sends {_MOST_BYTES >> 20} MiB at most"
        try:
            if fits:
                self._put(name, content)
            else:
                self._put("refused.json", json.dumps({"reason": why}).encode())
        except Exception:
            self._not_before = time.monotonic() + min(LONGEST_PAUSE_S, 2.0**self._failures)
            self._failures += 1
            raise
        self._failures = 0
        self._sent[name] = UploadState(mark, size * fits, time.monotonic())

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Every file that may be uploaded."""
        for within in ("", f"{_RECORDS}/"):
            with suppress(OSError), self._opened(within) as descriptor:
                for file in os.listdir(descriptor):
                    with suppress(OSError):  # it was renamed meanwhile
                        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                        if _OUTGOING.fullmatch(file) and self._may(within + file, status):
                            yield within + file, _mark(status)

    def _may(self, name: str, status: os.stat_result) -> bool:
        small = status.st_size <= _LARGEST_BYTES or _is_log(name)
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner and small

    def _read(self, name: str) -> tuple[bytes, Mark] | None:
        """None if it is no longer a file that may be uploaded."""
        within, slash, file = name.rpartition("/")
        with suppress(OSError), self._opened(within + slash) as descriptor:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(file, flags, dir_fd=descriptor), "rb") as opened:
                status = os.fstat(opened.fileno())
                if self._may(name, status):
                    most = _LOG_BYTES if _is_log(name) else _LARGEST_BYTES
                    opened.seek(max(0, status.st_size - most))
                    return opened.read(most), _mark(status)
        return None

    @contextmanager
    def _opened(self, within: str) -> Iterator[int]:
        """The folder or its `records`; the user can replace only the latter, by a link."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(f"{self.folder}/{within}".rstrip("/"), flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _every_s(name: str) -> float:
    """Seconds between uploads of a file that changes."""
    if _is_log(name):
        return LOG_EVERY_S
    return STEADY_EVERY_S if name in _STEADY else CHANGED_EVERY_S


def _is_log(name: str) -> bool:
    return name.startswith("log-") and name.endswith(".txt")


def _upload_order(name: str) -> tuple[int, str]:
    places = (place for place, start in enumerate(_UPLOADED_FIRST) if name.startswith(start))
    return next(places, len(_UPLOADED_FIRST)), name


def _mark(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_record(name: str) -> bool:
    return name.startswith(f"{_RECORDS}/")
