"""Count a campaign's dollars and seconds, and decide if the caps allow its next launch.

A campaign is the launches of one refresh. On EC2, the worst-case cost of a launch must fit under
the caps of the campaign and of the month. On local hosts, whose prices are only assumed, the
estimated cost must fit under the cap of the campaign.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from models.campaign import budget as pure
from models.campaign.budget import Allowance, Cap
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster, Offer, parse_cluster

from ..execution.claims import of_others
from ..execution.data_transfer import DataPlan, fetch_s
from ..execution.job import Served, workload_names
from ..execution.record_loader import Collected
from ..execution.session import MOST_REPLACEMENTS
from ..market.offers import current_offers
from ..node.requirements import INSTALL_S
from ..providers.base import Lease, LeaseUnreadable, ProviderError
from ..providers.ec2.api import Store, connect
from ..providers.ec2.attempts import SPOT_MARGIN
from ..providers.ec2.leases import STATED, Ec2Leases
from ..providers.ec2.prices import most_usd_per_hour_beside
from ..workspace.workspace import Workspace

START_UP_S = 150.0  # seconds that a deadline allows for the start of local hosts and torchrun
# Usual and minimum seconds that a deadline on EC2 allows for start-up. Machines may take ten
# minutes to report, and torchrun two more minutes. With a deadline below the minimum for start-up
# and installation, machines would end before they measure anything.
EC2_START_UP_S, EC2_LEAST_START_UP_S = 720.0, 300.0
LEAST_INSTALL_S = INSTALL_S / 5
# Maximum seconds for repeating disturbed runs, as a share of the launch's estimated seconds. A
# hypervisor may take CPU time from a virtual machine for minutes. Waiting costs money only on EC2.
_LOCAL_PATIENCE, _EC2_PATIENCE = 1.0, 0.25
PRICES_LAST = timedelta(days=180)  # a launch is refused if its prices are older
_WARNED = 0.8  # the user is warned if more than this share of the month's dollars is used
RELEASE_S = 2.0  # seconds that machines are billed after the request to end them


def allowance(
    workspace: Workspace,
    launch: PlannedLaunch,
    tally: Tally,
    now: datetime,
    offers: Sequence[Offer] | None = None,
) -> Allowance:
    """Return the deadline and the worst-case cost of `launch`, or the reason to refuse the launch.

    On EC2, the worst-case cost assumes that the machines run until the deadline, at the highest
    price that AWS can charge. On local hosts, the worst-case cost is the estimated cost.

    offers: the offers with the known prices. None means the newest snapshot in the warehouse.
    """
    if not tally.affords(launch):
        balance = f"but the campaign has ${tally.left_usd:.4f} left"
        why = f"it is expected to cost ${launch.est_usd:.4f}, {balance}"
        return Allowance(refusal=why if tally.left_s else "the campaign's time is up")
    if not workspace.spends_money:
        wished_s = (2 + _LOCAL_PATIENCE) * launch.est_s + START_UP_S
        return Allowance(deadline_s=wished_s, worst_usd=launch.est_usd)
    priced_at = min(offer.price_as_of for offer in launch.cluster.members)
    if now - priced_at > PRICES_LAST:
        old = f"its prices are of {priced_at:%Y-%m-%d}, too old to bound the cost"
        return Allowance(refusal=f"{old}: allow pricing:GetProducts in IAM")
    estimated_offer = next((offer for offer in launch.cluster.members if offer.price_source), None)
    if estimated_offer is not None:
        where = f"{estimated_offer.instance_type.name} in {estimated_offer.region}"
        why = f"the price of {where} is only an estimate: allow pricing:GetProducts in IAM"
        return Allowance(refusal=why)
    known_offers = current_offers(workspace) if offers is None else offers
    caps, unknown = caps_of(workspace, tally, now, known_offers)
    if unknown:
        return Allowance(refusal=unknown)
    start_up_s, least_s = _start_up_s(workspace, launch, tally)
    dearest = pure.dearest_usd_per_hour(launch.cluster, known_offers, _spot_margin(workspace))
    beside = most_usd_per_hour_beside(
        workspace.settings.ec2, launch.cluster.region, tally.bucket_region
    )
    machines = len(launch.cluster.members) + MOST_REPLACEMENTS  # each machine downloads the data
    plans = _plans(tally, launch)
    limits = pure.allow(
        dearest and dearest + len(launch.cluster.members) * beside,
        once_usd=sum(plan.upload_usd + machines * plan.download_usd for plan in plans),
        wished_s=2 * launch.est_s + start_up_s,
        least_s=launch.est_s + least_s,
        caps=caps,
    )
    return limits._replace(max_usd_per_hour=dearest or 0.0)


def _start_up_s(workspace: Workspace, launch: PlannedLaunch, tally: Tally) -> tuple[float, float]:
    """Return the start-up time of an EC2 launch as (usual seconds, minimum seconds).

    Start-up lasts from the request for machines to the first run. It includes downloads of data and
    installations of requirements.
    """
    workloads = workspace.settings.workloads
    installs = sum(bool(workloads[name].requirements) for name in workload_names(launch))
    download_s = sum(map(fetch_s, _plans(tally, launch)))
    usual_s = EC2_START_UP_S + installs * INSTALL_S + download_s
    return usual_s, EC2_LEAST_START_UP_S + installs * LEAST_INSTALL_S + download_s


def _plans(tally: Tally, launch: PlannedLaunch) -> list[DataPlan]:
    return [tally.data[name] for name in workload_names(launch) if name in tally.data]


def patience_s(
    workspace: Workspace, launch: PlannedLaunch, tally: Tally, deadline_s: float
) -> float:
    """Return the seconds that a launch may spend on repeating disturbed measurements.

    A measurement is disturbed if other programs on the same hardware take too much CPU time.

    deadline_s: seconds from the request for the machines to the deadline of the launch.
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
    """Return ([campaign cap, cap of the calendar month in UTC], error message or "").

    The error message says why a cost is unknown.
    """
    dearest = pure.dearest_by_type(offers, _spot_margin(workspace))
    # Leases are read before the spent dollars. A lease that ends between the two reads is then
    # counted twice. In the other order, it would not be counted at all.
    leases = workspace.provider.leases()
    problems = [lease.problem for lease in leases if lease.problem]
    worst = {
        lease.lease_id: _worst(workspace, lease, dearest) for lease in leases if not lease.problem
    }
    try:  # leases that have ended but are not in the warehouse yet
        worst |= {lease.lease_id: lease.usd for lease in workspace.provider.closed()}
    except LeaseUnreadable as error:
        problems.append(str(error))
    problems += [
        f"the cost of lease {lease_id} is unknown: end it with `srift reap`"
        for lease_id, usd in worst.items()
        if usd is None
    ]
    committed_usd = {lease_id: usd for lease_id, usd in worst.items() if usd is not None}
    others = of_others(workspace, pure.month_start(now), before=tally.refresh_id)
    spent_usd, unknown = spent_this_month(workspace, now)
    month = Cap(
        name="[ec2] max_usd_per_month",
        usd=workspace.settings.ec2.max_usd_per_month,
        spent_usd=spent_usd,
        committed_usd=sum(committed_usd.values()),
        claimed_usd=sum(row["left_usd"] for row in others),
        claimed_by=[f"refresh {row['refresh_id']} of {row['place']}" for row in others],
    )
    mine = [usd for name, usd in committed_usd.items() if name.startswith(f"{tally.refresh_id}-")]
    home_cap = Cap(
        name="this campaign's cap",
        usd=tally.cap_usd,
        spent_usd=tally.usd,
        committed_usd=sum(mine),
    )
    return [home_cap, month], next(filter(None, [unknown, *problems]), "")


def money_short(workspace: Workspace, tally: Tally, now: datetime) -> str:
    """Return a warning if most of the monthly dollar cap is used, else "".

    The used dollars are the recorded costs, plus the costs of launches that are not in the
    warehouse yet. A running launch counts with its worst-case cost. If a cost is unknown, the
    warning says why.
    """
    if not workspace.spends_money:
        return ""
    (_, month), unknown = caps_of(workspace, tally, now, current_offers(workspace))
    used = month.spent_usd + month.committed_usd
    if unknown or used < _WARNED * month.usd or not used:
        return unknown
    return f"${used:.2f} of {month.name} ${month.usd:.2f} are spent or committed"


def spent_this_month(workspace: Workspace, now: datetime) -> tuple[float, str]:
    """Return (dollars, error message) for the refreshes that ended in the month of `now`.

    A refresh that began in the previous month counts in full. If a cost is unknown, the dollars are
    infinite, and the error message says why. If the warehouse lacks a launch, its cost is read from
    the file of costs in SRIFT_HOME (`Ec2Leases.spent`).
    """
    month = f"{now:%Y-%m}"
    recent = workspace.mart("spend", month=month)
    for refresh_id in recent[recent["usd"].isna()]["refresh_id"]:
        return float("inf"), (
            f"the cost of refresh {refresh_id} is unknown (AWS's bill shows it): nothing can be"
            " launched before next month"
        )
    stored_ids = {*workspace.mart("lease_spend")["lease_id"]}
    try:
        costs = Ec2Leases(workspace.home).spent()
    except ProviderError as error:
        return float("inf"), str(error)
    lost_usd = [
        usd
        for name, (end_month, usd) in costs.items()
        if name not in stored_ids and end_month == month
    ]
    return float(recent["usd"].sum()) + sum(lost_usd), ""


def keep_spending(workspace: Workspace, now: datetime, aws_usd: float | None = None) -> None:
    """Copy this month's costs from the warehouse to a file in SRIFT_HOME.

    Call this function before buying machines. The file keeps the costs if the warehouse is lost or
    replaced. If a team shares the warehouse, the costs of all its SRIFT_HOMEs are copied.

    aws_usd: this month's cost in dollars, as the user states it, or None. If the recorded costs are
        lower, the difference is added to the file.

    Raises:
        ProviderError: if the bucket or the file cannot be read. Also if `aws_usd` is None, and the
            bucket has files of a launch whose cost is unknown (see `_refuse_unknown`).
    """
    ec2, leases, month = workspace.settings.ec2, Ec2Leases(workspace.home), f"{now:%Y-%m}"
    spent_usd, _ = spent_this_month(workspace, now)
    if aws_usd is None and ec2.bucket:
        _refuse_unknown(workspace, ec2.bucket, now)
    rows = workspace.mart("lease_spend")
    rows = rows[rows["ended_at"].dt.strftime("%Y-%m") == month].dropna(subset=["usd"])
    costs: dict[str, float] = rows.groupby("lease_id")["usd"].sum().to_dict()
    if aws_usd is not None:
        costs[f"{STATED}{now.isoformat()}"] = max(0.0, aws_usd - spent_usd)
    leases.begin_spent({name: (month, usd) for name, usd in costs.items()})


def _refuse_unknown(workspace: Workspace, bucket: str, now: datetime) -> None:
    """Raise ProviderError if machines of an unknown launch wrote to the bucket this month.

    Files that are older than the last cost stated by the user are ignored. A launch is known in
    these cases:

    - The warehouse or the file of costs has its cost.
    - This SRIFT_HOME has its lease.
    - Another SRIFT_HOME reserves dollars for its refresh.
    """
    ec2, leases, start = workspace.settings.ec2, Ec2Leases(workspace.home), pure.month_start(now)
    folder, store = f"{ec2.prefix}/leases/", Store(connect(), ec2.regions[0], bucket)
    # The ids of leases begin with the date. A launch of last month may still cost money. An older
    # launch has ended, because a campaign lasts at most a week (`claims` has the same bound).
    months = {f"{day:%Y%m}" for day in (now, start - timedelta(days=1))}
    files = [file for month in months for file in store.listed(folder + month)[0]]
    # Meanwhile, a launch may move from the reserved dollars to the folder of leases, and from there
    # to the warehouse. They are read in this order, so that no launch is missed.
    reserved_prefixes = tuple(
        f"{row['refresh_id']}-" for row in of_others(workspace, start, before="")
    )
    known_ids = {*leases.ids(), *workspace.mart("lease_spend")["lease_id"], *leases.spent()}
    stated_at = [name.removeprefix(STATED) for name in known_ids if name.startswith(STATED)]
    since = max([start, *map(datetime.fromisoformat, stated_at)])
    lease_ids = {
        file["Key"].removeprefix(folder).partition("/")[0]
        for file in files
        if file["LastModified"] >= since
    }
    if ids := [
        name for name in sorted(lease_ids - known_ids) if not name.startswith(reserved_prefixes)
    ]:
        raise ProviderError(
            "nothing was bought, because this month's spending is not known. Machines of"
            f" {len(ids)} launches, such as {ids[0]}, wrote to {bucket}. Their cost is missing in"
            f" the warehouse and in {leases.spent_file}. When the machines have ended, look up this"
            " month's total cost in AWS's bill, and run"
            " `srift refresh --provider ec2 --max-usd 0 --month-spent DOLLARS`"
        )


def _spot_margin(workspace: Workspace) -> float | None:
    """Return the highest accepted spot price, as a multiple of the known spot price.

    Returns None if the setting `markets` in [ec2] includes "on-demand". The on-demand price is then
    the highest accepted spot price.
    """
    return None if "on-demand" in workspace.settings.ec2.markets else SPOT_MARGIN


def _worst(workspace: Workspace, lease: Lease, dearest: Mapping[str, float]) -> float | None:
    """Return the maximum cost of a launch in dollars, if its machines run until its deadline.

    The hourly price is the higher of the price in `lease` and the sum of the machines' prices in
    `dearest`. Returns None if both prices are unknown.

    lease: the record of the launch. Its `usd_per_hour` may be None.
    dearest: {instance type: highest known dollars per hour}.
    """
    names = parse_cluster(lease.cluster)
    list_price = sum(dearest[name] for name in names) if dearest.keys() >= set(names) else 0.0
    rate = max(lease.usd_per_hour or 0.0, list_price)
    if rate <= 0:
        return None
    rate += len(names) * most_usd_per_hour_beside(workspace.settings.ec2)
    lasts_s = (lease.deadline_at - lease.started_at).total_seconds()
    downloads_usd = lease.usd_until(lease.started_at) or 0.0  # and each machine's minimum charge
    return pure.worst_usd(rate, lasts_s) + downloads_usd


@dataclass(kw_only=True)
class Tally:
    """The counts, dollars and seconds of one campaign (the launches of a refresh) so far.

    Attributes:
        cap_usd: the campaign's dollar cap.
        stop_at: the time at which the campaign ends, as `time.monotonic` returns it.
        refresh_id: id of the campaign's refresh. The ids of its launches begin with it.
        usd: dollars spent.
        runs: number of runs that machines have recorded, including failed runs.
        launches: number of launches, including refused launches.
        by_status: {status: number of runs and launches}, such as {"measured": 3, "failed": 1}.
        notes: messages for the user.
        refused: clusters that the provider could not supply, or that had a machine with missing
            devices.
        data: {workload: the plan to transfer its data to the machines}.
        bucket_region: the region of [ec2] `bucket`; empty if unknown.
        lacking: {workload: the reason why the workload cannot be measured}.
    """

    cap_usd: float
    stop_at: float
    refresh_id: str = ""
    usd: float = 0.0
    runs: int = 0
    launches: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    refused: list[Cluster] = field(default_factory=list)
    data: dict[str, DataPlan] = field(default_factory=dict)
    bucket_region: str = ""
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
        """Return True if the campaign has time left and can pay the estimated cost of `launch`.

        This method ignores the worst-case cost, which `allowance` compares with the caps.
        """
        return time.monotonic() < self.stop_at and self.usd + launch.est_usd <= self.cap_usd

    def stop_of(self, launch: PlannedLaunch) -> float:
        """Return the time at which `launch` must end, as `time.monotonic` returns it.

        The result is the earlier of two times: the end of the campaign, and the time at which the
        launch would exceed the campaign's remaining dollars.
        """
        price = launch.cluster.total_usd_per_hour
        if not price:
            return self.stop_at
        left_s = self.left_usd / price * 3600.0 - RELEASE_S
        return min(self.stop_at, time.monotonic() + max(left_s, 0.0))

    def add(self, result: Served, load_result: Collected, cluster: Cluster) -> None:
        """Add the results of one launch to the tally.

        result: the result of the launch.
        load_result: the result of loading the launch's records into the warehouse.
        cluster: the launched cluster. If `result.unavailable` is True, it is added to `refused`.
        """
        self.launches += 1
        if result.unavailable:
            self.refused.append(cluster)
        self.lacking |= load_result.lacking
        self.usd += load_result.usd
        self.runs += len(result.recorded)
        self.by_status.update(load_result.by_status)
        if result.mailbox is None:
            self.by_status.update(row["status"] for row in result.rows)
        self.notes += load_result.notes

    def summary(self) -> dict[str, Any]:
        return {
            "launches": self.launches,
            "runs": dict(self.by_status),
            "usd": round(self.usd, 6),
            "notes": self.notes,
        }
