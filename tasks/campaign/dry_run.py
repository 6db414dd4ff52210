"""The launches of a refresh with, on EC2, their worst cost and their requests; starts nothing.

With credentials, image, network and zones are read; without, names in brackets stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from models.campaign.campaign import PlannedLaunch
from models.domain.cluster import Cluster, Offer

from ..execution.data import DataCarrier, fetch_s
from ..execution.job import workload_names
from ..market.offers import offers_now
from ..providers.base import ProviderError
from ..providers.ec2.api import Clients, Ec2Api, connect
from ..providers.ec2.attempts import attempts
from ..providers.ec2.catalogue import TypeFacts
from ..providers.ec2.requests import LaunchSpec, requests_of, rules, security_group, shortened
from ..providers.ec2.survey import archive, launch_spec
from ..providers.ec2.userdata import user_data
from ..reporting.progress import reporter
from ..reporting.tables import launches_as_rows
from ..training.registry import load_champion
from ..workspace.workspace import Workspace, open_workspace
from .budget import Tally, allowance
from .campaign import list_of
from .named import Wish, launches_for

Row = dict[str, Any]
_UNCHECKED = (
    "not checked: image, network, zones, quotas, capacity; see `srift doctor --provider ec2`"
)


def dry_run(provider: str, max_usd: float | None, wish: Wish | None = None) -> list[Row]:
    """Return the launches that a refresh, or a measurement of `wish`, would make now."""
    workspace, now = open_workspace(provider), datetime.now(UTC)
    offers = offers_now(workspace, now)
    if workspace.spends_money:
        if max_usd is None:
            assumed = f"${workspace.settings.campaign.max_usd:g} of [campaign] max_usd"
            reporter().say(f"no --max-usd: this dry run assumes {assumed}; {provider} requires it")
        offers, note = with_spot(offers, workspace.settings.campaign.market)
        if note:
            reporter().say(note)
    if wish is None:
        launches: Sequence[PlannedLaunch] = list_of(workspace, offers, max_usd)
    else:
        champion = load_champion(workspace.home, provider)
        launches = launches_for(workspace, champion, wish, offers).launches
    return planned(workspace, launches, offers, max_usd, now)


def planned(
    workspace: Workspace,
    launches: Sequence[PlannedLaunch],
    offers: Sequence[Offer],
    max_usd: float | None,
    now: datetime,
    clients: Clients | None = None,
) -> list[Row]:
    """Return a row for each launch, as if every launch before it had its expected cost.

    `worst_usd` is None where nothing is paid and where a cap refuses the launch. `said` are the
    assumptions, and why a launch is refused.
    """
    tally = Tally(cap_usd=cap_of(workspace, max_usd), stop_at=float("inf"), refresh_id="dry-run")
    api, why = _api(clients) if workspace.spends_money else (None, "")
    carrier = DataCarrier(workspace, clients)
    rows = launches_as_rows(launches)
    for number, (launch, row) in enumerate(zip(launches, rows, strict=True)):
        plans = carrier.plans(workload_names(launch), launch.cluster.members[0].region)
        tally.fetch_s |= {plan.name: fetch_s(plan) for plan in plans}
        allowed = allowance(workspace, launch, tally, now, offers)
        worst_usd, requests, said = None, list[Row](), [why, *map(str, plans)]
        if allowed.refusal:
            said = [f"not launched: {allowed.refusal}"]
        elif workspace.spends_money:
            tally.usd += launch.est_usd
            worst_usd, name = allowed.worst_usd, f"dry-run-{number:02d}"
            requests, problem = _requests(
                workspace, launch.cluster, name, allowed.deadline_s, offers, now, api
            )
            said.append(problem)
        row |= {"deadline_s": allowed.deadline_s, "worst_usd": worst_usd, "requests": requests}
        row["said"] = list(filter(None, said))
    return rows


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


def _api(clients: Clients | None) -> tuple[Ec2Api | None, str]:
    try:
        return connect(clients), ""
    except ProviderError as error:
        return None, f"{error}; {_UNCHECKED}"


def _requests(
    workspace: Workspace,
    cluster: Cluster,
    lease_id: str,
    deadline_s: float,
    offers: Sequence[Offer],
    now: datetime,
    api: Ec2Api | None,
) -> tuple[list[Row], str]:
    """Return action and request of the lease and then of each attempt, and what was not read."""
    ec2, region, problem = workspace.settings.ec2, cluster.members[0].region, ""
    here_offers = [offer for offer in offers if offer.region == region]
    words: dict[str, Any] = {
        "lease_id": lease_id,
        "controller": "(this home)",
        "deadline_unix": int(now.timestamp() + deadline_s),
    }
    spec = _spec_without_asking(workspace, cluster, here_offers, **words)
    if api is not None:
        try:
            spec = launch_spec(api, ec2, cluster, **words)
        except ProviderError as error:
            problem = f"{error}; {_UNCHECKED}"
    script = user_data(
        deadline_s,
        bucket=ec2.bucket or "no-bucket-is-set",
        prefix=ec2.prefix,
        region=region,
        code_sha256=archive(Path(__file__).parents[1] / "node")[1],
        lease=lease_id,
        role_id=spec.role_id,
        python=ec2.python,
    )
    group = "(the security group's id)"
    made: list[tuple[str, Row]] = [("ec2:CreateSecurityGroup", security_group(spec))]
    for action, ruled in rules(group):
        made.append((action, {"GroupId": group, "IpPermissions": ruled}))
    for attempt in attempts(cluster, here_offers, spec.subnets, ec2.markets):
        made += requests_of(spec, attempt, security=group, user_data=script)
    return [{"action": action, "request": shortened(body)} for action, body in made], problem


def _spec_without_asking(
    workspace: Workspace, cluster: Cluster, offers: Sequence[Offer], **words: Any
) -> LaunchSpec:
    """Return the launch specification with placeholders for what only AWS knows."""
    ec2, region = workspace.settings.ec2, cluster.members[0].region
    zones = {offer.zone for offer in offers if offer.zone.startswith(region)} or {f"{region}a"}
    kinds = {offer.instance_type.name for offer in cluster.members}
    return LaunchSpec(
        choices=ec2,
        region=region,
        vpc="(the subnets' VPC)",
        subnets={zone: f"(the {ec2.subnets} subnet in {zone})" for zone in sorted(zones)},
        types={name: TypeFacts(grouped=False, efa_cards=()) for name in kinds},
        image_id=f"(the image of {ec2.ami_parameter})",
        root_device="/dev/sda1",
        role_id="AROAEXAMPLE",  # user-data takes nothing in brackets
        **words,
    )
