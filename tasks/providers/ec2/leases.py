"""Leases of EC2's machines: HOME/leases-ec2/<lease_id>/lease.json, written before a request that may cost money.

It tells what was asked under which token and when, so that whoever comes after a killed controller asks the same again
or ends what came of it; machines themselves are found by their tags.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from tasks.providers.base import EndedLease, Lease, ProviderError
from tasks.providers.ec2.capacity_ladder import LEAST_BILLED_S
from tasks.providers.leases import HeldLease, LeaseFolder, Moment, replace_durably, why_unreadable

_REGION = r"^[a-z]{2}(-[a-z]+)+-\d$"
_LOOKED_FOR = timedelta(
    days=30
)  # after its last lease: four times the longest that a machine may live
_SWEPT: TypeAdapter[dict[str, Moment]] = TypeAdapter(
    dict[str, Moment], config=ConfigDict(strict=True)
)
_USED: TypeAdapter[dict[str, dict[str, Moment]]] = TypeAdapter(
    dict[Annotated[str, Field(pattern=_REGION)], dict[str, Moment]], config=ConfigDict(strict=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance that was ours. `usd_per_hour` has its volume and address in it; `current` until it is replaced."""

    rank: int
    instance_id: str
    instance_type: str
    market: str
    zone: str
    usd_per_hour: float | None
    launched_at: Moment
    ended_at: Moment | None = None
    address: str = ""
    group: str = ""
    current: bool = True

    def usd_until(self, now: datetime) -> float | None:
        """What it has cost; None where its price is unknown."""
        seconds = ((self.ended_at or now) - self.launched_at).total_seconds()
        return (
            None
            if self.usd_per_hour is None
            else self.usd_per_hour * max(LEAST_BILLED_S, seconds) / 3600
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One group of machines that was asked for. `code` is AWS's refusal; `answered` tells that an answer was heard.

    `asked_at` is when it was first asked for, from which the machines' own end is counted; `tried_at` when the newest
    request for machines was sent, None where none was, or in a lease of an older version. `attempt` counts the fleets
    that were asked for it, each under a token of its own.
    """

    group: str  # "<rung>.<group>", and "r<node>.<times>" for a replacement; in the tag srift:node-group too
    rung: int
    asked_at: Moment
    usd_per_hour: float | None = None  # of one machine
    size: int = 1
    answered: bool = False
    code: str = ""
    fleet_id: str = ""
    attempt: int = 0
    tried_at: Moment | None = None

    @property
    def newest_at(self) -> datetime:
        """When the newest request was sent, as far as is known."""
        return self.tried_at or self.asked_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One rung that was not to be had: where, AWS's code, and the sentence."""

    rung: int
    market: str
    zone: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Lease(HeldLease):
    """The content of lease.json.

    `handed_over`: the machines ran and a controller took them. `releasing`: they are to be ended, and it did not
    work yet; `note` says why. `fetched`: everything that the nodes had uploaded lies in the mailbox.

    `deployment`, `bucket` and `prefix` are those of srift.toml when it was made: its machines have that tag and report
    there, whatever stands in srift.toml later. Empty in a lease of an older version.
    """

    region: Annotated[str, Field(pattern=_REGION)]
    deployment: str = ""
    bucket: str = ""
    prefix: str = ""
    image_id: str = ""
    role_id: str = ""
    code_sha256: str = ""
    security_group: str = ""
    machines: tuple[Machine, ...] = ()
    asked: tuple[Asked, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    handed_over: bool = False
    releasing: bool = False
    fetched: bool = False
    note: str = ""

    @property
    def userids(self) -> dict[str, Machine]:
        """Each machine by what it calls itself in the store."""
        return {f"{self.role_id}:{one.instance_id}": one for one in self.machines}

    @property
    def current(self) -> list[Machine]:
        """The cluster, in rank order."""
        return sorted((one for one in self.machines if one.current), key=lambda one: one.rank)

    def request_of(self, group: str) -> Asked | None:
        """What was asked under that name; None where nothing was."""
        return next((one for one in self.asked if one.group == group), None)

    def with_request(self, one: Asked) -> Ec2Lease:
        """With `one` in place of what was known of that group."""
        others = tuple(other for other in self.asked if other.group != one.group)
        return replace(self, asked=(*others, one))

    def with_machines(self, *machines: Machine) -> Ec2Lease:
        """With `machines` in place of what was known of them."""
        known = {one.instance_id: one for one in self.machines} | {
            one.instance_id: one for one in machines
        }
        return replace(self, machines=tuple(known.values()))

    def held(self, provider: str) -> Lease:
        """As every provider states what is held, with the dollars of each machine."""
        held = HeldLease.held(self, provider)
        return _Held(
            **{one.name: getattr(held, one.name) for one in fields(held)}, machines=self.machines
        )

    def over(self, mailbox: Path) -> EndedLease:
        """As every provider states what has ended, and the rungs that were refused."""
        over = HeldLease.over(self, mailbox)
        return replace(over, refusals=tuple(one.reason for one in self.refusals))

    def usd_until(self, now: datetime) -> float | None:
        """What all machines have cost, also those of refused rungs; None where a price is unknown."""
        return _usd_until(self.machines, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held(Lease):
    machines: tuple[Machine, ...]

    def usd_until(self, now: datetime) -> float | None:
        """What each machine has cost since its own launch, with its volume, address and requests."""
        return _usd_until(self.machines, now)


def _usd_until(machines: Iterable[Machine], now: datetime) -> float | None:
    costs = [one.usd_until(now) for one in machines]
    known = [usd for usd in costs if usd is not None]
    return sum(known) if len(known) == len(costs) else None


class Ec2Leases(LeaseFolder[Ec2Lease]):
    """The leases of one home."""

    kind = Ec2Lease

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases-ec2")

    @property
    def token(self) -> str:
        """Tells this home's machines from any other's, on whatever computer; drawn once. Raises OSError."""
        file = self.root / ".token"
        with suppress(FileNotFoundError):
            return file.read_text().strip()
        self.root.mkdir(parents=True, exist_ok=True)
        beside = self.root / f".token.{os.getpid()}"
        beside.write_text(uuid.uuid4().hex[:12])
        with suppress(FileExistsError):
            os.link(beside, file)  # the first one stays
        beside.unlink()
        return file.read_text().strip()

    @property
    def _swept_file(self) -> Path:
        return self.root / ".swept.json"

    def swept(self) -> dict[str, datetime]:
        """By region when the reaper last looked through it and ended all that it had to; what is unreadable is not."""
        try:
            return _SWEPT.validate_json(self._swept_file.read_bytes())
        except (OSError, ValueError):
            return {}

    def note_swept(self, regions: Iterable[str], now: datetime) -> None:
        """Durably. A full disk leaves it as it was: what is not noted counts as not swept."""
        with suppress(OSError):
            self.root.mkdir(parents=True, exist_ok=True)
            replace_durably(self._swept_file, self.swept() | dict.fromkeys(regions, now))

    @property
    def used_file(self) -> Path:
        """Region -> deployment name -> when a lease last had them. It outlives the leases: machines may too."""
        return self.root / ".regions.json"

    def used(self, now: datetime) -> list[tuple[str, str]]:
        """Regions and deployment names of leases of the last weeks. Raises ProviderError where nobody can tell."""
        since = now - _LOOKED_FOR
        return [
            (one, name)
            for one, names in self._used().items()
            for name in names
            if names[name] >= since
        ]

    def note_used(self, region: str, deployment: str, now: datetime) -> None:
        """Durably, and nothing where `region` is no name of one. Raises OSError, and ProviderError as `used`."""
        if re.match(_REGION, region):
            found = self._used()
            replace_durably(
                self.used_file, found | {region: found.get(region, {}) | {deployment: now}}
            )

    def _used(self) -> dict[str, dict[str, datetime]]:
        try:
            return _USED.validate_json(self.used_file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ProviderError(
                f"{self.used_file} cannot be read ({why_unreadable(error)}): it tells in which regions, and under "
                "which names of the deployment, machines of this home may run besides those in srift.toml. Make it "
                "readable, or delete it once no machine with the tag srift:deployment is left in any other region"
            ) from error

    def create(self, lease: Ec2Lease) -> Path:
        """As every lease's, once its region and deployment are noted."""
        try:
            self.note_used(lease.region, lease.deployment, lease.started_at)
        except OSError as error:
            raise ProviderError(
                f"{self.used_file} cannot be written, so nothing was started: {error.strerror}"
            ) from error
        return LeaseFolder.create(self, lease)

    def close(self, lease: Ec2Lease, now: datetime, outcome: str) -> Ec2Lease:
        """Mark it ended, now that its machines are. A full disk leaves it to the reaper."""
        over = tuple(one if one.ended_at else replace(one, ended_at=now) for one in lease.machines)
        lease = replace(
            lease, machines=over, ended_at=now, outcome=outcome, releasing=False, note=""
        )
        lease = replace(lease, usd=lease.usd_until(now), fetched=lease.fetched or not over)
        with suppress(OSError):
            self.write(lease)
        return lease


def utc(moment: datetime) -> datetime:
    """AWS's moments in our zone, so that a lease reads alike everywhere."""
    return moment.astimezone(UTC)
