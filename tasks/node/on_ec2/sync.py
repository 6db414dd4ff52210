"""Transfer files between a rented machine's disk and S3.

The inbox downloads the files that the controller (the process that launched the machine) lists in
its manifest. The outbox uploads the files in this node's folder, measurement records first.

This process is root, and user code can write to the node's folder. For example, user code could
create a link to a file that only root may read. The outbox therefore follows no links, and reads
only regular files that belong to the user.
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
from dataclasses import dataclass, field
from pathlib import Path

from ..record import write_file
from .s3 import FAULTS

_INCOMING = re.compile(
    r"workloads/[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}|(node|data|plan|go|done)(-\d+)?\.json"
)
# The order of downloads. A plan needs its workloads, and `go` needs the plan. `done` ends the
# agent.
_PLACED = ("workloads", "node", "data", "plan", "go", "done")


@dataclass
class Inbox:
    """Downloads the controller's files into `directory`.

    get: a function; `get(name)` returns the content of the S3 object `name`, or raises one of the
        errors listed in s3.FAULTS.
    placed: {name of a downloaded file: SHA-256 digest of its content}.
    """

    directory: Path
    get: Callable[[str], bytes]
    placed: dict[str, str] = field(default_factory=dict)

    def rank(self) -> int:
        """Return this machine's rank in the cluster, as the controller has assigned it.

        Raises one of the errors listed in s3.FAULTS if no rank is assigned yet, or if S3 does not
        respond.
        """
        return int(json.loads(self.get("node.json"))["node"])

    def fetch(self) -> None:
        """Download the manifest's new and changed files, workloads first and `done.json` last.

        Raises one of the errors listed in s3.FAULTS if S3 or the disk fails, or if the manifest
        lists an invalid file name.
        """
        files = dict(json.loads(self.get("manifest.json"))["files"])
        for name in files:
            if _INCOMING.fullmatch(name) is None:
                raise OSError(f"manifest.json lists {name!r}, which is not a mailbox file name")
        new = [name for name in files if self.placed.get(name) != files[name]]
        for name in sorted(new, key=lambda name: _PLACED.index(re.split(r"[-./]", name)[0])):
            content = self.get(name)
            if hashlib.sha256(content).hexdigest() != files[name]:
                break  # the file is newer than the manifest: wait for the next manifest
            write_file(self.directory / name, content)
            self.placed[name] = files[name]


_OUTGOING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}")
_RECORDS = "records/"
# Limits of one machine's uploads: 1000 records, 1000 other files, and 512 KiB per file. The limits
# allow 1 GiB in total. Of a longer log, only the last 512 KiB are uploaded.
_MOST_FILES = 1000
_LARGEST_BYTES = 2**19
# Minimum seconds between two uploads of a file, or between two attempts. CHANGED_EVERY_S
# applies to heartbeats too. It must be much less than 30 s, because the controller declares a node
# silent after 30 s without a heartbeat.
CHANGED_EVERY_S, LOG_EVERY_S = 5.0, 10.0
# Uploads cost money, and user code decides how often it rewrites files. All uploads except
# heartbeats therefore share a budget, whose price tasks/providers/ec2/prices.py adds to each
# launch. If the budget is spent, files wait. Records are uploaded first.
UPLOADS_AT_ONCE = 150.0
UPLOADS_PER_HOUR = 1800.0
_HEARTBEAT = "heartbeat.json"
Mark = tuple[int, int, int]  # inode, modification time in ns, bytes; changes with the content


@dataclass
class Outbox:
    """Uploads the files of `folder` and of its subfolder `records`.

    owner: a user id. Files of other users are not uploaded.
    put: a function; `put(name, content)` uploads a file, or raises one of the errors listed in
        s3.FAULTS.
    sent: {file name: (inode, modification time, size) of the file at its last upload}.
    due_at: {file name: earliest value of time.monotonic() for the next upload}.
    budget: the number of uploads that the rate limit permitted at the time `budget_at`.
    budget_at: the value of time.monotonic() at the last update of `budget`. It is -inf at first, so
        that the first upload starts with the full budget.
    """

    folder: Path
    owner: int
    put: Callable[[str, bytes], None]
    sent: dict[str, Mark] = field(default_factory=dict)
    due_at: dict[str, float] = field(default_factory=dict)
    budget: float = 0.0
    budget_at: float = -math.inf

    def carry(self, *, due_only: bool = True) -> None:
        """Upload the new and changed files that the rate limit permits now.

        due_only: True to skip each file whose last upload started in the last few seconds, even if
            that upload failed.

        If uploads fail, the first error is raised after all files have been tried. This error is
        one of the errors listed in s3.FAULTS.
        """
        # Errors are raised at the end, so that a failed upload does not delay other files.
        first_error = None
        for name in self.waiting():
            now = time.monotonic()
            if (due_only and now < self.due_at[name]) or not self._may_upload(name):
                continue
            self.due_at[name] = now + (LOG_EVERY_S if _is_log(name) else CHANGED_EVERY_S)
            try:
                self._upload(name)
            except FAULTS as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def waiting(self) -> list[str]:
        """Return the names of the files to upload: first records, then other files, then logs.

        The list has new records, and other files that are new or changed. Records that changed
        after their upload are not uploaded again.
        """
        # records and other files have separate limits, so that other files cannot block records
        count, found = Counter(map(_is_record, self.due_at)), []
        for name, mark in self._marks():
            is_record = _is_record(name)
            if name not in self.due_at and count[is_record] < _MOST_FILES:
                count[is_record] += 1
                self.due_at[name] = -math.inf
            is_new = name not in self.sent if is_record else self.sent.get(name) != mark
            if is_new and name in self.due_at:
                found.append(name)
        return sorted(found, key=lambda name: (not _is_record(name), _is_log(name), name))

    def records_wait(self) -> bool:
        """Return True if a measurement record on disk has not been uploaded yet."""
        return any(map(_is_record, self.waiting()))

    def _may_upload(self, name: str) -> bool:
        """Return True if the rate limit permits an upload of the file now, and count this upload.

        A token bucket allows UPLOADS_PER_HOUR on average, and UPLOADS_AT_ONCE in succession.
        Heartbeats are always allowed and not counted.
        """
        if name == _HEARTBEAT:
            return True
        now = time.monotonic()
        earned = (now - self.budget_at) * UPLOADS_PER_HOUR / 3600.0
        self.budget, self.budget_at = min(UPLOADS_AT_ONCE, self.budget + earned), now
        allowed = self.budget >= 1.0
        self.budget -= allowed
        return allowed

    def _upload(self, name: str) -> None:
        """Upload a file of at most _LARGEST_BYTES bytes.

        If a log is larger, only its last _LARGEST_BYTES bytes are uploaded. If any other file is
        larger, `refused.json` is uploaded instead, with the reason.
        """
        read = self._read(name)
        if read is None:  # the file is gone, or is no longer a regular file of the owner
            return
        content, status = read
        if status.st_size > _LARGEST_BYTES and not _is_log(name):
            why = f"{name}: a machine uploads files of at most {_LARGEST_BYTES >> 10} KiB"
            self.put("refused.json", json.dumps({"reason": why}).encode())
        else:
            self.put(name, content)
        self.sent[name] = _mark(status)

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Yield (name, mark) for each regular file of the user `owner` with an allowed name.

        The mark is (inode, modification time, size), which changes with the file's content.
        """
        for within in ("", _RECORDS):
            with suppress(OSError), self._open_folder(within) as descriptor:
                for file in filter(_OUTGOING.fullmatch, os.listdir(descriptor)):
                    with suppress(OSError):  # the file was renamed in the meantime
                        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                        if self._may_read(status):
                            yield within + file, _mark(status)

    def _may_read(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_uid == self.owner

    def _read(self, name: str) -> tuple[bytes, os.stat_result] | None:
        """Return (content, status) of a file; None if it is not a regular file of the user `owner`.

        Only the last _LARGEST_BYTES bytes of the content are returned.
        """
        within, _, file = name.rpartition("/")
        with suppress(OSError), self._open_folder(within) as descriptor:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(file, flags, dir_fd=descriptor), "rb") as opened:
                status = os.fstat(opened.fileno())
                if self._may_read(status):
                    opened.seek(max(0, status.st_size - _LARGEST_BYTES))
                    return opened.read(_LARGEST_BYTES), status
        return None

    @contextmanager
    def _open_folder(self, within: str) -> Iterator[int]:
        """Return a context manager that opens the subfolder `within`, and yields its descriptor.

        If `within` is "", the folder itself is opened. Raises OSError if the user has replaced the
        subfolder by a link.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(self.folder / within, flags)
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
