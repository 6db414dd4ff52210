"""What every provider of machines must do, and how it says no. Lack of capacity and interruption are results here.

ProviderError
+-- NoCapacity       the machines are not to be had now; a row, not a failure of the flow
+-- NotSupported     this machine or account can never serve the request; says what to do
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol, runtime_checkable

from models.cloud import Cluster, InstanceType, Offer


class ProviderError(Exception):
    """A provider could not do what it was asked; the message says what to do."""


class NoCapacity(ProviderError):
    """The machines are not to be had now."""


class NotSupported(ProviderError):
    """Never to be had here."""


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
    Machines that have not reported themselves within `ready_within_s` are taken for lost.
    """

    lease_id: str
    cluster: Cluster
    mailbox: Path
    addresses: list[str]
    ready_within_s: float

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
        """What is held now."""

    def ended(self) -> list[EndedLease]:
        """Leases that are over and not yet forgotten."""

    def forget(self, lease_id: str) -> None:
        """Delete an ended lease and its mailbox. Raises ProviderError while it is held."""

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End whatever outlived its deadline or its controller; one plain sentence for each thing ended."""


@runtime_checkable
class PackagedPrices(Protocol):
    """A provider that carries a dated snapshot with it, for when nobody can be asked."""

    def packaged_types(self) -> list[InstanceType]:
        """As Provider.instance_types, of the snapshot."""

    def packaged_offers(self) -> list[Offer]:
        """As Provider.offers, of the snapshot; `price_as_of` says how old it is."""
