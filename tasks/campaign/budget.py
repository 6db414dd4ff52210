"""Count a campaign's dollars and seconds, and decide if the caps allow its next launch.

On EC2, the worst-case cost of a launch must fit under the caps of the campaign and of the month.
Prices of local hosts are illustrative, so only the estimated cost must fit (`Tally.affords`).
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
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster, Offer, parse_cluster
from warehouse import reads

from ..execution.claims import of_others
from ..execution.job import START_UP_S, Served, workload_names
from ..execution.record_loader import Collected
from ..market.offers import current_offers
from ..node.requirements import INSTALL_S
from ..providers.base import Lease, LeaseUnreadable
from ..providers.ec2.attempts import SPOT_MARGIN
from ..providers.ec2.prices import most_usd_per_hour_beside
from ..workspace.workspace import Workspace

# Usual and minimum seconds for start-up in a deadline on EC2. Machines may take ten minutes to
# report, and torchrun two more minutes. If a deadline included less than the minimum times for
# start-up and installation, machines would end before they measure anything.
EC2_START_UP_S, EC2_LEAST_START_UP_S = 720.0, 300.0
LEAST_INSTALL_S = INSTALL_S / 5
# Seconds for repeating disturbed runs, as a share of the launch's estimated seconds on local hosts
# and on EC2. A hypervisor may take CPU time away from a virtual machine for minutes. Waiting is
# free on local hosts but not on EC2.
_LOCAL_PATIENCE, _EC2_PATIENCE = 1.0, 0.25
_WARNED = 0.8  # share of the month's dollars above which the user is warned
REFUSED = "refused"  # prefix of the outcome of a launch that got no machines
RELEASE_S = 2.0  # machines cost money until shortly after the request to stop


def allowance(
    workspace: Workspace,
    launch: PlannedLaunch,
    tally: Tally,
    now: datetime,
    offers: Sequence[Offer] | None = None,
) -> Allowance:
    """Return the permitted deadline and worst-case cost of `launch`, or the reason for a refusal.

    offers: the worst-case cost uses the highest prices of these offers. None means the newest
    snapshot of offers.
    """
    if not tally.affords(launch):
        left = f"the campaign has ${tally.left_usd:.4f} and {tally.left_s:.0f} s left"
        return Allowance(refusal=f"it is expected to cost ${launch.est_usd:.4f}, but {left}")
    if not workspace.spends_money:
        wished_s = (2 + _LOCAL_PATIENCE) * launch.est_s + START_UP_S
        return Allowance(deadline_s=wished_s, worst_usd=launch.est_usd)
    known = current_offers(workspace) if offers is None else offers
    caps, unknown = caps_of(workspace, tally, now, known)
    if unknown:
        return Allowance(refusal=unknown)
    start_up_s, least_s = _start_up_s(workspace, launch, tally)
    price = pure.dearest_usd_per_hour(launch.cluster, known, _spot_margin(workspace))
    if price is not None:
        price += len(launch.cluster.members) * _beside(workspace)
    return pure.allow(
        price,
        wished_s=2 * launch.est_s + start_up_s,
        least_s=launch.est_s + least_s,
        caps=caps,
    )


def _start_up_s(workspace: Workspace, launch: PlannedLaunch, tally: Tally) -> tuple[float, float]:
    """Return the usual and the minimum seconds from a launch on EC2 to its first run.

    Both include the installation of each workload's requirements, one after another, and the
    download of the workloads' data.
    """
    known, names = workspace.settings.workloads, workload_names(launch)
    installs = sum(bool(known[name].requirements) for name in names if name in known)
    fetch_s = sum(tally.fetch_s.get(name, 0.0) for name in names)
    usual_s = EC2_START_UP_S + installs * INSTALL_S + fetch_s
    return usual_s, EC2_LEAST_START_UP_S + installs * LEAST_INSTALL_S + fetch_s


def patience_s(
    workspace: Workspace, launch: PlannedLaunch, tally: Tally, deadline_s: float
) -> float:
    """Return the seconds that a launch may spend on repeating disturbed runs.

    The launch must still end within `deadline_s` seconds and within the campaign's time and
    dollars.
    """
    start_up_s, share = START_UP_S, _LOCAL_PATIENCE
    if workspace.spends_money:
        (start_up_s, _), share = _start_up_s(workspace, launch, tally), _EC2_PATIENCE
    spare_s = deadline_s - launch.est_s - start_up_s
    left_s = tally.stop_of(launch) - time.monotonic() - launch.est_s
    return max(0.0, min(share * launch.est_s, spare_s, left_s))


def caps_of(
    workspace: Workspace, tally: Tally, now: datetime, offers: Sequence[Offer]
) -> tuple[list[Cap], str]:
    """Return the dollar caps of the campaign and of the calendar month (UTC), and a problem.

    Each cap has the amounts that count against it. The problem is the reason why an amount is
    unknown, or "". Leases (records of launches) are read before the spent dollars, so that a lease
    that ends between the two reads counts twice instead of not at all.
    """
    dearest = pure.dearest_by_type(offers, _spot_margin(workspace))
    held, problems = workspace.provider.leases(), list[str]()
    worst: dict[str, float | None] = {}
    for lease in held:
        if lease.problem:
            problems.append(lease.problem)
        else:
            worst[lease.lease_id] = _worst(workspace, lease, dearest)
    try:  # leases that ended but are not in the warehouse yet
        worst |= {lease.lease_id: lease.usd for lease in workspace.provider.closed()}
    except LeaseUnreadable as error:
        problems.append(str(error))
    problems += [
        f"the cost of lease {lease_id} is unknown: end it with `srift reap`"
        for lease_id, usd in worst.items()
        if usd is None
    ]
    committed = {lease_id: usd for lease_id, usd in worst.items() if usd is not None}
    others = of_others(workspace, pure.month_start(now), before=tally.refresh_id)
    spent, unknown = spent_this_month(workspace, now)
    month = Cap(
        name="[ec2] max_usd_per_month",
        usd=workspace.settings.ec2.max_usd_per_month,
        spent_usd=spent,
        committed_usd=sum(committed.values()),
        claimed_usd=sum(row["left_usd"] for row in others),
        claimed_by=[f"refresh {row['refresh_id']} of {row['place']}" for row in others],
    )
    mine = [usd for name, usd in committed.items() if name.startswith(f"{tally.refresh_id}-")]
    own = Cap(
        name="this campaign's cap",
        usd=tally.cap_usd,
        spent_usd=tally.usd,
        committed_usd=sum(mine),
    )
    return [own, month], next(filter(None, [unknown, *problems]), "")


def money_short(workspace: Workspace, tally: Tally, now: datetime) -> str:
    """Return a warning if most of the month's dollars are spent or reserved.

    If the dollars are unknown, returns the reason. Returns "" if no warning is needed.
    """
    if not workspace.spends_money:
        return ""
    (_, month), unknown = caps_of(workspace, tally, now, current_offers(workspace))
    used = month.spent_usd + month.committed_usd
    if unknown or used < _WARNED * month.usd or not used:
        return unknown
    return f"${used:.2f} of {month.name} ${month.usd:.2f} are spent or committed"


def spent_this_month(workspace: Workspace, now: datetime) -> tuple[float, str]:
    """Return the dollars of refreshes that ended in the month of `now`, and a problem.

    If the cost of a refresh is unknown, the dollars are infinite and the problem names the refresh.
    Otherwise the problem is "". A refresh that began in the previous month counts in full.
    """
    spend = mart_of(workspace, "spend")
    start = pd.Timestamp(pure.month_start(now)).tz_localize(None)
    recent = spend[pd.to_datetime(spend["ended_at"]) >= start]
    for refresh_id in recent[recent["usd"].isna()]["refresh_id"]:
        return float("inf"), (
            f"the cost of refresh {refresh_id} is unknown, so nothing is launched before next"
            " month; AWS's bill shows the cost"
        )
    return float(recent["usd"].sum()), ""


def mart_of(workspace: Workspace, name: str, **equal: object) -> pd.DataFrame:
    """Return this provider's rows of the mart `name`; no rows before the first refresh.

    equal: values that columns of the rows must have.
    """
    return reads.mart(workspace.warehouse, name, provider=workspace.provider.name, **equal)


def _spot_margin(workspace: Workspace) -> float | None:
    """Return the ratio of the highest spot bid to the known spot price.

    Returns None if [ec2] markets includes on-demand, because the on-demand price then limits the
    bid.
    """
    return None if "on-demand" in workspace.settings.ec2.markets else SPOT_MARGIN


def _beside(workspace: Workspace) -> float:
    """Return the maximum dollars per hour of a machine's volume, address and requests."""
    return most_usd_per_hour_beside(workspace.settings.ec2.volume_gib)


def _worst(workspace: Workspace, lease: Lease, dearest: Mapping[str, float]) -> float | None:
    """Return the maximum dollars that a lease costs if it lasts until its deadline.

    dearest: {instance type: highest known dollars per hour}. Returns None if neither the lease nor
    `dearest` has a price.
    """
    names = parse_cluster(lease.cluster)
    listed = sum(dearest[name] for name in names) if dearest.keys() >= set(names) else 0.0
    rate = max(lease.usd_per_hour or 0.0, listed)
    if rate <= 0:
        return None
    lasts_s = (lease.deadline_at - lease.started_at).total_seconds()
    return pure.worst_usd(rate + len(names) * _beside(workspace), lasts_s)


@dataclass(slots=True, kw_only=True)
class Tally:
    """The counts, dollars and seconds of one campaign so far.

    Attributes:
        cap_usd: the campaign's dollar cap.
        stop_at: the end of the campaign on the clock `time.monotonic`.
        refresh_id: prefix of the campaign's lease ids.
        usd: dollars spent.
        runs: number of runs with a record.
        launches: number of launches, including refused launches.
        by_status: number of runs by status.
        seconds: {phase: seconds that all launches spent in it}.
        notes: messages for the user.
        refused: clusters that the provider could not supply, or whose machines lacked devices.
        fetch_s: {workload: seconds that a machine needs to download its data}.
        lacking: {workload: the reason why it cannot be measured}.
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

    @classmethod
    def of(cls, workspace: Workspace, max_usd: float | None, refresh_id: str) -> Tally:
        """Return the tally of a campaign that starts now.

        `max_usd` is the campaign's dollar cap; None means `[campaign] max_usd` of srift.toml.
        """
        return cls(
            cap_usd=workspace.settings.campaign.max_usd if max_usd is None else max_usd,
            stop_at=time.monotonic() + workspace.max_minutes * 60.0,
            refresh_id=refresh_id,
        )

    @property
    def left_usd(self) -> float:
        return max(0.0, self.cap_usd - self.usd)

    @property
    def left_s(self) -> float:
        return max(0.0, self.stop_at - time.monotonic())

    def affords(self, launch: PlannedLaunch) -> bool:
        """Return True if the estimated cost of `launch` fits under the cap and time is left.

        `allowance` also checks the worst-case cost.
        """
        return time.monotonic() < self.stop_at and self.usd + launch.est_usd <= self.cap_usd

    def stop_of(self, launch: PlannedLaunch) -> float:
        """Return the time, on the clock `time.monotonic`, at which `launch` must end.

        This is the end of the campaign, or the time at which the launch has spent the campaign's
        dollars if that is earlier.
        """
        price = launch.cluster.total_usd_per_hour
        if not price:
            return self.stop_at
        left_s = self.left_usd / price * 3600.0 - RELEASE_S
        return min(self.stop_at, time.monotonic() + max(left_s, 0.0))

    def add(
        self, served: Served, collected: Collected, *, load_s: float, cluster: Cluster | None = None
    ) -> None:
        """Add the results of one launch to the tally.

        load_s: the seconds that the launch's records took to load. cluster: the launched cluster;
        it is added to `refused` if the provider could not supply it or its machines lacked devices.
        """
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
        for phase, spent_s in (served.seconds | {"load records": load_s}).items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent_s
        self.notes += collected.notes

    def summary(self) -> dict[str, Any]:
        return {
            "launches": self.launches,
            "runs": dict(self.by_status),
            "usd": round(self.usd, 6),
            "seconds": {phase: round(spent, 2) for phase, spent in self.seconds.items()},
            "notes": list(self.notes),
        }
