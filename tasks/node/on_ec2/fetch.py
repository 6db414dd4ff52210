"""Download workloads' data from S3 to a rented machine's disk, in a thread.

The data folders belong to root, so that user code can read them but not write there. If a download
fails, the reason is written to a file beside the folder (see data_paths.py).
"""

import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3transfer.manager import TransferManager

from ..data_paths import (
    FAILED,
    FAILURE,
    FETCHING,
    KEPT_FREE_BYTES,
    READY,
    S3,
    Download,
    files_of,
    folder_of,
)
from ..record import write_file


@dataclass
class Fetcher:
    """Downloads data into the folder `data` of `mailbox`, one S3 address at a time.

    client: a boto3 client for S3.
    states: {digest of a workload's data: state of the download}. A state is a dictionary with the
        key `state` (FETCHING, READY or FAILED) and, after a failure, the key `reason`.
    """

    mailbox: Path
    client: Any
    states: dict[str, dict[str, str]] = field(default_factory=dict)

    def request(self, downloads: Mapping[str, Sequence[Any]]) -> None:
        """Start a thread that downloads the data, unless an earlier call has started the thread.

        downloads: {digest of a workload's data: values of a `Download`}, the same in every call.
        """
        if not self.states:
            self.states |= {digest: {"state": FETCHING} for digest in downloads}
            threading.Thread(target=self.fetch_all, args=(downloads,), daemon=True).start()

    def fetch_all(self, downloads: Mapping[str, Sequence[Any]]) -> None:
        """Download the data of one address after another, and store the outcomes in `states`."""
        for digest, values in downloads.items():
            download = Download(*values)
            try:
                self._fetch(digest, download)
                self.states[digest] = {"state": READY}
            except Exception as error:  # the controller waits for an outcome
                reason = (
                    f"the data of {download.address} could not be downloaded: {error}"
                    " (`srift doctor --provider ec2` checks the permissions of the machines' role)"
                )
                with suppress(OSError):  # if the disk is full, `states` still has the reason
                    path = folder_of(self.mailbox, digest).with_suffix(FAILURE)
                    write_file(path, reason.encode())
                self.states[digest] = {"state": FAILED, "reason": reason}

    def _fetch(self, digest: str, download: Download) -> None:
        """Download all objects below the address, and store them as the folder of `digest`.

        Objects are first downloaded into the folder `<digest>.part`. After the last download, this
        folder is renamed to `<digest>`.

        Raises ValueError if there are no objects, or if they exceed the free disk space or the
        limits in `download`. Also raises OSError and the errors of `files_of` and boto3.
        """
        bucket, _, prefix = download.address.removeprefix(S3).partition("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        files = files_of((each for page in pages for each in page.get("Contents", ())), prefix)
        if not files:
            raise ValueError("there are no objects below this S3 address")
        size = sum(each["Size"] for each in files.values())
        lacking = size + KEPT_FREE_BYTES - shutil.disk_usage(self.mailbox).free
        if lacking > 0:
            raise ValueError(
                "the disk is too small: raise `volume_gib` in the section [ec2] of srift.toml by"
                f" at least {-(-lacking // 2**30)} GiB"
            )
        if size > download.most_bytes or len(files) > download.most_files:
            raise ValueError(  # the caps on dollars count no more than the limits
                f"there are now {size} bytes in {len(files)} objects, but this launch may download"
                f" only {download.most_bytes} bytes in {download.most_files} objects:"
                " refresh again"
            )
        folder = folder_of(self.mailbox, digest)
        beside = folder.with_name(f"{digest}.part")
        try:
            with TransferManager(self.client) as manager:
                transfers = []
                for name, each in files.items():
                    (beside / name).parent.mkdir(parents=True, exist_ok=True)
                    transfers.append(manager.download(bucket, each["Key"], str(beside / name)))
                for transfer in transfers:
                    transfer.result()
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
