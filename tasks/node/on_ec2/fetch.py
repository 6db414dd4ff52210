"""A workload's data from S3 onto a rented machine's disk, by boto3's transfer manager in a thread
of the courier.

The folders are root's: the user whose code is measured reads them, writes nothing there, and has no
credentials. Beside the folders lies the reason where data could not be fetched (data.py), for the
runs that would have read them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from boto3.s3.transfer import ProgressCallbackInvoker
from botocore.exceptions import ClientError
from s3transfer.manager import TransferConfig, TransferManager

from ..data import FAILED, FETCHING, KEPT_FREE_BYTES, READY, S3, failure_of, files_of, folder_of
from ..record import write_file

MOST_OBJECTS = 1_000_000
_DENIED = ("AccessDenied", "AllAccessDisabled", "403")


class Fetcher:
    """Fetches data below `mailbox`, one address after the other."""

    def __init__(self, mailbox: Path, client: Any) -> None:
        self.mailbox, self.client = mailbox, client
        self._states: dict[str, dict[str, Any]] = {}
        self._lock, self._over = threading.Lock(), threading.Event()

    def request(self, addresses: Mapping[str, str]) -> None:
        """Start to fetch the addresses, by digest, that were not requested before."""
        new = {name: each for name, each in addresses.items() if name not in self._states}
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
                reason = f"the data of {address} could not be fetched: {_explain(error)}"
                with suppress(OSError):  # on a full disk the controller still gets the reason
                    write_file(failure_of(self.mailbox, digest), reason.encode())
                self._update(digest, state=FAILED, reason=reason)

    def _fetch(self, digest: str, address: str) -> None:
        """Raises ValueError for data that cannot be fetched, and boto3's errors."""
        bucket, _, prefix = address.removeprefix(S3).partition("/")
        sizes = self._listed(bucket, prefix)
        keys = files_of(sizes, prefix)
        if not keys:
            raise ValueError(f"no object is there: `aws s3 ls {address}` shows what is")
        needed, free = (
            sum(sizes[key] for key in keys.values()),
            shutil.disk_usage(self.mailbox).free,
        )
        self._update(digest, of_bytes=needed)
        if needed + KEPT_FREE_BYTES > free:
            lacking_gib = -(-(needed + KEPT_FREE_BYTES - free) // 2**30)
            raise ValueError(
                f"they take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free:"
                f" set [ec2] volume_gib higher by at least {lacking_gib}"
            )
        folder = folder_of(self.mailbox, digest)
        beside = folder.with_name(f"{digest}.part")
        progress = [ProgressCallbackInvoker(partial(self._count, digest))]
        try:
            with TransferManager(
                self.client, TransferConfig(max_request_concurrency=16)
            ) as manager:
                transfers = []
                for name, key in keys.items():
                    (beside / name).parent.mkdir(parents=True, exist_ok=True)
                    transfers.append(
                        manager.download(bucket, key, str(beside / name), None, progress)
                    )
                for transfer in transfers:
                    transfer.result()
            for name, key in keys.items():
                if (beside / name).stat().st_size != sizes[key]:
                    raise ValueError(f"the object {key} was written anew meanwhile")
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _listed(self, bucket: str, prefix: str) -> dict[str, int]:
        """Sizes by key."""
        found: dict[str, int] = {}
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            found |= {each["Key"]: each["Size"] for each in page.get("Contents", ())}
            if len(found) > MOST_OBJECTS:
                raise ValueError(f"more than {MOST_OBJECTS} objects: pack them into archives")
        return found

    def _update(self, digest: str, **news: Any) -> None:
        with self._lock:
            self._states[digest] |= news

    def _count(self, digest: str, size: int) -> None:
        if self._over.is_set():
            raise OSError("the machine goes down")
        with self._lock:
            self._states[digest]["bytes"] += size


def _explain(error: Exception) -> str:
    if isinstance(error, ClientError) and error.response["Error"]["Code"] in _DENIED:
        return (
            f"the machines' role may not list or read them ({error}):"
            " `srift doctor --provider ec2` prints the statement that its policy lacks"
        )
    return f"{error or type(error).__name__}"
