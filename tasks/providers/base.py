"""What every provider of machines must do, and how it says no. Lack of capacity and interruption are results here.

ProviderError
+-- NoCapacity       the machines are not to be had now; a row, not a failure of the flow
+-- NotSupported     this machine or account can never serve the request; says what to do
+-- LeaseUnreadable  a lease is there and cannot be read; its machines may run
+-- NotSwept         the reaper could not look everywhere; carries what it did all the same
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from models.domain.cluster import Cluster, InstanceType, Offer

MOST_DEPTH = (
    32  # of the JSON that a node writes: a record of ours is six deep, and Python recurses by level
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What holds of all machines of a provider, whatever srift.toml says of them.

    `spends_money`: they are paid for, so that nothing is launched without a dollar cap. `simulated`: they are parts of
    this computer, with the prices, revocations and CPU shares of srift.toml; no market is there to learn of.
    """

    spends_money: bool
    simulated: bool


class ProviderError(Exception):
    """A provider could not do what it was asked; the message says what to do."""


class NoCapacity(ProviderError):
    """The machines are not to be had now."""


class NotSupported(ProviderError):
    """Never to be had here."""


class LeaseUnreadable(ProviderError):
    """A lease is on the disk and cannot be read. `body`: its JSON where it is JSON, else empty."""

    def __init__(self, message: str, *, body: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.body: dict[str, Any] = dict(body or {})


class NotSwept(ProviderError):
    """The reaper could not look everywhere. `unswept`: a reason for each region or lease, by its name.

    `done`: a sentence for each thing that it ended or loaded all the same. `provider`: for which to reap again, empty
    for several.
    """

    def __init__(self, provider: str, unswept: Mapping[str, str], done: Sequence[str] = ()) -> None:
        super().__init__(provider, unswept, done)
        self.provider, self.unswept, self.done = provider, dict(unswept), list(done)

    def __str__(self) -> str:
        """What was not looked at and why, what may still run, and what to type."""
        reasons = "".join(f"\n  {name}: {why}" for name, why in self.unswept.items())
        again = f"`srift reap --provider {self.provider}`" if self.provider else "`srift reap`"
        return (
            f"not everything could be looked at:{reasons}\nMachines that should be dead may still run there; put this "
            f"right and run {again} again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Machines that somebody holds: on disk as long as they may be alive, so that the reaper can end them."""

    lease_id: str
    provider: str
    cluster: str
    usd_per_hour: float | None
    started_at: datetime
    deadline_at: datetime
    controller_pid: int
    controller_alive: bool
    problem: str = (
        ""  # why it cannot be read: then nothing but its id is known, and its dollars least of all
    )

    def usd_until(self, now: datetime) -> float | None:
        """Dollars from the start to `now`; None where the price is unknown. Machines do not outlive the deadline."""
        hours = max(0.0, (min(now, self.deadline_at) - self.started_at).total_seconds()) / 3600
        return None if self.usd_per_hour is None else self.usd_per_hour * hours


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLease:
    """Machines that are gone, whose mailbox may not have been loaded. `outcome`: "released" or "reaped".

    `refusals`: a sentence for each way of having them that was tried and refused; where all were, `outcome` is
    "refused", and there were none.
    """

    lease_id: str
    cluster: str
    market: str
    started_at: datetime
    ended_at: datetime
    usd: float | None
    outcome: str
    mailbox: Path
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What the provider (not the node) knows of one machine. `reason` is empty while it is alive.

    `leaving_s`: a notice says that it goes in so many seconds, alive until then; `notice` says which: "interruption",
    or "rebalance", by which the market only warns.
    """

    alive: bool
    interrupted: bool = False
    reason: str = ""
    leaving_s: float | None = None
    notice: str = ""


class RunningCluster(Protocol):
    """Acquired machines, each with a node agent that reports to `mailbox`.

    `cluster` is what was got: its markets, zones and prices may differ from what was asked for, its types do not.
    Machines that have not reported themselves within `ready_within_s` are taken for lost. `checkpoints` is a folder
    that all of them see at that path and that outlives each; None where there is none yet.
    """

    lease_id: str
    cluster: Cluster
    mailbox: Path
    addresses: list[str]
    ready_within_s: float
    checkpoints: Path | None

    @property
    def image_id(self) -> str:
        """The machine image that all of them started from; "" where there is none."""

    def settle(self) -> None:
        """Every worker is armed: put the instance types' CPU shares in force. Starting up is not what is measured."""

    def unsettle(self) -> None:
        """Lift the shares again, so that another attempt starts quickly."""

    def nodes(self) -> Sequence[NodeState]:
        """State of each machine, in rank order."""

    def now_unix(self) -> float:
        """The mailbox store's clock, by which liveness is judged; never a node's."""

    def usd_so_far(self) -> float | None:
        """Dollars since the machines were acquired; None where a price is unknown."""

    def replace(self, node: int) -> bool:
        """Order another machine in place of one lost or leaving, which is let go; False where none is to be had.

        Afterwards `addresses[node]`, `nodes()[node]`, `cluster` and the mailbox's folder of the node are the new one's.
        """


@runtime_checkable
class Revocable(Protocol):
    """A running cluster whose machines can be taken away to see what a job does then."""

    def revoke(self, index: int) -> None:
        """Take a machine away as its market would: at once, with everything that runs on it."""


class Provider(Protocol):
    """A source of machines."""

    name: str

    def instance_types(self) -> list[InstanceType]:
        """Types that can be had here; what is left out is said by `limits`. Raises ProviderError without an answer."""

    def offers(self, now: datetime) -> list[Offer]:
        """Every type in every market, at `now`. Raises ProviderError without an answer."""

    def limits(self) -> list[str]:
        """Plain sentences on what this provider cannot do here and how to put it right; empty when it can do all."""

    def fits(self, cluster: Cluster) -> str:
        """Empty if the cluster could be acquired on idle machines, else the reason why never (used by the planner)."""

    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> AbstractContextManager[RunningCluster]:
        """Machines with agents running, released on exit whatever happens. Raises NoCapacity or NotSupported."""

    def leases(self) -> list[Lease]:
        """What is held now, and each lease that cannot be read, with its `problem`."""

    def ended(self) -> list[EndedLease]:
        """Leases that are over and not yet forgotten."""

    def forget(self, lease_id: str) -> None:
        """Delete an ended lease and its mailbox. Raises ProviderError while it is held."""

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End whatever outlived its deadline or its controller; one plain sentence for each thing ended.

        Raises NotSwept, once all else is done, where something could not be looked at.
        """


@runtime_checkable
class OwnBill(Protocol):
    """A provider whose machines cost more than their own price, or other than everybody's."""

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        """`offers` as this installation pays for them: own prices, and what is beside the machine. Again: the same."""


@runtime_checkable
class PlacementScores(Protocol):
    """A provider that tells how likely a request for spot machines is to be served."""

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> Mapping[str, int]:
        """1 (unlikely) to 10 by zone, for `count` machines of any of `names`. Raises ProviderError."""


@runtime_checkable
class Closing(Protocol):
    """A provider whose leases may be over, and paid for, before what they measured is here."""

    def closed(self) -> list[EndedLease]:
        """Leases that are over and not forgotten. Raises LeaseUnreadable."""


def closed_leases(provider: Provider) -> list[EndedLease]:
    """Leases that are over and not forgotten, whether what they measured is here or not. Raises LeaseUnreadable."""
    return provider.closed() if isinstance(provider, Closing) else provider.ended()


@runtime_checkable
class Launching(Protocol):
    """A provider that is set up to launch fewer clusters than it can advise about."""

    def launches(self, cluster: Cluster) -> str:
        """Empty if the cluster would be launched, else the reason why not; as Provider.fits, of this installation."""


@runtime_checkable
class PackagedPrices(Protocol):
    """A provider that carries a dated snapshot with it, for when nobody can be asked."""

    def packaged_types(self) -> list[InstanceType]:
        """As Provider.instance_types, of the snapshot."""

    def packaged_offers(self) -> list[Offer]:
        """As Provider.offers, of the snapshot; `price_as_of` says how old it is."""


def json_of_node(text: str, **how: Any) -> Any:
    """What a node wrote, by `json.loads`. Raises ValueError, also where it is nested deeper than MOST_DEPTH."""
    try:
        body = json.loads(text, **how)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    level = [body]
    for _ in range(MOST_DEPTH + 1):
        level = [value for one in level for value in _values(one)]
        if not level:
            return body
    raise ValueError(f"it is nested more than {MOST_DEPTH} deep")


def _values(one: Any) -> Sequence[Any]:
    return list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else ()
