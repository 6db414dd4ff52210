"""A workload's data from S3 onto a rented machine's disk, by boto3's transfer manager in a thread
of the courier.

The folders are root's: the user whose code is measured reads them, writes nothing there, and has no
credentials. Beside the folders lies the reason where data could not be fetched (data.py), for the
runs that would have read them.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.exceptions import CancelledError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber

from ..data import FAILED, FETCHING, KEPT_FREE_BYTES, READY, S3, failure_of, files_of, folder_of
from ..record import write_file
from .s3 import S3Error

MOST_OBJECTS = 1_000_000
_DENIED = ("AccessDenied", "AllAccessDisabled", "403")


class NotFetched(Exception):
    """The data cannot be fetched; the message says why and what to do."""


class Fetcher:
    """Fetches data below `mailbox`, one address after the other."""

    def __init__(self, mailbox: Path, client: Any) -> None:
        self.mailbox, self.client = mailbox, client
        self._states: dict[str, dict[str, Any]] = {}
        self._lock, self._over = threading.Lock(), threading.Event()

    def request(self, addresses: Mapping[str, str]) -> None:
        """Start to fetch the addresses, by digest. An address that was requested before is not
        fetched again.
        """
        new = {digest: one for digest, one in addresses.items() if digest not in self._states}
        for digest in new:
            self._states[digest] = {"state": FETCHING, "bytes": 0, "of_bytes": None}
        if new:
            threading.Thread(target=self.fetch_all, args=(new,), daemon=True).start()

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each: `state`, `reason` of a failure, `bytes` of `of_bytes`."""
        with self._lock:
            return {digest: dict(state) for digest, state in self._states.items()}

    def stop(self) -> None:
        """Fetch nothing more."""
        self._over.set()

    def fetch_all(self, addresses: Mapping[str, str]) -> None:
        for digest, address in addresses.items():
            try:
                self._fetch(digest, address)
                self._update(digest, state=READY)
            except Exception as error:  # whatever it is: runs and the controller wait for an answer
                reason = f"the data of {address} could not be fetched: {_explain(error, address)}"
                with suppress(OSError):  # on a full disk the controller still gets the reason
                    write_file(failure_of(self.mailbox, digest), reason.encode())
                self._update(digest, state=FAILED, reason=reason)

    def _fetch(self, digest: str, address: str) -> None:
        bucket, _, prefix = address.removeprefix(S3).partition("/")
        sizes = self._listed(bucket, prefix)
        try:
            keys = files_of(sizes, prefix)
        except ValueError as error:
            raise NotFetched(str(error)) from None
        if not keys:
            raise NotFetched(f"no object is there: `aws s3 ls {address}` shows what is")
        needed = sum(sizes[key] for key in keys.values())
        self._update(digest, of_bytes=needed)
        self._refuse_no_room(needed)
        folder = folder_of(self.mailbox, digest)
        beside = folder.with_name(f"{digest}.part")
        try:
            with TransferManager(
                self.client, TransferConfig(max_request_concurrency=16)
            ) as manager:
                transfers = []
                for name, key in keys.items():
                    file = beside / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    progress = _Progress(self, digest)
                    transfers.append(manager.download(bucket, key, str(file), None, [progress]))
                for transfer in transfers:
                    transfer.result()
            for name, key in keys.items():
                if (beside / name).stat().st_size != sizes[key]:
                    raise NotFetched(f"the object {key} was written anew meanwhile")
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _listed(self, bucket: str, prefix: str) -> dict[str, int]:
        """Sizes by key."""
        found: dict[str, int] = {}
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            found |= {one["Key"]: one["Size"] for one in page.get("Contents", ())}
            if len(found) > MOST_OBJECTS:
                raise NotFetched(
                    f"they are more than {MOST_OBJECTS} objects: pack them into archives"
                )
        return found

    def _refuse_no_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.mailbox).free
        if needed + KEPT_FREE_BYTES > free:
            lacking_gib = -(-(needed + KEPT_FREE_BYTES - free) // 2**30)
            raise NotFetched(
                f"they take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free:"
                f" set [ec2] volume_gib higher by at least {lacking_gib}"
            )

    def _update(self, digest: str, **news: Any) -> None:
        with self._lock:
            self._states[digest] |= news

    def add(self, digest: str, size: int) -> None:
        """Count bytes that arrived. Raises CancelledError when the machine goes down."""
        if self._over.is_set():
            raise CancelledError("the machine goes down")
        with self._lock:
            self._states[digest]["bytes"] += size


class _Progress(BaseSubscriber):  # type: ignore[misc]
    def __init__(self, fetcher: Fetcher, digest: str) -> None:
        self._fetcher, self._digest = fetcher, digest

    def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
        self._fetcher.add(self._digest, bytes_transferred)


def _explain(error: Exception, address: str) -> str:
    if isinstance(error, ClientError):
        code = S3Error(error).code
        if code in _DENIED:
            return (
                f"the machines' role may not list or read them ({code}):"
                " `srift doctor --provider ec2` prints the statement that its policy lacks"
            )
        if code == "NoSuchBucket":
            return f"there is no bucket called {address.removeprefix(S3).partition('/')[0]}"
        if code in ("404", "NoSuchKey", "412", "PreconditionFailed"):
            return f"an object was deleted or written anew meanwhile ({error})"
    if isinstance(error, OSError) and error.errno is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; set [ec2] volume_gib higher" if full else ""
        return f"this machine's disk: {os.strerror(error.errno)}{hint}"
    if isinstance(error, NotFetched | CancelledError | BotoCoreError | ClientError):
        return str(error)
    return f"{type(error).__name__}: {error}"
