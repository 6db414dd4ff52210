"""Every request that a launch makes of EC2, as plain dicts that can be printed. Pure.

Machines of a lease share a zone, a security group that admits nobody else, and a placement group
if their types allow one. Each request has a token made of its purpose, so that a repeated request
buys nothing again.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .attempts import Attempt, Group
from .catalogue import TypeFacts
from .prices import other_usd_per_hour, storage_usd_per_hour
from .settings import Ec2

Request = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What all machines of a lease have in common. `subnets`: zone -> subnet id.

    `image`: as DescribeImages describes it.
    """

    choices: Ec2
    region: str
    vpc: str
    subnets: Mapping[str, str]
    types: Mapping[str, TypeFacts]
    image: Mapping[str, Any]
    role_id: str
    controller: str
    lease_id: str
    deadline_unix: int

    @property
    def usd_per_hour_more(self) -> float:
        """Expected dollars an hour of a machine's volume, requests and public address."""
        storage = storage_usd_per_hour(self.region, self.choices.volume_gib)
        return storage + other_usd_per_hour(public=self.choices.public)

    def token(self, *purpose: str) -> str:
        """A client token: always the same for the same purpose of the same lease."""
        words = (self.choices.deployment, self.controller, self.lease_id, *purpose)
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]

    def name(self, *purpose: str) -> str:
        return f"srift-{self.token(*purpose)[:16]}"


def security_group(spec: LaunchSpec) -> Request:
    """CreateSecurityGroup: one a lease, so that no cluster is open to another."""
    return {
        "GroupName": spec.name("security"),
        "Description": "Srift: one cluster, open to itself alone",
        "VpcId": spec.vpc,
        "TagSpecifications": _tagged(spec, "all", "security-group"),
    }


def rules(group_id: str) -> list[tuple[str, list[Request]]]:
    """(action, rules): in from the group itself; out to itself, as EFA needs, and by HTTPS."""
    anywhere = [{"CidrIp": "0.0.0.0/0"}]
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    https = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": anywhere}
    return [
        ("ec2:AuthorizeSecurityGroupIngress", [itself]),
        ("ec2:AuthorizeSecurityGroupEgress", [itself, https]),
        # A new group lets everything out.
        ("ec2:RevokeSecurityGroupEgress", [{"IpProtocol": "-1", "IpRanges": anywhere}]),
    ]


def placement_group(spec: LaunchSpec, attempt: Attempt) -> Request | None:
    """CreatePlacementGroup; None for one machine, or a type that cannot be in one."""
    grouped = all(spec.types[group.type_name].grouped for group in attempt.groups)
    if sum(group.size for group in attempt.groups) < 2 or not grouped:
        return None
    return {
        "GroupName": spec.name("placement", attempt.market),
        "Strategy": "cluster",
        "TagSpecifications": _tagged(spec, attempt.market, "placement-group"),
    }


def launch_template(
    spec: LaunchSpec, attempt: Attempt, group: Group, *, security: str, user_data: str
) -> Request:
    """CreateLaunchTemplate for a group's machines. No key pair: nobody logs in."""
    volume = {
        "VolumeSize": spec.choices.volume_gib,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    data = {
        "ImageId": spec.image["ImageId"],
        "IamInstanceProfile": {"Name": spec.choices.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
            "HttpProtocolIpv6": "disabled",  # user code is fenced from IPv4 alone
        },
        "BlockDeviceMappings": [
            {"DeviceName": spec.image.get("RootDeviceName") or "/dev/sda1", "Ebs": volume}
        ],
        "NetworkInterfaces": _interfaces(spec, spec.types[group.type_name], security),
        "UserData": base64.b64encode(user_data.encode()).decode(),
        "TagSpecifications": _tagged(spec, group.name, "instance", "volume"),
    }
    if placement := placement_group(spec, attempt):
        data["Placement"] = {"GroupName": placement["GroupName"]}
    return {
        "LaunchTemplateName": spec.name("template", group.name),
        "ClientToken": spec.token("template", group.name),
        "LaunchTemplateData": data,
        "TagSpecifications": _tagged(spec, group.name, "launch-template"),
    }


def create_fleet(spec: LaunchSpec, group: Group, market: str) -> Request:
    """CreateFleet, instant: all of the group or none, in one of the zones of its bids.

    Only spot requests have a highest price.
    """
    spot = market == "spot"
    overrides = [
        {"InstanceType": group.type_name, "SubnetId": spec.subnets[zone]}
        | ({"MaxPrice": f"{bid:.4f}"} if spot else {})
        for zone, bid in group.bids.items()
    ]
    gang = {
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": group.size,
        "AllocationStrategy": "price-capacity-optimized" if spot else "lowest-price",
    }
    template = {"LaunchTemplateName": spec.name("template", group.name), "Version": "1"}
    return {
        "Type": "instant",
        "ClientToken": spec.token("fleet", group.name),
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": template, "Overrides": overrides}
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": group.size,
            "OnDemandTargetCapacity": 0 if spot else group.size,
            "SpotTargetCapacity": group.size if spot else 0,
            "DefaultTargetCapacityType": market,
        },
        "TagSpecifications": _tagged(spec, group.name, "fleet", "instance"),
        "SpotOptions" if spot else "OnDemandOptions": gang,
    }


def requests_of(
    spec: LaunchSpec, attempt: Attempt, *, security: str, user_data: str
) -> Iterator[tuple[str, Request]]:
    """(action, request) of everything that one attempt asks for, in order."""
    if placement := placement_group(spec, attempt):
        yield "ec2:CreatePlacementGroup", placement
    for group in attempt.groups:
        words = {"security": security, "user_data": user_data}
        yield "ec2:CreateLaunchTemplate", launch_template(spec, attempt, group, **words)
        yield "ec2:CreateFleet", create_fleet(spec, group, attempt.market)


def shortened(request: Request) -> Request:
    """The request with the digest of its user-data in place of it."""

    def short(found: Request) -> Request:
        if text := found.get("UserData"):
            found["UserData"] = f"(sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
        return found

    made: Request = json.loads(json.dumps(request), object_hook=short)
    return made


def _interfaces(spec: LaunchSpec, facts: TypeFacts, security: str) -> list[Request]:
    """An EFA on every card that takes one, or one interface. The fleet names the subnet.

    EC2 gives no public address to a machine with several interfaces; with one, only the first card
    is used. Several: an ordinary interface, then EFAs without an address, as AWS recommends
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html, November 2026).
    """
    common = {"Groups": [security], "DeleteOnTermination": True}
    if spec.choices.public or not facts.several_interfaces:
        kind = {"InterfaceType": "efa"} if 0 in facts.efa_cards else {}
        public = {"AssociatePublicIpAddress": spec.choices.public}
        return [{"DeviceIndex": 0, **kind, **common, **public}]
    several = [(0, 0, "interface")]
    several += [(card, 0 if card else 1, "efa-only") for card in facts.efa_cards]
    return [
        {"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": kind, **common}
        for card, device, kind in several
    ]


def _tagged(spec: LaunchSpec, group: str, *kinds: str) -> list[Request]:
    values = {
        "Name": f"srift {spec.lease_id}",
        "srift:deployment": spec.choices.deployment,
        "srift:lease": spec.lease_id,
        "srift:node-group": group,
        "srift:deadline": str(spec.deadline_unix),
        "srift:controller": spec.controller,
    }
    tags = [{"Key": key, "Value": value} for key, value in values.items()]
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]
