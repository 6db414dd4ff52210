"""Transfer files between a rented machine's disk and S3.

The inbox downloads the files that the controller's manifest names. The outbox uploads this node's
folder, records first. The folder belongs to the user whose code is measured, while this process is
root. Therefore the outbox follows no links, waits for no pipes, and reads only regular files of
that user.
"""

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
from .s3 import FAULTS

_INCOMING = re.compile(
    r"workloads/[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}|(node|data|plan|go|done)(-\d+)?\.json"
)
# a plan needs its workloads, and go needs the plan; done ends the agents
_PLACED = ("workloads", "node", "data", "plan", "go", "done")


class Inbox:
    """Downloads the controller's files into `directory`.

    `get(name)` returns the content of an S3 object. It raises FAULTS if the request fails or the
    object does not exist yet.
    """

    def __init__(self, directory: Path, get: Callable[[str], bytes]) -> None:
        self._directory, self._get = directory, get
        self._placed: dict[str, str] = {}

    def rank(self) -> int:
        """Return this machine's index in the cluster. Raises FAULTS while it has none."""
        return int(json.loads(self._get("node.json"))["node"])

    def fetch(self) -> None:
        """Download new and changed files of the manifest, each after the files that it needs.

        Raises FAULTS if the store or the disk fails, or if the manifest names an invalid file.
        """
        files = dict(json.loads(self._get("manifest.json"))["files"])
        for name in files:
            if _INCOMING.fullmatch(name) is None:
                raise OSError(f"manifest.json names {name!r}, which is not a file of a mailbox")
        for name in sorted(files, key=lambda name: _PLACED.index(re.split(r"[-./]", name)[0])):
            if self._placed.get(name) == files[name]:
                continue
            content = self._get(name)
            if hashlib.sha256(content).hexdigest() != files[name]:
                break  # newer than the manifest; files that need it wait for the next manifest
            write_file(self._directory / name, content)
            self._placed[name] = files[name]


_OUTGOING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}")
_RECORDS = "records/"
# Limits of what one machine may write to the controller's disk, so 1 GiB: the number of records,
# and
# also of other files, and the bytes of a file. Of a longer log only the end is uploaded.
_MOST_FILES = 1000
_LARGEST_BYTES = 2**19
# Minimum seconds between uploads of a file that changes. The controller counts a node as silent
# after 30 s without a heartbeat.
CHANGED_EVERY_S, STEADY_EVERY_S, LOG_EVERY_S = 2.0, 5.0, 10.0
_RETRY_S = 15.0  # after a failed upload
# Uploads cost money, and user code decides how many files it rewrites. So all uploads but
# heartbeats share this budget. Files above the budget wait, and records go first. The dollar caps
# include the budget (tasks/providers/ec2/prices.py).
UPLOADS_AT_ONCE = 150.0
UPLOADS_PER_HOUR = 1800.0
_HEARTBEAT = "heartbeat.json"
Mark = tuple[int, int, int]  # inode, last write in ns, bytes; it changes with the file


@dataclass
class UploadState:
    """The state of the uploads of one file.

    mark: identifies the content of the file at the last upload.
    due_at: the time.monotonic() before which the file is not uploaded again.
    """

    mark: Mark | None = None
    due_at: float = -math.inf


class Outbox:
    """Uploads the files of `folder` and of its subfolder `records`.

    Only files of the user id `owner` are uploaded. `put(name, content)` uploads a file and raises
    FAULTS.
    """

    def __init__(self, folder: Path, *, owner: int, put: Callable[[str, bytes], None]) -> None:
        self.folder, self._owner, self._put = folder, owner, put
        self._states: dict[str, UploadState] = {}
        self._budget, self._budget_at = UPLOADS_AT_ONCE, time.monotonic()

    def carry(self, *, until: float = math.inf, due_only: bool = True) -> None:
        """Upload new and changed files until time.monotonic() reaches `until`.

        `due_only` leaves out files that were uploaded, or failed, shortly before. If an upload
        fails, the first error is raised after all files were tried. A bad file then does not delay
        the heartbeat.
        """
        first_error = None
        for name in self.waiting():
            now, state = time.monotonic(), self._states[name]
            if now >= until:
                break
            if (due_only and now < state.due_at) or not self._may_upload(name):
                continue
            try:
                self._upload(name)
            except FAULTS as error:
                state.due_at = time.monotonic() + _RETRY_S
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def waiting(self) -> list[str]:
        """Return the names of new and changed files: records, other files, logs.

        A record is uploaded once. Records and other files have separate limits, so that many other
        files do not block records.
        """
        count, found = Counter(map(_is_record, self._states)), []
        for name, mark in self._marks():
            is_record = _is_record(name)
            if name not in self._states and count[is_record] < _MOST_FILES:
                count[is_record] += 1
                self._states[name] = UploadState()
            state = self._states.get(name)
            if state and state.mark != mark and not (is_record and state.mark):
                found.append(name)
        return sorted(found, key=lambda name: (not _is_record(name), _is_log(name), name))

    def records_wait(self) -> bool:
        """Return True if a record was not uploaded yet."""
        return any(map(_is_record, self.waiting()))

    def _may_upload(self, name: str) -> bool:
        """Take one upload from the budget, except for heartbeats. Return False if none is left."""
        if name == _HEARTBEAT:
            return True
        now = time.monotonic()
        earned = (now - self._budget_at) * UPLOADS_PER_HOUR / 3600.0
        self._budget, self._budget_at = min(UPLOADS_AT_ONCE, self._budget + earned), now
        allowed = self._budget >= 1.0
        self._budget -= allowed
        return allowed

    def _upload(self, name: str) -> None:
        """Upload a file. If it is too large, upload the reason in `refused.json` instead."""
        read = self._read(name)
        if read is None:  # it is gone, or no file of the owner any more
            return
        content, mark = read
        if len(content) > _LARGEST_BYTES:
            why = f"{name}: a machine uploads files of at most {_LARGEST_BYTES >> 10} KiB"
            self._put("refused.json", json.dumps({"reason": why}).encode())
        else:
            self._put(name, content)
        every_s = STEADY_EVERY_S if name in (_HEARTBEAT, "progress.json") else CHANGED_EVERY_S
        pause_s = LOG_EVERY_S if _is_log(name) else every_s
        self._states[name] = UploadState(mark, time.monotonic() + pause_s)

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Yield the name and a mark, which changes with the content, of each file to upload."""
        for within in ("", _RECORDS):
            with suppress(OSError), self._opened(within) as descriptor:
                for file in filter(_OUTGOING.fullmatch, os.listdir(descriptor)):
                    with suppress(OSError):  # the file was renamed in the meantime
                        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                        if self._may_read(status):
                            yield within + file, _mark(status)

    def _may_read(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner

    def _read(self, name: str) -> tuple[bytes, Mark] | None:
        """Return the content and the mark of a file; None if it may not be uploaded.

        The content is the end of a log. For other files, it is at most a byte more than the size
        limit.
        """
        within, slash, file = name.rpartition("/")
        with suppress(OSError), self._opened(within + slash) as descriptor:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(file, flags, dir_fd=descriptor), "rb") as opened:
                status = os.fstat(opened.fileno())
                if self._may_read(status):
                    if _is_log(name):
                        opened.seek(max(0, status.st_size - _LARGEST_BYTES))
                        return opened.read(_LARGEST_BYTES), _mark(status)
                    return opened.read(_LARGEST_BYTES + 1), _mark(status)
        return None

    @contextmanager
    def _opened(self, within: str) -> Iterator[int]:
        """Open the folder or its subfolder `records`, and yield its file descriptor.

        The user can replace `records` by a link, which O_NOFOLLOW refuses.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(f"{self.folder}/{within}".rstrip("/"), flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _is_log(name: str) -> bool:
    return name.startswith("log-") and name.endswith(".txt")


def _is_record(name: str) -> bool:
    return name.startswith(_RECORDS)


def _mark(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_size
