"""A workload's data on a machine: where they lie, and why they do not where they could not be had. Standard library.

A plan names a folder of the machine itself (a local host's), or an address of S3. What an address names is fetched into
`data/<digest>/` of the mailbox by the machine's courier, which says in `data/<digest>.failed` why where it could not.
The controller asks for it in `data.json`, before there is a plan, and reads in `node-<i>/data.json` how far it is:

    data.json             {"data": {digest: address}}
    node-<i>/data.json    {digest: {"state": FETCHING, READY or FAILED, "reason", "bytes", "of_bytes"}}
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from .record import WorkloadFile

S3 = "s3://"
FILE = "data.json"
KEPT_FREE_BYTES = (
    5 * 2**30
)  # of a machine's volume: a checkpoint of up to 4 GB, logs, what is compiled
FETCHING, READY, FAILED = "fetching", "ready", "failed"


class DataMissing(Exception):
    """A workload's data are not on this machine; the message says why, and what to do where that is known."""


def folder_of(mailbox: Path, digest: str) -> Path:
    """Where the courier puts what an address names."""
    return mailbox / "data" / digest


def failure_of(mailbox: Path, digest: str) -> Path:
    """The file that says why the courier could not."""
    return mailbox / "data" / f"{digest}.failed"


def data_path(mailbox: Path, workload: WorkloadFile) -> str:
    """The folder on this machine that holds the workload's data. Raises DataMissing."""
    if not workload.data.startswith(S3):
        folder = Path(workload.data)
        if not folder.is_dir():
            raise DataMissing(
                f"its data folder {folder} is not there any more: put it back, and refresh again"
            )
        if not os.access(folder, os.R_OK | os.X_OK):
            raise DataMissing(f"its data folder {folder} may not be read by the user who runs this")
        return str(folder)
    try:
        raise DataMissing(failure_of(mailbox, workload.data_digest).read_text())
    except OSError:  # then nothing went wrong
        folder = folder_of(mailbox, workload.data_digest)
    if not folder.is_dir():
        raise DataMissing(f"its data, {workload.data}, were not fetched to this machine")
    return str(folder)


def files_of(keys: Iterable[str], prefix: str) -> dict[str, str]:
    """Keys of objects below `prefix` by the names of the files that they become.

    What only stands for a folder becomes none. Raises ValueError where one would lie outside the folder, could not be a
    file, or is a folder for another.
    """
    found: dict[str, str] = {}
    for key in keys:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix):
            raise ValueError(f"{key!r} does not lie below {prefix!r}")
        if not name or name.endswith("/"):
            continue
        parts = name.split("/")
        if (
            any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
            or not name.isprintable()
        ):
            raise ValueError(
                f"the object {key!r} cannot be a file of a folder: rename it, or move it elsewhere"
            )
        found[name] = key
    folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    if both := sorted(folders & found.keys()):
        raise ValueError(f"{found[both[0]]!r} is an object, and others lie below it: rename one")
    return found
