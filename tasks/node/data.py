"""A workload's data on a machine: their folder, or why they are missing. Standard library.

A plan names a folder of the machine itself (a local host's), or an address of S3. The machine's
courier fetches the objects of an address into `data/<digest>/` of the mailbox, or writes the reason
of a failure to `data/<digest>.failed`. The controller requests it in `data.json`, before there is a
plan, and reads the progress in `node-<i>/data.json`:

    data.json             {"data": {digest: address}}
    node-<i>/data.json    {digest: {"state": FETCHING, READY or FAILED, "reason", "bytes",
                          "of_bytes"}}
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from .record import WorkloadFile

S3 = "s3://"
FILE = "data.json"
# of a machine's volume: for a checkpoint of up to 4 GB, logs, compiled code
KEPT_FREE_BYTES = 5 * 2**30
FETCHING, READY, FAILED = "fetching", "ready", "failed"


class DataMissing(Exception):
    """A workload's data are not on this machine."""


def folder_of(mailbox: Path, digest: str) -> Path:
    """The folder into which the courier fetches."""
    return mailbox / "data" / digest


def failure_of(mailbox: Path, digest: str) -> Path:
    """The file with the reason of a failure to fetch."""
    return mailbox / "data" / f"{digest}.failed"


def data_path(mailbox: Path, workload: WorkloadFile) -> str:
    """Return the folder on this machine that holds the workload's data; empty if it takes none.

    Raises DataMissing.
    """
    if not workload.data:
        return ""
    folder = Path(workload.data)
    if workload.data.startswith(S3):
        folder = folder_of(mailbox, workload.data_digest)
        failure = failure_of(mailbox, workload.data_digest)
        if failure.exists():
            raise DataMissing(failure.read_text())
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        raise DataMissing(f"its data folder {folder} is gone or cannot be read: refresh again")
    return str(folder)


def files_of(keys: Iterable[str], prefix: str) -> dict[str, str]:
    """Map file names to the keys of objects below `prefix`; an object that stands for a folder
    becomes none.

    Raises ValueError for a key that would lie outside the folder, could be no file, or is a folder
    of another.
    """
    found: dict[str, str] = {}
    for key in keys:
        name = key.removeprefix(prefix)
        if not name or name.endswith("/"):
            continue
        parts = name.split("/")
        odd = any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
        if odd or not name.isprintable() or not key.startswith(prefix):
            raise ValueError(f"the object {key!r} cannot be a file of a folder: rename it")
        found[name] = key
    folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    both = sorted(folders & found.keys())
    if both:
        raise ValueError(f"{found[both[0]]!r} is an object, and others lie below it: rename one")
    return found
