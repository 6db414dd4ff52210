"""Data of S3 onto a rented machine's disk, by its courier: listed, looked at for room, and streamed, several at once.

The folders are root's: the user whose code is measured reads them and writes nothing there, and has no credentials.
What cannot be fetched is said in one sentence beside them (data.py), for the runs that would have read it.
"""

from __future__ import annotations

import errno
import http.client
import shutil
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from ..data import FAILED, FETCHING, KEPT_FREE_BYTES, READY, S3, failure_of, files_of, folder_of
from ..record import write_file
from .s3 import Answer, Bucket, S3Error

MOST_OBJECTS = 1_000_000
_AT_ONCE = 16
_PIECE_BYTES = 2**20
_DENIED = ("AccessDenied", "AllAccessDisabled")
_CHANGED = {"NoSuchKey": "deleted", "PreconditionFailed": "written anew"}


class NotFetched(Exception):
    """The data cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One object as a listing tells of it."""

    key: str
    size: int
    etag: str


class DataBucket(Bucket):
    """A bucket that is listed and whose objects are written to disk as they come; it may lie in another region."""

    _file: BinaryIO | None = None
    _more: Mapping[str, str] = {}
    over: Callable[[], bool] = staticmethod(lambda: False)  # whether nobody waits for it any more

    def listed(self, prefix: str) -> list[Listed]:
        """Every object below `prefix`, or the first of too many. Raises S3Error."""
        found: list[Listed] = []
        token = ""
        while len(found) <= MOST_OBJECTS:
            asked = {"encoding-type": "url", "list-type": "2", "prefix": prefix}
            asked |= {"continuation-token": token} if token else {}
            page = self._ask("GET", "", b"", f"?{_query(asked)}")
            try:
                tree = ElementTree.fromstring(page)
                found += [_listed(one) for one in tree.iterfind("{*}Contents")]
            except (ElementTree.ParseError, ValueError):
                raise S3Error("GET", prefix, 200, "MalformedListing") from None
            token = tree.findtext("{*}NextContinuationToken", "")
            if not token:
                break
        return found

    def save(self, one: Listed, path: Path) -> None:
        """The object as the file `path`. As long as some of it comes, it is asked for again from where it was.

        Raises S3Error, with PreconditionFailed or NoSuchKey where it is no longer what was listed; OSError of the disk.
        """
        with path.open("wb") as self._file:
            try:
                while (had := self._file.tell()) < one.size:
                    self._more = {"If-Match": one.etag} | (
                        {"Range": f"bytes={had}-"} if had else {}
                    )
                    with suppress(_Came):
                        self._ask("GET", one.key, b"")
                    if self._file.tell() > one.size:
                        raise S3Error("GET", one.key, 200, "PreconditionFailed")
            finally:
                self._file, self._more = None, {}

    def _send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        try:
            self._connection.request(method, path, headers={**headers, **self._more})
            answer = self._connection.getresponse()
            there = answer.getheader("x-amz-bucket-region") or self._region
            if answer.status in (301, 307, 400) and there != self._region:
                self._connection.close()
                self._lies_in(there)
                raise ConnectionError("it lies in another region")  # asked again there
            if self._file is None or answer.status not in (200, 206):
                return Answer(answer.status, answer.getheader("Date") or "", answer.read())
        except BaseException:
            self._connection.close()
            raise
        return self._written(answer, self._file)

    def _written(self, answer: http.client.HTTPResponse, file: BinaryIO) -> Answer:
        if "Range" in self._more and answer.status == 200:  # whole, though a part was asked for
            file.seek(0)
            file.truncate()
        had = file.tell()
        try:
            while True:
                try:
                    piece = answer.read(_PIECE_BYTES)
                except (OSError, http.client.HTTPException):
                    if file.tell() > had:
                        raise _Came from None
                    raise
                if not piece:
                    break
                try:
                    file.write(piece)
                except OSError as error:
                    raise _Disk(error) from error
                if self.over():
                    raise _Disk(OSError(errno.ECANCELED, "the machine goes down"))
        except BaseException:
            self._connection.close()
            raise
        if answer.length:  # it ended before all of it had come
            self._connection.close()
            raise _Came if file.tell() > had else http.client.IncompleteRead(b"", answer.length)
        return Answer(200, answer.getheader("Date") or "", b"")


class _Came(Exception):
    """Some of the object came, and then no more."""


class _Disk(Exception):
    """What the disk refused; S3 is not asked again for that."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Fetcher:
    """Fetches below `mailbox`, one address after the other, in a thread. `opened(name)` is a connection to a bucket."""

    def __init__(self, mailbox: Path, opened: Callable[[str], DataBucket]) -> None:
        self.mailbox, self._opened = mailbox, opened
        self._states: dict[str, dict[str, Any]] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self._waiting: list[tuple[str, str]] = []
        self._thread: threading.Thread | None = None

    def ask(self, addresses: Mapping[str, str]) -> None:
        """Have them fetched, by digest; one that was asked for is not fetched again."""
        with self._lock:
            new = [
                (digest, address)
                for digest, address in addresses.items()
                if digest not in self._states
            ]
            self._states |= {
                digest: {"state": FETCHING, "bytes": 0, "of_bytes": None} for digest, _ in new
            }
            self._waiting += new
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="data", daemon=True)
                self._thread.start()

    def states(self) -> dict[str, dict[str, Any]]:
        """How far each is: `state`, `reason` of a failure, `bytes` of `of_bytes`."""
        with self._lock:
            return {digest: dict(state) for digest, state in self._states.items()}

    def stop(self) -> None:
        """Nothing more is fetched."""
        self._over.set()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._over.is_set():
                    self._thread = None
                    return
                digest, address = self._waiting.pop(0)
            try:
                self._fetch(digest, address)
                self._say(digest, state=READY)
            except Exception as error:  # whatever it is: runs and controller wait for a word
                why = (
                    str(error)
                    if isinstance(error, NotFetched)
                    else f"{type(error).__name__}: {error}"
                )
                reason = f"the data of {address} could not be fetched: {why}"
                with suppress(
                    OSError
                ):  # a full disk: it is reported to the controller, and no folder is there
                    write_file(failure_of(self.mailbox, digest), reason.encode())
                self._say(digest, state=FAILED, reason=reason)

    def _fetch(self, digest: str, address: str) -> None:
        name, _, prefix = address.removeprefix(S3).partition("/")
        objects = self._listed(name, prefix)
        needed = sum(one.size for one in objects.values())
        self._say(digest, of_bytes=needed)
        self._refuse_no_room(needed)
        target = folder_of(self.mailbox, digest)
        beside = target.with_name(f"{digest}.part")
        own = threading.local()

        def save(file: str) -> None:
            if self._over.is_set():
                return
            if not hasattr(own, "bucket"):
                own.bucket = self._open(name)
            path = beside / file
            path.parent.mkdir(parents=True, exist_ok=True)
            own.bucket.save(objects[file], path)
            with self._lock:
                self._states[digest]["bytes"] += objects[file].size

        try:
            beside.mkdir(parents=True)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                try:
                    for _ in pool.map(save, objects):
                        pass
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            if self._over.is_set():
                raise NotFetched("the machine goes down")
            beside.rename(target)
        except S3Error as error:
            raise NotFetched(_said(error, name)) from None
        except _Disk as refused:
            raise NotFetched(_disk(refused.error)) from None
        except OSError as error:
            raise NotFetched(_disk(error)) from None
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _listed(self, name: str, prefix: str) -> dict[str, Listed]:
        try:
            listed = self._open(name).listed(prefix)
        except S3Error as error:
            raise NotFetched(_said(error, name)) from None
        if len(listed) > MOST_OBJECTS:
            raise NotFetched(
                f"they are more than {MOST_OBJECTS} objects: pack them into archives, or name a part"
            )
        by_key = {one.key: one for one in listed}
        try:
            found = {file: by_key[key] for file, key in files_of(by_key, prefix).items()}
        except ValueError as error:
            raise NotFetched(str(error)) from None
        if not found:
            raise NotFetched(f"no object is there: `aws s3 ls {S3}{name}/{prefix}` shows what is")
        return found

    def _refuse_no_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.mailbox).free
        if needed + KEPT_FREE_BYTES > free:
            lacking_gib = -(-(needed + KEPT_FREE_BYTES - free) // 2**30)
            raise NotFetched(
                f"they take {needed / 2**30:.1f} GiB, and the volume has {free / 2**30:.1f} GiB free, of which"
                f" {KEPT_FREE_BYTES / 2**30:.0f} are kept: set [ec2] volume_gib higher by at least {lacking_gib}"
            )

    def _open(self, name: str) -> DataBucket:
        with self._lock:
            bucket = self._opened(name)
        bucket.over = self._over.is_set
        return bucket

    def _say(self, digest: str, **news: Any) -> None:
        with self._lock:
            self._states[digest] |= news


def _disk(error: OSError) -> str:
    more = "; set [ec2] volume_gib higher" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"this machine's disk: {error.strerror or error}{more}"


def _said(error: S3Error, bucket: str) -> str:
    if error.code in _DENIED:
        return (
            f"the machines' role may not list or read them ({error.code}): `srift doctor --provider ec2` prints the"
            " statement that its policy lacks"
        )
    if error.code == "NoSuchBucket":
        return f"there is no bucket called {bucket}"
    return (
        f"an object was {_CHANGED[error.code]} meanwhile ({error})"
        if error.code in _CHANGED
        else str(error)
    )


def _listed(one: ElementTree.Element) -> Listed:
    key = urllib.parse.unquote_plus(one.findtext("{*}Key", ""))
    return Listed(key=key, size=int(one.findtext("{*}Size", "")), etag=one.findtext("{*}ETag", ""))


def _query(words: Mapping[str, str]) -> str:
    """As it is signed: names in order, everything encoded."""
    return "&".join(
        f"{name}={urllib.parse.quote(words[name], safe='-_.~')}" for name in sorted(words)
    )
