"""What a launch in one region needs: image, network, permissions, quotas. Asked with the very requests of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from models.cloud import InstanceType

from .doctor import Finding, Wrong, judged
from .ec2_settings import Ec2
from .providers.base import ProviderError
from .providers.ec2 import Ec2Provider
from .providers.ec2_account import Ec2Account
from .providers.ec2_types import quota_of
from .settings import Settings


def examine_region(account: Ec2Account, settings: Settings, region: str) -> Iterator[Finding]:
    """Findings about `region`, each check's name ending with it."""
    ec2 = settings.ec2
    image = judged(f"image in {region}", lambda: _image(account, ec2, region))
    network = judged(f"network in {region}", lambda: _network(account, ec2, region))
    yield image
    yield network
    yield from _quotas(account, settings, region)


def _image(account: Ec2Account, ec2: Ec2, region: str) -> str:
    image = account.image(region, ec2.ami_parameter)
    if image is None or image.state != "available":
        raise Wrong(f"the image that {ec2.ami_parameter} names is gone: set [ec2] ami_parameter to one that is there")
    if image.architecture != "x86_64":
        raise Wrong(f"{image.image_id} is for {image.architecture}, and machines with NVIDIA's GPUs here are x86_64")
    if image.root_gib > ec2.volume_gib:
        raise Wrong(f"{image.image_id} needs {image.root_gib} GiB: set [ec2] volume_gib to at least that")
    return f"{image.image_id} {image.name}"


def _network(account: Ec2Account, ec2: Ec2, region: str) -> str:
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
    zones = sorted(zone for zone, ids in subnets.items() if ids)
    return f"{vpc} with subnets in {', '.join(zones)}"


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
