"""Every request that a launch makes of EC2, as plain dicts that can be printed. Pure, and free of secrets.

Machines of one rung share a zone, a security group that admits nobody else, and a placement group where their types
allow one. Each request carries a token made of what it is for: asked again it buys nothing again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.providers.ec2_ladder import Group, Rung, worst_usd
from tasks.providers.ec2_types import TypeFacts

Request = dict[str, Any]

BOOT_S = 180.0  # a machine sets its own end when it has come up, this much after it was asked for at the latest
# Bounds of the regions' list prices, November 2026: gp3 0.08 to 0.15 dollars a GiB and month, a public address 0.005/h.
VOLUME_USD_PER_GIB_HOUR = 0.15 / 730
ADDRESS_USD_PER_HOUR = 0.005
_TEMPLATE_NAME = "srift-{token}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What is known before anything is asked for, and common to all machines of a lease.

    `subnets`: zone -> subnet; `root_device` and `least_gib` are the image's; `deadline_unix` goes into the tag.
    """

    region: str
    vpc: str
    subnets: Mapping[str, str]
    types: Mapping[str, TypeFacts]
    image_id: str
    root_device: str
    least_gib: int
    volume_gib: int
    instance_profile: str
    deployment: str
    controller: str
    lease_id: str
    deadline_unix: int

    @property
    def gib(self) -> int:
        """Of the encrypted volume."""
        return max(self.volume_gib, self.least_gib)

    @property
    def usd_per_hour_more(self) -> float:
        """What a machine costs beside its own price: volume and public address, at most."""
        return self.gib * VOLUME_USD_PER_GIB_HOUR + ADDRESS_USD_PER_HOUR

    def token(self, *parts: object) -> str:
        """The same for the same thing, for ever; different for everything else."""
        words = (self.deployment, self.controller, self.lease_id, *map(str, parts))
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]


def group_name(rung: Rung, group: Group) -> str:
    """How a group of a rung is called in tags and in lease.json."""
    return f"{rung.number}.{group.number}"


def shutdown_minutes(deadline_s: float) -> int:
    """After how many minutes of life a machine ends itself, as its user-data says."""
    return math.ceil(deadline_s / 60)


def worst_case_usd(rungs: list[Rung], ground: Ground, deadline_s: float) -> float:
    """Most that a launch can cost, whatever becomes of the controller. Minutes are whole, and boots take time."""
    seconds = 60.0 * shutdown_minutes(deadline_s) + BOOT_S
    return worst_usd(rungs, seconds, ground.usd_per_hour_more)


def tags(ground: Ground, group: str) -> list[Request]:
    """On everything that is made."""
    values = {
        "Name": f"srift {ground.lease_id}",
        "srift:deployment": ground.deployment,
        "srift:lease": ground.lease_id,
        "srift:node-group": group,
        "srift:deadline": str(ground.deadline_unix),
        "srift:controller": ground.controller,
    }
    return [{"Key": key, "Value": value} for key, value in values.items()]


def security_group(ground: Ground) -> Request:
    """For CreateSecurityGroup: one a lease, so that no cluster is open to another."""
    return {
        "GroupName": f"srift-{ground.token('security')[:16]}",
        "Description": "Srift: one cluster, open to itself alone",
        "VpcId": ground.vpc,
        "TagSpecifications": _tagged(ground, "all", "security-group"),
    }


def rules() -> dict[str, list[Request]]:
    """In from itself; out to itself (EFA asks for that by name) and to HTTPS, where the store is. What is revoked too.

    A rule without ranges is about the group itself, which has no id before it is made.
    """
    anywhere = [{"CidrIp": "0.0.0.0/0"}]
    itself = {"IpProtocol": "-1"}
    https = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": anywhere}
    return {"ingress": [itself], "egress": [itself, https], "revoked": [{"IpProtocol": "-1", "IpRanges": anywhere}]}


def placement_group(ground: Ground, rung: Rung) -> Request | None:
    """For CreatePlacementGroup; None where there is one machine, or a type that cannot lie in one."""
    grouped = all(ground.types[offer.instance_type.name].grouped for offer in rung.cluster.members)
    if len(rung.cluster.members) < 2 or not grouped:
        return None
    return {
        "GroupName": f"srift-{ground.token('placement', rung.number)[:16]}",
        "Strategy": "cluster",
        "TagSpecifications": _tagged(ground, str(rung.number), "placement-group"),
    }


def run_instances(ground: Ground, rung: Rung, group: Group, *, name: str, security: str, user_data: str) -> Request:
    """For RunInstances, on demand: all of the group or none. boto3 encodes the user-data of this call itself."""
    return _machine(ground, rung) | {
        "InstanceType": group.offer.instance_type.name,
        "MinCount": group.size,
        "MaxCount": group.size,
        "ClientToken": ground.token("run", name),
        "UserData": user_data,
        **_network(ground, rung, group, security),
        "TagSpecifications": _tagged(ground, name, "instance", "volume"),
    }


def launch_template(ground: Ground, rung: Rung, group: Group, *, name: str, security: str, user_data: str) -> Request:
    """For CreateLaunchTemplate, which a fleet needs; here the user-data has to be encoded."""
    network = _network(ground, rung, group, security)
    network.pop("SubnetId", None)  # the fleet names it
    for interface in network.get("NetworkInterfaces", ()):
        interface.pop("SubnetId")
    return {
        "LaunchTemplateName": template_name(ground, name),
        "ClientToken": ground.token("template", name),
        "LaunchTemplateData": _machine(ground, rung)
        | network
        | {
            "UserData": base64.b64encode(user_data.encode()).decode(),
            "TagSpecifications": _tagged(ground, name, "instance", "volume"),
        },
        "TagSpecifications": _tagged(ground, name, "launch-template"),
    }


def template_name(ground: Ground, name: str) -> str:
    """Of the launch template of a group."""
    return _TEMPLATE_NAME.format(token=ground.token("template", name)[:16])


def create_fleet(ground: Ground, rung: Rung, group: Group, *, name: str) -> Request:
    """For CreateFleet, spot, at once: all of the group or none, in the rung's zone, up to the highest price."""
    override = {
        "InstanceType": group.offer.instance_type.name,
        "SubnetId": ground.subnets[rung.zone],
        "MaxPrice": f"{group.most_usd:.4f}",
    }
    template = {"LaunchTemplateName": template_name(ground, name), "Version": "1"}
    return {
        "Type": "instant",
        "ClientToken": ground.token("fleet", name),
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template, "Overrides": [override]}],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": group.size,
            "OnDemandTargetCapacity": 0,
            "SpotTargetCapacity": group.size,
            "DefaultTargetCapacityType": "spot",
        },
        "SpotOptions": {
            "AllocationStrategy": "price-capacity-optimized",
            "SingleInstanceType": True,
            "SingleAvailabilityZone": True,
            "MinTargetCapacity": group.size,
            "InstanceInterruptionBehavior": "terminate",
        },
        "TagSpecifications": _tagged(ground, name, "fleet", "instance"),
    }


def requests_of(ground: Ground, rung: Rung, *, security: str, user_data: str) -> Iterator[tuple[str, Request]]:
    """(action, request) of everything that one rung asks for, in order; what a dry run prints."""
    placement = placement_group(ground, rung)
    if placement is not None:
        yield "ec2:CreatePlacementGroup", placement
    for group in rung.groups:
        words = {"name": group_name(rung, group), "security": security, "user_data": user_data}
        if group.offer.market == "spot":
            yield "ec2:CreateLaunchTemplate", launch_template(ground, rung, group, **words)
            yield "ec2:CreateFleet", create_fleet(ground, rung, group, name=words["name"])
        else:
            yield "ec2:RunInstances", run_instances(ground, rung, group, **words)


def printed(requests: list[tuple[str, Request]]) -> str:
    """Every request in full, but for the user-data, of which the size and digest are told."""
    return "\n".join(f"{action} {json.dumps(shortened(request), indent=1)}" for action, request in requests)


def shortened(value: Any) -> Any:
    """A request with the digest of its user-data in place of it."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _digest(one) if key == "UserData" else shortened(one) for key, one in value.items()}


def _digest(text: str) -> str:
    return f"({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _machine(ground: Ground, rung: Rung) -> Request:
    """What is alike for both ways of launching. No key pair: nobody logs in."""
    volume = {"VolumeSize": ground.gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    placement = placement_group(ground, rung)
    return {
        "ImageId": ground.image_id,
        "IamInstanceProfile": {"Name": ground.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
            "HttpProtocolIpv6": "disabled",  # whatever account or image say: the fence is proven over IPv4
        },
        "BlockDeviceMappings": [{"DeviceName": ground.root_device, "Ebs": volume}],
        **({"Placement": {"GroupName": placement["GroupName"]}} if placement is not None else {}),
    }


def _network(ground: Ground, rung: Rung, group: Group, security: str) -> Request:
    """An EFA interface where the type has one; its first card carries the ordinary traffic too."""
    subnet = ground.subnets[rung.zone]
    if not ground.types[group.offer.instance_type.name].efa:
        return {"SubnetId": subnet, "SecurityGroupIds": [security]}
    interface = {"DeviceIndex": 0, "InterfaceType": "efa", "Groups": [security], "DeleteOnTermination": True}
    return {"NetworkInterfaces": [interface | {"SubnetId": subnet}]}


def _tagged(ground: Ground, group: str, *kinds: str) -> list[Request]:
    return [{"ResourceType": kind, "Tags": tags(ground, group)} for kind in kinds]
