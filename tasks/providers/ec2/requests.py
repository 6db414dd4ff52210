"""Build every request that a launch sends to EC2, as plain dicts that can be printed.

The machines of a launch share a zone and a security group. They also share a placement group if
all their types allow placement groups. Resource names and client tokens are hashes of the lease id
and the request's purpose. A repeated request therefore creates nothing new.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .attempts import Attempt, Group
from .catalogue import Answer, efa_cards, may_be_grouped, several_interfaces
from .settings import Ec2

Request = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The values that all requests of a launch share.

    choices: the section [ec2] of srift.toml.
    subnets: {zone: subnet id}.
    types: {instance type: its description from DescribeInstanceTypes}.
    image: the image's description from DescribeImages.
    role_id: id of the machines' IAM role.
    controller: random name of the SRIFT_HOME that makes the launch.
    deadline_unix: Unix time in seconds at which the machines must have ended.
    """

    choices: Ec2
    region: str
    vpc: str
    subnets: Mapping[str, str]
    types: Mapping[str, Answer]
    image: Answer
    role_id: str
    controller: str
    lease_id: str
    deadline_unix: int

    def token(self, *purpose: str) -> str:
        """Return the client token of a request. AWS recognizes a repeated request by its token.

        purpose: what the request is for, such as ("fleet", name of the group).
        """
        words = (self.choices.deployment, self.controller, self.lease_id, *purpose)
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]

    def name(self, *purpose: str) -> str:
        """Return the name of an AWS resource: "srift-" and a hash of the lease id and `purpose`."""
        return f"srift-{self.token(*purpose)[:16]}"


def security_group(spec: LaunchSpec) -> Request:
    """Return the CreateSecurityGroup request of one launch."""
    return {
        "GroupName": spec.name("security"),
        "Description": "Srift: one cluster, open to itself alone",
        "VpcId": spec.vpc,
        "TagSpecifications": _tags(spec, "all", "security-group"),
    }


def rules(group_id: str) -> list[tuple[str, Request]]:
    """Return (action, request) pairs that set the rules of a new security group.

    Inbound traffic is allowed only from the group itself. Outbound traffic is allowed to the group,
    as EFA requires, and to any HTTPS server.
    """
    anywhere = [{"CidrIp": "0.0.0.0/0"}]
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    https = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": anywhere}
    # EC2 creates a group with a rule that allows all outbound traffic.
    everything = {"IpProtocol": "-1", "IpRanges": anywhere}
    changes = [
        ("ec2:AuthorizeSecurityGroupIngress", itself),
        ("ec2:AuthorizeSecurityGroupEgress", itself),
        ("ec2:AuthorizeSecurityGroupEgress", https),
        ("ec2:RevokeSecurityGroupEgress", everything),
    ]
    return [(action, {"GroupId": group_id, "IpPermissions": [rule]}) for action, rule in changes]


def placement_group(spec: LaunchSpec, attempt: Attempt) -> Request | None:
    """Return the CreatePlacementGroup request.

    Returns None for a single machine, or if a type cannot be in a placement group.
    """
    grouped = all(may_be_grouped(spec.types[group.type_name]) for group in attempt.groups)
    if sum(group.size for group in attempt.groups) < 2 or not grouped:
        return None
    return {
        "GroupName": spec.name("placement", attempt.market),
        "Strategy": "cluster",
        "TagSpecifications": _tags(spec, attempt.market, "placement-group"),
    }


def launch_template(
    spec: LaunchSpec, attempt: Attempt, group: Group, *, security: str, user_data: str
) -> Request:
    """Return the CreateLaunchTemplate request for the machines of `group`.

    security: id of the security group.
    user_data: the machines' user-data in base64.

    The template has no key pair, because nobody logs in to the machines.
    """
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
        # User code is blocked from the metadata service only over IPv4, so IPv6 is disabled.
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
            "HttpProtocolIpv6": "disabled",
        },
        "BlockDeviceMappings": [
            {"DeviceName": spec.image.get("RootDeviceName") or "/dev/sda1", "Ebs": volume}
        ],
        "NetworkInterfaces": _interfaces(spec, spec.types[group.type_name], security),
        "UserData": user_data,
        "TagSpecifications": _tags(spec, group.name, "instance", "volume"),
    }
    if placement := placement_group(spec, attempt):
        data["Placement"] = {"GroupName": placement["GroupName"]}
    return {
        "LaunchTemplateName": spec.name("template", group.name),
        "ClientToken": spec.token("template", group.name),
        "LaunchTemplateData": data,
        "TagSpecifications": _tags(spec, group.name, "launch-template"),
    }


def create_fleet(spec: LaunchSpec, group: Group, market: str) -> Request:
    """Return the CreateFleet request, which launches all machines of `group` or none.

    All machines are in the same zone. The permitted zones are the keys of `group.bids`.
    """
    spot = market == "spot"
    overrides = [
        {"InstanceType": group.type_name, "SubnetId": spec.subnets[zone]}
        | ({"MaxPrice": f"{bid - 4.99e-5:.4f}"} if spot else {})  # rounded down
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
        "TagSpecifications": _tags(spec, group.name, "fleet", "instance"),
        "SpotOptions" if spot else "OnDemandOptions": gang,
    }


def requests_of(
    spec: LaunchSpec, attempt: Attempt, *, security: str, user_data: str
) -> Iterator[tuple[str, Request]]:
    """Yield (action, parameters) for every request of one launch attempt, in order.

    security: id of the launch's security group, which must already exist.
    user_data: the machines' user-data in base64.
    """
    if placement := placement_group(spec, attempt):
        yield "ec2:CreatePlacementGroup", placement
    for group in attempt.groups:
        words = {"security": security, "user_data": user_data}
        yield "ec2:CreateLaunchTemplate", launch_template(spec, attempt, group, **words)
        yield "ec2:CreateFleet", create_fleet(spec, group, attempt.market)


def _interfaces(spec: LaunchSpec, kind: Answer, security: str) -> list[Request]:
    """Return the network interfaces of a machine for the launch template.

    kind: description of the instance type from DescribeInstanceTypes.
    security: id of the security group.

    A machine has a single interface if it gets a public IP address, or if its first network card
    reaches the full network rate. This interface uses EFA if the first card supports EFA.

    All other machines have an interface for IP traffic, and an "efa-only" interface on each EFA
    card. AWS recommends this combination
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html, November 2026).
    """
    # The subnet is missing here, because the CreateFleet request names it.
    first: Request = {"DeviceIndex": 0, "Groups": [security], "DeleteOnTermination": True}
    # EC2 gives no public IP address to machines with several interfaces.
    if spec.choices.public or not several_interfaces(kind):
        first["AssociatePublicIpAddress"] = spec.choices.public
        return [first | ({"InterfaceType": "efa"} if 0 in efa_cards(kind) else {})]
    return [first | {"NetworkCardIndex": 0, "InterfaceType": "interface"}] + [
        first
        | {"NetworkCardIndex": card, "DeviceIndex": int(card == 0), "InterfaceType": "efa-only"}
        for card in efa_cards(kind)
    ]


def _tags(spec: LaunchSpec, group: str, *kinds: str) -> list[Request]:
    """Return TagSpecifications that attach Srift's tags to the resource types in `kinds`.

    group: value of the tag srift:node-group.
    """
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
