"""What a campaign has spent, what the caps leave, and what a launch may therefore do.

Asked before every launch. On EC2 the campaign's cap and the month's are hard: the launch's worst case must fit under
both. On this machine money is illustrative, and the campaign's own estimate decides (`Tally.affords`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pandas as pd

from models.campaign import budget as pure
from models.campaign.budget import Allowance, Cap
from models.campaign.campaign import PlannedLaunch
from models.domain.cluster import Cluster, Offer, parse_cluster
from warehouse import reads
from warehouse.database import WarehouseMissing

from ..execution.claims import of_others
from ..execution.job import START_UP_S, Served, workload_names
from ..execution.record_loader import Collected
from ..market.offers import current_offers
from ..node.requirements import INSTALL_S
from ..providers.base import Lease, LeaseUnreadable
from ..providers.ec2.capacity_ladder import SPOT_MARGIN
from ..providers.ec2.prices import most_usd_per_hour_beside
from ..workspace.workspace import Workspace

# Of the deadline on EC2, beside the work: machines may take ten minutes to report themselves, torchrun two more.
EC2_START_UP_S = 720.0
EC2_LEAST_START_UP_S = (
    300.0  # with less, money would be spent on machines that end before they could have measured
)
# What an installation is expected to take, of the INSTALL_S that it is given: a guess, since torch is there already and
# the rest are mostly wheels. With less, too, machines would end before they could have measured.
LEAST_INSTALL_S = INSTALL_S / 5
# For measuring again what a machine's host disturbed, part of what a launch is expected to take: hosts take processors
# away for minutes, which costs nothing here and is paid for on EC2.
_LOCAL_PATIENCE, _EC2_PATIENCE = 1.0, 0.25
# And part of what is left of the campaign: a host that always takes must not end it.
_CAMPAIGN_PATIENCE = 1 / 3
_MUCH = 0.8  # of a month's dollars: somebody is told
# A launch may climb the whole ladder: spot and on demand in every zone, of which no region has more than six.
LATE_S = pure.late_s(2 * 6)


def allowance(
    workspace: Workspace,
    launch: PlannedLaunch,
    tally: Tally,
    now: datetime,
    offers: Sequence[Offer] | None = None,
) -> Allowance:
    """How long `launch` may last, or why it may not be made. `offers`: the newest prices, where they are at hand."""
    if not workspace.spends_money:
        wished_s = (2 + _LOCAL_PATIENCE) * launch.est_s + START_UP_S
        return Allowance(deadline_s=wished_s, worst_usd=launch.est_usd)
    known = current_offers(workspace) if offers is None else offers
    caps, unknown = caps_of(workspace, tally, now, known)
    if unknown:
        return Allowance(refusal=unknown)
    installs = _installs(workspace, launch)
    price = pure.dearest_usd_per_hour(launch.cluster, known, _spot_margin(workspace))
    return pure.allow(
        None if price is None else price + len(launch.cluster.members) * _beside(workspace),
        wished_s=2 * launch.est_s
        + EC2_START_UP_S
        + installs * INSTALL_S
        + tally.fetch_s_of(launch),
        least_s=launch.est_s
        + EC2_LEAST_START_UP_S
        + installs * LEAST_INSTALL_S
        + tally.fetch_s_of(launch),
        caps=caps,
        late=LATE_S,
    )


def _installs(workspace: Workspace, launch: PlannedLaunch) -> int:
    """How many workloads of `launch` have requirements: paid machines install them one after the other."""
    workloads = workspace.settings.workloads
    return sum(
        name in workloads and workloads[name].requirements is not None
        for name in workload_names(launch)
    )


def patience_s(
    workspace: Workspace, launch: PlannedLaunch, tally: Tally, deadline_s: float
) -> float:
    """Seconds that `launch` may put into measuring again what was disturbed, and still end in time."""
    start_up_s = START_UP_S
    if workspace.spends_money:
        start_up_s = (
            EC2_START_UP_S + _installs(workspace, launch) * INSTALL_S + tally.fetch_s_of(launch)
        )
    spare_s = deadline_s - launch.est_s - start_up_s
    share = _EC2_PATIENCE if workspace.spends_money else _LOCAL_PATIENCE
    left_s = tally.stop_of(launch) - time.monotonic() - launch.est_s
    return max(0.0, min(share * launch.est_s, _CAMPAIGN_PATIENCE * tally.left_s, spare_s, left_s))


def caps_of(
    workspace: Workspace, tally: Tally, now: datetime, offers: Sequence[Offer]
) -> tuple[list[Cap], str]:
    """The campaign's cap and the month's (UTC); and, instead, why nobody can say what is left of them.

    The ledger is read last: what is loaded or settled meanwhile counts twice rather than not at all.
    """
    dearest = pure.dearest_by_type(offers, _spot_margin(workspace))
    held = workspace.provider.leases()
    unknown = next((lease.problem for lease in held if lease.problem), "")
    worst = {
        lease.lease_id: _worst(workspace, lease, dearest) for lease in held if not lease.problem
    }
    try:
        closed = workspace.provider.closed()
    except LeaseUnreadable as error:  # since a moment ago
        closed, unknown = [], unknown or str(error)
    worst |= {lease.lease_id: lease.usd for lease in closed}  # over, and not in the ledger yet
    nameless = [lease_id for lease_id, usd in worst.items() if usd is None]
    if nameless:
        unknown = (
            unknown
            or f"lease {nameless[0]} costs an amount that nobody knows: end it with `srift reap`"
        )
    committed = {lease_id: usd for lease_id, usd in worst.items() if usd is not None}
    mine = sum(
        usd for lease_id, usd in committed.items() if lease_id.startswith(f"{tally.refresh_id}-")
    )
    others = of_others(workspace, pure.month_start(now), before=tally.refresh_id)
    spent, why = spent_this_month(workspace, now)
    month = Cap(
        name="[ec2] max_usd_per_month",
        usd=workspace.settings.ec2.max_usd_per_month,
        spent_usd=spent,
        committed_usd=sum(committed.values()),
        claimed_usd=sum(row["left_usd"] for row in others),
        claimed_by=[f"refresh {row['refresh_id']} of {row['place']}" for row in others],
    )
    own = Cap(
        name="this campaign's cap", usd=tally.cap_usd, spent_usd=tally.usd, committed_usd=mine
    )
    return [own, month], why or unknown


def money_short(workspace: Workspace, tally: Tally, now: datetime) -> str:
    """A sentence where _MUCH of what this month may cost is spent, or held machines may still cost it; else empty."""
    if not workspace.spends_money:
        return ""
    (_, month), unknown = caps_of(workspace, tally, now, current_offers(workspace))
    used = month.spent_usd + month.committed_usd
    if unknown or used < _MUCH * month.usd or not used:
        return unknown
    return f"${used:.2f} of the ${month.usd:.2f} of {month.name} are spent, or held machines may still cost them"


def spent_this_month(workspace: Workspace, now: datetime) -> tuple[float, str]:
    """Dollars of this provider's refreshes that ended in `now`'s month, and why that is unknown where it is.

    A refresh that began in the month before counts for both: rather too much than too little.
    """
    try:
        spend = reads.mart(workspace.warehouse, "spend", provider=workspace.provider.name)
    except WarehouseMissing:
        return 0.0, ""
    start = pd.Timestamp(pure.month_start(now)).tz_localize(None)
    recent = spend[pd.to_datetime(spend["ended_at"]) >= start]
    unknown = recent[recent["usd"].isna()]["refresh_id"].tolist()
    if unknown:
        why = f"what refresh {unknown[0]} spent this month is not known, so nothing more is launched until the next one"
        return float("inf"), f"{why} (AWS's bill tells; the ledger does not)"
    return float(recent["usd"].sum()), ""


def _spot_margin(workspace: Workspace) -> float | None:
    """How far above what was seen a spot price is bid for where on-demand, which bounds it, is not considered."""
    return None if "on-demand" in workspace.settings.ec2.markets else SPOT_MARGIN


def _beside(workspace: Workspace) -> float:
    """Dollars an hour of a machine's volume, public address and requests, at most."""
    return most_usd_per_hour_beside(workspace.settings.ec2.volume_gib)


def _worst(workspace: Workspace, lease: Lease, dearest: dict[str, float]) -> float | None:
    """Dollars of a lease that is held to its very end, at the highest price of its types; None where none is known."""
    names = parse_cluster(lease.cluster)
    prices = [dearest.get(name) for name in names]
    known = sum(price for price in prices if price is not None)
    rate = max(lease.usd_per_hour or 0.0, 0.0 if None in prices else known)
    lasts_s = (lease.deadline_at - lease.started_at).total_seconds()
    return (
        pure.worst_usd(rate + len(names) * _beside(workspace), lasts_s, LATE_S)
        if rate > 0
        else None
    )


REFUSED = "refused"  # how the outcome of a launch without machines begins
RELEASE_S = 2.0  # machines are paid for until they are gone, which is a little after they were asked to stop


@dataclass(slots=True, kw_only=True)
class Tally:
    """Rows by status, dollars, and seconds by phase of one campaign. `stop_at` is on `time.monotonic`.

    The ids of its leases begin with `refresh_id`. `refused` are clusters that were not to be had, in
    whole, or not with their devices. By workload: `fetch_s` is within how many seconds a machine has its data, where it
    fetches some; `lacking` why its data or requirements are not to be had, so that nothing more of it is bought.
    """

    cap_usd: float
    stop_at: float
    refresh_id: str = ""
    usd: float = 0.0
    runs: int = 0
    launches: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: list[Cluster] = field(default_factory=list)
    fetch_s: dict[str, float] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    @property
    def left_usd(self) -> float:
        """Dollars under the cap."""
        return max(0.0, self.cap_usd - self.usd)

    @property
    def left_s(self) -> float:
        """Seconds to the campaign's end."""
        return max(0.0, self.stop_at - time.monotonic())

    def fetch_s_of(self, launch: PlannedLaunch) -> float:
        """Seconds of its machines' start-up that go into fetching data, as far as is known."""
        return sum(self.fetch_s.get(name, 0.0) for name in workload_names(launch))

    def affords(self, launch: PlannedLaunch) -> bool:
        """Whether `launch` may still start within dollars and minutes by its estimate; `allowance` has the worst."""
        return time.monotonic() < self.stop_at and self.usd + launch.est_usd <= self.cap_usd

    def stop_of(self, launch: PlannedLaunch) -> float:
        """When `launch` must end at the latest: the campaign's end, or when it has spent what is left."""
        price = launch.cluster.total_usd_per_hour
        if not price:
            return self.stop_at
        left_s = (self.cap_usd - self.usd) / price * 3600.0 - RELEASE_S
        return min(self.stop_at, time.monotonic() + max(left_s, 0.0))

    def add(
        self, served: Served, collected: Collected, *, load_s: float, cluster: Cluster | None = None
    ) -> None:
        """Count what one launch of `cluster` brought home."""
        self.launches += 1
        refused = served.outcome.startswith(REFUSED) and not served.over_cap
        if cluster is not None and (served.lacked_devices or refused):
            self.refused.append(cluster)
        self.lacking |= served.lacked_data
        self.usd += collected.usd
        self.runs += len(served.recorded)
        self.by_status.update(collected.by_status)
        if served.mailbox is None:
            self.by_status.update(row["status"] for row in served.rows)
        self.spend(served.seconds | {"load records": load_s})
        self.notes += collected.notes

    def spend(self, seconds: Mapping[str, float]) -> None:
        """Add seconds to phases."""
        for phase, spent in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def summary(self) -> dict[str, Any]:
        """As a flow returns it."""
        return {
            "launches": self.launches,
            "runs": dict(self.by_status),
            "usd": round(self.usd, 6),
            "seconds": {phase: round(spent, 2) for phase, spent in self.seconds.items()},
            "notes": list(self.notes),
        }
