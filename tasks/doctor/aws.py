"""Check an AWS account: credentials, bucket, roles, and per region launches and quotas.

A launch's requests are tried as dry runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from models.domain.cluster import Cluster, Offer

from ..providers.base import ProviderError
from ..providers.ec2 import api as ec2_api
from ..providers.ec2.account import SERVICE_ROLES, Ec2Account
from ..providers.ec2.api import Clients, Ec2Api
from ..providers.ec2.attempts import attempts
from ..providers.ec2.catalogue import quota_of
from ..providers.ec2.errors import DENIED, NO_CREDENTIALS, AwsRefused
from ..providers.ec2.provider import left_out, misspelt, packaged_types
from ..providers.ec2.requests import LaunchSpec, requests_of, security_group
from ..providers.ec2.settings import Ec2
from ..providers.ec2.snapshot import packaged
from ..providers.ec2.survey import Surveyor, not_launched
from ..workspace.home import Wrong
from ..workspace.settings import Settings
from .data import examine_data
from .findings import Finding, judged

MAX_CLOCK_S = 240.0  # AWS refuses requests signed more than 300 s before or after its time


def examine_ec2(settings: Settings, clients: Clients | None = None) -> list[Finding]:
    """Return findings about the account. Stops at what later checks depend on."""
    ec2, account = settings.ec2, _account(clients)
    checks: dict[str, Callable[[Ec2Account, Ec2], str]] = {
        "identity": partial(_identity, clients),
        "regions": _regions,
        "clock": _clock,
    }
    if ec2.bucket:
        checks |= {"bucket": _bucket, "bucket is private": _private, "bucket can be used": _usable}
    if "spot" in (*ec2.markets, settings.campaign.market):
        checks |= {f"role {role}": partial(_service_role, role) for role in SERVICE_ROLES}
    found = [judged("settings", partial(_settings, ec2)), *_types(ec2)]
    wrong: set[str] = set()
    for check, ask in checks.items():
        if check.startswith("bucket ") and "bucket" in wrong:
            continue
        found.append(judged(check, partial(ask, account, ec2)))
        if found[-1].status == "wrong":
            wrong.add(check)
        if wrong & {"identity", "regions"}:
            return found
    found += examine_data(settings, account.api)
    for region in ec2.regions:
        found += _launch(account, ec2, region)
        found += _quotas(account, settings, region)
    return found


def account_number(ec2: Ec2, clients: Clients | None = None) -> str | None:
    """Return the account's number, or None without credentials."""
    try:
        return _identity(clients, _account(clients), ec2).split()[1]
    except ProviderError:
        return None


def _account(clients: Clients | None) -> Ec2Account:
    return Ec2Account(Ec2Api(clients or ec2_api.boto_clients()))


def _settings(ec2: Ec2) -> str:
    if ec2.bucket is None:
        raise Wrong("set bucket under [ec2]: launches need a bucket of S3")
    return f"machines report to s3://{ec2.bucket}/{ec2.prefix}"


def _types(ec2: Ec2) -> list[Finding]:
    """Return notes only: AWS may have types that are newer than this package."""
    notes = [Finding("instance types", "note", one) for one in misspelt(ec2)]
    if not notes:
        count = len(packaged_types(ec2))
        notes = [Finding("instance types", "ok", f"{count} match {', '.join(ec2.instance_types)}")]
    return notes + [Finding("instance types", "note", one) for one in left_out(ec2)]


def _identity(clients: Clients | None, account: Ec2Account, ec2: Ec2) -> str:
    if clients is None and not ec2_api.has_credentials():
        raise Wrong(NO_CREDENTIALS)
    identity = account.identity(ec2.regions[0])
    return f"account {identity.account} {identity.arn}"


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


def _bucket(account: Ec2Account, ec2: Ec2) -> str:
    region = account.api.bucket_region(ec2.regions[0], str(ec2.bucket))
    if region not in ec2.regions:
        raise Wrong(f"{ec2.bucket} is in {region}, which is not in [ec2] regions")
    return f"{ec2.bucket} is in {region}"


def _private(account: Ec2Account, ec2: Ec2) -> str:
    if account.bucket_is_public(ec2.regions[0], str(ec2.bucket)):
        raise Wrong(f"{ec2.bucket} is public: run `aws s3api put-public-access-block` on it")
    return "nobody else may read or write it"


def _usable(account: Ec2Account, ec2: Ec2) -> str:
    key = f"{ec2.prefix}/doctor/{uuid4().hex}"
    if problem := account.try_bucket(ec2.regions[0], str(ec2.bucket), key):
        raise Wrong(problem)
    return f"an object under {ec2.prefix}/ was written, read, listed and deleted"


def _service_role(role: str, account: Ec2Account, ec2: Ec2) -> str:
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


def _launch(account: Ec2Account, ec2: Ec2, region: str) -> Iterator[Finding]:
    """Survey a launch of two machines of the smallest type, and dry-run its requests."""
    check = f"launches in {region}"
    offers = packaged().offers(packaged_types(ec2), (region,))
    pairs = [Cluster.of((2, offer)) for offer in offers]
    pairs = [one for one in pairs if not not_launched(one, ec2, packaged().several_interfaces)]
    if not pairs:
        yield Finding(check, "note", "not tried: the package knows no type that is sold here")
        return
    cluster = min(pairs, key=lambda pair: pair.members[0].instance_type.cores)
    surveyor, who = Surveyor(account.api, ec2), "doctor"
    try:
        image = account.api.image(region, ec2.ami_parameter)
        architecture = image.get("Architecture", "x86_64")
        if architecture != "x86_64":
            raise Wrong(f"{image['ImageId']} is for {architecture}, the machines are x86_64")
        spec = surveyor.launch_spec(cluster, lease_id=who, controller=who, deadline_unix=0)
    except ProviderError as error:
        yield Finding(check, "wrong", str(error))
        return
    subnets = ", ".join(sorted(spec.subnets))
    yield Finding(check, "ok", f"{spec.image_id}, {ec2.subnets} subnets in {subnets}")
    yield from _permissions(account, ec2, spec, cluster.members[0])


def _permissions(
    account: Ec2Account, ec2: Ec2, spec: LaunchSpec, offer: Offer
) -> Iterator[Finding]:
    """Dry-run everything that creates something, without the groups that do not exist yet."""
    check, allowed = f"permissions in {spec.region}", list[str]()
    requests = [("ec2:CreateSecurityGroup", security_group(spec))]
    zone = min(spec.subnets)
    for market in ec2.markets:
        priced = replace(offer, market=market, zone=zone, usd_per_hour=0.01)
        [attempt] = attempts(Cluster.of((2, priced)), (), [zone], ())
        requests += requests_of(spec, attempt, security="", user_data="#!/bin/sh\n")
    for action, request in requests:
        words = _without(request, ("SecurityGroupIds", "Groups", "Placement"))
        may, says = account.may(action, spec.region, **words)
        if may:
            allowed.append(action)
        else:
            yield Finding(check, "note" if may is None else "wrong", says)
    if allowed:
        yield Finding(check, "ok", f"may call {', '.join(allowed)}")


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def _quotas(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    """Check that the smallest type fits under one quota of the campaign's market."""
    cores: dict[str, float] = {}
    for kind in packaged_types(settings.ec2):
        code = quota_of(kind.name, settings.campaign.market)
        if code is not None:
            cores[code] = min(kind.cores, cores.get(code, kind.cores))
    lines, unknown, fits = [], [], False
    for code, least in sorted(cores.items()):
        try:
            name, value = account.api.quota(region, code)
            lines.append(f"{name!r} ({code}) is {value:g} vCPUs of {least:g} for one machine")
            fits |= value >= least
        except ProviderError as error:
            unknown.append(f"unknown: {error}")
    for says in unknown:
        yield Finding(f"quotas in {region}", "note", says)
    for says in lines:
        yield Finding(f"quotas in {region}", "ok" if fits else "wrong", says)
