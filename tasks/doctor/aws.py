"""Check an AWS account: credentials, bucket, roles, and launches and quotas in each region.

The checks start no machine. They write one object to the bucket, and delete it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

from models.domain.cluster import Cluster, Offer

from ..execution.data_transfer import DataCarrier
from ..providers.base import ProviderError
from ..providers.ec2.api import PRICE_LIST_REGION, Clients, Ec2Api, answered_at, connect
from ..providers.ec2.attempts import attempts
from ..providers.ec2.catalogue import quota_of
from ..providers.ec2.errors import DENIED, AwsRefused
from ..providers.ec2.market import notes_on_types, packaged_offers, packaged_types
from ..providers.ec2.requests import LaunchSpec, requests_of, security_group
from ..providers.ec2.settings import Ec2
from ..providers.ec2.survey import launch_spec, not_launched
from ..workspace.home import Wrong
from ..workspace.settings import Settings
from ..workspace.workspace import open_workspace
from .data import examine_data
from .findings import Finding, NotChecked, run_check

MAX_CLOCK_S = 240.0  # AWS refuses requests whose time is more than 300 s from AWS's clock
# EC2's service-linked roles. AWS creates them with an account's first spot machine and first fleet.
SERVICE_ROLES = {
    "AWSServiceRoleForEC2Spot": "spot.amazonaws.com",
    "AWSServiceRoleForEC2Fleet": "ec2fleet.amazonaws.com",
}
_EVERYBODY = ("/AllUsers", "/AuthenticatedUsers")  # endings of the URIs of public groups in an ACL


def examine_ec2(settings: Settings, clients: Clients | None = None) -> Iterator[Finding]:
    """Check the AWS account, and yield the result of each check.

    If a check fails, the checks that depend on it are skipped.
    """
    ec2 = settings.ec2
    if ec2.bucket:
        yield Finding("settings", "ok", f"machines report to s3://{ec2.bucket}/{ec2.prefix}")
    else:
        says = "set bucket under [ec2]: machines report through an S3 bucket"
        yield Finding("settings", "wrong", says)
    yield from (Finding("instance types", "note", note) for note in notes_on_types(ec2))
    try:  # GetCallerIdentity needs no permission: a refusal means wrong credentials
        api = connect(clients)
        caller = api.ask("sts:GetCallerIdentity", ec2.regions[0])
    except ProviderError as error:
        yield Finding("identity", "wrong", str(error))
        return
    yield Finding("identity", "ok", f"account {caller['Account']} {caller['Arn']}")
    yield run_check("clock", _clock, api, answered_at(caller))
    yield (regions := run_check("regions", _regions, api, ec2))
    if regions.status == "wrong":
        return
    yield run_check("live prices", _prices, api, ec2)
    if ec2.bucket:
        yield (bucket := run_check("bucket", _bucket, api, ec2))
        if bucket.status == "ok":
            yield run_check("bucket is private", _private, api, ec2)
            yield run_check("bucket can be used", _usable, api, ec2)
    if "spot" in (*ec2.markets, settings.campaign.market):
        for role in SERVICE_ROLES:
            yield run_check(f"role {role}", _service_role, api, ec2, role)
    yield from examine_data(settings, DataCarrier(open_workspace("ec2", settings), clients))
    for region in ec2.regions:
        yield from _launch(api, ec2, region)
        yield from _quotas(api, settings, region)


def account_number(ec2: Ec2) -> str | None:
    """Return the number of the AWS account; None if the credentials do not work."""
    try:
        return str(connect().ask("sts:GetCallerIdentity", ec2.regions[0])["Account"])
    except ProviderError:
        return None


def _regions(api: Ec2Api, ec2: Ec2) -> str:
    every = api.ask("ec2:DescribeRegions", ec2.regions[0], AllRegions=True)["Regions"]
    enabled = {
        region["RegionName"] for region in every if region.get("OptInStatus") != "not-opted-in"
    }
    unusable = [region for region in ec2.regions if region not in enabled]
    if unusable:
        raise Wrong(
            f"this AWS account has not enabled {', '.join(unusable)}: enable the regions,"
            " or remove them from `regions` in [ec2] of srift.toml"
        )
    return f"{', '.join(ec2.regions)} enabled"


def _clock(api: Ec2Api, answered_at_unix: float) -> str:
    ahead_s = api.now().timestamp() - answered_at_unix
    if abs(ahead_s) > MAX_CLOCK_S:
        raise Wrong(
            f"the clock of this computer is {abs(ahead_s):.0f} s"
            f" {'ahead of' if ahead_s > 0 else 'behind'} AWS's clock: synchronize it with NTP"
        )
    return f"{ahead_s:+.0f} s from AWS's clock"


def _prices(api: Ec2Api, ec2: Ec2) -> str:
    """Check that list prices and spot prices can be read, and return a sentence that says so.

    Raises NotChecked if AWS refuses a request.
    """
    try:
        api.ask("pricing:GetProducts", PRICE_LIST_REGION, ServiceCode="AmazonEC2", MaxResults=1)
        api.ask("ec2:DescribeSpotPriceHistory", ec2.regions[0], MaxResults=1)
    except AwsRefused as error:
        raise NotChecked(
            f"AWS refused to show prices, so the prices that ship with Srift are used: {error}"
        ) from None
    return "list prices and spot prices can be read"


def _bucket(api: Ec2Api, ec2: Ec2) -> str:
    answer = api.ask("s3:GetBucketLocation", ec2.regions[0], Bucket=ec2.bucket)
    location = answer.get("LocationConstraint")
    region = {None: "us-east-1", "EU": "eu-west-1"}.get(location, location)
    if region not in ec2.regions:
        raise Wrong(
            f"bucket {ec2.bucket} is in {region}: add this region to `regions` in [ec2] of"
            " srift.toml"
        )
    return f"{ec2.bucket} is in {region}"


def _private(api: Ec2Api, ec2: Ec2) -> str:
    """Check that the bucket is not public, and return a sentence that says so.

    Raises Wrong if the bucket is public.
    """
    region, words = ec2.regions[0], {"Bucket": ec2.bucket}
    missing = ("NoSuchPublicAccessBlockConfiguration", "NoSuchBucketPolicy")
    block = api.ask_unless(missing, "s3:GetBucketPublicAccessBlock", region, **words)
    policy = api.ask_unless(missing, "s3:GetBucketPolicyStatus", region, **words)
    grants = api.ask("s3:GetBucketAcl", region, **words)["Grants"]
    by_policy = policy.get("PolicyStatus", {}).get("IsPublic")
    by_acl = any(str(grant["Grantee"].get("URI", "")).endswith(_EVERYBODY) for grant in grants)
    # The public access block overrides the bucket policy and the ACL.
    access_block = block.get("PublicAccessBlockConfiguration", {})
    if (by_policy and not access_block.get("RestrictPublicBuckets")) or (
        by_acl and not access_block.get("IgnorePublicAcls")
    ):
        raise Wrong(f"bucket {ec2.bucket} is public: run `aws s3api put-public-access-block` on it")
    return "the bucket is not public"


def _usable(api: Ec2Api, ec2: Ec2) -> str:
    """Check that an object in the bucket can be written, read, listed and deleted.

    Returns a sentence about the check. Raises Wrong if the bucket's listing lacks the object.
    """
    region, key = ec2.regions[0], f"{ec2.prefix}/doctor/{uuid4().hex}"
    words = {"Bucket": ec2.bucket, "Key": key}
    api.ask("s3:PutObject", region, Body=b"srift doctor deletes this\n", **words)
    try:
        api.ask("s3:GetObject", region, **words)
        if not api.ask("s3:ListBucket", region, Bucket=ec2.bucket, Prefix=key).get("Contents"):
            raise Wrong(f"object {key} was written, but listing the bucket does not show it")
    finally:
        api.ask("s3:DeleteObject", region, **words)
    return f"an object under {ec2.prefix}/ was written, read, listed and deleted"


def _service_role(api: Ec2Api, ec2: Ec2, role: str) -> str:
    try:
        api.ask("iam:GetRole", ec2.regions[0], RoleName=role)
    except AwsRefused as error:
        # IAM may answer with "access denied" even if the role does not exist.
        if error.code not in ("NoSuchEntity", *DENIED):
            raise
        fix = f"aws iam create-service-linked-role --aws-service-name {SERVICE_ROLES[role]}"
        raise Wrong(
            f"role {role} not found: run `{fix}`. If the role exists, allow iam:GetRole"
        ) from None
    return "exists"


def _launch(api: Ec2Api, ec2: Ec2, region: str) -> Iterator[Finding]:
    """Check the machine image and the subnets, and dry-run a launch of two machines."""
    check = f"launches in {region}"
    pairs = [Cluster.of((2, offer)) for offer in packaged_offers(ec2, region)]
    pairs = [pair for pair in pairs if not not_launched(pair, ec2)]
    if not pairs:
        yield Finding(
            check,
            "note",
            "not tried: no type of [ec2] instance_types is known to be sold in this region",
        )
        return
    cluster = min(pairs, key=lambda pair: pair.members[0].instance_type.cores)
    try:
        image = api.image(region, ec2.ami_parameter)
        if image.get("Architecture", "x86_64") != "x86_64":
            raise Wrong(
                f"image {image['ImageId']} needs {image['Architecture']} machines: set"
                " `ami_parameter` in [ec2] of srift.toml to an x86_64 image"
            )
        spec = launch_spec(
            api, ec2, cluster, deadline_unix=0, lease_id="doctor", controller="doctor"
        )
    except ProviderError as error:
        yield Finding(check, "wrong", str(error))
        return
    subnets = ", ".join(sorted(spec.subnets))
    yield Finding(check, "ok", f"{spec.image['ImageId']}, {ec2.subnets} subnets in {subnets}")
    yield from _permissions(api, spec, cluster.members[0])


def _permissions(api: Ec2Api, spec: LaunchSpec, offer: Offer) -> Iterator[Finding]:
    """Send the EC2 requests of a launch as dry runs, and yield findings on their permissions."""
    check, actions = f"permissions in {spec.region}", list[str]()
    requests = [("ec2:CreateSecurityGroup", security_group(spec))]
    zone = min(spec.subnets)
    for market in spec.choices.markets:
        zone_offer = replace(offer, market=market, zone=zone, usd_per_hour=0.01)
        [attempt] = attempts(Cluster.of((2, zone_offer)), (), [zone], ())
        requests += requests_of(spec, attempt, security="", user_data="")
    for action, request in requests:
        try:
            api.ask(action, spec.region, DryRun=True, **_without_groups(request))
        except AwsRefused as error:
            if error.code == "DryRunOperation":
                actions.append(action)
            else:
                yield Finding(check, "wrong" if error.code in DENIED else "note", str(error))
    if actions:
        yield Finding(check, "ok", f"may call {', '.join(actions)}")


def _without_groups(value: Any) -> Any:
    """Return the JSON `value` without the keys "Groups" and "Placement", at any depth.

    A dry run cannot name the security group and the placement group: neither exists yet.
    """
    if isinstance(value, dict):
        keys = value.keys() - {"Groups", "Placement"}
        return {key: _without_groups(value[key]) for key in keys}
    return list(map(_without_groups, value)) if isinstance(value, list) else value


def _quotas(api: Ec2Api, settings: Settings, region: str) -> Iterator[Finding]:
    """Yield a finding for each vCPU quota of the region.

    A quota limits the vCPUs of a family of instance types. A quota is sufficient if it permits the
    smallest machine of the family. Srift can launch machines if at least one quota is sufficient.
    In that case, all quotas have the status `ok`, otherwise `wrong`. A quota that cannot be read
    has the status `note` instead.

    The setting [campaign] `market` determines whether spot or on-demand quotas are checked.
    """
    cores: dict[str, float] = {}
    for kind in packaged_types(settings.ec2):
        code = quota_of(kind.name, settings.campaign.market)
        if code is not None:
            cores[code] = min(kind.cores, cores.get(code, kind.cores))
    check, action, quotas = f"quotas in {region}", "servicequotas:GetServiceQuota", {}
    for code in sorted(cores):
        try:
            quotas[code] = api.ask(action, region, ServiceCode="ec2", QuotaCode=code)["Quota"]
        except ProviderError as error:
            yield Finding(check, "note", f"unknown: {error}")
    fits = any(quota["Value"] >= cores[code] for code, quota in quotas.items())
    for code, quota in quotas.items():
        says = f"{quota['QuotaName']!r} is {quota['Value']:g} vCPUs, and {cores[code]:g} are needed"
        yield Finding(check, "ok" if fits else "wrong", f"{says} for a machine ({code})")
