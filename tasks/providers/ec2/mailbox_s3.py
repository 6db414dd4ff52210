"""Copy a launch's files between S3 and a local folder, the mailbox.

Each upload of a machine becomes a local file. The file's modification time is the time at which S3
stored the upload. A machine chooses the names of its uploads, but cannot write outside its own
local folders.

This process (the controller) uploads the files for a machine to `<machine's prefix>/in/` in the S3
bucket. After these files, the controller uploads manifest.json: the SHA-256 of every file.

`Mirror.now_unix` is the clock for the ages of heartbeats. While S3 does not respond, this clock
stops, so that no machine is considered lost.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..leases import write_durably
from .api import Answer, Store
from .errors import AwsRefused
from .leases import Ec2Lease, Ec2Machine

POLL_S = 1.0
LIST_EVERY = 5  # number of polls between two LISTs; prices.py counts 720 LIST requests an hour
MOST_BYTES = 64 * 2**20  # size limit of one download; a machine uploads at most 512 KiB per file
MOST_FILES = 20_000  # maximum number of uploads that are downloaded from one machine
_NAME = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}/){0,3}[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}"
)
_KEPT = ("records/", "log-")  # files of a replaced machine that are still downloaded


class Mirror:
    """Copies one launch's files between S3 and a local folder. Thread-safe.

    `sync` exchanges files once. `start` exchanges files in a thread until `stop` is called.

    store: the bucket.
    now_unix: the time at which the last complete download began, as Unix time on S3's clock; -inf
        before the first complete download.
    """

    def __init__(self, store: Store, lease: Ec2Lease, mailbox: Path) -> None:
        self.store, self._under, self.mailbox = store, lease.objects, mailbox
        self._machines = lease.by_userid
        self._have: dict[str, tuple[str, datetime]] = {}  # {key: (ETag, modification time)}
        self._sent: dict[str, dict[str, str]] = {}  # {aws:userid: {name: digest}}
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._rounds, daemon=True)
        self.now_unix = float("-inf")

    def serve(self, lease: Ec2Lease) -> None:
        """From now on, exchange files with the machines that `lease` lists."""
        with self._lock:
            self._machines = lease.by_userid

    def start(self) -> None:
        """Upload and download files in a background thread until `stop` is called."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after it has finished its current uploads and downloads."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def sync(self) -> None:
        """Download new uploads, and upload changed files. AWS and disk errors are not raised."""
        self.pull()
        self.push()

    def pull(self) -> bool:
        """Download the machines' new uploads. Return False if any download failed."""
        with self._lock:
            try:
                listed, began = self.store.listed(self._under)
            except AwsRefused:
                return False
            wanted = self._new_uploads(listed)
            complete = sum(self._fetch(*each) for each in wanted) == len(wanted)
            if complete:
                self.now_unix = max(self.now_unix, began)
            return complete

    def push(self) -> None:
        """Upload the controller's new and changed files for each current machine of the cluster.

        Each machine also gets node.json, which has its rank and the number of machines. If AWS
        refuses an upload or a local file cannot be read, the next call tries again.
        """
        with self._lock, suppress(AwsRefused, OSError):
            files = {
                path.relative_to(self.mailbox).as_posix(): path.read_bytes()
                for path in (*self.mailbox.glob("*.json"), *self.mailbox.glob("workloads/*"))
                if not path.name.startswith(".")  # a file that is being written
            }
            current = {name: machine for name, machine in self._machines.items() if machine.current}
            for userid, machine in current.items():
                node = json.dumps({"node": machine.rank, "nodes": len(current)}).encode()
                self._bring(userid, files | {"node.json": node})

    def _rounds(self) -> None:
        polls = 0
        while not self._over.wait(POLL_S):
            self.push()
            if polls % LIST_EVERY == 0:
                self.pull()
            polls += 1

    def _new_uploads(self, listed: list[Answer]) -> list[tuple[Answer, Path]]:
        """Return (entry in `listed`, local path) for each new or changed upload.

        At most MOST_FILES uploads of each machine are accepted. Measurement records have priority.

        listed: S3's list of all objects of the launch.
        """
        found, count = list[tuple[Answer, Path]](), Counter[str]()
        for stored in sorted(listed, key=lambda stored: "/out/records/" not in stored["Key"]):
            userid, _, name = stored["Key"].removeprefix(self._under).partition("/out/")
            machine = self._machines.get(userid)
            if machine is None or not _is_allowed(stored, name, machine):
                continue
            count[userid] += 1
            version = stored["ETag"], stored["LastModified"]
            if count[userid] <= MOST_FILES and self._have.get(stored["Key"]) != version:
                found.append((stored, self.mailbox / f"node-{machine.rank}" / name))
        return found

    def _fetch(self, stored: Answer, path: Path) -> bool:
        """Download an object to `path`. Return False if the download must be tried again later.

        In these cases, another try would not help, and True is returned without a download:

        - The object no longer exists in S3.
        - `path` conflicts with an existing file or folder.

        stored: the object's entry in S3's list.
        """
        try:
            content, written = self.store.get(stored["Key"], MOST_BYTES), stored["LastModified"]
            path = _free_path(path, stored["Key"], content)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content, written.timestamp())
        except AwsRefused as error:
            return error.kind == "gone"
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            pass  # a folder and a file have the same name, which no courier uploads
        except OSError:
            return False
        self._have[stored["Key"]] = stored["ETag"], stored["LastModified"]
        return True

    def _bring(self, userid: str, files: Mapping[str, bytes]) -> None:
        """Upload new and changed files for the machine with the aws:userid `userid`.

        files: {name: content} of all files that the machine must have.
        """
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        fresh = digests.items() - self._sent.get(userid, {}).items()
        if not fresh:
            return
        into = f"{self._under}{userid}/in/"
        for name, _ in sorted(fresh):
            self.store.put(into + name, files[name])
        self.store.put(into + "manifest.json", json.dumps({"files": digests}).encode())
        self._sent[userid] = digests


def _is_allowed(stored: Answer, name: str, machine: Ec2Machine) -> bool:
    """Return True if the upload `name` of `machine` may be downloaded.

    An upload may have at most MOST_BYTES, and its name must match the pattern _NAME. Only records
    and logs are accepted from a machine that has been replaced.
    """
    kept = machine.current or name.startswith(_KEPT)
    # A `*` in an IAM policy also matches slashes. Machine A can therefore upload to
    # `<folder of machine B>/out/<folder of machine A>/`. _NAME rejects this name, because the name
    # of a machine's folder (its aws:userid) has a colon.
    plain = _NAME.fullmatch(name) is not None and ".." not in name
    return kept and plain and bool(stored["Size"] <= MOST_BYTES)


def _free_path(path: Path, key: str, content: bytes) -> Path:
    """Return a local path for an upload that does not overwrite the record of another machine.

    A lost machine and its replacement may both upload a record of the same run. If the records
    differ, the second is stored in a folder with its machine's id, such as node-0-i-0a1b/records.
    All other uploads are stored at `path`.

    key: the upload's key on S3, which contains the id of the machine.
    content: the upload's content.
    """
    if path.parent.name != "records" or not path.is_file() or path.read_bytes() == content:
        return path
    machine = key.partition("/out/")[0].rpartition(":")[2]
    return path.parents[1].with_name(f"{path.parents[1].name}-{machine}") / "records" / path.name
