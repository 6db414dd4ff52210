"""Store the lease (the record) of each launch in a folder.

lease.json is written before machines are requested, so that no machine runs without a record.

<root>/<lease_id>/lease.json   what was started, and how the launch ended
                  controller   lock file, held by the process that launched the machines
                  mailbox/     the machines' files, kept until the warehouse has loaded them

A launch counts as abandoned if no process holds the lock. The kernel releases the lock when the
process dies.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from .base import Lease, LeaseUnreadable, ProviderError

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
# {folder of a lease: file descriptor of the lock that this process holds}
_CONTROLLED: dict[Path, int] = {}


L = TypeVar("L", bound=Lease)


class LeaseFolder(Generic[L]):
    """The leases (records of launches) in the folder `root`.

    kind: the class of the leases, `Lease` or a subclass.
    """

    kind: type[L]

    def __init__(self, root: Path) -> None:
        self.root = root
        self._schema = TypeAdapter(self.kind)

    def directory(self, lease_id: str) -> Path:
        """Return the folder of a lease. Raises ProviderError if the id is not a valid name."""
        if NAME.match(lease_id) is None:
            raise ProviderError(
                f"lease id {lease_id!r} must begin with a letter or digit, and consist of letters, "
                "digits, '_', '.' and '-'"
            )
        return self.root / lease_id

    def mailbox(self, lease_id: str) -> Path:
        return self.directory(lease_id) / "mailbox"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for an exclusive lock on this folder, and hold the lock during the block.

        Callers must hold the lock to create or reap (end) leases.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def create(self, lease: L) -> None:
        """Create the lease's folder with lease.json, a mailbox, and a locked file `controller`.

        The lock shows other processes that this process is alive. Raises ProviderError if the lease
        exists already, and OSError if lease.json cannot be written.
        """
        directory = self.directory(lease.lease_id)
        try:
            self.mailbox(lease.lease_id).mkdir(parents=True)
        except FileExistsError:
            raise ProviderError(f"lease {lease.lease_id} exists already") from None
        try:
            lock = os.open(directory / "controller", os.O_CREAT | os.O_WRONLY, 0o644)
            _CONTROLLED[directory] = lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write(lease)
        except OSError:
            self.forget(lease.lease_id)
            raise

    def _controller_alive(self, lease_id: str) -> bool:
        """Return True if the process that created the lease is alive or cannot be checked."""
        try:  # unlike a PID, a file lock also works between containers
            with (self.directory(lease_id) / "controller").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:  # the lock is held, or the file is unreadable
            return True
        return False

    def release(self, lease_id: str) -> None:
        """Release this process's lock on the lease. The launch then counts as abandoned."""
        descriptor = _CONTROLLED.pop(self.directory(lease_id), None)
        if descriptor is not None:
            os.close(descriptor)

    def write(self, lease: L) -> None:
        """Write lease.json atomically. Raises OSError on failure."""
        body = self._schema.dump_json(lease, indent=1)
        write_durably(self.directory(lease.lease_id) / "lease.json", body)

    def read(self, lease_id: str) -> L | None:
        """Return the lease with this id; None if it has no lease.json.

        Raises LeaseUnreadable if the file exists but is not a valid lease with this id.
        """
        path = self.directory(lease_id) / "lease.json"
        try:
            lease = self._schema.validate_json(path.read_bytes())
            if lease.lease_id != lease_id:
                raise ValueError(f"the file's lease_id is {lease.lease_id}, not {lease_id}")
            return replace(
                lease,
                mailbox=self.mailbox(lease_id),
                controller_alive=self._controller_alive(lease_id),
                problem="",
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise LeaseUnreadable(
                f"{path} cannot be read ({error}), so the machines of this launch were not ended. "
                f"Fix the file, or move the folder {path.parent} out of {self.root}. Then run "
                "`srift reap`"
            ) from error

    def ids(self) -> list[str]:
        """Return the ids of all leases that have a folder, whether they have ended or not."""
        paths = self.root.glob("*")
        return sorted(path.name for path in paths if path.is_dir() and NAME.match(path.name))

    def known(self) -> list[L]:
        """Return every lease, including ended leases.

        Raises LeaseUnreadable if any lease cannot be read.
        """
        return [lease for lease_id in self.ids() if (lease := self.read(lease_id))]

    def stored(self) -> list[Lease]:
        """Return every lease, including ended leases and unreadable leases.

        The `problem` of an unreadable lease says why the lease cannot be read.
        """
        found: list[Lease] = []
        for lease_id in self.ids():
            try:
                if lease := self.read(lease_id):
                    found.append(lease)
            except LeaseUnreadable as error:
                moment = datetime.fromtimestamp(self.directory(lease_id).stat().st_mtime, UTC)
                found.append(
                    Lease(
                        lease_id=lease_id,
                        cluster="",
                        market="",
                        usd_per_hour=None,
                        started_at=moment,
                        deadline_at=moment,
                        controller=0,
                        problem=str(error),
                    )
                )
        return found

    def held(self) -> list[Lease]:
        """Return the leases that may have running machines, or files that are not yet downloaded.

        Unreadable leases are included.
        """
        return [lease for lease in self.stored() if lease.is_held]

    def forget(self, lease_id: str) -> None:
        """Delete a lease's folder with its mailbox."""
        self.release(lease_id)
        shutil.rmtree(self.directory(lease_id), ignore_errors=True)

    def forget_ended(self, lease_id: str) -> None:
        """Delete an ended lease with its folder.

        Raises ProviderError if the lease has not ended or cannot be read.
        """
        lease = self.read(lease_id)
        if lease is not None and lease.ended_at is None:
            raise ProviderError(
                f"lease {lease_id} has not ended: its machines may be running. "
                "Run `srift reap` to end them first"
            )
        self.forget(lease_id)

    def forget_without_records(self, lease_id: str) -> str:
        """Delete the folder of a lease that has no lease.json, unless it has measurement records.

        Returns a sentence that says where the records are, or that there are none.
        """
        mailbox = self.mailbox(lease_id)
        if any(mailbox.glob("node-*/records/*.json")):
            return f"its records stay in {mailbox}: delete or move this folder"
        self.forget(lease_id)
        return "it has no records"


def write_durably(path: Path, content: bytes, modified_unix: float | None = None) -> None:
    """Write `content` to `path` atomically, and wait until it is on disk.

    modified_unix: the file's modification time; None means now.

    Raises OSError on failure.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # without fsync, a power loss may leave a renamed file empty
        if modified_unix is not None:
            os.utime(beside, (modified_unix,) * 2)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
