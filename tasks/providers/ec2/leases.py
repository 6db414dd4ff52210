"""EC2's leases: HOME/leases-ec2/<lease_id>/lease.json, written before any request that costs money.

A lease has every request for machines, so that the reaper can end and count what a killed
controller never heard of. Machines are found by their tags.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from ..base import EndedLease, Lease, ProviderError
from ..leases import HeldLease, LeaseFolder, Moment, replace_durably, why_unreadable
from .attempts import LEAST_BILLED_S
from .settings import Region

_REMEMBERED = timedelta(days=30)
_SWEPT = TypeAdapter(dict[Region, Moment], config=ConfigDict(strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Machine:
    """One instance. `usd_per_hour` includes volume and address.

    `current`: it is in the cluster, with a `rank`. `group`: of the request it came from.
    """

    instance_id: str
    usd_per_hour: float
    launched_at: Moment
    group: str
    ended_at: Moment | None = None
    rank: int = -1
    instance_type: str = ""
    market: str = ""
    zone: str = ""
    address: str = ""
    current: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRequest:
    """One fleet. `group` is in the tag srift:node-group; `usd_per_hour` the most of one machine.

    `answered`: it is known which machines came of it.
    """

    group: str
    size: int
    usd_per_hour: float
    asked_at: Moment
    answered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Lease(HeldLease):
    """The content of lease.json.

    `releasing`: the machines are to be ended, and that has failed so far. `fetched`: the mailbox
    has all uploads of the nodes. `home` is the token of its home; `deployment`, `bucket` and
    `prefix` are those of srift.toml when the lease was made. `refusals`: a sentence for each refused attempt.
    """

    region: Region
    home: str
    deployment: str
    bucket: str
    prefix: str
    role_id: str
    machines: tuple[Ec2Machine, ...] = ()
    requests: tuple[FleetRequest, ...] = ()
    refusals: tuple[str, ...] = ()
    releasing: bool = False
    fetched: bool = False

    @property
    def is_held(self) -> bool:
        return self.ended_at is None or not self.fetched

    @property
    def tags(self) -> dict[str, str]:
        """Tags by which all machines of the lease are found."""
        return {
            "srift:lease": self.lease_id,
            "srift:deployment": self.deployment,
            "srift:controller": self.home,
        }

    @property
    def objects(self) -> str:
        """Prefix of all objects of the lease in its bucket."""
        return f"{self.prefix}/leases/{self.lease_id}/"

    @property
    def by_userid(self) -> dict[str, Ec2Machine]:
        """Machines that had a rank by their aws:userid, which names their folder in the bucket."""
        ranked = [machine for machine in self.machines if machine.rank >= 0]
        return {f"{self.role_id}:{machine.instance_id}": machine for machine in ranked}

    @property
    def current(self) -> list[Ec2Machine]:
        """The cluster, in rank order."""
        found = [machine for machine in self.machines if machine.current]
        return sorted(found, key=lambda machine: machine.rank)

    def with_request(self, request: FleetRequest) -> Ec2Lease:
        """With `request` in place of the one of its group."""
        others = tuple(sent for sent in self.requests if sent.group != request.group)
        return replace(self, requests=(*others, request))

    def with_machines(self, *machines: Ec2Machine) -> Ec2Lease:
        """With `machines` in place of those with the same ids."""
        by_id = {machine.instance_id: machine for machine in (*self.machines, *machines)}
        return replace(self, machines=tuple(by_id.values()))

    def held(self, provider: str) -> Lease:
        return _Held(**asdict(HeldLease.held(self, provider)), machines=self.machines)

    def over(self, mailbox: Path) -> EndedLease:
        return replace(HeldLease.over(self, mailbox), refusals=self.refusals)

    def usd_until(self, now: datetime) -> float:
        return _usd_until(self.machines, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held(Lease):
    machines: tuple[Ec2Machine, ...]

    def usd_until(self, now: datetime) -> float | None:
        return _usd_until(self.machines, now)


def _usd_until(machines: Iterable[Ec2Machine], now: datetime) -> float:
    """Dollars of all machines, also of refused attempts."""
    usd = 0.0
    for machine in machines:
        seconds = ((machine.ended_at or now) - machine.launched_at).total_seconds()
        usd += machine.usd_per_hour * max(LEAST_BILLED_S, seconds) / 3600
    return usd


class Ec2Leases(LeaseFolder[Ec2Lease]):
    """The leases of one home, and when the reaper looked through each region."""

    kind = Ec2Lease

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases-ec2")
        self.swept_file = self.root / ".swept.json"

    @property
    def token(self) -> str:
        """A random name of this home, in the tag srift:controller. Raises OSError."""
        file = self.root / ".token"
        with suppress(FileNotFoundError):
            return file.read_text().strip()
        self.root.mkdir(parents=True, exist_ok=True)
        beside = self.root / f".token.{os.getpid()}"
        beside.write_text(uuid.uuid4().hex[:12])
        with suppress(FileExistsError):
            os.link(beside, file)  # of two controllers the first wins
        beside.unlink()
        return file.read_text().strip()

    def swept(self) -> dict[str, datetime]:
        """Region -> when the reaper last looked through all of it. Raises ProviderError."""
        try:
            return _SWEPT.validate_json(self.swept_file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ProviderError(
                f"{self.swept_file} cannot be read ({why_unreadable(error)}). Machines may run in "
                "regions that srift.toml no longer names: look there, then delete the file"
            ) from error

    def used_regions(self, now: datetime) -> list[str]:
        """Regions swept in the last 30 days: nothing was bought elsewhere. Raises ProviderError."""
        return [region for region, moment in self.swept().items() if now - moment < _REMEMBERED]

    def note_swept(self, regions: Iterable[str], now: datetime) -> None:
        """A full disk changes nothing: an unrecorded sweep does not count."""
        with suppress(OSError, ProviderError):
            self.root.mkdir(parents=True, exist_ok=True)
            replace_durably(self.swept_file, self.swept() | dict.fromkeys(regions, now))

    def close(self, lease: Ec2Lease, now: datetime, outcome: str) -> Ec2Lease:
        """Mark a lease without machines as ended; forget it if nothing was ever refused or bought.

        A full disk leaves that to the reaper.
        """
        if not lease.machines and not lease.refusals:
            self.forget(lease.lease_id)
            return lease
        lease = replace(
            lease,
            machines=tuple(
                replace(machine, ended_at=machine.ended_at or now) for machine in lease.machines
            ),
            ended_at=now,
            outcome=outcome if lease.machines else "refused",
            releasing=False,
            usd=lease.usd_until(now),
            fetched=lease.fetched or not lease.machines,
        )
        with suppress(OSError):
            self.write(lease)
        return lease


def utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)
