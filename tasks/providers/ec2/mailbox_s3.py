"""The mailbox on S3, mirrored into a directory that reads and is written as a local one.

What nodes upload appears beside and is renamed, with the store's moment as its own; what the controller writes goes to
every machine's `in/`, the manifest last. Nothing that a node names leads out of its folder. The store is listed every
second while something changes, and every five once nothing has for a while: what the controller writes goes up within
a second all the same, and a record or a notice is heard up to four seconds later. A store that fails is asked again at
the next round, and until then its clock stands still: nobody is called silent who could not be heard.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.providers.ec2.api import Store, Stored
from tasks.providers.ec2.errors import AwsRefused

POLL_S = 1.0  # between rounds; the controller's own files are looked at in each, which asks nothing of the store
QUIET_AFTER_S = 20.0  # without a change, from when on the store is listed less often
QUIET_POLL_S = 5.0
_STEADY = re.compile(
    r".*/out/(heartbeat\.json|progress\.json|data\.json|log-\d+\.txt)"
)  # rewritten while all goes on as it did
MOST_BYTES = 64 * 2**20  # of one upload; the courier sends no more than 32 MiB
MOST_FILES = 20_000  # of one machine
_NAME = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}/){0,3}[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}"
)
_KEPT = (
    "records/",
    "log-",
)  # of a machine that was replaced: what it measured, not what it says of itself
_OF_CONTROLLER = re.compile(r"(plan|done|data|go-\d+)\.json|workloads/[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a machine stands. Of one that was replaced (`current` False) only records and logs are taken."""

    rank: int
    nodes: int
    current: bool = True


def lease_prefix(prefix: str, lease_id: str) -> str:
    """Below which all of a lease lies in the bucket."""
    return f"{prefix}/leases/{lease_id}/"


class Mirror:
    """One lease's. `sync()` is a round, by hand or (`start`) every second in a thread. Several threads may use it."""

    def __init__(
        self,
        store: Store,
        under: str,
        mailbox: Path,
        places: Mapping[str, Place],
        now_unix: Callable[[], float],
    ) -> None:
        self._store, self._under, self._mailbox = store, under, mailbox
        self._places = dict(places)
        self._have: dict[str, str] = {}
        self._sent: dict[str, dict[str, str]] = {}
        self._digests: dict[
            str, tuple[tuple[int, int, int] | None, str]
        ] = {}  # of what the controller wrote
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._own_unix = now_unix  # for a store that does not tell the time, and between listings
        self._listed_at = self._changed_at = float("-inf")
        # The store's clock at the last round that heard everybody; before the first, nobody is late by any clock.
        self.now_unix = float("-inf")
        self.problem = ""  # why the last round was not whole

    def place(self, places: Mapping[str, Place]) -> None:
        """Other machines from the next round on."""
        with self._lock:
            self._places = dict(places)
            self._changed_at = self._own_unix()

    def start(self) -> None:
        """Round after round until `stop`."""
        self._thread = threading.Thread(
            target=self._rounds, name=f"mirror-{self._under}", daemon=True
        )
        self._thread.start()

    def sync_by_hand(self) -> None:
        """One round, where no thread takes them."""
        if self._thread is None:
            self.sync()

    def stop(self) -> None:
        """No round is under way afterwards; waits for one that is."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def sync(self) -> bool:
        """One round both ways; False, with `problem`, where something could not be carried."""
        with self._lock:
            pulled = self.pull()
            return self.push() and pulled

    def poll(self) -> bool:
        """As `sync`, but the store is listed only as often as something changes."""
        with self._lock:
            pushed = self.push()
            now = self._own_unix()
            every_s = QUIET_POLL_S if now - self._changed_at >= QUIET_AFTER_S else POLL_S
            # a twentieth of a second less, or every sixth round would list instead of every fifth; a clock that was set
            # back must not keep the store from being heard
            if 0 <= now - self._listed_at < every_s - 0.05:
                return pushed
            return self.pull() and pushed

    def pull(self) -> bool:
        """Fetch what is new. False where the store failed or the disk refused; the rest is there all the same."""
        with self._lock:
            self._listed_at = self._own_unix()
            try:
                listed, began = self._store.listed(self._under)
            except AwsRefused as error:
                self.problem = str(error)
                return False
            wanted = self._wanted(listed)
            if not all(_STEADY.fullmatch(one.key) for one, _ in wanted):
                self._changed_at = self._listed_at
            fetched = [self._fetch(one) for one in wanted]
            whole = all(fetched)
            if whole:
                self.now_unix = max(self.now_unix, began if began == began else self._own_unix())
            self.problem = "" if whole else self.problem
            return whole

    def push(self) -> bool:
        """Bring every machine what the controller has written, and then the manifest that names it."""
        with self._lock:
            try:
                files = self._written()
                for userid, place in self._places.items():
                    if place.current:
                        self._bring(userid, place, files)
            except (AwsRefused, OSError) as error:
                self.problem = str(error)
                return False
            return True

    def _rounds(self) -> None:
        while not self._over.wait(POLL_S):
            self.poll()

    def _wanted(self, listed: list[Stored]) -> list[tuple[Stored, Path]]:
        """What is new, of each machine MOST_FILES in all: its records first, so that no flood of names drops one."""
        found: list[tuple[Stored, Path]] = []
        count: dict[str, int] = {}
        named = sorted(
            map(self._named, listed), key=lambda some: not some[2].startswith("records/")
        )
        for one, userid, name in named:
            place = self._places.get(userid)
            if place is None or not self._may(one, name, place):
                continue
            count[userid] = count.get(userid, 0) + 1
            if count[userid] <= MOST_FILES and self._have.get(one.key) != one.version:
                found.append((one, self._mailbox / f"node-{place.rank}" / name))
        return found

    def _named(self, one: Stored) -> tuple[Stored, str, str]:
        """With what the machine calls itself, and the name that it gave."""
        userid, _, name = one.key.removeprefix(self._under).partition("/out/")
        return one, userid, name

    def _may(self, one: Stored, name: str, place: Place) -> bool:
        """Whether an upload is one that a node of ours makes; a stranger's name or a flood is left where it is.

        IAM's `*` spans slashes: below the folder of another machine one may write <its own userid, with a colon>/out/.
        """
        kept = place.current or name.startswith(_KEPT)
        plain = _NAME.fullmatch(name) is not None and ".." not in name
        return kept and plain and one.size <= MOST_BYTES

    def _fetch(self, wanted: tuple[Stored, Path]) -> bool:
        one, path = wanted
        try:
            content, written = self._store.get(one.key, MOST_BYTES)
            _appear(_beside_another(path, one.key, content), content, written)
        except AwsRefused as error:
            self.problem = str(error)
            return error.kind == "gone"
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            self._have[one.key] = (
                one.version
            )  # a file where another upload has a folder: no node of ours does that
            return True
        except OSError as error:
            self.problem = str(error)
            return False
        self._have[one.key] = one.version
        return True

    def _written(self) -> dict[str, str]:
        """Digests of the controller's files for the nodes by name; a file is read when it was written anew."""
        digests = {}
        for file in sorted([*self._mailbox.glob("*.json"), *self._mailbox.glob("workloads/*")]):
            name = file.relative_to(self._mailbox).as_posix()
            if _OF_CONTROLLER.fullmatch(name):
                status = file.stat()
                mark = (status.st_ino, status.st_mtime_ns, status.st_size)
                if self._digests.get(name, (None, ""))[0] != mark:
                    self._digests[name] = (mark, hashlib.sha256(file.read_bytes()).hexdigest())
                digests[name] = self._digests[name][1]
        return digests

    def _bring(self, userid: str, place: Place, files: Mapping[str, str]) -> None:
        sent = self._sent.setdefault(userid, {})
        own = json.dumps({"node": place.rank, "nodes": place.nodes}).encode()
        digests = dict(files) | {"node.json": hashlib.sha256(own).hexdigest()}
        fresh = [name for name, digest in digests.items() if sent.get(name) != digest]
        if not fresh:
            return
        self._changed_at = self._own_unix()  # an answer may be near
        into = f"{self._under}{userid}/in/"
        for name in fresh:  # of one written since, the node waits for the manifest that has it
            self._store.put(
                into + name, own if name == "node.json" else (self._mailbox / name).read_bytes()
            )
        self._store.put(into + "manifest.json", json.dumps({"files": digests}).encode())
        sent.update({name: digests[name] for name in fresh})


def _beside_another(path: Path, key: str, content: bytes) -> Path:
    """Where a record goes: a machine that was replaced may have measured the same run, and neither record is lost."""
    if path.parent.name != "records" or not path.is_file() or path.read_bytes() == content:
        return path
    machine = key.partition("/out/")[0].rpartition(":")[2]
    return path.parents[1].with_name(f"{path.parents[1].name}-{machine}") / "records" / path.name


def _appear(path: Path, content: bytes, written: float) -> None:
    """All of it at once, as of when the store took it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.mirror")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        if (
            path.parent.name == "records"
        ):  # the lease will say durably that they are here, and none is fetched again
            os.fsync(file.fileno())
    os.utime(beside, (written, written))
    beside.replace(path)
