"""List the launches that a refresh would make, without starting any machine.

On EC2, the list also shows the worst-case cost and the AWS requests of each launch. Values that
only AWS knows are shown as text in brackets.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster, Offer

from ..execution.data_transfer import DataCarrier
from ..execution.job import workload_names
from ..execution.outcomes import Row
from ..market.offers import offers_now
from ..providers.ec2.attempts import attempts
from ..providers.ec2.requests import LaunchSpec, requests_of, rules, security_group
from ..reporting.progress import reporter
from ..reporting.tables import launches_as_rows
from ..training.registry import load_champion
from ..workspace.workspace import Workspace, open_workspace
from .campaign import list_of, torch_mismatch
from .named import Wish, case_of, launches_for
from .spending import Tally, allowance


def dry_run(provider: str, max_usd: float | None, wish: Wish | None = None) -> list[Row]:
    """Return a row for each launch that a refresh or `srift measure` would make now.

    wish: the request of `srift measure`; None for a refresh.
    max_usd: the dollar cap; None means `[campaign] max_usd` of srift.toml.
    """
    workspace, now = open_workspace(provider), datetime.now(UTC)
    offers, tally = offers_now(workspace, now), Tally.of(workspace, max_usd, "dry-run")
    if workspace.spends_money:
        if max_usd is None:
            cap = f"${workspace.settings.campaign.max_usd:g} of [campaign] max_usd"
            reporter().say(
                f"no --max-usd: assuming {cap}; launches on {provider} require --max-usd"
            )
        offers = with_spot(offers, workspace.settings.campaign.market)
        tally.cap_usd = min(tally.cap_usd, workspace.settings.ec2.max_usd_per_month)
    if wish is None:
        launches = list_of(workspace, offers, tally)
    else:
        case = case_of(workspace, load_champion(workspace.home, provider), wish, offers)
        launches = launches_for(case, wish)
    if launches and (warning := torch_mismatch(workspace)):
        reporter().say(warning)
    with workspace.warehouse.read():  # opens the file once, although each launch reads from it
        return dry_run_rows(workspace, launches, offers, tally, now)


def dry_run_rows(
    workspace: Workspace,
    launches: Sequence[PlannedLaunch],
    offers: Sequence[Offer],
    tally: Tally,
    now: datetime,
) -> list[Row]:
    """Return a row for each launch: deadline, worst-case cost, AWS requests and messages.

    The estimated cost of an EC2 launch is added to `tally` before the caps are applied to the next
    launch. Some columns of a row:

    refused: True if `allowance` refuses the launch.
    notes: messages for the user, such as the reason of a refusal or the age of the prices.
    worst_usd: the worst-case cost; None for refused launches and local hosts.
    """
    carrier = DataCarrier(workspace)
    tally.bucket_region = carrier.bucket_region
    rows = launches_as_rows(launches)
    for number, (launch, row) in enumerate(zip(launches, rows, strict=True)):
        plans = carrier.plans(workload_names(launch), launch.cluster.region)
        tally.data |= {plan.name: plan for plan in plans}
        limits = allowance(workspace, launch, tally, now, offers)
        row |= {
            "deadline_s": limits.deadline_s,
            "refused": bool(limits.refusal),
            "worst_usd": None,
            "requests": [],
            "notes": [str(plan) for plan in plans],
        }
        if limits.refusal:
            row["notes"] = [f"not launched: {limits.refusal}"]
        elif workspace.spends_money:
            tally.usd += launch.est_usd
            name = f"dry-run-{number:02d}"
            row["worst_usd"] = limits.worst_usd
            row["requests"] = _requests(workspace, launch.cluster, offers, name, limits.deadline_s)
            priced_at = min(offer.price_as_of for offer in launch.cluster.members)
            row["notes"] += [
                f"prices as of {priced_at:%Y-%m-%d}, {(now - priced_at).days} days old",
                "not checked: image, network, zones, quotas, capacity; see `srift doctor --provider"
                " ec2`",
            ]
    return rows


def with_spot(offers: Sequence[Offer], market: str) -> list[Offer]:
    """Return `offers`, with estimated spot offers if the campaign needs them.

    If `market` is "spot" and no spot price is known, a spot offer is added for each on-demand
    offer. The added offer has the on-demand price, which is an upper bound of the spot price.

    market: the market in which the campaign buys machines, "spot" or "on-demand".
    """
    markets = {offer.market for offer in offers if offer.usd_per_hour is not None}
    if market != "spot" or "spot" in markets:
        return list(offers)
    reporter().say("no spot price is known: this dry run uses on-demand prices as upper bounds")
    on_demand = [offer for offer in offers if offer.market == "on-demand"]
    return on_demand + [
        replace(offer, market="spot", zone=f"{offer.region}a") for offer in on_demand
    ]


def _requests(
    workspace: Workspace, cluster: Cluster, offers: Sequence[Offer], name: str, deadline_s: float
) -> list[Row]:
    """Return a row for each AWS request of a launch, in order.

    A row has the `action`, such as "ec2:CreateSecurityGroup", and the `request` without the
    user-data script.

    name: the launch's id.
    """
    ec2, region = workspace.settings.ec2, cluster.region
    here = [offer for offer in offers if offer.region == region]
    zones = {offer.zone for offer in here if offer.zone.startswith(region)} or {f"{region}a"}
    spec = LaunchSpec(
        choices=ec2,
        region=region,
        vpc="(the subnets' VPC)",
        subnets={zone: f"(the {ec2.subnets} subnet in {zone})" for zone in sorted(zones)},
        types=defaultdict(lambda: {"NetworkInfo": {}}),
        image={"ImageId": f"(the image of {ec2.ami_parameter})"},
        role_id="(the role of [ec2] instance_profile)",
        controller="(this home)",
        lease_id=name,
        deadline_unix=int(datetime.now(UTC).timestamp() + deadline_s),
    )
    group = "(the security group's id)"
    requests = [("ec2:CreateSecurityGroup", security_group(spec))]
    requests += rules(group)
    script = "(the script that starts the agent)"
    for attempt in attempts(cluster, here, spec.subnets, ec2.markets):
        requests += requests_of(spec, attempt, security=group, user_data=script)
    return [{"action": action, "request": body} for action, body in requests]
