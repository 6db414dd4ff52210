"""What an account in memory says of itself: types, zones, image, subnets, groups, quotas and prices, by region."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from tests.fake_s3 import ROLE

ZONES = ("a", "b", "c")
ON_DEMAND_USD = 3.912
SPOT_USD = {"a": 1.2, "b": 1.4, "c": 1.1}


def matches(one: dict[str, Any], filters: list[dict[str, Any]]) -> bool:
    """As AWS's filters do, of those that are used."""
    tags = {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())}
    values = {
        "instance-id": one.get("InstanceId"),
        "instance-state-name": one.get("State", {}).get("Name")
        if isinstance(one.get("State"), dict)
        else None,
        "group-name": one.get("GroupName"),
        "vpc-id": one.get("VpcId"),
        "default-for-az": "true",
    } | {f"tag:{key}": value for key, value in tags.items()}
    return all(values.get(each["Name"]) in each["Values"] for each in filters)


def _tags(words: dict[str, Any]) -> list[dict[str, str]]:
    return list(words["TagSpecifications"][0]["Tags"])


def _no(code: str, operation: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "very-secret-key was wrong"}}, operation)


@dataclass(slots=True)
class Account:
    spot: dict[str, float] = field(
        default_factory=lambda: {
            f"{r}{z}": usd for r in ("us-east-1", "eu-west-1") for z, usd in SPOT_USD.items()
        }
    )
    images: list[str] = field(default_factory=lambda: ["ami-0123456789abcdef0"])
    templates: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    placements: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    in_use: bool = False  # groups cannot be deleted
    tagged: bool = False  # the subnets have our tag
    cards: int = 1  # network cards of a type that has EFA

    def zone_of(self, subnet: str) -> str:
        return subnet.removeprefix("subnet-")

    def describe_subnets(self, *, region: str, Filters: list[Any], **_: Any) -> Any:
        """The default VPC's, unless `tagged`."""
        [asked] = Filters
        if asked["Name"] == "tag:srift:deployment" and not self.tagged:
            return {"Subnets": []}
        found = [(f"subnet-{region}{zone}", f"{region}{zone}") for zone in ZONES]
        return {
            "Subnets": [
                {"SubnetId": name, "AvailabilityZone": zone, "VpcId": "vpc-1"}
                for name, zone in found
                if asked["Name"] != "subnet-id" or name in asked["Values"]
            ]
        }

    def describe_instance_types(self, *, InstanceTypes: list[str], **_: Any) -> Any:
        return {"InstanceTypes": [self._described(name) for name in InstanceTypes]}

    def describe_instance_type_offerings(self, *, region: str, **_: Any) -> Any:
        names = ("g4dn.12xlarge", "g4dn.xlarge")
        return {
            "InstanceTypeOfferings": [{"InstanceType": name, "Location": region} for name in names]
        }

    def get_parameter(self, *, Name: str, **_: Any) -> Any:
        return {"Parameter": {"Value": "ami-0123456789abcdef0"}}

    def describe_images(self, *, ImageIds: list[str], **_: Any) -> Any:
        if not set(ImageIds) <= set(self.images):
            raise _no("InvalidAMIID.NotFound", "DescribeImages")
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 45}}
        image = {"RootDeviceName": "/dev/sda1", "State": "available", "BlockDeviceMappings": [disk]}
        return {"Images": [{"ImageId": ImageIds[0], **image}]}

    def get_instance_profile(self, **_: Any) -> Any:
        return {"InstanceProfile": {"Roles": [{"RoleId": ROLE}]}}

    def describe_spot_price_history(
        self, *, region: str, now: datetime, InstanceTypes: list[str] | None = None, **_: Any
    ) -> Any:
        rows = [
            {
                "InstanceType": name,
                "AvailabilityZone": zone,
                "SpotPrice": str(usd),
                "Timestamp": now,
            }
            for name in InstanceTypes or ["g4dn.12xlarge", "g4dn.xlarge"]
            for zone, usd in self.spot.items()
            if zone.startswith(region)
        ]
        return {"SpotPriceHistory": rows}

    def get_products(self, *, Filters: list[Any], **_: Any) -> Any:
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": str(ON_DEMAND_USD)}}
        terms = {"OnDemand": {"1": {"priceDimensions": {"1": dimension}}}}
        names = ("g4dn.12xlarge", "g4dn.xlarge")
        products = [
            {"product": {"attributes": {"instanceType": name}}, "terms": terms} for name in names
        ]
        return {"PriceList": [json.dumps(product) for product in products]}

    def get_spot_placement_scores(self, *, region: str, **_: Any) -> Any:
        return {
            "SpotPlacementScores": [
                {"AvailabilityZoneId": f"az-{zone}", "Score": 5} for zone in ZONES
            ]
        }

    def describe_availability_zones(self, *, region: str, **_: Any) -> Any:
        return {
            "AvailabilityZones": [
                {"ZoneId": f"az-{zone}", "ZoneName": f"{region}{zone}"} for zone in ZONES
            ]
        }

    def create_launch_template(self, *, region: str, now: datetime, **words: Any) -> Any:
        key = (region, words["LaunchTemplateName"])
        if (
            key in self.templates
            and self.templates[key]["LaunchTemplateData"] != words["LaunchTemplateData"]
        ):
            raise _no("IdempotentParameterMismatch", "CreateLaunchTemplate")
        self.templates[key] = words | {"Tags": _tags(words)}
        return {}

    def create_placement_group(self, *, region: str, now: datetime, **words: Any) -> Any:
        if (region, words["GroupName"]) in self.placements:
            raise _no("InvalidPlacementGroup.Duplicate", "CreatePlacementGroup")
        self.placements[region, words["GroupName"]] = words | {"Tags": _tags(words)}
        return {}

    def create_security_group(self, *, region: str, now: datetime, **words: Any) -> Any:
        if any(one["GroupName"] == words["GroupName"] for one in self.groups.values()):
            raise _no("InvalidGroup.Duplicate", "CreateSecurityGroup")
        name = f"sg-{len(self.groups)}"
        self.groups[region, name] = words | {
            "GroupId": name,
            "Tags": _tags(words),
            "in": [],
            "out": ["everything"],
        }
        return {"GroupId": name}

    def authorize_security_group_ingress(
        self, *, region: str, GroupId: str, IpPermissions: list[Any], **_: Any
    ) -> Any:
        self.groups[region, GroupId]["in"] += IpPermissions
        return {}

    def authorize_security_group_egress(
        self, *, region: str, GroupId: str, IpPermissions: list[Any], **_: Any
    ) -> Any:
        self.groups[region, GroupId]["out"] += IpPermissions
        return {}

    def revoke_security_group_egress(self, *, region: str, GroupId: str, **_: Any) -> Any:
        self.groups[region, GroupId]["out"] = [
            one for one in self.groups[region, GroupId]["out"] if one != "everything"
        ]
        return {}

    def describe_launch_templates(self, *, region: str, Filters: list[Any], **_: Any) -> Any:
        return {"LaunchTemplates": self._found(self.templates, region, Filters)}

    def describe_placement_groups(self, *, region: str, Filters: list[Any], **_: Any) -> Any:
        return {"PlacementGroups": self._found(self.placements, region, Filters)}

    def describe_security_groups(self, *, region: str, Filters: list[Any], **_: Any) -> Any:
        return {"SecurityGroups": self._found(self.groups, region, Filters)}

    def delete_launch_template(self, *, region: str, LaunchTemplateName: str, **_: Any) -> Any:
        return self._delete(self.templates, (region, LaunchTemplateName), "")

    def delete_placement_group(self, *, region: str, GroupName: str, **_: Any) -> Any:
        return self._delete(self.placements, (region, GroupName), "InvalidPlacementGroup.InUse")

    def delete_security_group(self, *, region: str, GroupId: str, **_: Any) -> Any:
        return self._delete(self.groups, (region, GroupId), "DependencyViolation")

    def _found(
        self, where: dict[tuple[str, str], Any], region: str, filters: list[Any]
    ) -> list[Any]:
        return [
            one for (place, _), one in where.items() if place == region and matches(one, filters)
        ]

    def _delete(self, where: dict[tuple[str, str], Any], key: tuple[str, str], busy: str) -> Any:
        if self.in_use and busy:
            raise _no(busy, "Delete")
        where.pop(key)
        return {}

    def _described(self, name: str) -> dict[str, Any]:
        efa = name.endswith("12xlarge")
        gpu = {"Name": "T4", "Count": 4 if efa else 1, "MemoryInfo": {"SizeInMiB": 16384}}
        card = {"BaselineBandwidthInGbps": 50.0 if efa else 5.0}
        cards = [card] * (self.cards if efa else 1)
        network = {
            "EfaSupported": efa,
            "EfaInfo": {"MaximumEfaInterfaces": len(cards)},
            "NetworkCards": cards,
        }
        return {
            "InstanceType": name,
            "VCpuInfo": {"DefaultVCpus": 48 if efa else 4},
            "MemoryInfo": {"SizeInMiB": 196608 if efa else 16384},
            "NetworkInfo": network | {"NetworkPerformance": "50 Gigabit"},
            "PlacementGroupInfo": {"SupportedStrategies": ["cluster", "partition", "spread"]},
            "GpuInfo": {"Gpus": [gpu]},
        }
