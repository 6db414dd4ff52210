"""The doctor of an AWS account: credentials, bucket, roles, then of each region image, network, permissions and quotas.

What stands on something that is wrong is not asked: one fault gives one line. Permissions are tried with the very
requests of a launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from models.domain.cluster import Cluster, InstanceType, Offer

from ..providers.base import ProviderError
from ..providers.ec2 import api as ec2_api
from ..providers.ec2 import requests as ec2_request
from ..providers.ec2.account import SERVICE_ROLES, Ec2Account
from ..providers.ec2.api import Answer, Clients, Ec2Api
from ..providers.ec2.attempts import Attempt, Place
from ..providers.ec2.catalogue import TypeFacts, quota_of
from ..providers.ec2.errors import DENIED, NO_CREDENTIALS, AwsRefused
from ..providers.ec2.provider import Ec2Provider
from ..providers.ec2.settings import Ec2
from ..providers.ec2.survey import Network, network_of, root_device, too_small
from ..workspace.home import Wrong
from ..workspace.settings import Settings
from .data import examine_data
from .findings import Finding, judged, well

AHEAD_S = 240.0  # AWS refuses what was signed more than five minutes before or after its own time
EXPIRE_AFTER_DAYS = 30  # a lease lives for seven days at most, and may be fetched later
_REGIONS_AT_ONCE = 8


def examine_ec2(settings: Settings, clients: Clients | None = None) -> list[Finding]:
    """Findings about the account of the ordinary credentials, or of `clients`."""
    ec2 = settings.ec2
    found = [_bucket_named(ec2), *_types_named(ec2)]
    credentials = judged("credentials", lambda: _credentials(clients))
    found.append(credentials)
    if credentials.status == "wrong":
        return found
    account = Ec2Account(Ec2Api(clients or ec2_api.boto_clients()))
    home = ec2.regions[0]
    identity = list(_identity(account, home))
    found += identity
    if not well(identity):
        return found
    enabled = judged("regions", lambda: _regions(account, ec2))
    found.append(enabled)
    if enabled.status == "wrong":
        return found
    found += _bucket(account, ec2) if ec2.bucket else []
    found += examine_data(settings, account.api)
    found.append(_keys())
    found.append(judged("instance profile", lambda: _profile(account, ec2)))
    if "spot" in (*ec2.markets, settings.campaign.market):
        found += [
            judged(f"role {one}", partial(_service_role, account, home, one))
            for one in SERVICE_ROLES
        ]
    with ThreadPoolExecutor(_REGIONS_AT_ONCE) as pool:
        for findings in pool.map(
            lambda region: list(examine_region(account, settings, region)), ec2.regions
        ):
            found += findings
    return found


def account_number(ec2: Ec2, clients: Clients | None = None) -> str | None:
    """Whose credentials these are; None where AWS cannot be asked."""
    try:
        _credentials(clients)
        return (
            Ec2Account(Ec2Api(clients or ec2_api.boto_clients())).identity(ec2.regions[0]).account
        )
    except ProviderError:
        return None


def _bucket_named(ec2: Ec2) -> Finding:
    if ec2.bucket is None:
        says = "bucket is not set under [ec2]: name a bucket of S3 that is yours, or nothing can be launched"
        return Finding("settings", "wrong", says)
    return Finding("settings", "ok", f"machines report to s3://{ec2.bucket}/{ec2.prefix}")


def _types_named(ec2: Ec2) -> list[Finding]:
    """Notes alone: AWS may have a type that is younger than the package."""
    provider = Ec2Provider(ec2)
    notes = [Finding("instance types", "note", one) for one in provider.off_image()]
    if misspelt := provider.misspelt():
        return [Finding("instance types", "note", one) for one in misspelt] + notes
    says = f"{len(provider.packaged_types())} that the package knows match {', '.join(ec2.instance_types)}"
    return [Finding("instance types", "ok", says), *notes]


def _credentials(clients: Clients | None) -> str:
    if clients is None and not ec2_api.has_credentials():
        raise Wrong(NO_CREDENTIALS)
    return "found"


def _identity(account: Ec2Account, region: str) -> Iterator[Finding]:
    try:
        identity = account.identity(region)
    except ProviderError as error:
        yield Finding("identity", "wrong", str(error))
        return
    yield Finding("identity", "ok", f"account {identity.account}, {identity.arn}")
    ahead_s = identity.ahead_s
    if ahead_s is None:
        yield Finding("clock", "note", "AWS's answer had no time to compare with")
    elif abs(ahead_s) > AHEAD_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        says = f"this machine's clock is {abs(ahead_s):.0f} s {way} AWS's, which refuses more than 300: set it (NTP)"
        yield Finding("clock", "wrong", says)
    else:
        yield Finding("clock", "ok", f"within {max(1.0, abs(ahead_s)):.0f} s of AWS's")


def _regions(account: Ec2Account, ec2: Ec2) -> str:
    known = account.regions(ec2.regions[0])
    missing = [one for one in ec2.regions if one not in known]
    if missing:
        raise Wrong(
            f"AWS has no region {missing[0]}: mend [ec2] regions ({', '.join(sorted(known))})"
        )
    off = [one for one in ec2.regions if not known[one]]
    if off:
        raise Wrong(
            f"{off[0]} is not enabled in this account: enable it, or take it out of [ec2] regions"
        )
    return f"{', '.join(ec2.regions)} enabled"


def _bucket(account: Ec2Account, ec2: Ec2) -> Iterator[Finding]:
    bucket, home = str(ec2.bucket), ec2.regions[0]

    def lies_in() -> str:
        region = account.api.bucket_region(home, bucket)
        if region not in ec2.regions:
            raise Wrong(
                f"{bucket} lies in {region}, which is none of [ec2] regions: name a bucket in {home}"
            )
        return f"{bucket} lies in {region}"

    def private() -> str:
        if account.bucket_is_public(home, bucket):
            raise Wrong(
                f"strangers may read or write {bucket}: block public access"
                f" (aws s3api put-public-access-block --bucket {bucket} --public-access-block-configuration"
                " BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true)"
            )
        return "nobody else may read or write it"

    def used() -> str:
        wrong = account.try_bucket(home, bucket, f"{ec2.prefix}/doctor/{uuid4().hex}")
        if wrong:
            raise Wrong(
                f"{wrong}: something else writes to this bucket, or stands between it and here"
            )
        return f"an object under {ec2.prefix}/ was written, read, listed and deleted"

    yield (first := judged("bucket", lies_in))
    if first.status == "ok":
        yield judged("bucket is private", private)
        yield judged("bucket can be used", used)
        yield _expiry(account, ec2)


def lifecycle_rule(ec2: Ec2) -> dict[str, Any]:
    """What keeps the bucket from filling up: all of a lease is fetched soon after its end, and is no use later."""
    return {
        "ID": "srift-leases-expire",
        "Filter": {"Prefix": f"{ec2.prefix}/leases/"},
        "Status": "Enabled",
        "Expiration": {"Days": EXPIRE_AFTER_DAYS},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
    }


def _expiry(account: Ec2Account, ec2: Ec2) -> Finding:
    """A note at most: what stays costs cents a month."""
    check, below = "bucket empties itself", f"{ec2.prefix}/leases/"
    try:
        days = account.expiry_days(ec2.regions[0], str(ec2.bucket), below)
        why = f"nothing deletes what leases leave below {below}"
    except ProviderError as error:
        days, why = None, f"whether leases' objects expire could not be asked ({error})"
    if days is not None:
        return Finding(check, "ok", f"objects below {below} expire after {days:g} days")
    rules = json.dumps({"Rules": [lifecycle_rule(ec2)]})
    says = (
        f"{why}: add this rule to the bucket's (the command replaces those that it has): aws s3api"
        f" put-bucket-lifecycle-configuration --bucket {ec2.bucket} --lifecycle-configuration '{rules}'"
    )
    return Finding(check, "note", says)


def _profile(account: Ec2Account, ec2: Ec2) -> str:
    roles = account.api.roles(ec2.regions[0], ec2.instance_profile)
    if len(roles) != 1:
        raise Wrong(
            f"{ec2.instance_profile} holds no role: add one that has deployments/iam/node-policy.json"
        )
    return f"{ec2.instance_profile} with role {roles[0]['RoleName']}"


def _service_role(account: Ec2Account, region: str, name: str) -> str:
    """IAM judges a question about a role that is not there by its bare name, which a policy may not hold."""
    service = SERVICE_ROLES[name]
    fix = f"run `aws iam create-service-linked-role --aws-service-name {service}` once"
    try:
        there = account.has_role(region, name)
    except AwsRefused as error:
        if error.code not in DENIED:
            raise
        raise Wrong(
            f"not shown to this AWS identity ({error.code}): most likely it is missing, so {fix}; if that says that it"
            " is there, add iam:GetRole to the identity's IAM policy (`srift doctor --print-policies`)"
        ) from None
    if not there:
        raise Wrong(f"missing: {fix}")
    return "there"


def _keys() -> Finding:
    """What cannot be seen without rights to look at keys, which a launch does not need."""
    return Finding(
        "encryption keys",
        "note",
        "not looked at: where the bucket or the default EBS encryption uses a customer-managed KMS key,"
        " kms:GenerateDataKey and kms:Decrypt on the bucket's must be allowed to this identity and to the machines'"
        " role, and on the volume's kms:CreateGrant, kms:Decrypt, kms:DescribeKey,"
        " kms:GenerateDataKeyWithoutPlaintext and kms:ReEncrypt* to this identity (for spot machines a grant to"
        " AWSServiceRoleForEC2Spot and AWSServiceRoleForEC2Fleet too)",
    )


def examine_region(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    """Findings about `region`, each check's name ending with it."""
    ec2, image, network = settings.ec2, list[Answer](), list[Network]()
    yield judged(f"image in {region}", lambda: _image(account, ec2, region, image))
    yield judged(f"network in {region}", lambda: _network(account, ec2, region, network))
    if image and network:
        yield from _permissions(account, ec2, _spec(ec2, region, network[0], image[0]))
    yield from _quotas(account, settings, region)


def _image(account: Ec2Account, ec2: Ec2, region: str, found: list[Answer]) -> str:
    image = account.api.image(region, ec2.ami_parameter)
    name, architecture = image["ImageId"], image.get("Architecture", "x86_64")
    if architecture != "x86_64":
        raise Wrong(
            f"{name} is for {architecture}, and machines with NVIDIA's GPUs here are x86_64"
        )
    if why := too_small(ec2.volume_gib, image):
        raise Wrong(why)
    found.append(image)
    return f"{name} {image.get('Name', '')}"


def _network(account: Ec2Account, ec2: Ec2, region: str, found: list[Network]) -> str:
    """By the rule that launches follow."""
    network = network_of(account.api, region, ec2)
    found.append(network)
    return f"{network.vpc} with {ec2.subnets} subnets in {', '.join(sorted(network.subnets))}"


def _permissions(account: Ec2Account, ec2: Ec2, spec: ec2_request.LaunchSpec) -> Iterator[Finding]:
    """Dry runs of all that makes something. What names a thing that is yet to be made cannot be tried so."""
    check, refused, tried = f"permissions in {spec.region}", list[str](), list[str]()
    for action, request in _requests(ec2, spec):
        may, says = account.may(action, spec.region, **request)
        tried += [action] if may else []
        refused += [says] if may is False else []
        if may is None:
            yield Finding(check, "note", f"not tried to the end: {says}")
    yield from (Finding(check, "wrong", says) for says in refused)
    if tried:
        yield Finding(check, "ok", f"may call {', '.join(tried)}")


def _requests(ec2: Ec2, spec: ec2_request.LaunchSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests as a launch makes them, less what they would name and is not there: security and placement group."""
    yield "ec2:CreateSecurityGroup", ec2_request.security_group(spec)
    zone, kind = min(spec.subnets), next(iter(spec.types))
    for market in ec2.markets:
        offer = replace(_offer(spec.region, kind), market=market, zone=zone)
        place = Place(cluster=Cluster.of((2, offer)), bids=(0.01, 0.01))
        attempt = Attempt(market=market, places={zone: place})
        for action, request in ec2_request.requests_of(
            spec, attempt, security="", user_data="#!/bin/sh\n"
        ):
            yield action, _without(request, ("SecurityGroupIds", "Groups", "Placement"))


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def _spec(ec2: Ec2, region: str, network: Network, image: Answer) -> ec2_request.LaunchSpec:
    kind = min(Ec2Provider(ec2).packaged_types(), key=lambda one: one.cores, default=None)
    name = "g4dn.xlarge" if kind is None else kind.name
    return ec2_request.LaunchSpec(
        region=region,
        vpc=network.vpc,
        subnets=network.subnets,
        public=ec2.subnets == "public",
        types={name: TypeFacts(efa=False, grouped=True)},
        image_id=str(image["ImageId"]),
        root_device=root_device(image),
        volume_gib=ec2.volume_gib,
        instance_profile=ec2.instance_profile,
        deployment=ec2.deployment,
        controller="doctor",
        lease_id="doctor",
        deadline_unix=0,
    )


def _offer(region: str, name: str) -> Offer:
    kind = InstanceType(name=name, provider="ec2", devices=1, device="", cores=4.0, memory_gib=16.0,
                        device_memory_gib=16.0, bandwidth_gbps=5.0)  # fmt: skip
    return Offer(instance_type=kind, market="spot", zone="", region=region, usd_per_hour=None,
                 interruptions_per_hour=0.0, price_as_of=datetime.now(UTC))  # fmt: skip


def _quotas(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    """Whether at least the smallest type that is considered fits under each quota that the campaign would use."""
    market, check = settings.campaign.market, f"quotas in {region}"
    least: dict[str, InstanceType] = {}
    for kind in Ec2Provider(settings.ec2).packaged_types():
        code = quota_of(kind.name, market)
        if code is not None and (code not in least or kind.cores < least[code].cores):
            least[code] = kind
    room, none = [], []
    for code, kind in sorted(least.items()):
        try:
            name, value = account.api.quota(region, code)
        except ProviderError as error:
            yield Finding(check, "note", f"not known: {error}")
            continue
        said = f"{name!r} ({code}) is {value:g} vCPUs"
        if value < kind.cores:
            none.append(
                f"{said}, less than one {kind.name} has ({kind.cores:g}): ask for more in Service Quotas"
            )
        else:
            room.append(said)
    status: Literal["wrong", "note"] = "wrong" if none and not room else "note"
    yield from (Finding(check, "ok", one) for one in room)
    yield from (Finding(check, status, one) for one in none)
