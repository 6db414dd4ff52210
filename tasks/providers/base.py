"""The contract of a provider of machines, and its errors.

ProviderError
+-- NoCapacity       no machines at the moment: recorded as a row, not a failure of the flow
+-- NotSupported     this machine or account can never serve the request
+-- LeaseUnreadable  a lease file exists and cannot be read; its machines may run
+-- NotSwept         the reaper could not look everywhere; carries what it ended
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from models.domain.cluster import Cluster, InstanceType, Offer

MAX_JSON_DEPTH = 32  # records are six deep; json and DuckDB recurse by level


class ProviderError(Exception):
    """A request to a provider failed; the message says what to do."""

    exit_code = 1


class NoCapacity(ProviderError):
    """The provider has no such machines at the moment."""


class NotSupported(ProviderError):
    """The provider can never serve the request here."""


class LeaseUnreadable(ProviderError):
    """A lease file cannot be read."""


class NotSwept(ProviderError):
    """The reaper could not look everywhere. `unswept`: region or lease -> reason.

    `done`: a sentence for each thing that it ended. `provider`: empty for several.
    """

    def __init__(self, provider: str, unswept: Mapping[str, str], done: Sequence[str] = ()) -> None:
        super().__init__(provider, unswept, done)
        self.provider, self.unswept, self.done = provider, dict(unswept), list(done)

    def __str__(self) -> str:
        reasons = "".join(f"\n  {name}: {why}" for name, why in self.unswept.items())
        command = "srift reap" + (f" --provider {self.provider}" if self.provider else "")
        return (
            f"the reaper could not look everywhere:{reasons}\n"
            f"Machines past their deadline may still run there. Fix this and run `{command}`."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Machines that a controller holds. `problem`: why the lease file cannot be read."""

    lease_id: str
    provider: str
    cluster: str
    usd_per_hour: float | None
    started_at: datetime
    deadline_at: datetime
    controller_pid: int
    controller_alive: bool
    problem: str = ""

    def usd_until(self, now: datetime) -> float | None:
        """Dollars from the start to `now` or the deadline; None if the price is unknown."""
        hours = max(0.0, (min(now, self.deadline_at) - self.started_at).total_seconds()) / 3600
        return None if self.usd_per_hour is None else self.usd_per_hour * hours


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLease:
    """A lease without machines whose mailbox may not be loaded yet.

    `outcome`: "released", "reaped", or "refused" if there never were machines. `refusals`: a
    sentence for each refused request.
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
    """The provider's view of one machine. `reason`: why it is not alive.

    `leaving_s`: seconds until an announced end. `notice`: "interruption", or "rebalance", which is
    a warning only.
    """

    alive: bool
    interrupted: bool = False
    reason: str = ""
    leaving_s: float | None = None
    notice: str = ""


class RunningCluster(Protocol):
    """Acquired machines, each with a node agent that reports to `mailbox`.

    `cluster` has the zones and prices of the machines. A machine that has not reported within
    `ready_within_s` is lost. `checkpoints`: a folder that all machines share, if there is one.
    """

    lease_id: str
    cluster: Cluster
    mailbox: Path
    addresses: list[str]
    ready_within_s: float
    checkpoints: Path | None
    image_id: str  # of all machines; "" if the provider has no images

    def settle(self) -> None:
        """Apply the CPU shares of the instance types, once every worker is armed."""
        return

    def unsettle(self) -> None:
        """Lift the CPU shares, so that the next attempt starts quickly."""
        return

    def nodes(self) -> Sequence[NodeState]:
        """State of each machine, in rank order."""

    def now_unix(self) -> float:
        """Clock of the mailbox store, by which liveness is judged."""

    def usd_so_far(self) -> float | None:
        """Dollars since the machines were acquired; None if a price is unknown."""

    def replace(self, node: int) -> bool:
        """Replace a lost or leaving machine; False if there is none to replace it.

        Afterwards `addresses`, `nodes()`, `cluster` and the node's mailbox folder are the new
        machine's.
        """

    def revoke(self, index: int) -> None:
        """Take a machine away as its market would. Does nothing where the market is a real one."""
        return


class Provider(Protocol):
    """A source of machines. Methods with a body are optional."""

    name: str

    def instance_types(self) -> list[InstanceType]:
        """Types that can be launched here. Raises ProviderError if nobody answers."""

    def offers(self, now: datetime) -> list[Offer]:
        """Every type in every market at `now`. Raises ProviderError if nobody answers."""

    def limits(self) -> list[str]:
        """Sentences on what this provider cannot do here and how to fix it."""

    def fits(self, cluster: Cluster) -> str:
        """Why the cluster can never be acquired on idle machines; empty if it can."""

    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> AbstractContextManager[RunningCluster]:
        """Machines with agents, released on exit. Raises NoCapacity or NotSupported."""

    def leases(self) -> list[Lease]:
        """Held leases, and each unreadable lease with its `problem`."""

    def ended(self) -> list[EndedLease]:
        """Leases that ended and are not forgotten."""

    def forget(self, lease_id: str) -> None:
        """Delete an ended lease and its mailbox. Raises ProviderError while it is held."""

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End what outlived its deadline or controller; a sentence for each thing ended.

        Raises NotSwept, after everything else is done, if something could not be looked at.
        """

    def closed(self) -> list[EndedLease]:
        """As `ended`, also leases whose uploads are not fetched yet. Raises LeaseUnreadable."""
        return self.ended()

    def launches(self, cluster: Cluster) -> str:
        """Why this installation would not launch the cluster; empty if it would."""
        return self.fits(cluster)

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        """`offers` at this installation's own prices, with storage and other costs; idempotent."""
        return list(offers)

    def packaged_types(self) -> list[InstanceType]:
        """Types of the dated snapshot that comes with the package."""
        return []

    def packaged_offers(self) -> list[Offer]:
        """Offers of the dated snapshot that comes with the package."""
        return []

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> Mapping[str, int]:
        """Zone -> 1 (unlikely) to 10 that a spot request for `count` machines is served.

        Empty if this provider has no scores. Raises ProviderError.
        """
        return {}

    def not_swept_since(self, moment: datetime) -> list[str]:
        """Regions that the reaper has not looked through since `moment`."""
        return []

    def was_used(self) -> bool:
        """Whether this home may have left machines or leases here."""
        return True


def json_of_node(text: str, **options: Any) -> Any:
    """`json.loads` for text from a node. Raises ValueError, also beyond MAX_JSON_DEPTH levels."""
    too_deep = ValueError(f"it is nested more than {MAX_JSON_DEPTH} deep")
    try:
        body = json.loads(text, **options)
    except RecursionError:
        raise too_deep from None
    level = [body]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else ()
            inner += value if isinstance(value, list) else ()
        level = inner
    if level:
        raise too_deep
    return body
