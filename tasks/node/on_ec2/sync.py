"""Carries the mailbox between a rented machine's disk and the store.

Inbox: the files that the controller's manifest names. Outbox: this node's folder, records first. The folder belongs to
the user whose code is measured, and the courier is root: no link is followed, no pipe is waited for, and nothing is
read that is not that user's own file.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..record import write_file

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_NAMED = 1000
_MOST_PARTS = 3
# a plan needs its workloads, a go its plan; done ends it all
_PLACED_LAST = ("plan", "go", "done")


class BadManifest(OSError):
    """The manifest, or the place that a node is given, is not what this version knows; the message says what."""


def files_of(content: bytes) -> dict[str, str]:
    """Names and digests in the order in which they are to be put in place. Raises BadManifest."""
    files = _object(content, "manifest.json").get("files")
    if not isinstance(files, dict) or len(files) > _MOST_NAMED:
        raise BadManifest(f"manifest.json names no files, or more than {_MOST_NAMED}")
    for name, digest in files.items():
        parts = str(name).split("/")
        if (
            len(parts) > _MOST_PARTS
            or not all(_PART.fullmatch(part) for part in parts)
            or parts[0].startswith("node-")
        ):
            raise BadManifest(f"manifest.json names {name!r}, which is no file of a mailbox")
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise BadManifest(f"manifest.json has no sha256 for {name!r}")
    return dict(sorted(files.items(), key=lambda one: _placing_order(one[0])))


class Inbox:
    """Fetches into `directory`. `get(name)` raises OSError, also for what is not there yet."""

    def __init__(self, directory: Path, get: Callable[[str], bytes]) -> None:
        self._directory, self._get = directory, get
        self._placed: dict[str, str] = {}

    def rank(self) -> int:
        """This machine's place in the cluster. Raises OSError: not said yet, or not understood."""
        body = _object(self._get("node.json"), "node.json")
        node, nodes = body.get("node"), body.get("nodes")
        if not isinstance(node, int) or not isinstance(nodes, int) or not 0 <= node < nodes:
            raise BadManifest(f"node.json gives no place in a cluster: node {node!r} of {nodes!r}")
        return node

    def fetch(self) -> list[str]:
        """Put in place what is new or changed and name it. Raises OSError; what is in place by then stays there."""
        fresh = []
        for name, digest in files_of(self._get("manifest.json")).items():
            if self._placed.get(name) == digest:
                continue
            content = self._get(name)
            if hashlib.sha256(content).hexdigest() != digest:
                break  # it was replaced since; what depends on it waits for the next manifest
            write_file(self._directory / name, content)
            self._placed[name] = digest
            fresh.append(name)
        return fresh


def _placing_order(name: str) -> tuple[int, str]:
    kind = re.split(r"[-.]", name, maxsplit=1)[0]
    return (_PLACED_LAST.index(kind) + 1 if kind in _PLACED_LAST else 0), name


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadManifest(f"{name} is not a JSON object")
    return body


_NAME = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}/){0,3}[A-Za-z0-9_][A-Za-z0-9._+:-]{0,200}"
)
_NOT_OURS = ("scratch",)
_MOST_FILES = 5000  # records, and as many others: a request costs money
_LARGEST_BYTES = 32 * 2**20
_LOG_BYTES = 2**20  # of a longer log, its end
CHANGED_EVERY_S = (
    2.0  # a file that changes goes up again no sooner; what is rewritten all the time, later still
)
STEADY_EVERY_S = 5.0  # a node is silent after thirty seconds without a heartbeat
# What one machine may lay on the controller's disk: so much of records and as much of all else, and small files beside,
# as every record and heartbeat of ours is: together less than 1.2 GiB.
_MOST_BYTES = 256 * 2**20
_SMALL_BYTES = 64 * 2**10
LOG_EVERY_S = 10.0
LONGEST_PAUSE_S = 10.0
# Uploads cost money, and user code decides how many files it rewrites: so many at once, and on average so many an hour,
# beside heartbeats. What is over waits, and records wait least. The caps count them (tasks/providers/ec2/prices.py).
UPLOADS_AT_ONCE = 150
UPLOADS_PER_HOUR = 1800.0
_HEARTBEAT = "heartbeat.json"
_STEADY = (_HEARTBEAT, "progress.json")  # and logs: rewritten while all goes on as it did
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
Mark = tuple[
    int, int, int
]  # by which a change is seen: inode, moment of the last write in ns, bytes


@dataclass(slots=True)
class UploadState:
    """What the store has of one file, when it took it, and how often in a row it has refused since."""

    mark: Mark | None = None
    size: int = 0  # bytes that the store holds of it
    refused: Mark | None = None  # what would have been too much
    at: float = float("-inf")
    failures: int = 0
    not_before: float = float("-inf")


class Outbox:
    """Carries `folder`. `put(name, content)` raises OSError; `owner` is the user id whose files are carried."""

    def __init__(self, folder: Path, *, owner: int, put: Callable[[str, bytes], None]) -> None:
        self.folder, self._owner, self._put = folder, owner, put
        self.problem = ""  # what the last fault was
        self.news_at = float("-inf")  # when something went up that the controller may answer
        self.refused = ""  # the sentence on what is not carried, since it is too much
        self._sent: dict[str, UploadState] = {}
        self._left, self._counted_at = (
            float(UPLOADS_AT_ONCE),
            time.monotonic(),
        )  # uploads that may be made; as of when

    def carry(self) -> bool:
        """One pass over what is due, up to the first fault. Returns whether there was one; `problem` says which."""
        return not all(
            self._send(name)
            for name in self._waiting()
            if self._due(name) and self._may_upload(name)
        )

    def flush(self, until: float) -> int:
        """One pass over everything, due or not, past faults and until `until`. Returns how many files did not go up."""
        waiting = self._waiting()
        return len(waiting) - sum(
            time.monotonic() < until and self._may_upload(name) and self._send(name)
            for name in waiting
        )

    def records_waiting(self) -> int:
        """How many records the store lacks."""
        return sum(_is_record(name) for name in self._waiting())

    def _waiting(self) -> list[str]:
        lacking = []
        for name, mark in self._marks():
            sent = self._sent.setdefault(name, UploadState())
            final = (
                _is_record(name) and sent.mark is not None
            )  # what somebody makes of it after it went up is not it
            if mark not in (sent.mark, sent.refused) and not final:
                lacking.append(name)
        return sorted(lacking, key=_upload_order)

    def _due(self, name: str) -> bool:
        sent, now = self._sent[name], time.monotonic()
        every_s = (
            LOG_EVERY_S if _is_log(name) else STEADY_EVERY_S if name in _STEADY else CHANGED_EVERY_S
        )
        return now >= sent.not_before and now >= sent.at + every_s

    def _may_upload(self, name: str) -> bool:
        """Whether one more upload is within what may be spent; it is counted. A heartbeat always is."""
        if name == _HEARTBEAT:
            return True
        now = time.monotonic()
        earned = (now - self._counted_at) * UPLOADS_PER_HOUR / 3600.0
        self._left, self._counted_at = min(float(UPLOADS_AT_ONCE), self._left + earned), now
        if self._left < 1.0:
            self.problem = f"more than {UPLOADS_PER_HOUR:.0f} uploads an hour: the rest waits"
            return False
        self._left -= 1.0
        return True

    def _send(self, name: str) -> bool:
        sent = self._sent[name]
        try:
            read = self._read(name)
            if read is not None:
                content, mark = read
                if not self._has_room(name, len(content)):
                    sent.refused = mark
                    return True
                self._put(name, content)
                sent.mark, sent.at, sent.failures, sent.size = (
                    mark,
                    time.monotonic(),
                    0,
                    len(content),
                )
                if name not in _STEADY and not _is_log(name):
                    self.news_at = sent.at
            return True
        except OSError as error:
            self.problem = str(error)
            sent.failures += 1
            sent.not_before = time.monotonic() + min(LONGEST_PAUSE_S, 2.0 ** (sent.failures - 1))
            return False

    def _has_room(self, name: str, size: int) -> bool:
        """Whether so much may go up under that name; else `refused` says so. Nothing else takes the room of records."""
        alike = [
            sent.size
            for one, sent in self._sent.items()
            if one != name and _is_record(one) == _is_record(name)
        ]
        fits = size <= _SMALL_BYTES or size + sum(alike) <= _MOST_BYTES
        if not fits:
            kind = "records" if _is_record(name) else "files that are no records"
            self.refused = f"{name} ({size} bytes) and maybe more: of {kind} one machine sends {_MOST_BYTES >> 20} MiB"
        return fits

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        """Every file that may go up. Directories are walked by descriptor, so that none can become a link meanwhile."""
        known = Counter(
            map(_is_record, self._sent)
        )  # records have a number of their own: no flood keeps them here
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
                if self._may(name, status) and (
                    name in self._sent or known[_is_record(name)] < _MOST_FILES
                ):
                    known[_is_record(name)] += name not in self._sent
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
                held.append(
                    os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held[-1])
                )
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


def _upload_order(name: str) -> tuple[int, str]:
    return next(
        (at for at, start in enumerate(_UPLOADED_FIRST) if name.startswith(start)),
        len(_UPLOADED_FIRST),
    ), name


def _mark(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_record(name: str) -> bool:
    return name.startswith("records/")


def _is_log(name: str) -> bool:
    return name.startswith("log-") and name.endswith(".txt")
