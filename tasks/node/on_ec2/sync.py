"""Carries the mailbox between a rented machine's disk and S3.

The inbox downloads the files that the controller's manifest names. The outbox uploads this node's
folder, records first. The folder belongs to the user whose code is measured, while the courier is
root. So the outbox follows no links, waits for no pipes, and reads only regular files of that user.
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
from typing import Any

from ..record import write_file
from .s3 import FAULTS

_INCOMING = re.compile(r"(?:workloads/)?[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_PLACED_LAST = (
    "plan",
    "go",
    "done",
)  # a plan needs its workloads, and go needs the plan; done ends the agents


class Inbox:
    """Downloads the controller's files into `directory`.

    `get(name)` returns the content of an object. It raises FAULTS, also if the object does not
    exist yet.
    """

    def __init__(self, directory: Path, get: Callable[[str], bytes]) -> None:
        self._directory, self._get = directory, get
        self._placed: dict[str, str] = {}

    def rank(self) -> int:
        """Return this machine's index in the cluster. Raises FAULTS while it has none."""
        return int(_parsed(self._get("node.json"), "node"))

    def fetch(self) -> bool:
        """Download new and changed files of the manifest; return True if there were any.

        Raises FAULTS if the store or the disk fails, or if the manifest names an invalid file.
        """
        files = dict(_parsed(self._get("manifest.json"), "files"))
        changed = False
        for name in sorted(files, key=_placing_order):
            if _INCOMING.fullmatch(name) is None:
                raise OSError(f"manifest.json names {name!r}, which is not a file of a mailbox")
            if self._placed.get(name) == files[name]:
                continue
            content = self._get(name)
            if hashlib.sha256(content).hexdigest() != files[name]:
                break  # newer than the manifest; files that need it wait for the next manifest
            write_file(self._directory / name, content)
            self._placed[name] = files[name]
            changed = True
        return changed


def _parsed(content: bytes, key: str) -> Any:
    """Return the value of `key` in a JSON object. Raises OSError if the object is malformed."""
    try:
        return json.loads(content)[key]
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"malformed {key}: {error!r}") from None


def _placing_order(name: str) -> tuple[int, str]:
    """Return the sort key of a manifest's file. A file sorts after the files that it needs."""
    kind = re.split(r"[-.]", name, maxsplit=1)[0]
    return (_PLACED_LAST.index(kind) + 1 if kind in _PLACED_LAST else 0), name


_OUTGOING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}")
_RECORDS = "records"
_MOST_FILES = 5000  # limit of records, and also of other files, since each request costs money
_LARGEST_BYTES = 32 * 2**20
_LOG_BYTES = 2**20  # of a longer log only the end is uploaded
CHANGED_EVERY_S = 2.0  # minimum seconds between uploads of a file that changes
STEADY_EVERY_S = 5.0  # the controller counts a node as silent after 30 s without a heartbeat
LOG_EVERY_S = 10.0
# Maximum bytes of records, and of all other files, that one machine may write to the controller's
# disk. Small files, such as Srift's records and heartbeats, are not limited by it; with them a
# machine can write less than 1.2 GiB.
_MOST_BYTES = 256 * 2**20
_SMALL_BYTES = 64 * 2**10
LONGEST_PAUSE_S = 10.0
# Uploads cost money, and user code decides how many files it rewrites. So all uploads but
# heartbeats share this budget. Files above the budget wait, and records go first. The dollar caps
# include the budget (tasks/providers/ec2/prices.py).
UPLOADS_AT_ONCE = 150
UPLOADS_PER_HOUR = 1800.0
_HEARTBEAT = "heartbeat.json"
_STEADY = (_HEARTBEAT, "progress.json")
_UPLOADED_FIRST = ("records/", "finished", "armed", "ready", "heartbeat", "progress", "log")
Mark = tuple[int, int, int]  # inode, last write in ns, bytes; it changes with the file


@dataclass(slots=True)
class UploadState:
    """The state of the uploads of one file. Times are seconds of time.monotonic().

    mark, size: the mark and the bytes of the file when it was last uploaded.
    at: the time of the last upload.
    failures: the number of failed uploads since then.
    not_before: the time before which a file whose upload failed is not tried again.
    """

    mark: Mark | None = None
    size: int = 0
    at: float = -math.inf
    failures: int = 0
    not_before: float = -math.inf


class Outbox:
    """Uploads the files of `folder` and of its subfolder `records`.

    Only files of the user id `owner` are uploaded. `put(name, content)` uploads and raises FAULTS.
    """

    def __init__(self, folder: Path, *, owner: int, put: Callable[[str, bytes], None]) -> None:
        self.folder, self._owner, self._put = folder, owner, put
        self._sent: dict[str, UploadState] = {}
        self._budget, self._budget_at = float(UPLOADS_AT_ONCE), time.monotonic()

    def carry(self, *, until: float = math.inf, due_only: bool = True) -> bool:
        """Upload new and changed files until time.monotonic() reaches `until`.

        `due_only` leaves out files that were uploaded, or failed, shortly before. Returns True if
        a file was uploaded to which the controller may respond. If uploads fail, it raises the
        first error after it has tried all files, since one file must not delay the heartbeat.
        """
        is_news, first_error = False, None
        for name in self.waiting():
            now, sent = time.monotonic(), self._sent[name]
            early = now < max(sent.at + _every_s(name), sent.not_before)
            if now >= until:
                break
            if (due_only and early) or not self._may_upload(name):
                continue
            try:
                self._upload(name)
                is_news |= name not in _STEADY and not _is_log(name)
            except FAULTS as error:
                sent.not_before = time.monotonic() + min(LONGEST_PAUSE_S, 2.0**sent.failures)
                sent.failures += 1
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return is_news

    def waiting(self) -> list[str]:
        """Return the names of new and changed files, records first."""
        count = Counter(
            map(_is_record, self._sent)
        )  # separate limits, so that many other files do not block records
        lacking = []
        for name, mark in self._marks():
            is_record = _is_record(name)
            if name not in self._sent and count[is_record] < _MOST_FILES:
                count[is_record] += 1
                self._sent[name] = UploadState()
            sent = self._sent.get(name)
            if (
                sent and sent.mark != mark and not (is_record and sent.mark)
            ):  # a record is uploaded once
                lacking.append(name)
        return sorted(lacking, key=_upload_order)

    def records_wait(self) -> bool:
        """Return True if a record was not uploaded yet."""
        return any(map(_is_record, self.waiting()))

    def _may_upload(self, name: str) -> bool:
        """Take one upload from the budget; return False if none is left. Heartbeats are free."""
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
        """Upload a file. If it exceeds the limit of bytes, upload the reason in `refused.json`.

        Records and other files have separate limits. Does nothing if the file is gone.
        """
        read = self._read(name)
        if read is None:
            return
        content, mark = read
        size, kind = len(content), _is_record(name)
        same = [sent for other, sent in self._sent.items() if _is_record(other) == kind]
        total = size - self._sent[name].size + sum(sent.size for sent in same)
        fits = size <= _SMALL_BYTES or total <= _MOST_BYTES
        why = f"{name} ({size} bytes): a machine uploads at most {_MOST_BYTES >> 20} MiB"
        if fits:
            self._put(name, content)
        else:
            self._put("refused.json", json.dumps({"reason": why}).encode())
        self._sent[name] = UploadState(mark, size * fits, time.monotonic())

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Yield the name and mark of each file that may be uploaded."""
        for within in ("", f"{_RECORDS}/"):
            with suppress(OSError), self._opened(within) as descriptor:
                for file in os.listdir(descriptor):
                    with suppress(OSError):  # the file was renamed in the meantime
                        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                        if _OUTGOING.fullmatch(file) and self._may(within + file, status):
                            yield within + file, _mark(status)

    def _may(self, name: str, status: os.stat_result) -> bool:
        """Return True for a regular file of the owner that is a log or not too large."""
        small = status.st_size <= _LARGEST_BYTES or _is_log(name)
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner and small

    def _read(self, name: str) -> tuple[bytes, Mark] | None:
        """Return a pair: the content and the mark of a file. None if it may not be uploaded."""
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
        """Open the folder or its subfolder `records`; yield the descriptor.

        The user can replace `records` by a link, which O_NOFOLLOW refuses.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(f"{self.folder}/{within}".rstrip("/"), flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _every_s(name: str) -> float:
    """Return the minimum seconds between uploads of a file that changes."""
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
