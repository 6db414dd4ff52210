"""Downloads workloads' data from S3 to a rented machine's disk, in a thread of the courier.

The folders belong to root: the user whose code is measured can read them, but not write there, and
has no credentials. If a download fails, its reason is written to a file beside the folder
(data.py), for the runs that need the data.
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
    """Downloads data into the folder `data` of `mailbox`, one S3 address after another."""

    def __init__(self, mailbox: Path, client: Any) -> None:
        self.mailbox, self.client = mailbox, client
        self._states: dict[str, dict[str, Any]] = {}
        self._lock, self._over = threading.Lock(), threading.Event()

    def request(self, addresses: Mapping[str, str]) -> None:
        """Start to download the S3 addresses that were not requested before.

        `addresses` maps the digest of the data to their address.
        """
        new = {name: each for name, each in addresses.items() if name not in self._states}
        for digest in new:
            self._states[digest] = {"state": FETCHING, "bytes": 0, "of_bytes": None}
        if new:
            threading.Thread(target=self.fetch_all, args=(new,), daemon=True).start()

    def states(self) -> dict[str, dict[str, Any]]:
        """Return a dictionary from the digest of the data to the state of their download.

        `state` is FETCHING, READY or FAILED. `bytes` were downloaded so far. `of_bytes` is the
        total, or None before it is known. `reason` is present only after a failure.
        """
        with self._lock:
            return {digest: dict(state) for digest, state in self._states.items()}

    def stop(self) -> None:
        """Abort the downloads."""
        self._over.set()

    def fetch_all(self, addresses: Mapping[str, str]) -> None:
        """Download the addresses one after another, and record how each download ends."""
        for digest, address in addresses.items():
            try:
                self._fetch(digest, address)
                self._update(digest, state=READY)
            except Exception as error:  # runs and the controller wait for an answer in any case
                reason = f"the data of {address} could not be downloaded: {_explain(error)}"
                with suppress(OSError):  # if the disk is full, `states` still has the reason
                    write_file(failure_of(self.mailbox, digest), reason.encode())
                self._update(digest, state=FAILED, reason=reason)

    def _fetch(self, digest: str, address: str) -> None:
        """Download all objects below `address` into the folder of `digest`.

        Raises ValueError if there are no objects or too many, if a key cannot be a file name, if
        the disk is too small, or if an object changes. Also raises the errors of boto3.
        """
        bucket, _, prefix = address.removeprefix(S3).partition("/")
        sizes = self._listed(bucket, prefix)
        keys = files_of(sizes, prefix)
        if not keys:
            raise ValueError(f"there are no objects: list them with `aws s3 ls {address}`")
        needed, free = (
            sum(sizes[key] for key in keys.values()),
            shutil.disk_usage(self.mailbox).free,
        )
        self._update(digest, of_bytes=needed)
        if needed + KEPT_FREE_BYTES > free:
            lacking_gib = -(-(needed + KEPT_FREE_BYTES - free) // 2**30)
            raise ValueError(
                f"the data take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free:"
                f" raise [ec2] volume_gib by at least {lacking_gib}"
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
                    raise ValueError(f"the object {key} changed during the download")
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _listed(self, bucket: str, prefix: str) -> dict[str, int]:
        """Return the size of each object in bytes, by key. Raises ValueError for too many."""
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
            raise OSError("the machine shuts down")
        with self._lock:
            self._states[digest]["bytes"] += size


def _explain(error: Exception) -> str:
    if isinstance(error, ClientError) and error.response["Error"]["Code"] in _DENIED:
        return (
            f"the machines' role may not list or read them ({error}):"
            " `srift doctor --provider ec2` prints the missing statement of its policy"
        )
    return f"{error or type(error).__name__}"
