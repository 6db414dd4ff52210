"""EC2 where moto lacks it or is wrong: instant fleets, placement groups, spot prices and placement
scores.

Everything else is moto's. A fleet gets all that it asks for, at the cheapest of its subnets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses import EC2Response
from moto.ec2.utils import convert_tag_spec, random_fleet_id

from tests.world.market import page

if TYPE_CHECKING:
    from tests.world.account import Account


class Elastic(EC2Response):
    """`account` holds what moto has no place for."""

    account: ClassVar[Account]

    def create_placement_group(self) -> ActionResult:
        self.error_on_dryrun()
        name, groups = self._get_param("GroupName"), self._groups()
        tags = convert_tag_spec(self._get_param("TagSpecifications", [])).get("placement-group", {})
        groups[name] = {
            "GroupName": name,
            "GroupId": f"pg-{len(groups):017x}",
            "Strategy": self._get_param("Strategy", "cluster"),
            "State": "available",
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        }
        return ActionResult({"PlacementGroup": groups[name]})

    def describe_placement_groups(self) -> ActionResult:
        asked = self._filters_from_querystring()
        found = [one for one in self._groups().values() if _passes(one, asked)]
        return ActionResult({"PlacementGroups": found})

    def delete_placement_group(self) -> ActionResult:
        self.error_on_dryrun()
        name = self._get_param("GroupName")
        if any(one.placement.group_name == name for one in self.account.instances()):
            raise EC2ClientError("InvalidPlacementGroup.InUse", f"{name} is in use")
        if self._groups().pop(name, None) is None:
            raise EC2ClientError("InvalidPlacementGroup.Unknown", f"{name} is unknown")
        return ActionResult({})

    def describe_spot_price_history(self) -> ActionResult:
        rows = self.account.market.spot_history(self.region, self._get_param("InstanceTypes", []))
        rows = [one for one in rows if self.account.sells(one["InstanceType"])]
        size = int(self._get_param("MaxResults", 1000))
        some, token = page(rows, self._get_param("NextToken"), size)
        return ActionResult({"SpotPriceHistory": some, "NextToken": token})

    def describe_instance_type_offerings(self) -> ActionResult:
        answer: Any = super().describe_instance_type_offerings().result
        rows = answer["InstanceTypeOfferings"]
        sold = [one for one in rows if self.account.sells(one["InstanceType"])]
        return ActionResult({"InstanceTypeOfferings": sold})

    def get_spot_placement_scores(self) -> ActionResult:
        regions = self._get_param("RegionNames", [self.region])
        scores = [
            {"Region": region, "AvailabilityZoneId": zone.zone_id, "Score": 9}
            for region in regions
            for zone in self.ec2_backend.zones.get(region, ())
        ]
        return ActionResult({"SpotPlacementScores": scores})

    def create_fleet(self) -> ActionResult:
        self.error_on_dryrun()
        asked, fleet = dict(self.params), random_fleet_id()
        target = asked["TargetCapacitySpecification"]
        market, count = str(target["DefaultTargetCapacityType"]), int(target["TotalTargetCapacity"])
        (config,) = asked["LaunchTemplateConfigs"]
        specification = config["LaunchTemplateSpecification"]
        template = dict(self.ec2_backend._get_template_from_args(specification).data)
        zones = {
            one.id: one.availability_zone
            for by_zone in self.ec2_backend.subnets.values()
            for one in by_zone.values()
        }
        override = min(config["Overrides"], key=lambda one: self._usd(one, zones))
        name, zone = str(override["InstanceType"]), zones[override["SubnetId"]]
        fleet_tag = {"Key": "aws:ec2:fleet-id", "Value": fleet}
        tags = [*template.get("TagSpecifications", ()), *asked.get("TagSpecifications", ())]
        tags.append({"ResourceType": "instance", "Tags": [fleet_tag]})
        nics = [
            dict(nic) | {"SubnetId": override["SubnetId"]} for nic in template["NetworkInterfaces"]
        ]
        placement = dict(template.get("Placement") or {}) | {"AvailabilityZone": zone}
        spot = {"InstanceMarketOptions": {"MarketType": "spot"}} if market == "spot" else {}
        self.params = {
            **template,
            **spot,
            "InstanceType": name,
            "NetworkInterfaces": nics,
            "Placement": placement,
            "MinCount": count,
            "MaxCount": count,
            "TagSpecifications": _merged(tags),
            "UserData": str(template["UserData"]),
        }
        ids = self._launch(market, placement.get("GroupName", ""))
        described = {
            "LaunchTemplateSpecification": specification,
            "Overrides": {**override, "AvailabilityZone": zone},
        }
        launched = {
            "LaunchTemplateAndOverrides": described,
            "Lifecycle": market,
            "InstanceIds": ids,
            "InstanceType": name,
        }
        return ActionResult({"FleetId": fleet, "Instances": [launched], "Errors": []})

    def _launch(self, market: str, group: str) -> list[str]:
        """moto's launch; each instance with its role, and its group."""
        reservation: Any = super().run_instances().result
        profile = self.params.get("IamInstanceProfile") or {}
        for index, instance in enumerate(reservation.instances):
            instance.placement.group_name = group
            if market == "spot":
                instance.spot_instance_request_id = f"sir-{instance.id[-8:]}"
            if profile and index:  # moto gives it to the first alone
                self.ec2_backend.associate_iam_instance_profile(
                    instance.id,
                    iam_instance_profile_name=profile.get("Name"),
                    iam_instance_profile_arn=profile.get("Arn"),
                )
        self.account.launched(self.region, reservation.instances, market)
        return [instance.id for instance in reservation.instances]

    def _usd(self, override: Mapping[str, Any], zones: Mapping[str, str]) -> float:
        zone = zones[override["SubnetId"]]
        usd = self.account.market.spot(str(override["InstanceType"]), self.region, zone)
        return float("inf") if usd is None else usd

    def _groups(self) -> dict[str, Any]:
        return self.account.placement_groups.setdefault(self.region, {})


def _merged(specifications: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    tags: dict[str, list[Any]] = {}
    for one in specifications:
        if one["ResourceType"] != "fleet":
            tags.setdefault(str(one["ResourceType"]), []).extend(one["Tags"])
    return [{"ResourceType": kind, "Tags": found} for kind, found in tags.items()]


def _passes(group: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    tags = {f"tag:{one['Key']}": one["Value"] for one in group["Tags"]}
    described = tags | {"group-name": group["GroupName"], "state": group["State"]}
    return all(described.get(name) in values for name, values in asked.items())
