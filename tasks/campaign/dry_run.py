"""The launches of a refresh on EC2 with their worst cost and their requests; starts nothing.

With credentials, image, network and zones are read; without, names in brackets stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from models.campaign.campaign import PlannedLaunch
from models.domain.cluster import Cluster, Offer

from ..execution.data import DataCarrier, fetch_s
from ..execution.job import workload_names
from ..market.offers import offers_now
from ..providers.base import ProviderError
from ..providers.ec2 import api as ec2_api
from ..providers.ec2.api import Clients, Ec2Api
from ..providers.ec2.attempts import Attempt, attempts
from ..providers.ec2.catalogue import TypeFacts
from ..providers.ec2.requests import LaunchSpec, requests_of, rules, security_group, shortened
from ..providers.ec2.survey import Surveyor, archive
from ..providers.ec2.userdata import NodeBoot, user_data
from ..reporting.progress import reporter
from ..reporting.tables import launches_as_rows
from ..training.registry import load_champion
from ..workspace.workspace import Workspace, open_workspace
from .budget import Tally, allowance
from .campaign import list_of
from .named import Wish, launches_for

_UNCHECKED = (
    "not checked: image, network, zones, quotas, capacity; see `srift doctor --provider ec2`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryLaunch:
    """A launch and its requests; `worst_usd` None: a cap refuses it. `notes` say what is
    assumed.
    """

    launch: PlannedLaunch
    deadline_s: float
    worst_usd: float | None
    requests: Sequence[tuple[str, Mapping[str, Any]]]
    notes: Sequence[str]


def dry_run(
    provider: str, max_usd: float | None, wish: Wish | None = None
) -> tuple[list[DryLaunch], float]:
    """Return what a refresh, or a measurement of `wish`, would request now, and its cap."""
    workspace, now = open_workspace(provider), datetime.now(UTC)
    if max_usd is None:
        assumed = f"${workspace.settings.campaign.max_usd:g} of [campaign] max_usd"
        reporter().say(f"no --max-usd: this dry run assumes {assumed}; {provider} requires it")
    offers, note = with_spot(offers_now(workspace, now), workspace.settings.campaign.market)
    if note:
        reporter().say(note)
    if wish is None:
        launches: Sequence[PlannedLaunch] = list_of(workspace, offers, max_usd)
    else:
        champion = load_champion(workspace.home, provider)
        launches = launches_for(workspace, champion, wish, offers).launches
    return planned(workspace, launches, offers, max_usd, now), cap_of(workspace, max_usd)


def planned(
    workspace: Workspace,
    launches: Sequence[PlannedLaunch],
    offers: Sequence[Offer],
    max_usd: float | None,
    now: datetime,
    clients: Clients | None = None,
) -> list[DryLaunch]:
    """Plan each launch as if every one before it had its expected cost."""
    tally = Tally(cap_usd=cap_of(workspace, max_usd), stop_at=float("inf"), refresh_id="dry-run")
    surveyor, why = _surveyor(workspace, clients)
    carrier = DataCarrier(workspace, clients)
    found = []
    for number, launch in enumerate(launches):
        plans = carrier.plans(workload_names(launch), launch.cluster.members[0].region)
        tally.fetch_s |= {plan.name: fetch_s(plan) for plan in plans}
        allowed = allowance(workspace, launch, tally, now, offers)
        requests: list[tuple[str, Mapping[str, Any]]] = []
        notes = [f"not launched: {allowed.refusal}"]
        if not allowed.refusal:
            tally.usd += launch.est_usd
            name = f"dry-run-{number:02d}"
            requests, more = _requests(
                workspace, launch.cluster, name, allowed.deadline_s, offers, now, surveyor
            )
            notes = [why] if why else []
            notes += [*more, *(str(plan) for plan in plans)]
        found.append(
            DryLaunch(
                launch=launch,
                deadline_s=allowed.deadline_s,
                worst_usd=None if allowed.refusal else allowed.worst_usd,
                requests=requests,
                notes=notes,
            )
        )
    return found


def cap_of(workspace: Workspace, max_usd: float | None) -> float:
    """Return `max_usd`, by default the campaign's, and at most the month's."""
    wanted = workspace.settings.campaign.max_usd if max_usd is None else max_usd
    return min(wanted, workspace.settings.ec2.max_usd_per_month)


def with_spot(offers: Sequence[Offer], market: str) -> tuple[list[Offer], str]:
    """Add spot offers at on-demand prices, which bound them, if no spot price is known."""
    known = {offer.market for offer in offers if offer.usd_per_hour is not None}
    if market != "spot" or "spot" in known:
        return list(offers), ""
    listed = [offer for offer in offers if offer.market == "on-demand"]
    bound = [replace(offer, market="spot", zone=f"{offer.region}a") for offer in listed]
    return [*listed, *bound], "no spot price is known: on-demand prices, which bound it, are used"


def as_rows(plan: Sequence[DryLaunch]) -> list[dict[str, Any]]:
    """Return the launches with their requests, as `--json` prints them."""
    rows = launches_as_rows([one.launch for one in plan])
    return [
        row
        | {
            "deadline_s": one.deadline_s,
            "worst_usd": one.worst_usd,
            "requests": [
                {"action": action, "request": shortened(request)}
                for action, request in one.requests
            ],
            "said": list(one.notes),
        }
        for row, one in zip(rows, plan, strict=True)
    ]


def as_text(plan: Sequence[DryLaunch], cap_usd: float) -> str:
    """Return a table of launches with expected and worst dollars, and the notes once each."""
    rows = [("cluster", "market", "runs", "about usd", "worst usd", "seconds")]
    for one in plan:
        market = one.launch.cluster.members[0].market
        worst = "-" if one.worst_usd is None else f"{one.worst_usd:.2f}"
        numbers = (f"{one.launch.est_usd:.4f}", worst, f"{one.deadline_s:.0f}")
        rows.append((one.launch.cluster.name, market, str(len(one.launch.items)), *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += dict.fromkeys(note for one in plan for note in one.notes)
    worst_usd = [one.worst_usd for one in plan if one.worst_usd is not None]
    total = min(cap_usd, sum(worst_usd))
    lines.append(f"{len(worst_usd)} launches, at worst ${total:.2f}; --json shows the requests")
    return "\n".join(lines)


def _surveyor(workspace: Workspace, clients: Clients | None) -> tuple[Surveyor | None, str]:
    try:
        if clients is None and not ec2_api.has_credentials():
            return None, f"no AWS credentials; {_UNCHECKED}"
        return Surveyor(Ec2Api(clients or ec2_api.boto_clients()), workspace.settings.ec2), ""
    except ProviderError as error:
        return None, f"{error}; {_UNCHECKED}"


def _requests(
    workspace: Workspace,
    cluster: Cluster,
    lease_id: str,
    deadline_s: float,
    offers: Sequence[Offer],
    now: datetime,
    surveyor: Surveyor | None,
) -> tuple[list[tuple[str, Mapping[str, Any]]], list[str]]:
    """Return (action, request) of the lease and then of each attempt, and notes."""
    ec2, region, notes = workspace.settings.ec2, cluster.members[0].region, list[str]()
    here_offers = [offer for offer in offers if offer.region == region]
    words: dict[str, Any] = {
        "lease_id": lease_id,
        "controller": "(this home)",
        "deadline_unix": int(now.timestamp() + deadline_s),
    }
    try:
        if surveyor is None:
            raise ProviderError("")
        spec = surveyor.launch_spec(cluster, **words)
    except ProviderError as error:
        notes += [f"{error}; {_UNCHECKED}"] if str(error) else []
        spec = _spec_without_asking(workspace, cluster, here_offers, **words)
    planned_attempts = attempts(cluster, here_offers, spec.subnets, ec2.markets)
    boot = NodeBoot(
        bucket=ec2.bucket or "no-bucket-is-set",
        prefix=ec2.prefix,
        region=region,
        code_sha256=archive(Path(__file__).parents[1] / "node")[1],
        lease_id=lease_id,
        role_id=spec.role_id,
        python=ec2.python,
    )
    return list(_in_order(spec, planned_attempts, user_data(boot, deadline_s))), notes


def _in_order(
    spec: LaunchSpec, planned_attempts: Sequence[Attempt], script: str
) -> list[tuple[str, Mapping[str, Any]]]:
    group = "(the security group's id)"
    made: list[tuple[str, Mapping[str, Any]]] = [("ec2:CreateSecurityGroup", security_group(spec))]
    for action, ruled in rules(group):
        made.append((action, {"GroupId": group, "IpPermissions": ruled}))
    for attempt in planned_attempts:
        made += requests_of(spec, attempt, security=group, user_data=script)
    return made


def _spec_without_asking(
    workspace: Workspace, cluster: Cluster, offers: Sequence[Offer], **words: Any
) -> LaunchSpec:
    """Return the launch specification with placeholders for what only AWS knows."""
    ec2, region = workspace.settings.ec2, cluster.members[0].region
    zones = {offer.zone for offer in offers if offer.zone.startswith(region)} or {f"{region}a"}
    kinds = {offer.instance_type.name for offer in cluster.members}
    return LaunchSpec(
        region=region,
        vpc="(the subnets' VPC)",
        subnets={zone: f"(the {ec2.subnets} subnet in {zone})" for zone in sorted(zones)},
        public=ec2.subnets == "public",
        types={name: TypeFacts(efa=False, grouped=False) for name in kinds},
        image_id=f"(the image of {ec2.ami_parameter})",
        root_device="/dev/sda1",
        volume_gib=ec2.volume_gib,
        instance_profile=ec2.instance_profile,
        role_id="AROAEXAMPLE",  # user-data takes nothing in brackets
        deployment=ec2.deployment,
        **words,
    )
