"""Leases on disk: one directory each, whose lease.json is written before anything is started and marked at the end.

leases/<lease_id>/lease.json   what was started, and how it ended
                  mailbox/     what the nodes report; stays until it was loaded and the lease forgotten
                  code/node/   the agent's copy, so that an edit of the checkout never reaches a running host
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from tasks.providers.base import Lease, ProviderError
from tasks.providers.local_cpu import CpuShares, remove
from tasks.providers.local_processes import Process, boot_id, end, is_running, of_environment

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
_ROUNDS = 5  # of looking for what was started while others were being ended


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLease:
    """The content of lease.json. `ended_at`, `usd` and `outcome` ("released" or "reaped") are set at the end."""

    lease_id: str
    cluster: str
    market: str
    usd_per_hour: float | None
    started_at: datetime
    deadline_at: datetime
    boot_id: str
    controller: Process
    processes: tuple[Process, ...] = ()
    groups: tuple[str, ...] = ()
    ended_at: datetime | None = None
    usd: float | None = None
    outcome: str = ""

    @property
    def controller_alive(self) -> bool:
        """Whether the very process that acquired it still runs."""
        return self.boot_id == boot_id() and is_running(self.controller)

    def public(self) -> Lease:
        """As every provider states it."""
        return Lease(
            lease_id=self.lease_id,
            provider="local",
            cluster=self.cluster,
            usd_per_hour=self.usd_per_hour,
            started_at=self.started_at,
            deadline_at=self.deadline_at,
            controller_pid=self.controller.pid,
            controller_alive=self.controller_alive,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What ending a lease found still there."""

    processes: int
    groups: int


class LeaseStore:
    """The leases of one home. `token` tells its hosts and groups from another home's."""

    def __init__(self, home: Path) -> None:
        self.root = home.resolve() / "leases"
        self.token = sha256(os.fsencode(self.root)).hexdigest()[:8]

    @property
    def prefix(self) -> str:
        """How the names of this home's CPU groups begin."""
        return f"srift-{self.token}-"

    def directory(self, lease_id: str) -> Path:
        """Raises ProviderError where the id is no plain name."""
        if _NAME.match(lease_id) is None:
            raise ProviderError(f"lease id {lease_id!r}: only letters, digits, '_', '.' and '-' are allowed")
        return self.root / lease_id

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One acquisition or reaping at a time in this home; the kernel lets go when a holder dies."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def create(self, lease: LocalLease) -> Path:
        """The lease's new directory, with lease.json in it. Raises ProviderError where there is one already."""
        directory = self.directory(lease.lease_id)
        try:
            directory.mkdir()
        except FileExistsError:
            raise ProviderError(f"lease {lease.lease_id} exists already") from None
        try:
            self.write(lease)
        except OSError as error:
            self.forget(lease.lease_id)
            raise ProviderError(f"{directory} cannot be written, so nothing was started: {error.strerror}") from error
        return directory

    def write(self, lease: LocalLease) -> None:
        """Written beside, to the disk, and renamed: a reader sees all of it or the old one. Raises OSError."""
        path = self.directory(lease.lease_id) / "lease.json"
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            with beside.open("w") as file:
                json.dump(asdict(lease), file, default=datetime.isoformat, indent=1)
                file.flush()
                os.fsync(file.fileno())  # else a machine that loses power keeps the name of a file without its content
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def read(self, lease_id: str) -> LocalLease | None:
        """None where there is no readable lease of that id."""
        try:
            return _parse(json.loads((self.directory(lease_id) / "lease.json").read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def ids(self) -> list[str]:
        """Every lease that has a directory, ended or not, oldest name first."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and _NAME.match(path.name))

    def end(self, lease_id: str, shares: CpuShares) -> Ended:
        """Kill whatever belongs to a lease and remove its CPU groups; nothing is left when this returns.

        Raises ProviderError naming what would not end.
        """
        lease = self.read(lease_id)
        recorded = lease.processes if lease is not None and lease.boot_id == boot_id() else ()
        groups = {Path(group) for group in (lease.groups if lease else ())}
        groups |= set(shares.groups(f"{self.prefix}{lease_id}-"))
        killed = set(end(recorded))
        code = self.directory(lease_id) / "code"
        for _ in range(_ROUNDS):
            left = {process for process, _ in of_environment("PYTHONPATH", code)}
            if not left:
                break
            killed |= set(end(left))
        try:
            removed = sum(remove(group) for group in groups if group.name.startswith(self.prefix))
        except OSError as error:
            raise ProviderError(f"lease {lease_id}: {error.filename} is still busy; run `srift reap` again") from error
        return Ended(processes=len(killed), groups=removed)

    def close(self, lease_id: str, now: datetime, outcome: str) -> LocalLease | None:
        """Mark a lease ended, once, and drop its code; its mailbox stays. A full disk leaves it to the reaper."""
        lease = self.read(lease_id)
        if lease is None or lease.ended_at is not None:
            return lease
        lease = replace(
            lease, ended_at=now, usd=lease.public().usd_until(now), outcome=outcome, processes=(), groups=()
        )
        directory = self.directory(lease_id)
        shutil.rmtree(directory / "code", ignore_errors=True)
        shutil.rmtree(directory / "scratch", ignore_errors=True)
        with suppress(OSError):
            self.write(lease)
        return lease

    def forget(self, lease_id: str) -> None:
        """Delete a lease's directory, mailbox included. Nothing happens where it is gone already."""
        shutil.rmtree(self.directory(lease_id), ignore_errors=True)

    def set_aside(self, lease_id: str) -> Path | None:
        """Move the mailbox of a lease that nothing tells of to home/rejected, and forget the lease.

        Returns where it lies now, or None where the nodes had recorded nothing. Raises ProviderError; then all stays.
        """
        mailbox, target = self.directory(lease_id) / "mailbox", None
        if any(mailbox.glob("node-*/records/*.json")):
            rejected = self.root.parent / "rejected"
            names = (f"{lease_id}.{number}" if number else lease_id for number in count())
            target = next(rejected / name for name in names if not (rejected / name).exists())
            try:
                rejected.mkdir(exist_ok=True)
                mailbox.rename(target)
            except OSError as error:
                raise ProviderError(f"lease {lease_id}: {mailbox} cannot be moved to {target}: {error}") from error
        self.forget(lease_id)
        return target

    def stray_ids(self, shares: CpuShares) -> set[str]:
        """Lease ids of this home's processes and CPU groups, whether or not a directory tells of them."""
        names = {path.name.removeprefix(self.prefix).rpartition("-")[0] for path in shares.groups(self.prefix)}
        for _, path in of_environment("PYTHONPATH", self.root):
            names.add(path.relative_to(self.root).parts[0])
        return {name for name in names if _NAME.match(name)}


def _parse(body: dict[str, Any]) -> LocalLease:
    for key in ("started_at", "deadline_at", "ended_at"):
        body[key] = None if body[key] is None else datetime.fromisoformat(body[key])
    body["controller"] = Process(**body["controller"])
    body["processes"] = tuple(Process(**one) for one in body["processes"])
    body["groups"] = tuple(body["groups"])
    return LocalLease(**body)
