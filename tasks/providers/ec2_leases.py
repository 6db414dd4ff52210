"""Leases of EC2's machines: HOME/leases-ec2/<lease_id>/lease.json, written before a request that may cost money.

It tells what was asked under which token and when, so that whoever comes after a killed controller asks the same again
or ends what came of it; machines themselves are found by their tags.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.providers.base import EndedLease
from tasks.providers.ec2_ladder import LEAST_BILLED_S
from tasks.providers.lease_folder import HeldLease, LeaseFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance that was ours. `usd_per_hour` has its volume and address in it; `current` until it is replaced."""

    rank: int
    instance_id: str
    instance_type: str
    market: str
    zone: str
    usd_per_hour: float | None
    launched_at: datetime
    ended_at: datetime | None = None
    address: str = ""
    group: str = ""
    current: bool = True

    def usd_until(self, now: datetime) -> float | None:
        """What it has cost; None where its price is unknown."""
        seconds = ((self.ended_at or now) - self.launched_at).total_seconds()
        return None if self.usd_per_hour is None else self.usd_per_hour * max(LEAST_BILLED_S, seconds) / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One group of machines that was asked for. `code` is AWS's refusal; `answered` tells that an answer was heard."""

    group: str  # "<rung>.<group>", and "r<node>.<times>" for a replacement; in the tag srift:node-group too
    rung: int
    asked_at: datetime
    usd_per_hour: float | None = None  # of one machine
    size: int = 1
    answered: bool = False
    code: str = ""
    fleet_id: str = ""


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
    """

    region: str
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

    def asked_for(self, group: str) -> Asked | None:
        """What was asked under that name; None where nothing was."""
        return next((one for one in self.asked if one.group == group), None)

    def asking(self, one: Asked) -> Ec2Lease:
        """With `one` in place of what was known of that group."""
        others = tuple(other for other in self.asked if other.group != one.group)
        return replace(self, asked=(*others, one))

    def having(self, *machines: Machine) -> Ec2Lease:
        """With `machines` in place of what was known of them."""
        known = {one.instance_id: one for one in self.machines} | {one.instance_id: one for one in machines}
        return replace(self, machines=tuple(known.values()))

    def over(self, mailbox: Path) -> EndedLease:
        """As every provider states what has ended, and the rungs that were refused."""
        over = HeldLease.over(self, mailbox)
        return replace(over, refusals=tuple(one.reason for one in self.refusals))

    def usd_until(self, now: datetime) -> float | None:
        """What all machines have cost, also those of refused rungs; None where a price is unknown."""
        costs = [one.usd_until(now) for one in self.machines]
        known = [usd for usd in costs if usd is not None]
        return sum(known) if len(known) == len(costs) else None


class Ec2Leases(LeaseFolder[Ec2Lease]):
    """The leases of one home."""

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases-ec2")

    def parsed(self, body: dict[str, Any]) -> Ec2Lease:
        """The lease in lease.json."""
        body["machines"] = tuple(Machine(**_dated(one, "launched_at", "ended_at")) for one in body["machines"])
        body["asked"] = tuple(Asked(**_dated(one, "asked_at")) for one in body["asked"])
        body["refusals"] = tuple(Refusal(**one) for one in body["refusals"])
        return Ec2Lease(**body)

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

    def close(self, lease: Ec2Lease, now: datetime, outcome: str) -> Ec2Lease:
        """Mark it ended, now that its machines are. A full disk leaves it to the reaper."""
        over = tuple(one if one.ended_at else replace(one, ended_at=now) for one in lease.machines)
        lease = replace(lease, machines=over, ended_at=now, outcome=outcome, releasing=False, note="")
        lease = replace(lease, usd=lease.usd_until(now), fetched=lease.fetched or not over)
        with suppress(OSError):
            self.write(lease)
        return lease


def _dated(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    return body | {key: datetime.fromisoformat(body[key]) if body[key] else None for key in keys}


def utc(moment: datetime) -> datetime:
    """AWS's moments in our zone, so that a lease reads alike everywhere."""
    return moment.astimezone(UTC)
