"""What a launch in one region needs: image, network, permissions, quotas. Tried with the very requests of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from models.cloud import Cluster, InstanceType, Offer

from .doctor import Finding, Wrong, judged
from .ec2_settings import Ec2
from .providers import ec2_request
from .providers.base import ProviderError
from .providers.ec2 import Ec2Provider
from .providers.ec2_account import Ec2Account, Image
from .providers.ec2_ladder import Rung
from .providers.ec2_types import TypeFacts, quota_of
from .settings import Settings


def examine_region(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    """Findings about `region`, each check's name ending with it."""
    ec2, image, network = settings.ec2, list[Image](), dict[str, str]()
    vpc: list[str] = []
    yield judged(f"image in {region}", lambda: _image(account, ec2, region, image))
    yield judged(f"network in {region}", lambda: _network(account, ec2, region, vpc, network))
    if image and network:
        yield from _permissions(account, ec2, _ground(ec2, region, vpc[0], network, image[0]))
    yield from _quotas(account, settings, region)


def _image(account: Ec2Account, ec2: Ec2, region: str, found: list[Image]) -> str:
    image = account.image(region, ec2.ami_parameter)
    if image is None or image.state != "available":
        raise Wrong(f"the image that {ec2.ami_parameter} names is gone: set [ec2] ami_parameter to one that is there")
    if image.architecture not in ("", "x86_64"):  # "": not told
        raise Wrong(f"{image.image_id} is for {image.architecture}, and machines with NVIDIA's GPUs here are x86_64")
    if image.root_gib > ec2.volume_gib:
        raise Wrong(f"{image.image_id} needs {image.root_gib} GiB: set [ec2] volume_gib to at least that")
    found.append(image)
    return f"{image.image_id} {image.name}"


def _network(account: Ec2Account, ec2: Ec2, region: str, at: list[str], found: dict[str, str]) -> str:
    vpc = account.vpc(region, ec2.vpc)
    if vpc is None:
        missing = f"{ec2.vpc} is not there" if ec2.vpc else "there is no default VPC"
        raise Wrong(f"{missing}: name one in [ec2] vpc, or run `aws ec2 create-default-vpc --region {region}`")
    subnets = account.subnets(region, vpc)
    if not any(subnets.values()):
        raise Wrong(
            f"{vpc} has no subnet that gives its machines a public address, without which they do not reach S3:"
            " name another in [ec2] vpc, or change one of its subnets"
        )
    at.append(vpc)
    found |= {zone: ids[0] for zone, ids in subnets.items() if ids}
    return f"{vpc} with subnets in {', '.join(sorted(found))}"


def _permissions(account: Ec2Account, ec2: Ec2, ground: ec2_request.Ground) -> Iterator[Finding]:
    """Dry runs of all that makes something. What names a thing that is yet to be made cannot be tried so."""
    check, refused, tried = f"permissions in {ground.region}", list[str](), list[str]()
    for action, request in _requests(ec2, ground):
        may, says = account.may(action, ground.region, **request)
        tried += [action] if may else []
        refused += [says] if may is False else []
        if may is None:
            yield Finding(check=check, status="note", says=f"not tried to the end: {says}")
    yield from (Finding(check=check, status="wrong", says=says) for says in refused)
    if tried:
        yield Finding(check=check, status="ok", says=f"may call {', '.join(tried)}")


def _requests(ec2: Ec2, ground: ec2_request.Ground) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests as a launch makes them, less what they would name and is not there: security and placement group."""
    yield "ec2:CreateSecurityGroup", ec2_request.security_group(ground)
    zone, kind = min(ground.subnets), next(iter(ground.types))
    for market in ec2.markets:
        offer = replace(_offer(ground.region, kind), market=market, zone=zone)
        rung = Rung(number=0, cluster=Cluster.of((2, offer)), most_usd=(0.01, 0.01))
        for action, request in ec2_request.requests_of(ground, rung, security="", user_data="#!/bin/sh\n"):
            yield action, _without(request, ("SecurityGroupIds", "Groups", "Placement"))


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, names) for key, one in value.items() if key not in names}
    return [_without(one, names) for one in value] if isinstance(value, list) else value


def _ground(ec2: Ec2, region: str, vpc: str, subnets: dict[str, str], image: Image) -> ec2_request.Ground:
    kind = min(Ec2Provider(ec2).packaged_types(), key=lambda one: one.cores, default=None)
    name = "g4dn.xlarge" if kind is None else kind.name
    return ec2_request.Ground(
        region=region,
        vpc=vpc,
        subnets=subnets,
        types={name: TypeFacts(name=name, vcpus=4, arm=False, efa=False, grouped=True)},
        image_id=image.image_id,
        root_device=image.root_device,
        least_gib=image.root_gib,
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
            name, value = account.quota(region, code)
        except ProviderError as error:
            yield Finding(check=check, status="note", says=f"not known: {error}")
            continue
        said = f"{name!r} ({code}) is {value:g} vCPUs"
        if value < kind.cores:
            none.append(f"{said}, less than one {kind.name} has ({kind.cores:g}): ask for more in Service Quotas")
        else:
            room.append(said)
    status: Literal["wrong", "note"] = "wrong" if none and not room else "note"
    yield from (Finding(check=check, status="ok", says=one) for one in room)
    yield from (Finding(check=check, status=status, says=one) for one in none)
