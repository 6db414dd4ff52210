"""What a refresh on EC2 would ask AWS for, request by request, and what it could cost at worst. Asks for no machine.

With credentials image, network, zones and quotas are read; without, names in brackets stand for what nobody could say.
"""

from __future__ import annotations

import json
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
    "not checked: the image, the network and its zones, which zones have the type, EFA, placement groups, quotas,"
    " permissions, capacity; `srift doctor --provider ec2` checks what can be checked"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One launch as it would be asked for. `worst_usd` None: it would not be made, `said` tells why."""

    launch: PlannedLaunch
    deadline_s: float
    worst_usd: float | None
    requests: Sequence[tuple[str, Mapping[str, Any]]]
    said: Sequence[str]


def dry_run(
    provider: str, max_usd: float | None, wish: Wish | None = None
) -> tuple[list[Planned], float]:
    """What a refresh of `provider`, or a measurement of what `wish` names, would ask for now, and its cap.

    Says what it had to take for granted.
    """
    workspace, now = open_workspace(provider), datetime.now(UTC)
    if max_usd is None:
        assumed = f"${workspace.settings.campaign.max_usd:g} of [campaign] max_usd"
        reporter().say(
            f"no --max-usd: this dry run assumes the {assumed}; nothing on {provider} starts without it"
        )
    offers, said = with_spot(offers_now(workspace, now), workspace.settings.campaign.market)
    if said:
        reporter().say(said)
    if wish is None:
        launches: Sequence[PlannedLaunch] = list_of(workspace, offers, max_usd)
    else:
        launches = launches_for(
            workspace, load_champion(workspace.home, provider), wish, offers
        ).launches
    return planned(workspace, launches, offers, max_usd, now), cap_of(workspace, max_usd)


def planned(
    workspace: Workspace,
    launches: Sequence[PlannedLaunch],
    offers: Sequence[Offer],
    max_usd: float | None,
    now: datetime,
    clients: Clients | None = None,
) -> list[Planned]:
    """Each launch in turn, as if every one before it had cost what it is expected to."""
    tally = Tally(cap_usd=cap_of(workspace, max_usd), stop_at=float("inf"), refresh_id="dry-run")
    surveyor, why = _surveyor(workspace, clients)
    carrier = DataCarrier(workspace, clients)
    found = []
    for number, launch in enumerate(launches):
        plans = carrier.plans(workload_names(launch), launch.cluster.members[0].region)
        tally.fetch_s |= {plan.name: fetch_s(plan) for plan in plans}
        allowed = allowance(workspace, launch, tally, now, offers)
        said = [f"would not be launched then: {allowed.refusal}"] if allowed.refusal else []
        requests: list[tuple[str, Mapping[str, Any]]] = []
        if not allowed.refusal:
            tally.usd += launch.est_usd
            name = f"dry-run-{number:02d}"
            requests, more = _requests(
                workspace, launch.cluster, name, allowed.deadline_s, offers, now, surveyor
            )
            said += [why] if why else []
            said += more
            said += [str(plan) for plan in plans]
        worst_usd = None if allowed.refusal else allowed.worst_usd
        found.append(
            Planned(
                launch=launch,
                deadline_s=allowed.deadline_s,
                worst_usd=worst_usd,
                requests=requests,
                said=said,
            )
        )
    return found


def cap_of(workspace: Workspace, max_usd: float | None) -> float:
    """Dollars that may be spent: those asked for, and not more than those of a month."""
    asked = workspace.settings.campaign.max_usd if max_usd is None else max_usd
    return min(asked, workspace.settings.ec2.max_usd_per_month)


def with_spot(offers: Sequence[Offer], market: str) -> tuple[list[Offer], str]:
    """Where spot is wanted and no spot price is known: on-demand's, which it never exceeds, and the sentence on it."""
    if market != "spot" or any(
        offer.market == "spot" and offer.usd_per_hour is not None for offer in offers
    ):
        return list(offers), ""
    listed = [offer for offer in offers if offer.market == "on-demand"]
    bound = [replace(offer, market="spot", zone=f"{offer.region}a") for offer in listed]
    return [
        *listed,
        *bound,
    ], "no spot price is known: each is taken to be as high as on demand, which bounds it"


def as_rows(plan: Sequence[Planned]) -> list[dict[str, Any]]:
    """As `--json` prints it."""
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
            "said": list(one.said),
        }
        for row, one in zip(rows, plan, strict=True)
    ]


def as_text(plan: Sequence[Planned], cap_usd: float) -> str:
    """Every request on a line, and the dollars: together never more than the cap, which each launch asks anew."""
    lines: list[str] = []
    asked = [one.said for one in plan if one.worst_usd is not None]
    of_all = (
        []
        if len(asked) < 2
        else [sentence for sentence in asked[0] if all(sentence in said for said in asked)]
    )
    for one in plan:
        name = f"{one.launch.cluster.name} {one.launch.cluster.members[0].market}"
        cost = (
            "not launched"
            if one.worst_usd is None
            else f"at worst ${one.worst_usd:.2f} ({one.deadline_s:.0f} s)"
        )
        lines += [f"{name}: {len(one.launch.items)} runs, about ${one.launch.est_usd:.4f}, {cost}"]
        lines += [
            f"  {action} {json.dumps(shortened(request))}" for action, request in one.requests
        ]
        lines += [f"  {sentence}" for sentence in dict.fromkeys(one.said) if sentence not in of_all]
    lines += dict.fromkeys(of_all)
    total = min(cap_usd, sum(one.worst_usd or 0.0 for one in plan))
    made = sum(one.worst_usd is not None for one in plan)
    return "\n".join(
        [*lines, f"{made} launches, at worst ${total:.2f} together; nothing was asked for"]
    )


def _surveyor(workspace: Workspace, clients: Clients | None) -> tuple[Surveyor | None, str]:
    """Who asks AWS, or None and why nobody can."""
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
    """(action, request) in order: what belongs to the whole lease, then attempt after attempt; and remarks."""
    ec2, region, said = workspace.settings.ec2, cluster.members[0].region, list[str]()
    here_offers = [offer for offer in offers if offer.region == region]
    words: dict[str, Any] = {
        "lease_id": lease_id,
        "controller": "(this home)",
        "deadline_unix": int(now.timestamp() + deadline_s),
    }
    role = "AROAEXAMPLE"  # stands for the id of the machines' role; user-data takes nothing in brackets
    try:
        if surveyor is None:
            raise ProviderError("")
        spec = surveyor.launch_spec(cluster, **words)
        role = surveyor.account(region).role_id
    except ProviderError as error:
        said += [f"{error}; {_UNCHECKED}"] if str(error) else []
        spec = _spec_without_asking(workspace, cluster, here_offers, **words)
    planned_attempts = attempts(cluster, here_offers, spec.subnets, ec2.markets)
    boot = NodeBoot(
        bucket=ec2.bucket or "no-bucket-is-set",
        prefix=ec2.prefix,
        region=region,
        code_sha256=archive(Path(__file__).parents[1] / "node")[1],
        lease_id=lease_id,
        role_id=role,
        python=ec2.python,
    )
    return list(_in_order(spec, planned_attempts, user_data(boot, deadline_s))), said


def _in_order(
    spec: LaunchSpec, planned_attempts: Sequence[Attempt], script: str
) -> list[tuple[str, Mapping[str, Any]]]:
    group = "(the security group's id)"
    made: list[tuple[str, Mapping[str, Any]]] = [("ec2:CreateSecurityGroup", security_group(spec))]
    actions = {"ingress": "ec2:AuthorizeSecurityGroupIngress", "egress": "ec2:AuthorizeSecurityGroupEgress",
               "revoked": "ec2:RevokeSecurityGroupEgress"}  # fmt: skip
    for kind, ruled in rules().items():
        made.append((actions[kind], {"GroupId": group, "IpPermissions": ruled}))
    for attempt in planned_attempts:
        made += requests_of(spec, attempt, security=group, user_data=script)
    return made


def _spec_without_asking(
    workspace: Workspace, cluster: Cluster, offers: Sequence[Offer], **words: Any
) -> LaunchSpec:
    """What a launch would stand on, as far as it is known without asking."""
    ec2, region = workspace.settings.ec2, cluster.members[0].region
    zones = sorted({offer.zone for offer in offers if offer.zone.startswith(region)}) or [
        f"{region}a"
    ]
    kinds = {offer.instance_type.name for offer in cluster.members}
    return LaunchSpec(
        region=region,
        vpc="(the subnets' VPC)",
        subnets={zone: f"(the {ec2.subnets} subnet in {zone})" for zone in zones},
        public=ec2.subnets == "public",
        types={name: TypeFacts(efa=False, grouped=False) for name in kinds},
        image_id=f"(the image of {ec2.ami_parameter})",
        root_device="/dev/sda1",
        volume_gib=ec2.volume_gib,
        instance_profile=ec2.instance_profile,
        deployment=ec2.deployment,
        **words,
    )
