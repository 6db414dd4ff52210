"""Leases on disk, whatever their machines are: one directory each, whose lease.json is written before anything is asked
for and marked at the end.

<root>/<lease_id>/lease.json   what was started, and how it ended
                  mailbox/     what the nodes report; stays until it was loaded and the lease forgotten
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from models.domain.cluster import Cluster
from tasks.providers.base import EndedLease, Lease, LeaseUnreadable, ProviderError
from tasks.providers.local.processes import Process, boot_id, is_running, myself

SCHEMA = 1  # of lease.json; what an older version wrote has none
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError(f"{moment.isoformat()} has no time zone")
    return moment.astimezone(UTC)


Moment = Annotated[datetime, AfterValidator(_in_utc)]
"""Of a lease.json: read only where it says its time zone, and then in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """What every lease.json tells. `ended_at`, `usd` and `outcome` ("released" or "reaped") are set at the end."""

    lease_id: str
    cluster: str
    market: str
    usd_per_hour: float | None
    started_at: Moment
    deadline_at: Moment
    boot_id: str
    controller: Process
    ended_at: Moment | None = None
    usd: float | None = None
    outcome: str = ""
    schema: int = SCHEMA

    @classmethod
    def new(
        cls, cluster: Cluster, *, lease_id: str, deadline_s: float, now: datetime, **more: Any
    ) -> Self:
        """The lease of `cluster` from `now` on, held by this process; `more` is what its kind tells besides."""
        return cls(
            lease_id=lease_id,
            cluster=cluster.name,
            market="+".join(sorted({offer.market for offer in cluster.members})),
            usd_per_hour=cluster.usd_per_hour,
            started_at=now,
            deadline_at=now + timedelta(seconds=deadline_s),
            boot_id=boot_id(),
            controller=myself(),
            **more,
        )

    @property
    def controller_alive(self) -> bool:
        """Whether the very process that acquired it still runs."""
        return self.boot_id == boot_id() and is_running(self.controller)

    def why_end(self, now: datetime, *, all_of_them: bool) -> str:
        """Why it is to be ended while it is held; empty where it is not."""
        if not self.controller_alive:
            return f"its controller (process {self.controller.pid}) is gone"
        if now >= self.deadline_at:
            return f"its deadline was {self.deadline_at:%Y-%m-%d %H:%M:%S} UTC"
        return "everything was to be ended" if all_of_them else ""

    def held(self, provider: str) -> Lease:
        """As every provider states what is held."""
        return Lease(
            lease_id=self.lease_id,
            provider=provider,
            cluster=self.cluster,
            usd_per_hour=self.usd_per_hour,
            started_at=self.started_at,
            deadline_at=self.deadline_at,
            controller_pid=self.controller.pid,
            controller_alive=self.controller_alive,
        )

    def over(self, mailbox: Path) -> EndedLease:
        """As every provider states what has ended."""
        assert self.ended_at is not None
        return EndedLease(
            lease_id=self.lease_id,
            cluster=self.cluster,
            market=self.market,
            started_at=self.started_at,
            ended_at=self.ended_at,
            usd=self.usd,
            outcome=self.outcome,
            mailbox=mailbox,
        )


L = TypeVar("L", bound=HeldLease)


class LeaseFolder(Generic[L]):
    """The leases below `root`, each an instance of `kind`.

    `keys` have a default and stand in every lease.json all the same: one without them is of no version of Srift.
    """

    kind: type[L]
    keys: ClassVar[frozenset[str]] = frozenset({"ended_at"})

    def __init__(self, root: Path) -> None:
        self.root = root
        strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        one: Any = GenericAlias(tuple, (self.kind,))  # a dataclass alone takes no configuration
        self._form: TypeAdapter[tuple[L]] = TypeAdapter(one, config=strict)

    def parsed(self, lease_id: str, body: dict[str, Any]) -> L:
        """The lease that lease.json holds. Raises ValueError where any of it is not what this version writes."""
        schema = body.get("schema", 0)
        if type(schema) is not int or schema > SCHEMA:
            raise ValueError(f"a newer version of Srift wrote it (schema {schema!r})")
        if missing := self.keys - body.keys():
            raise ValueError(f"{min(missing)} is missing")
        (lease,) = self._form.validate_json(json.dumps([body]))
        if lease.lease_id != lease_id:
            raise ValueError(f"it tells of lease {lease.lease_id}")
        return lease

    def directory(self, lease_id: str) -> Path:
        """Raises ProviderError where the id is no plain name."""
        if NAME.match(lease_id) is None:
            raise ProviderError(
                f"lease id {lease_id!r}: only letters, digits, '_', '.' and '-' are allowed"
            )
        return self.root / lease_id

    def mailbox(self, lease_id: str) -> Path:
        """Where its nodes report."""
        return self.directory(lease_id) / "mailbox"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One acquisition or reaping at a time in this home; the kernel lets go when a holder dies."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def create(self, lease: L) -> Path:
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
            raise ProviderError(
                f"{directory} cannot be written, so nothing was started: {error.strerror}"
            ) from error
        return directory

    def write(self, lease: L) -> None:
        """Written beside, to the disk, and renamed: a reader sees all of it or the old one. Raises OSError."""
        replace_durably(self.directory(lease.lease_id) / "lease.json", asdict(lease))

    def read(self, lease_id: str) -> L | None:
        """None where there is no lease of that id. Raises LeaseUnreadable where there is one that cannot be read."""
        path = self.directory(lease_id) / "lease.json"
        body: Any = None
        try:
            body = json.loads(path.read_text())
            if not isinstance(body, dict):
                raise ValueError("it is no JSON object")
            return self.parsed(lease_id, body)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            why = why_unreadable(error)
            raise LeaseUnreadable(
                f"{path} cannot be read ({why}): the lease and its machines are left as they are. "
                "Make it readable, or use the version of Srift that wrote it; to give it up, move "
                f"{path.parent} out of {self.root}, and the next `srift reap` ends its machines",
                body=body if isinstance(body, dict) else None,
            ) from error

    def ids(self) -> list[str]:
        """Every lease that has a directory, ended or not, oldest name first."""
        if not self.root.is_dir():
            return []
        return sorted(
            path.name for path in self.root.iterdir() if path.is_dir() and NAME.match(path.name)
        )

    def read_all(self) -> tuple[list[L], dict[str, LeaseUnreadable]]:
        """Every readable lease, ended or not; and by its id why each of the others cannot be read."""
        found: list[L] = []
        unreadable: dict[str, LeaseUnreadable] = {}
        for lease_id in self.ids():
            try:
                lease = self.read(lease_id)
            except LeaseUnreadable as error:
                unreadable[lease_id] = error
                continue
            found += [] if lease is None else [lease]
        return found, unreadable

    def all(self) -> list[L]:
        """Every readable lease, ended or not."""
        return self.read_all()[0]

    def known(self) -> list[L]:
        """Every lease, ended or not. Raises LeaseUnreadable where one cannot be read: what it holds nobody knows."""
        found, unreadable = self.read_all()
        for error in unreadable.values():
            raise error
        return found

    def unknown(self, lease_id: str, error: LeaseUnreadable, provider: str) -> Lease:
        """As every provider states a lease that cannot be read: nothing is known of its controller or its dollars."""
        try:
            moment = datetime.fromtimestamp(self.directory(lease_id).stat().st_mtime, UTC)
        except OSError:
            moment = datetime.fromtimestamp(0.0, UTC)
        return Lease(
            lease_id=lease_id,
            provider=provider,
            cluster="",
            usd_per_hour=None,
            started_at=moment,
            deadline_at=moment,
            controller_pid=0,
            controller_alive=True,
            problem=str(error),
        )

    def forget(self, lease_id: str) -> None:
        """Delete a lease's directory, mailbox included. Nothing happens where it is gone already."""
        shutil.rmtree(self.directory(lease_id), ignore_errors=True)

    def forget_ended(self, lease_id: str) -> None:
        """As `forget`. Raises ProviderError while it is held, or where nobody can tell."""
        lease = self.read(lease_id)
        if lease is not None and lease.ended_at is None:
            raise ProviderError(f"lease {lease_id} is still held; end it first: srift reap")
        self.forget(lease_id)

    def set_aside(self, lease_id: str) -> Path | None:
        """Move the mailbox of a lease that nothing tells of to home/rejected, and forget the lease.

        Returns where it lies now, or None where the nodes had recorded nothing. Raises ProviderError; then all stays.
        """
        mailbox, target = self.mailbox(lease_id), None
        if any(mailbox.glob("node-*/records/*.json")):
            rejected = self.root.parent / "rejected"
            names = (f"{lease_id}.{number}" if number else lease_id for number in count())
            target = next(rejected / name for name in names if not (rejected / name).exists())
            try:
                rejected.mkdir(exist_ok=True)
                mailbox.rename(target)
            except OSError as error:
                raise ProviderError(
                    f"lease {lease_id}: {mailbox} cannot be moved to {target}: {error}"
                ) from error
        self.forget(lease_id)
        return target


def replace_durably(path: Path, body: Any) -> None:
    """JSON beside `path`, to the disk, and renamed. Raises OSError; then `path` is as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            json.dump(body, file, default=datetime.isoformat, indent=1)
            file.flush()
            os.fsync(
                file.fileno()
            )  # else a machine that loses power keeps the name of a file without its content
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def why_unreadable(error: Exception) -> str:
    """Why a file of JSON cannot be read, in one line."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"
