"""Emulate the actions of EC2 that moto lacks or gets wrong.

These are instant fleets, placement groups, spot prices, spot placement scores and instance types.
All other actions are moto's. A fleet gets all the instances that it requests, in its cheapest
subnet.
"""

from datetime import UTC, datetime
from functools import partialmethod
from typing import ClassVar

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.ec2.utils import random_fleet_id

from tests.world.account import Account, Launch


class Elastic(EC2Response):
    """moto's EC2 API with corrected actions. `account` has the state that moto does not keep."""

    account: ClassVar[Account]

    def _of_fake(self, method):
        """Return the answer of the fake account in tests/fake_ec2_account.py."""
        words = {name: self._get_param(name) for name in self.params if name[0].isupper()}
        answer = getattr(self.account.market, method)
        return ActionResult(answer(region=self.region, now=datetime.now(UTC), **words))

    create_placement_group = partialmethod(_of_fake, "create_placement_group")
    describe_placement_groups = partialmethod(_of_fake, "describe_placement_groups")
    delete_placement_group = partialmethod(_of_fake, "delete_placement_group")
    describe_spot_price_history = partialmethod(_of_fake, "describe_spot_price_history")
    describe_instance_types = partialmethod(_of_fake, "describe_instance_types")

    def get_spot_placement_scores(self):
        scores = [
            {"Region": region, "AvailabilityZoneId": zone.zone_id, "Score": 9}
            for region in self._get_param("RegionNames", [self.region])
            for zone in self.ec2_backend.zones.get(region, ())
        ]
        return ActionResult({"SpotPlacementScores": scores})

    def create_fleet(self):
        request, fleet = dict(self.params), random_fleet_id()
        target = request["TargetCapacitySpecification"]
        market, count = target["DefaultTargetCapacityType"], int(target["TotalTargetCapacity"])
        [config] = request["LaunchTemplateConfigs"]
        specification = config["LaunchTemplateSpecification"]
        template = dict(self.ec2_backend._get_template_from_args(specification).data)
        zones = {
            subnet.id: subnet.availability_zone
            for by_zone in self.ec2_backend.subnets.values()
            for subnet in by_zone.values()
        }

        usd = self.account.market.spot_usd[self.region]

        def price(override):
            place = override["InstanceType"], zones[override["SubnetId"]]
            return usd.get(place, float("inf"))

        override = min(config["Overrides"], key=price)
        subnet = {"SubnetId": override["SubnetId"]}
        zone = {"AvailabilityZone": zones[override["SubnetId"]]}
        placement = {**(template.get("Placement") or {}), **zone}
        fleet_tag = {"Key": "aws:ec2:fleet-id", "Value": fleet}
        tags = [*template.get("TagSpecifications", ()), *request.get("TagSpecifications", ())]
        tags.append({"ResourceType": "instance", "Tags": [fleet_tag]})
        self.params = {
            **template,
            "InstanceType": override["InstanceType"],
            "NetworkInterfaces": [{**nic, **subnet} for nic in template["NetworkInterfaces"]],
            "Placement": placement,
            "MinCount": count,
            "MaxCount": count,
            "TagSpecifications": _merged(tags),
            "UserData": str(template["UserData"]),  # moto refuses its own class
        }
        if market == "spot":
            self.params["InstanceMarketOptions"] = {"MarketType": "spot"}
        launched = {
            "LaunchTemplateAndOverrides": {
                "LaunchTemplateSpecification": specification,
                "Overrides": {**override, **zone},
            },
            "Lifecycle": market,
            "InstanceIds": self._launch(market, placement.get("GroupName", "")),
            "InstanceType": override["InstanceType"],
        }
        return ActionResult({"FleetId": fleet, "Instances": [launched], "Errors": []})

    def _launch(self, market, group):
        """Launch instances with moto, and return their ids.

        Each instance gets the role and the placement group, which moto neglects.
        """
        reservation = super().run_instances().result
        profile = self.params.get("IamInstanceProfile") or {}
        for index, instance in enumerate(reservation.instances):
            instance.placement.group_name = group
            if market == "spot":
                instance.spot_instance_request_id = f"sir-{instance.id[-8:]}"
            if profile and index:  # moto gives it to the first instance alone
                self.ec2_backend.associate_iam_instance_profile(
                    instance.id,
                    iam_instance_profile_name=profile.get("Name"),
                    iam_instance_profile_arn=profile.get("Arn"),
                )
        ids = [instance.id for instance in reservation.instances]
        tags = {tag["key"]: tag["value"] for tag in reservation.instances[0].get_tags()}
        self.account.launches.append(Launch(market=market, ids=ids, tags=tags))
        return ids


def _merged(specifications):
    tags = {}
    for specification in specifications:
        if specification["ResourceType"] != "fleet":
            tags.setdefault(specification["ResourceType"], []).extend(specification["Tags"])
    return [{"ResourceType": kind, "Tags": found} for kind, found in tags.items()]
