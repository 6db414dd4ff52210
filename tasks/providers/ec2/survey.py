"""What a launch needs to know before it requests anything: image, subnets, role, node package."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from models.domain.cluster import Cluster
from tasks.providers.base import NotSupported
from tasks.providers.ec2.api import Answer, Ec2Api, Filters
from tasks.providers.ec2.catalogue import facts_of, image_line, off_image
from tasks.providers.ec2.requests import LaunchSpec
from tasks.providers.ec2.settings import Ec2


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Subnets of one VPC by zone, one a zone."""

    vpc: str
    subnets: Mapping[str, str]


class Surveyor:
    """Asks AWS what a launch needs, once a region: the image stays the same for a campaign."""

    def __init__(self, api: Ec2Api, choices: Ec2) -> None:
        self._api, self._choices = api, choices
        self._regions: dict[str, tuple[Answer, str, Network]] = {}

    def launch_spec(
        self, cluster: Cluster, *, lease_id: str, controller: str, deadline_unix: int
    ) -> LaunchSpec:
        """Raises NotSupported or AwsRefused with the fix."""
        region, choices = cluster.members[0].region, self._choices
        names = sorted({offer.instance_type.name for offer in cluster.members})
        answers = self._api.instance_types(region, names)
        types = {str(answer["InstanceType"]): facts_of(answer) for answer in answers}
        several = [name for name, facts in types.items() if facts.several_interfaces]
        if why := not_launched(cluster, choices, several):
            raise NotSupported(why)
        image, role_id, network = self._facts(region)
        if why := too_small(choices.volume_gib, image):
            raise NotSupported(why)
        return LaunchSpec(
            region=region,
            vpc=network.vpc,
            subnets=network.subnets,
            public=choices.subnets == "public",
            types=types,
            image_id=str(image["ImageId"]),
            root_device=root_device(image),
            volume_gib=choices.volume_gib,
            instance_profile=choices.instance_profile,
            role_id=role_id,
            deployment=choices.deployment,
            controller=controller,
            lease_id=lease_id,
            deadline_unix=deadline_unix,
        )

    def _facts(self, region: str) -> tuple[Answer, str, Network]:
        """Image, id of the machines' role, and network."""
        if region not in self._regions:
            network = network_of(self._api, region, self._choices)
            image = self._api.image(region, self._choices.ami_parameter)
            profile = self._choices.instance_profile
            roles = self._api.roles(region, profile)
            if not roles:
                raise NotSupported(f"{profile} has no role: add one with the node policy")
            self._regions[region] = image, str(roles[0]["RoleId"]), network
        return self._regions[region]


def not_launched(cluster: Cluster, choices: Ec2, several_interfaces: Collection[str]) -> str:
    """Why `choices` keep `cluster` from being launched; empty if they do not.

    `several_interfaces`: types whose whole network takes more than one interface.
    """
    if len({offer.market for offer in cluster.members}) > 1:
        return "the machines of a cluster are launched in one market"
    line = image_line(choices.ami_parameter)
    for offer in cluster.members:
        if off := off_image(offer.instance_type, line):
            return f"{off}; take it out of [ec2] instance_types"
    names = dict.fromkeys(offer.instance_type.name for offer in cluster.members)
    wide = [name for name in names if name in several_interfaces]
    if choices.subnets == "public" and len(cluster.members) > 1 and wide:
        return (
            f"{', '.join(wide)} has several network cards, and EC2 gives no public address to a "
            'machine that uses them all: set [ec2] subnets = "private"'
        )
    return ""


def root_device(image: Answer) -> str:
    return str(image.get("RootDeviceName") or "/dev/sda1")


def least_gib(image: Answer) -> int:
    """Volume size that the image needs."""
    volumes = (volume.get("Ebs", {}) for volume in image.get("BlockDeviceMappings", ()))
    return max((int(volume.get("VolumeSize", 0)) for volume in volumes), default=0)


def too_small(volume_gib: int, image: Answer) -> str:
    """Why the image does not fit on the volume; empty if it does."""
    least = least_gib(image)
    if volume_gib >= least:
        return ""
    return f"{image['ImageId']} needs {least} GiB: set [ec2] volume_gib to at least {least}"


def network_of(api: Ec2Api, region: str, choices: Ec2) -> Network:
    """The subnets that [ec2] names, else those with our tag, else the default VPC's.

    Of several in a zone the first by id is taken. Raises NotSupported with the fix.
    """

    wanted: list[Filters] = [{"tag:srift:deployment": choices.deployment}]
    if choices.subnets == "public":
        wanted.append({"default-for-az": "true"})
    if choices.subnet_ids:
        wanted = [{"subnet-id": choices.subnet_ids}]
    subnets: list[Answer] = []
    for filters in wanted:
        subnets = subnets or api.described("Subnets", "ec2:DescribeSubnets", region, filters)
    vpcs = {str(subnet["VpcId"]) for subnet in subnets}
    if len(vpcs) != 1:
        problem = f"{len(vpcs)} VPCs have subnets for machines" if vpcs else "no subnet was found"
        raise NotSupported(
            f"{problem} in {region}: name subnets of one VPC in [ec2] subnet_ids, or give them the "
            f"tag srift:deployment = {choices.deployment}"
        )
    by_zone: dict[str, str] = {}
    for subnet in sorted(subnets, key=lambda subnet: str(subnet["SubnetId"])):
        by_zone.setdefault(str(subnet["AvailabilityZone"]), str(subnet["SubnetId"]))
    return Network(vpc=vpcs.pop(), subnets=by_zone)


@cache
def archive(package: Path) -> tuple[bytes, str]:
    """The node package as .tar.gz and its sha256; the same bytes for the same files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                entry = tarfile.TarInfo(f"node/{path.relative_to(package).as_posix()}")
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), mtime=0)
    return content, hashlib.sha256(content).hexdigest()
