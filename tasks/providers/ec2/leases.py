"""Store the leases (records of launches) of EC2: SRIFT_HOME/leases-ec2/<lease_id>/lease.json.

A lease lists every request for machines of one launch. Each request is written to disk before it is
sent. If the launching process is killed, the reaper finds the machines of these requests by their
tags. The reaper then ends the machines and computes their cost.
"""

import json
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from ..base import Lease, ProviderError
from ..leases import LeaseFolder, write_durably
from .api import Filters
from .attempts import LEAST_BILLED_S
from .settings import Region

_SWEPT = TypeAdapter(dict[Region, AwareDatetime], config=ConfigDict(strict=True))
_Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SPENT = TypeAdapter(dict[str, tuple[str, _Dollars]])
STATED = "stated-"  # a statement in the cost file has this prefix and its time as its key
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ec2Machine:
    """One EC2 instance of a launch.

    usd_per_hour: the price, including the volume, the public IP address and S3 requests.
    group: the `group` of the `FleetRequest` that launched the machine.
    current: True if the whole cluster has started and the machine has not been replaced.
    rank: index in the cluster; -1 if EC2's response was lost and the machine was found by its tags.
    download_usd: an upper bound in dollars on the cost of the machine's downloads.
    """

    instance_id: str
    usd_per_hour: float
    launched_at: AwareDatetime
    group: str
    ended_at: AwareDatetime | None = None
    rank: int = -1
    zone: str = ""
    address: str = ""
    current: bool = False
    download_usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """One CreateFleet request for `size` machines of one type.

    group: the value of the machines' tag srift:node-group.
    usd_per_hour: an upper bound on the cost of one machine, including its volume, IP address and S3
        requests.
    asked_at: the time of the request.
    answered: False until the launched machines are in the lease file.
    """

    group: str
    size: int
    usd_per_hour: float
    asked_at: AwareDatetime
    answered: bool = False


@dataclass(frozen=True, kw_only=True)
class Ec2Lease(Lease):
    """The content of lease.json, which records one launch.

    home: random name of the SRIFT_HOME that made the launch, such as "3f9a0c1b22d4".
    deployment, bucket, prefix: the values that srift.toml had at the launch.
    role_id: the id of the machines' IAM role.
    releasing: True after a failed attempt to end all machines.
    fetched: True when all files that the machines uploaded have been downloaded.
    """

    region: Region
    home: str
    deployment: str
    bucket: str
    prefix: str
    role_id: str
    machines: tuple[Ec2Machine, ...] = ()
    requests: tuple[FleetRequest, ...] = ()
    releasing: bool = False
    fetched: bool = False

    @property
    def is_held(self) -> bool:
        return self.ended_at is None or not self.fetched

    @property
    def filters(self) -> Filters:
        """Return the EC2 filters that match the machines and resources of this launch."""
        return {
            "tag:srift:lease": self.lease_id,
            "tag:srift:deployment": self.deployment,
            "tag:srift:controller": self.home,
        }

    @property
    def objects(self) -> str:
        """Return the prefix of the launch's objects in the S3 bucket."""
        return f"{self.prefix}/leases/{self.lease_id}/"

    @property
    def by_userid(self) -> dict[str, Ec2Machine]:
        """Return {aws:userid: machine}, including machines that have been replaced.

        The aws:userid of a machine is the name of its folder in the bucket. Machines whose rank is
        unknown (-1) are left out.
        """
        return {
            f"{self.role_id}:{machine.instance_id}": machine
            for machine in self.machines
            if machine.rank >= 0
        }

    @property
    def current(self) -> list[Ec2Machine]:
        """Return the machines that belong to the cluster now, in rank order."""
        found = [machine for machine in self.machines if machine.current]
        return sorted(found, key=lambda machine: machine.rank)

    def with_request(self, request: FleetRequest) -> Self:
        """Return a copy of this lease with `request` added.

        An earlier request with the same `group` is removed.
        """
        others = tuple(sent for sent in self.requests if sent.group != request.group)
        return replace(self, requests=(*others, request))

    def with_machines(self, *machines: Ec2Machine) -> Self:
        """Return a copy of this lease with `machines` added, or updated if already listed."""
        by_id = {machine.instance_id: machine for machine in (*self.machines, *machines)}
        return replace(self, machines=tuple(by_id.values()))

    def usd_until(self, now: datetime) -> float:
        """Return the dollars that all machines and their downloads have cost until `now`.

        Machines of failed launch attempts count. EC2 bills each machine for at least
        LEAST_BILLED_S seconds.
        """
        usd = 0.0
        for machine in self.machines:
            seconds = ((machine.ended_at or now) - machine.launched_at).total_seconds()
            usd += machine.usd_per_hour * max(LEAST_BILLED_S, seconds) / 3600 + machine.download_usd
        return usd


def _read(file: Path, schema: TypeAdapter[dict[str, T]], advice: str) -> dict[str, T]:
    """Return the content of `file`; {} if it is missing.

    Raises ProviderError if the file cannot be read. The error's message ends with `advice`.
    """
    try:
        return schema.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ProviderError(f"{file} cannot be read ({error}), so {advice}") from error


class Ec2Leases(LeaseFolder[Ec2Lease]):
    """The EC2 leases of one SRIFT_HOME, and the time of the reaper's last search of each region."""

    kind = Ec2Lease

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases-ec2")
        self.swept_file = self.root / ".swept.json"
        self.spent_file = self.root / ".spent.json"

    @property
    def token(self) -> str:
        """Return the random name that identifies this SRIFT_HOME, such as "3f9a0c1b22d4".

        AWS resources have this name in their tag srift:controller. The first call creates the name.
        Raises OSError if the file with the name cannot be read or written.
        """
        file = self.root / ".token"
        with self.locked():
            if not file.exists():
                write_durably(file, json.dumps(uuid.uuid4().hex[:12]).encode())
        return str(json.loads(file.read_text()))

    def swept(self) -> dict[str, datetime]:
        """Return {region: time of the last complete search for overdue machines}.

        Raises ProviderError if the file with these times cannot be read.
        """
        advice = (
            "machines may still run in regions that srift.toml named earlier. Check these regions"
            " in AWS, then delete the file"
        )
        return _read(self.swept_file, _SWEPT, advice)

    def note_swept(self, regions: Iterable[str], now: datetime) -> None:
        """Store that `regions` were searched for overdue machines at `now`.

        If the time cannot be stored, no error is raised.
        """
        with suppress(OSError, ProviderError), self.locked():
            swept = self.swept() | dict.fromkeys(regions, now)
            write_durably(self.swept_file, _SWEPT.dump_json(swept, indent=1))

    def spent(self) -> dict[str, tuple[str, float]]:
        """Return the content of the cost file: {lease id: (month as YYYY-MM, cost in dollars)}.

        The month is the month in which the lease ended. The cost file keeps the costs of deleted
        leases. It also has the costs of data uploads, and costs that the user stated.

        Returns {} if the file is missing. Raises ProviderError if it cannot be read.
        """
        advice = (
            "nothing was bought. Delete the file, look up this month's cost in AWS's bill, and run"
            " `srift refresh --provider ec2 --max-usd 0 --month-spent DOLLARS`"
        )
        return _read(self.spent_file, _SPENT, advice)

    def begin_spent(self, spent: dict[str, tuple[str, float]]) -> None:
        """Add the costs of leases to the cost file (see `spent`). A missing file is created.

        spent: {lease id: (month of the lease's end as YYYY-MM, cost in dollars)}.

        Raises ProviderError if the existing file cannot be read, and OSError if it cannot be
        written.
        """
        with self.locked():
            write_durably(self.spent_file, _SPENT.dump_json(self.spent() | spent, indent=1))

    def note_spent(self, lease_id: str, ended_at: datetime, usd: float) -> None:
        """Store the cost of a lease in the cost file (see `spent`).

        Does nothing if the file is missing, because a new file would lack the cost of earlier
        leases. Raises ProviderError if the file cannot be read, and OSError if it cannot be
        written.
        """
        if self.spent_file.exists():
            self.begin_spent({lease_id: (f"{ended_at:%Y-%m}", usd)})

    def forget_ended(self, lease_id: str) -> None:
        """Store the cost of an ended lease in the cost file (see `spent`), and delete the lease.

        Raises ProviderError if the lease has not ended, or if the lease or the cost file cannot be
        read. Raises OSError if the cost file cannot be written.
        """
        lease = self.read(lease_id)
        if lease and lease.ended_at:
            self.note_spent(lease_id, lease.ended_at, lease.usd or 0.0)
        super().forget_ended(lease_id)

    def close(self, lease: Ec2Lease, now: datetime, outcome: str) -> Ec2Lease:
        """Store that `lease` ended at `now` with `outcome`, and return the updated lease.

        Call this method after all machines of the lease have ended. There are two special cases:

        - A lease with neither machines nor requests is deleted, and returned unchanged.
        - A lease with requests but without machines gets the outcome "refused".

        If lease.json cannot be written, no error is raised. The lease on disk stays open until the
        reaper closes it.
        """
        if not lease.machines and not lease.requests:
            self.forget(lease.lease_id)
            return lease
        if not lease.machines:
            unheard = ("AWS's answer was not stored before the process ended",)
            lease = replace(lease, refusals=lease.refusals or unheard, fetched=True)
            outcome = "refused"
        usd = lease.usd_until(now)
        lease = replace(lease, ended_at=now, outcome=outcome, releasing=False, usd=usd)
        with suppress(OSError):
            self.write(lease)
        return lease
