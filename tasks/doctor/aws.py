"""Check an AWS account: credentials, bucket, roles, and per region image, network, permissions.

Permissions are tried with dry runs of a launch's requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

from models.domain.cluster import Cluster, InstanceType, Offer

from ..providers.base import ProviderError
from ..providers.ec2 import api as ec2_api
from ..providers.ec2.account import SERVICE_ROLES, Ec2Account
from ..providers.ec2.api import Clients, Ec2Api
from ..providers.ec2.attempts import attempts
from ..providers.ec2.catalogue import TypeFacts, quota_of
from ..providers.ec2.errors import DENIED, NO_CREDENTIALS, AwsRefused
from ..providers.ec2.provider import left_out, misspelt, packaged_types
from ..providers.ec2.requests import LaunchSpec, requests_of, security_group
from ..providers.ec2.settings import Ec2
from ..providers.ec2.survey import network_of, root_device, too_small
from ..workspace.home import Wrong
from ..workspace.settings import Settings
from .data import examine_data
from .findings import Finding, judged

MAX_CLOCK_S = 240.0  # AWS refuses requests signed more than 300 s before or after its time


def examine_ec2(settings: Settings, clients: Clients | None = None) -> list[Finding]:
    """Return findings about the account. Stops at what later checks depend on."""
    ec2, found = settings.ec2, [_settings(settings.ec2), *_types(settings.ec2)]
    account = Ec2Account(Ec2Api(clients or ec2_api.boto_clients()))
    found.append(judged("credentials", lambda: _credentials(clients)))
    for check in (("identity", _identity), ("regions", _regions)):
        if found[-1].status == "wrong":
            return found
        found.append(judged(check[0], partial(check[1], account, ec2)))
    if found[-1].status == "wrong":
        return found
    found.append(judged("clock", partial(_clock, account, ec2)))
    if ec2.bucket:
        found += _bucket(account, ec2)
    found += examine_data(settings, account.api)
    found.append(judged("instance profile", partial(_profile, account, ec2)))
    if "spot" in (*ec2.markets, settings.campaign.market):
        for role in SERVICE_ROLES:
            found.append(judged(f"role {role}", partial(_service_role, account, ec2, role)))
    for region in ec2.regions:
        found += _region(account, settings, region)
    return found


def account_number(ec2: Ec2, clients: Clients | None = None) -> str | None:
    """Return the account's number, or None without credentials."""
    try:
        _credentials(clients)
        account = Ec2Account(Ec2Api(clients or ec2_api.boto_clients()))
        return account.identity(ec2.regions[0]).account
    except ProviderError:
        return None


def _settings(ec2: Ec2) -> Finding:
    if ec2.bucket is None:
        return Finding("settings", "wrong", "set bucket under [ec2]: launches need a bucket of S3")
    return Finding("settings", "ok", f"machines report to s3://{ec2.bucket}/{ec2.prefix}")


def _types(ec2: Ec2) -> list[Finding]:
    """Return notes only: AWS may have types that are newer than this package."""
    notes = [Finding("instance types", "note", one) for one in misspelt(ec2)]
    if not notes:
        count = len(packaged_types(ec2))
        notes = [Finding("instance types", "ok", f"{count} match {', '.join(ec2.instance_types)}")]
    return notes + [Finding("instance types", "note", one) for one in left_out(ec2)]


def _credentials(clients: Clients | None) -> str:
    if clients is None and not ec2_api.has_credentials():
        raise Wrong(NO_CREDENTIALS)
    return "found"


def _identity(account: Ec2Account, ec2: Ec2) -> str:
    identity = account.identity(ec2.regions[0])
    return f"account {identity.account}, {identity.arn}"


def _clock(account: Ec2Account, ec2: Ec2) -> str:
    ahead_s = account.identity(ec2.regions[0]).ahead_s
    if ahead_s is not None and abs(ahead_s) > MAX_CLOCK_S:
        raise Wrong(f"this clock is {ahead_s:+.0f} s off AWS's, which refuses 300: use NTP")
    return "AWS sent no time" if ahead_s is None else f"{ahead_s:+.0f} s off AWS's"


def _regions(account: Ec2Account, ec2: Ec2) -> str:
    known = account.regions(ec2.regions[0])
    unusable = [one for one in ec2.regions if not known.get(one)]
    if unusable:
        raise Wrong(f"{', '.join(unusable)} in [ec2] regions: no such region, or not enabled")
    return f"{', '.join(ec2.regions)} enabled"


def _bucket(account: Ec2Account, ec2: Ec2) -> Iterator[Finding]:
    bucket, home = str(ec2.bucket), ec2.regions[0]

    def region() -> str:
        found = account.api.bucket_region(home, bucket)
        if found not in ec2.regions:
            raise Wrong(f"{bucket} is in {found}, which is not in [ec2] regions")
        return f"{bucket} is in {found}"

    def private() -> str:
        if account.bucket_is_public(home, bucket):
            raise Wrong(f"{bucket} is public: run `aws s3api put-public-access-block` on it")
        return "nobody else may read or write it"

    def usable() -> str:
        wrong = account.try_bucket(home, bucket, f"{ec2.prefix}/doctor/{uuid4().hex}")
        if wrong:
            raise Wrong(wrong)
        return f"an object under {ec2.prefix}/ was written, read, listed and deleted"

    yield (first := judged("bucket", region))
    if first.status == "ok":
        yield judged("bucket is private", private)
        yield judged("bucket can be used", usable)


def _profile(account: Ec2Account, ec2: Ec2) -> str:
    roles = account.api.roles(ec2.regions[0], ec2.instance_profile)
    if len(roles) != 1:
        raise Wrong(f"{ec2.instance_profile} has no role: add one with the node policy")
    return f"{ec2.instance_profile} with role {roles[0]['RoleName']}"


def _service_role(account: Ec2Account, ec2: Ec2, role: str) -> str:
    fix = f"run `aws iam create-service-linked-role --aws-service-name {SERVICE_ROLES[role]}` once"
    try:
        exists = account.has_role(ec2.regions[0], role)
    except AwsRefused as error:
        # IAM denies a question about a role that does not exist.
        if error.code not in DENIED:
            raise
        raise Wrong(f"not visible: {fix}; if it exists, allow iam:GetRole") from None
    if not exists:
        raise Wrong(f"missing: {fix}")
    return "exists"


def _region(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    ec2, spec = settings.ec2, list[LaunchSpec]()

    def launchable() -> str:
        spec.append(_spec(account, ec2, region))
        subnets = ", ".join(sorted(spec[0].subnets))
        return f"{spec[0].image_id}, {ec2.subnets} subnets in {subnets}"

    yield judged(f"image and network in {region}", launchable)
    if spec:
        yield from _permissions(account, ec2, spec[0])
    yield from _quotas(account, settings, region)


def _spec(account: Ec2Account, ec2: Ec2, region: str) -> LaunchSpec:
    image = account.api.image(region, ec2.ami_parameter)
    architecture = image.get("Architecture", "x86_64")
    if architecture != "x86_64":
        raise Wrong(f"{image['ImageId']} is for {architecture}, the machines are x86_64")
    if why := too_small(ec2.volume_gib, image):
        raise Wrong(why)
    network = network_of(account.api, region, ec2)
    return LaunchSpec(
        region=region,
        vpc=network.vpc,
        subnets=network.subnets,
        public=ec2.subnets == "public",
        types={_smallest(ec2): TypeFacts(efa=False, grouped=True)},
        image_id=str(image["ImageId"]),
        root_device=root_device(image),
        volume_gib=ec2.volume_gib,
        instance_profile=ec2.instance_profile,
        role_id="",
        deployment=ec2.deployment,
        controller="doctor",
        lease_id="doctor",
        deadline_unix=0,
    )


def _smallest(ec2: Ec2) -> str:
    types = packaged_types(ec2)
    return min(types, key=lambda one: one.cores).name if types else "g4dn.xlarge"


def _permissions(account: Ec2Account, ec2: Ec2, spec: LaunchSpec) -> Iterator[Finding]:
    """Dry-run everything that creates something, without the groups that do not exist yet."""
    check, allowed = f"permissions in {spec.region}", list[str]()
    for action, request in _requests(ec2, spec):
        may, says = account.may(action, spec.region, **request)
        if may:
            allowed.append(action)
        else:
            yield Finding(check, "note" if may is None else "wrong", says)
    if allowed:
        yield Finding(check, "ok", f"may call {', '.join(allowed)}")


def _requests(ec2: Ec2, spec: LaunchSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "ec2:CreateSecurityGroup", security_group(spec)
    zone, kind = min(spec.subnets), next(iter(spec.types))
    for market in ec2.markets:
        offer = replace(_offer(spec.region, kind), market=market, zone=zone)
        [attempt] = attempts(Cluster.of((2, offer)), (), [zone], ())
        requests = requests_of(spec, attempt, security="", user_data="#!/bin/sh\n")
        for action, request in requests:
            yield action, _without(request, ("SecurityGroupIds", "Groups", "Placement"))


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def _offer(region: str, name: str) -> Offer:
    kind = InstanceType(
        name=name,
        provider="ec2",
        devices=1,
        device="",
        cores=4.0,
        memory_gib=16.0,
        device_memory_gib=16.0,
        bandwidth_gbps=5.0,
    )
    return Offer(
        instance_type=kind,
        market="spot",
        zone="",
        region=region,
        usd_per_hour=0.01,
        interruptions_per_hour=0.0,
        price_as_of=datetime.now(UTC),
    )


def _quotas(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    """Check that the smallest type fits under a quota of the campaign's market."""
    check, smallest = f"quotas in {region}", dict[str, InstanceType]()
    for kind in packaged_types(settings.ec2):
        code = quota_of(kind.name, settings.campaign.market)
        if code is not None and (code not in smallest or kind.cores < smallest[code].cores):
            smallest[code] = kind
    found: list[Finding] = []
    for code, kind in sorted(smallest.items()):
        try:
            name, value = account.api.quota(region, code)
        except ProviderError as error:
            yield Finding(check, "note", f"unknown: {error}")
            continue
        says = f"{name!r} ({code}) is {value:g} vCPUs; one {kind.name} has {kind.cores:g}"
        fits = value >= kind.cores
        found.append(Finding(check, "ok" if fits else "wrong", says))
    one_fits = any(one.status == "ok" for one in found)
    for one in found:
        yield replace(one, status="note") if one_fits and one.status == "wrong" else one
