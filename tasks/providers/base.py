"""Define the interface of a machine provider (EC2 or this computer), and its errors.

A lease is the file that records a launch and its machines. The controller is the process that
launched the machines. The reaper ends machines whose deadline has passed or whose controller has
died. Each machine runs an agent, the program that measures. Agents and controller exchange files
through a folder, the mailbox.

ProviderError
+-- NoCapacity       too few machines are available now at a permitted price
+-- NotSupported     this computer or account can never serve the request
+-- LeaseUnreadable  a lease file exists but cannot be read; its machines may still be running
+-- NotSwept         the reaper failed to check a region or a lease, or to end a machine
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from pydantic import AwareDatetime, ConfigDict, Field

from models.domain.cluster import Cluster, InstanceType, Offer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and new lines
MAX_JSON_DEPTH = 32  # records have six levels; json and DuckDB recurse at each level


class ProviderError(Exception):
    """A request to a provider failed. The message says what to do."""

    exit_code = 1


class NoCapacity(ProviderError):
    """The provider cannot supply all of the requested machines at the moment."""


class NotSupported(ProviderError):
    """The provider can never serve the request with this computer or account."""


class LeaseUnreadable(ProviderError):
    """A lease file exists but cannot be read. The machines of its launch may still be running."""


class NotSwept(ProviderError):
    """The reaper failed to check at least one region or lease, or to end at least one machine.

    unswept: {region or lease: why it could not be checked, or why its machines did not end}.
    done: one sentence for each launch or machine that was ended or needs attention, such as
        "machine i-0a1 in us-east-1 was ended: its lease a7 is over".
    provider: the provider's name; "" if several providers are affected.
    """

    def __init__(self, provider: str, unswept: Mapping[str, str], done: Sequence[str] = ()) -> None:
        self.provider, self.unswept, self.done = provider, dict(unswept), list(done)

    def __str__(self) -> str:
        reasons = "".join(f"\n  {name}: {why}" for name, why in self.unswept.items())
        command = "srift reap" + (f" --provider {self.provider}" if self.provider else "")
        return (
            f"the reaper could not check everything:{reasons}\n"
            f"Machines past their deadline may still run there. Fix this and run `{command}`."
        )


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The record of a launch, which is stored in the file lease.json.

    controller: PID of the process that launched the machines.
    usd_per_hour: the price of all machines together, without volumes, IP addresses and S3 requests;
        None if unknown.
    refusals: one sentence for each failed launch attempt.
    ended_at: the time of the end; None before the end.
    usd: the cost of the launch in dollars; None before the end, or if unknown.
    outcome: "" before the end, and then one of these values:

    released   the controller ended the launch
    reaped     the reaper (`srift reap`) ended the overdue or abandoned launch
    refused    no machine was launched

    These fields are not in the file:

    mailbox: the folder for files from and to the machines.
    controller_alive: True if the controller still ran when the file was read.
    problem: why the file is unreadable; "" for a readable file.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    lease_id: str
    cluster: str
    market: str
    usd_per_hour: float | None
    started_at: AwareDatetime
    deadline_at: AwareDatetime
    controller: int
    ended_at: AwareDatetime | None = None
    usd: float | None = None
    outcome: str = ""
    refusals: tuple[str, ...] = ()
    mailbox: Annotated[Path, Field(exclude=True)] = field(default=Path(), compare=False)
    controller_alive: Annotated[bool, Field(exclude=True)] = field(default=True, compare=False)
    problem: Annotated[str, Field(exclude=True)] = ""

    @classmethod
    def new(
        cls, cluster: Cluster, *, lease_id: str, deadline_s: float, now: datetime, **fields: Any
    ) -> Self:
        """Return a lease that starts at `now`, with this process as its controller.

        deadline_s: seconds from `now` to the deadline.
        fields: the additional fields of a subclass.
        """
        return cls(
            lease_id=lease_id,
            cluster=cluster.name,
            market=cluster.market,
            usd_per_hour=cluster.usd_per_hour,
            started_at=now,
            deadline_at=now + timedelta(seconds=deadline_s),
            controller=os.getpid(),
            **fields,
        )

    @property
    def is_held(self) -> bool:
        """Return True if machines may still run, or if some of their files are not downloaded."""
        return self.ended_at is None

    def why_end(self, now: datetime) -> str:
        """Return the reason to end this launch at time `now`; "" if it may continue.

        A launch must end if its controller has died or its deadline has passed.
        """
        if not self.controller_alive:
            return f"its controller (process {self.controller}) is gone"
        if now >= self.deadline_at:
            return f"its deadline was {self.deadline_at:%Y-%m-%d %H:%M:%S} UTC"
        return ""

    def usd_until(self, now: datetime) -> float | None:
        """Return the cost in dollars from the start until `now`; None if the price is unknown.

        Time after the deadline is not counted, because the machines end themselves at the deadline.
        """
        hours = max(0.0, (min(now, self.deadline_at) - self.started_at).total_seconds()) / 3600
        return None if self.usd_per_hour is None else self.usd_per_hour * hours


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """The state of one machine, as its provider reports it.

    interrupted: True if the provider took the machine away.
    reason: why the machine has ended.
    leaving_s: seconds until the machine's announced end; None if no end is announced.
    """

    alive: bool
    interrupted: bool = False
    reason: str = ""
    leaving_s: float | None = None


class RunningCluster(Protocol):
    """The machines of a launch. Each machine runs an agent, the program that measures.

    cluster: the machines, with their zones and prices.
    mailbox: the folder for files from and to the machines.
    addresses: the machines' IP addresses, in rank order.
    ready_within_s: time limit in seconds for a new machine's agent to report that it has started. A
        slower machine counts as lost.
    checkpoints: a folder that all machines share; None if they share no folder.
    """

    lease_id: str
    cluster: Cluster
    mailbox: Path
    addresses: list[str]
    ready_within_s: float
    checkpoints: Path | None
    image_id: str  # image of all machines; "" if the provider has no images

    def settle(self) -> None:
        """Apply the CPU quotas of the instance types, if the provider has CPU quotas.

        Call this method when all workers are ready to measure. Workers start faster without quotas.
        """
        return

    def unsettle(self) -> None:
        """Remove the CPU quotas that `settle` set, so that the next run starts fast."""
        return

    def nodes(self) -> Sequence[NodeState]:
        """Return the state of each machine, in rank order."""

    def now_unix(self) -> float:
        """Return the Unix time from which the ages of heartbeats are computed.

        The age is this time minus the modification time of the heartbeat's file. Both times are
        from the same clock. The local provider returns the current time. The EC2 provider returns
        the time at which the last complete download of files began.
        """

    def usd_so_far(self) -> float | None:
        """Return the cost in dollars since the machines were acquired; None if unknown."""

    def note_download(self, usd: float) -> None:
        """Store `usd`, the maximum cost in dollars of each machine's downloads from S3.

        A machine that replaces a lost machine downloads the files again, at the same cost.
        """
        return

    def replace(self, node: int) -> bool:
        """Replace the machine with rank `node`. Return False if no new machine is available.

        The new machine gets the rank and the mailbox folder of the old machine. The state files of
        the old machine, such as heartbeats, are deleted.

        Raises ProviderError or OSError if the replacement fails for another reason.
        """

    def forget(self, node: int) -> None:
        """Delete the state files of a lost machine, such as heartbeats. Records and logs stay."""
        for file in (self.mailbox / f"node-{node}").glob("*.json"):
            file.unlink(missing_ok=True)

    def revoke(self, index: int) -> None:
        """Simulate a spot interruption: end the machine with rank `index` at once.

        Does nothing if the provider has a real spot market.
        """
        return


class Provider(Protocol):
    """A source of machines. Methods with a body are default implementations."""

    name: str

    def instance_types(self) -> list[InstanceType]:
        """Return the types that this installation can launch.

        Raises ProviderError if the types cannot be determined.
        """

    def offers(self, now: datetime) -> list[Offer]:
        """Return the offers (prices and interruption rates) for every instance type and market.

        Raises ProviderError if the offers cannot be determined.
        """

    def limits(self) -> list[str]:
        """Return a sentence for each restriction on launches, such as missing network namespaces.

        The sentence also says how to lift the restriction.
        """

    def fits(self, cluster: Cluster) -> str:
        """Return why this provider can never launch the cluster; "" if it can."""

    def acquire(
        self,
        cluster: Cluster,
        *,
        lease_id: str,
        deadline_s: float,
        seed: int,
        max_usd_per_hour: float,
    ) -> AbstractContextManager[RunningCluster]:
        """Return a context manager that launches the machines and ends them after the block.

        deadline_s: seconds until the machines end themselves.
        seed: seed of simulated spot interruptions.
        max_usd_per_hour: the highest permitted sum of the machines' list prices or spot bids,
            without volumes, IP addresses and S3 requests. Ignored for local hosts.

        Raises ProviderError (such as NoCapacity or NotSupported) or OSError if the machines cannot
        be launched.
        """

    def leases(self) -> list[Lease]:
        """Return the leases that may have running machines, or files that are not yet downloaded.

        An unreadable lease file is a `Lease` whose `problem` says why it cannot be read.
        """

    def ended(self) -> list[Lease]:
        """Return the records of ended launches whose files are all on this computer."""

    def forget(self, lease_id: str) -> None:
        """Delete the record of an ended launch and all files of its machines.

        Raises ProviderError if the machines may still run, or if the record cannot be read.
        """

    def reap(self, now: datetime) -> list[str]:
        """End the launches whose deadline has passed, or whose controller process has died.

        Returns a sentence for each launch or machine that was ended or needs attention. Raises
        NotSwept, after all other work, if a region or lease file could not be checked. The EC2
        provider also raises NotSwept if machines did not end.
        """

    def closed(self) -> list[Lease]:
        """Return the records of all ended launches, even if their files are not yet downloaded.

        The EC2 provider raises LeaseUnreadable if a lease file cannot be read.
        """
        return self.ended()

    def launches(self, cluster: Cluster) -> str:
        """Return why the current settings prevent a launch of the cluster; "" if they allow it."""
        return self.fits(cluster)

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return `offers` with this account's prices.

        The prices cover the machine, its volume, its public IP address and its S3 requests. The
        default implementation returns the offers unchanged. Overrides must be idempotent.
        """
        return list(offers)

    def packaged_offers(self) -> list[Offer]:
        """Return the offers that ship with Srift. Each offer states the date of its price."""
        return []

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> Mapping[str, int]:
        """Return {zone: score} for a spot request of `count` machines of any type in `names`.

        A score ranges from 1 (the request is unlikely to succeed) to 10 (likely). Returns {} if the
        provider has no scores. Raises ProviderError if the query fails.
        """
        return {}

    def not_swept_since(self, moment: datetime) -> list[str]:
        """Return the configured regions that `reap` has not checked since `moment`."""
        return []

    def was_used(self) -> bool:
        """Return True if this SRIFT_HOME may have machines or leases of this provider."""
        return True


def plain(text: str) -> str:
    """Remove terminal control codes from `text`, which a machine wrote.

    Only the first 10,000 characters are kept.
    """
    # agents write at most 4,000 characters
    return _CONTROL.sub("", text[:10_000])


def json_of_node(text: str, **options: Any) -> Any:
    """Parse JSON text that a machine wrote, and clean its string values with `plain`.

    Keys are not cleaned. `options` are passed to `json.loads`. Raises ValueError if the text is not
    JSON or has more than MAX_JSON_DEPTH nested levels.
    """
    too_deep = ValueError(f"it has more than {MAX_JSON_DEPTH} nested levels")

    def cleaned(value: Any, levels: int) -> Any:
        if isinstance(value, str):
            return plain(value)
        if not isinstance(value, dict | list):
            return value
        if levels == 0:
            raise too_deep
        if isinstance(value, list):
            return [cleaned(held, levels - 1) for held in value]
        return {key: cleaned(held, levels - 1) for key, held in value.items()}

    try:
        return cleaned(json.loads(text, **options), MAX_JSON_DEPTH)
    except RecursionError:
        raise too_deep from None


def read_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in `file`; None if the file is missing or has no valid JSON object."""
    try:
        body = json_of_node(file.read_text())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return None
    return body if isinstance(body, dict) else None
