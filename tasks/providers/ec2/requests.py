"""Every request that a launch makes of EC2, as plain dicts that can be printed. Pure, and free of secrets.

Machines of one rung share a zone, a security group that admits nobody else, and a placement group where their types
allow one. Each request carries a token made of what it is for: asked again it buys nothing again.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.providers.ec2.capacity_ladder import Group, Rung
from tasks.providers.ec2.catalogue import TypeFacts
from tasks.providers.ec2.prices import other_usd_per_hour, storage_usd_per_hour

Request = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What is known before anything is asked for, and common to all machines of a lease.

    `subnets`: zone -> subnet; `public`: machines get a public address.
    `root_device` is the image's; `volume_gib` is what srift.toml states, which settles what a machine's disk costs;
    `deadline_unix` goes into the tag.
    """

    region: str
    vpc: str
    subnets: Mapping[str, str]
    types: Mapping[str, TypeFacts]
    image_id: str
    root_device: str
    volume_gib: int
    instance_profile: str
    deployment: str
    controller: str
    lease_id: str
    deadline_unix: int
    public: bool = True

    @property
    def usd_per_hour_more(self) -> float:
        """What a machine costs beside its own price, as expected: volume, requests, and a public address if any."""
        return storage_usd_per_hour(self.region, self.volume_gib) + other_usd_per_hour(
            public=self.public
        )

    def token(self, *parts: object) -> str:
        """The same for the same thing, for ever; different for everything else."""
        words = (self.deployment, self.controller, self.lease_id, *map(str, parts))
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]


def group_name(rung: Rung, group: Group) -> str:
    """How a group of a rung is called in tags and in lease.json."""
    return f"{rung.number}.{group.number}"


def tags(spec: LaunchSpec, group: str) -> list[Request]:
    """On everything that is made."""
    values = {
        "Name": f"srift {spec.lease_id}",
        "srift:deployment": spec.deployment,
        "srift:lease": spec.lease_id,
        "srift:node-group": group,
        "srift:deadline": str(spec.deadline_unix),
        "srift:controller": spec.controller,
    }
    return [{"Key": key, "Value": value} for key, value in values.items()]


def security_group(spec: LaunchSpec) -> Request:
    """For CreateSecurityGroup: one a lease, so that no cluster is open to another."""
    return {
        "GroupName": f"srift-{spec.token('security')[:16]}",
        "Description": "Srift: one cluster, open to itself alone",
        "VpcId": spec.vpc,
        "TagSpecifications": _tagged(spec, "all", "security-group"),
    }


def rules() -> dict[str, list[Request]]:
    """In from itself; out to itself (EFA asks for that by name) and to HTTPS, where the store is. What is revoked too.

    A rule without ranges is about the group itself, which has no id before it is made.
    """
    anywhere = [{"CidrIp": "0.0.0.0/0"}]
    itself = {"IpProtocol": "-1"}
    https = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": anywhere}
    return {
        "ingress": [itself],
        "egress": [itself, https],
        "revoked": [{"IpProtocol": "-1", "IpRanges": anywhere}],
    }


def placement_group(spec: LaunchSpec, rung: Rung) -> Request | None:
    """For CreatePlacementGroup; None where there is one machine, or a type that cannot lie in one."""
    grouped = all(spec.types[offer.instance_type.name].grouped for offer in rung.cluster.members)
    if len(rung.cluster.members) < 2 or not grouped:
        return None
    return {
        "GroupName": f"srift-{spec.token('placement', rung.number)[:16]}",
        "Strategy": "cluster",
        "TagSpecifications": _tagged(spec, str(rung.number), "placement-group"),
    }


def run_instances(
    spec: LaunchSpec, rung: Rung, group: Group, *, name: str, security: str, user_data: str
) -> Request:
    """For RunInstances, on demand: all of the group or none. boto3 encodes the user-data of this call itself."""
    return _machine(spec, rung) | {
        "InstanceType": group.offer.instance_type.name,
        "MinCount": group.size,
        "MaxCount": group.size,
        "ClientToken": spec.token("run", name),
        "UserData": user_data,
        **_network(spec, rung, group, security),
        "TagSpecifications": _tagged(spec, name, "instance", "volume"),
    }


def launch_template(
    spec: LaunchSpec, rung: Rung, group: Group, *, name: str, security: str, user_data: str
) -> Request:
    """For CreateLaunchTemplate, which a fleet needs; here the user-data has to be encoded."""
    network = _network(spec, rung, group, security)
    for interface in network["NetworkInterfaces"]:
        interface.pop("SubnetId")  # the fleet names it
    return {
        "LaunchTemplateName": template_name(spec, name),
        "ClientToken": spec.token("template", name),
        "LaunchTemplateData": _machine(spec, rung)
        | network
        | {
            "UserData": base64.b64encode(user_data.encode()).decode(),
            "TagSpecifications": _tagged(spec, name, "instance", "volume"),
        },
        "TagSpecifications": _tagged(spec, name, "launch-template"),
    }


def template_name(spec: LaunchSpec, name: str) -> str:
    """Of the launch template of a group."""
    return f"srift-{spec.token('template', name)[:16]}"


def create_fleet(
    spec: LaunchSpec, rung: Rung, group: Group, *, name: str, attempt: int = 0
) -> Request:
    """For CreateFleet, spot, at once: all of the group or none, in one of the rung's zones, up to each one's price.

    What a fleet refused is final for its token: another `attempt` has another.
    """
    overrides = [
        {
            "InstanceType": group.offer.instance_type.name,
            "SubnetId": spec.subnets[place.zone],
            "MaxPrice": f"{place.most_usd[group.first]:.4f}",
        }
        for place in rung.places
    ]
    template = {"LaunchTemplateName": template_name(spec, name), "Version": "1"}
    return {
        "Type": "instant",
        "ClientToken": spec.token("fleet", name, *([attempt] if attempt else [])),
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": template, "Overrides": overrides}
        ],
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
        "TagSpecifications": _tagged(spec, name, "fleet", "instance"),
    }


def requests_of(
    spec: LaunchSpec, rung: Rung, *, security: str, user_data: str
) -> Iterator[tuple[str, Request]]:
    """(action, request) of everything that one rung asks for, in order; what a dry run prints."""
    placement = placement_group(spec, rung)
    if placement is not None:
        yield "ec2:CreatePlacementGroup", placement
    for group in rung.groups:
        words = {"name": group_name(rung, group), "security": security, "user_data": user_data}
        if group.offer.market == "spot":
            yield "ec2:CreateLaunchTemplate", launch_template(spec, rung, group, **words)
            yield "ec2:CreateFleet", create_fleet(spec, rung, group, name=words["name"])
        else:
            yield "ec2:RunInstances", run_instances(spec, rung, group, **words)


def shortened(value: Any) -> Any:
    """A request with the digest of its user-data in place of it."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _digest(one) if key == "UserData" else shortened(one) for key, one in value.items()
    }


def _digest(text: str) -> str:
    return f"({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _machine(spec: LaunchSpec, rung: Rung) -> Request:
    """What is alike for both ways of launching. No key pair: nobody logs in."""
    volume = {
        "VolumeSize": spec.volume_gib,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    placement = placement_group(spec, rung)
    return {
        "ImageId": spec.image_id,
        "IamInstanceProfile": {"Name": spec.instance_profile},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
            "HttpProtocolIpv6": "disabled",  # whatever account or image say: the fence is proven over IPv4
        },
        "BlockDeviceMappings": [{"DeviceName": spec.root_device, "Ebs": volume}],
        **({"Placement": {"GroupName": placement["GroupName"]}} if placement is not None else {}),
    }


def _network(spec: LaunchSpec, rung: Rung, group: Group, security: str) -> Request:
    """The network interfaces: with an EFA on every card that takes one, or one interface where there is one card.

    EC2 gives no public address to a machine of several interfaces (the words may not even be there), so that a machine
    with one has its first card alone; `Surveyor.launch_spec` refuses clusters that would want more.
    Several: an ordinary interface first, then EFAs without an address of their own, as AWS recommends
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html, read in November 2026).
    """
    facts = spec.types[group.offer.instance_type.name]
    common = {
        "SubnetId": spec.subnets[rung.zone],
        "Groups": [security],
        "DeleteOnTermination": True,
    }
    if spec.public or not facts.several_interfaces:
        kind = {"InterfaceType": "efa"} if facts.efa and 0 in facts.efa_cards else {}
        return {
            "NetworkInterfaces": [
                {"DeviceIndex": 0, **kind, **common, "AssociatePublicIpAddress": spec.public}
            ]
        }
    first = {"NetworkCardIndex": 0, "DeviceIndex": 0, "InterfaceType": "interface", **common}
    others = [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": 0 if card else 1,
            "InterfaceType": "efa-only",
            **common,
        }
        for card in facts.efa_cards
    ]
    return {"NetworkInterfaces": [first, *others]}


def _tagged(spec: LaunchSpec, group: str, *kinds: str) -> list[Request]:
    return [{"ResourceType": kind, "Tags": tags(spec, group)} for kind in kinds]
