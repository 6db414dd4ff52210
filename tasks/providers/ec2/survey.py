"""Collect what a launch needs: instance types, image, subnets, IAM role and code archive."""

import hashlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from models.domain.cluster import Cluster

from ..archive import archive
from ..base import NotSupported
from .api import Answer, Ec2Api
from .catalogue import off_image
from .requests import LaunchSpec
from .settings import Ec2
from .snapshot import read_snapshot


def launch_spec(
    api: Ec2Api,
    choices: Ec2,
    cluster: Cluster,
    *,
    lease_id: str,
    controller: str,
    deadline_unix: int,
) -> LaunchSpec:
    """Query AWS for subnets, image, IAM role and instance types, and return the `LaunchSpec`.

    choices: the section [ec2] of srift.toml.
    controller: random name of this SRIFT_HOME, for the tag srift:controller.

    Raises NotSupported if the settings or the account do not allow the launch, and AwsRefused if
    AWS refuses a request.
    """
    region, names = cluster.region, sorted({*cluster.type_names})
    answer = api.ask("ec2:DescribeInstanceTypes", region, InstanceTypes=names)
    types = {kind["InstanceType"]: kind for kind in answer["InstanceTypes"]}
    if why := not_launched(cluster, choices):
        raise NotSupported(why)
    vpc, subnets = network_of(api, region, choices)
    image, profile = api.image(region, choices.ami_parameter), choices.instance_profile
    if choices.volume_gib < least_gib(image):
        raise NotSupported(
            f"the image {image['ImageId']} does not fit on the volume: "
            f"set [ec2] volume_gib to at least {least_gib(image)}"
        )
    found = api.ask("iam:GetInstanceProfile", region, InstanceProfileName=profile)
    roles = found["InstanceProfile"]["Roles"]
    if not roles:
        raise NotSupported(
            f"the instance profile {profile} has no IAM role: add a role with the policy for "
            "machines, which `srift doctor --print-policies` prints"
        )
    return LaunchSpec(
        choices=choices,
        region=region,
        vpc=vpc,
        subnets=subnets,
        types=types,
        image=image,
        role_id=roles[0]["RoleId"],
        controller=controller,
        lease_id=lease_id,
        deadline_unix=deadline_unix,
    )


def not_launched(cluster: Cluster, choices: Ec2) -> str:
    """Return why the settings `choices` do not allow a launch of `cluster`; "" if they allow it."""
    several = read_snapshot().several_interfaces
    for offer in cluster.members:
        kind = offer.instance_type
        if off := off_image(kind, choices.ami_parameter):
            return f"{off}; remove this type from [ec2] instance_types"
        if choices.public and len(cluster.members) > 1 and kind.name in several:
            return (
                f"{kind.name} needs several network interfaces, and EC2 gives such machines no "
                'public IP address: set [ec2] subnets = "private"'
            )
    return ""


def least_gib(image: Answer) -> int:
    """Return the minimum size in GiB of a volume for the image; 0 if EC2 reports no size."""
    volumes = (volume.get("Ebs", {}) for volume in image.get("BlockDeviceMappings", ()))
    return max((volume.get("VolumeSize", 0) for volume in volumes), default=0)


def network_of(api: Ec2Api, region: str, choices: Ec2) -> tuple[str, Mapping[str, str]]:
    """Return the VPC's id, and {zone: subnet id} for the machines.

    The subnets are the first of these groups that is not empty:

    1. The subnets in [ec2] subnet_ids.
    2. The subnets whose tag srift:deployment has the value of [ec2] deployment.
    3. The subnets of the default VPC, if machines get public IP addresses.

    Raises NotSupported if there are no subnets, or if the subnets are in several VPCs.
    """
    describe = partial(api.described, "Subnets", "ec2:DescribeSubnets", region)
    if choices.subnet_ids:
        subnets = describe({"subnet-id": choices.subnet_ids})
    else:
        subnets = describe({"tag:srift:deployment": choices.deployment})
        if choices.public and not subnets:
            subnets = describe({"default-for-az": "true"})
    vpcs = {subnet["VpcId"] for subnet in subnets}
    if len(vpcs) != 1:
        raise NotSupported(
            f"{len(vpcs)} VPCs have subnets for machines in {region}, but Srift needs exactly 1: "
            "list the subnets of one VPC in [ec2] subnet_ids, or tag only its subnets with "
            f"srift:deployment = {choices.deployment}"
        )
    # In each zone, the subnet with the smallest id is used.
    ordered = sorted(subnets, key=lambda subnet: subnet["SubnetId"], reverse=True)
    return vpcs.pop(), {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in ordered}


@cache
def node_archive(package: Path) -> tuple[bytes, str]:
    """Return the .py and .txt files of `package` as a .tar.gz, and its SHA-256 in hex.

    The same files always give the same bytes.
    """
    paths = [path for path in package.rglob("*") if path.suffix in (".py", ".txt")]
    content = archive({f"node/{path.relative_to(package)}": path.read_bytes() for path in paths})
    return content, hashlib.sha256(content).hexdigest()
