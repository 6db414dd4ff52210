"""Find the folder of a workload's data on this machine. Imports only the standard library.

The controller is the process that launched the machine. Its plan names the data of each workload: a
folder on the machine (local hosts) or an S3 address (EC2). The courier, a root process on the
machine, downloads the objects below the S3 address.

Files in the mailbox folder, where `digest` is the workload's `data_digest`:

    data.json               {"data": {digest: Download}}, written by the controller before the plan
    node-<i>/data.json      {digest: {"state": "fetching" or "ready"}}, or after a failure
                            {digest: {"state": "failed", "reason": "..."}}
    data/<digest>/          the downloaded objects
    data/<digest>.failed    the reason why the download failed
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .record import WorkloadFile

S3 = "s3://"
DATA_FILE = "data.json"
# Bytes of a machine's volume to keep free for a checkpoint of up to 4 GB, logs and compiled code.
KEPT_FREE_BYTES = 5 * 2**30
FAILURE = ".failed"  # suffix of a file beside a data folder, with the reason of a failed download
FETCHING, READY, FAILED = "fetching", "ready", "failed"


class Download(NamedTuple):
    """An S3 address, and the maximum bytes and files that a machine downloads from the address."""

    address: str
    most_bytes: int
    most_files: int


class DataMissing(Exception):
    """A workload's data are not on this machine."""


def folder_of(mailbox: Path, digest: str) -> Path:
    """Return the folder for the downloaded data that `digest` identifies."""
    return mailbox / "data" / digest


def data_path(mailbox: Path, workload: WorkloadFile) -> str:
    """Return the folder on this machine with the workload's data; "" if the workload has none.

    Raises DataMissing if the download failed, or if the folder does not exist or cannot be read.
    """
    if not workload.data:
        return ""
    folder = Path(workload.data)
    if workload.data.startswith(S3):
        folder = folder_of(mailbox, workload.data_digest)
        failure = folder.with_suffix(FAILURE)
        if failure.exists():
            raise DataMissing(failure.read_text())
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        raise DataMissing(
            f"the workload's data folder {folder} is gone or cannot be read: run `srift refresh`"
        )
    return str(folder)


def files_of(listed: Iterable[Mapping[str, Any]], prefix: str) -> dict[str, Mapping[str, Any]]:
    """Return {file name: entry in `listed`}, where the file name is the key without `prefix`.

    listed: entries of S3's list of the objects below `prefix`. Objects that represent a folder are
        left out.

    Raises ValueError if S3 charges extra for reading an object, because of its storage class. Also
    raises ValueError if a key cannot be a file name, for example because it contains "..".
    """
    found: dict[str, Mapping[str, Any]] = {}
    for each in listed:
        key, storage = each["Key"], each.get("StorageClass") or "STANDARD"
        name = key.removeprefix(prefix)
        if not name or name.endswith("/"):
            continue
        if storage not in ("STANDARD", "INTELLIGENT_TIERING"):
            raise ValueError(
                f"reading the object {key!r} costs extra, because its storage class is {storage}:"
                " copy the data with `aws s3 cp --recursive --storage-class STANDARD`"
            )
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or not name.isprintable():
            raise ValueError(
                f"the object {key!r} has a key that cannot be a file name: rename the object"
            )
        found[name] = each
    return found
