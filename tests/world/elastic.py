"""EC2 where moto lacks it or is wrong: launches, fleets, placement groups, spot prices and placement scores.

Everything else is moto's own, and so is what a launch that passed the checks really does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses import EC2Response
from moto.ec2.utils import convert_tag_spec, random_fleet_id

from tests.world.launching import Candidate, Ground, Held
from tests.world.market import page, zones_of

if TYPE_CHECKING:
    from tests.world.account import Account

_GONE = ("shutting-down", "terminated")


class Elastic(EC2Response):
    """`account` holds what moto has no place for."""

    account: ClassVar[Account]

    def run_instances(self) -> ActionResult:
        return self._once("RunInstances", self._run)

    def create_fleet(self) -> ActionResult:
        return self._once("CreateFleet", self._fleet)

    def create_placement_group(self) -> ActionResult:
        self.error_on_dryrun()
        name, groups = (
            self._get_param("GroupName"),
            self.account.placement_groups.setdefault(self.region, {}),
        )
        if name in groups:
            raise EC2ClientError(
                "InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists."
            )
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
        groups = self.account.placement_groups.get(self.region, {})
        asked = self._filters_from_querystring()
        found = [one for one in groups.values() if _passes(one, asked)]
        return ActionResult({"PlacementGroups": found})

    def delete_placement_group(self) -> ActionResult:
        self.error_on_dryrun()
        name, groups = (
            self._get_param("GroupName"),
            self.account.placement_groups.get(self.region, {}),
        )
        if name not in groups:
            raise EC2ClientError(
                "InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown."
            )
        if any(
            one.placement.group_name == name and one.state not in _GONE for one in self._instances()
        ):
            raise EC2ClientError(
                "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use"
            )
        del groups[name]
        return ActionResult({})

    def describe_spot_price_history(self) -> ActionResult:
        rows = self.account.market.spot_history(self.region, self._get_param("InstanceTypes", []))
        rows = [one for one in rows if self.account.sells(one["InstanceType"])]
        some, token = page(
            rows, self._get_param("NextToken"), int(self._get_param("MaxResults", 1000))
        )
        return ActionResult({"SpotPriceHistory": some, "NextToken": token})

    def describe_instance_type_offerings(self) -> ActionResult:
        rows = super().describe_instance_type_offerings().result["InstanceTypeOfferings"]  # type: ignore[index]
        return ActionResult(
            {
                "InstanceTypeOfferings": [
                    one for one in rows if self.account.sells(one["InstanceType"])
                ]
            }
        )

    def get_spot_placement_scores(self) -> ActionResult:
        names, count = (
            self._get_param("InstanceTypes", []),
            int(self._get_param("TargetCapacity", 1)),
        )
        ground = self._ground()
        scores = [
            {
                "Region": region,
                "AvailabilityZoneId": zone.zone_id,
                "Score": 9
                if any(ground.room(name, "spot", zone.name) >= count for name in names)
                else 1,
            }
            for region in self._get_param("RegionNames", [self.region])
            for zone in self.ec2_backend.zones.get(region, ())
        ]
        return ActionResult({"SpotPlacementScores": scores})

    def _once(self, action: str, do: Callable[[], dict[str, Any] | Any]) -> ActionResult:
        """Do it, or answer as the first time. Raises EC2ClientError for another request of the same token."""
        token = self._get_param("ClientToken")
        asked = json.dumps(
            {key: value for key, value in self.params.items() if key != "ClientToken"}, default=str
        )
        key = (self.region, action, str(token))
        if token and key in self.account.tokens:
            before, result = self.account.tokens[key]
            if before != asked:
                raise EC2ClientError(
                    "IdempotentParameterMismatch", "The client token was used for another request."
                )
            return ActionResult(result)
        result = do()
        if token:
            self.account.tokens[key] = (asked, result)
        return ActionResult(result)

    def _run(self) -> Any:
        ground, data = self._ground(), dict(self.params)
        ground.check(data)
        options = data.get("InstanceMarketOptions") or {}
        name, market = (
            str(data["InstanceType"]),
            "spot" if options.get("MarketType") == "spot" else "on-demand",
        )
        count = int(data["MinCount"])
        zones = [ground.zone(data)] if ground.zone(data) else list(zones_of(self.region))
        refusals = {zone: ground.refusal(name, market, zone, count) for zone in zones}
        zone = next((zone for zone, (code, _) in refusals.items() if not code), None)
        if zone is None:
            raise EC2ClientError(*next(iter(refusals.values())))
        return self._launch(ground.placed(data, zone), market)

    def _fleet(self) -> dict[str, Any]:
        asked = self.params
        if asked.get("Type") != "instant":
            raise EC2ClientError("InvalidParameterValue", "only instant fleets are emulated")
        self.error_on_dryrun()
        target = asked["TargetCapacitySpecification"]
        market = str(target["DefaultTargetCapacityType"])
        options = asked.get("SpotOptions" if market == "spot" else "OnDemandOptions") or {}
        count = int(target["TotalTargetCapacity"])
        gang = options.get("SingleInstanceType") and options.get("SingleAvailabilityZone")
        if not gang or options.get("MinTargetCapacity") != count:
            raise EC2ClientError("InvalidParameterValue", "only gangs in one zone are emulated")
        ground = self._ground()
        one, refused = ground.chosen(self._candidates(ground), market, count)
        fleet, launched = random_fleet_id(), []
        if one is not None:
            data = dict(ground.placed(one.data, one.zone)) | {"MinCount": count, "MaxCount": count}
            known = {
                "ResourceType": "instance",
                "Tags": [{"Key": "aws:ec2:fleet-id", "Value": fleet}],
            }
            tags = [
                *one.data.get("TagSpecifications", ()),
                *(asked.get("TagSpecifications") or ()),
                known,
            ]
            data["TagSpecifications"] = _merged(tags)
            ids = [instance.id for instance in self._launch(data, market).instances]
            launched.append(
                _described(one)
                | {"Lifecycle": market, "InstanceIds": ids, "InstanceType": one.name}
            )
        errors = [
            _described(one) | {"Lifecycle": market, "ErrorCode": code, "ErrorMessage": message}
            for one, code, message in refused
        ]
        return {"FleetId": fleet, "Instances": launched, "Errors": errors}

    def _candidates(self, ground: Ground) -> Iterator[Candidate]:
        for config in self.params["LaunchTemplateConfigs"]:
            specification = config["LaunchTemplateSpecification"]
            template = self._template(specification)
            for override in config.get("Overrides") or [{}]:
                subnet = override.get("SubnetId")
                data = template | {
                    key: value
                    for key, value in override.items()
                    if key in ("InstanceType", "ImageId")
                }
                if subnet:
                    nics = [
                        dict(nic) | {"SubnetId": subnet}
                        for nic in data.get("NetworkInterfaces") or ()
                    ]
                    data |= {"NetworkInterfaces": nics} if nics else {"SubnetId": subnet}
                ground.check(data)
                name, asked = (
                    str(data["InstanceType"]),
                    ground.zone(data) or override.get("AvailabilityZone"),
                )
                for zone in [asked] if asked else zones_of(self.region):
                    usd = self.account.market.spot(name, self.region, zone)
                    yield Candidate(
                        data=data, specification=specification, override=override, name=name, zone=zone,
                        usd=float("inf") if usd is None else usd,
                    )  # fmt: skip

    def _launch(self, data: Mapping[str, Any], market: str) -> Any:
        """moto's own launch of what was checked; each instance with its role, and its group."""
        self.params = dict(data) | (
            {"InstanceMarketOptions": {"MarketType": "spot"}} if market == "spot" else {}
        )
        self.params["UserData"] = None if data.get("UserData") is None else str(data["UserData"])
        reservation: Any = super().run_instances().result
        profile = data.get("IamInstanceProfile") or {}
        for index, instance in enumerate(reservation.instances):
            instance.placement.group_name = (data.get("Placement") or {}).get("GroupName", "")
            if market == "spot":
                instance.spot_instance_request_id = f"sir-{instance.id[-8:]}"
            if profile and index:  # moto gives it to the first alone
                self.ec2_backend.associate_iam_instance_profile(
                    instance.id,
                    iam_instance_profile_name=profile.get("Name"),
                    iam_instance_profile_arn=profile.get("Arn"),
                )
        self.account.launched(self.region, reservation.instances, market)
        return reservation

    def _template(self, specification: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self.ec2_backend._get_template_from_args(specification).data)

    def _instances(self) -> list[Any]:
        return list(self.ec2_backend.all_instances())

    def _ground(self) -> Ground:
        subnets = [one for by_zone in self.ec2_backend.subnets.values() for one in by_zone.values()]
        alive = [one for one in self._instances() if one.state not in _GONE]
        return Ground(
            region=self.region,
            market=self.account.market,
            quotas=self.account.quotas,
            held=[
                Held(
                    name=one.instance_type,
                    market=one.lifecycle or "on-demand",
                    zone=str(one.availability_zone),
                )
                for one in alive
            ],
            images=frozenset(self.ec2_backend.amis) - frozenset(self.ec2_backend.deleted_amis),
            groups=frozenset(self.account.placement_groups.get(self.region, {})),
            default_subnets={
                zone: one.id for zone, one in self.ec2_backend.get_default_subnets().items()
            },
            zone_of_subnet={one.id: one.availability_zone for one in subnets},
        )


def _described(one: Candidate) -> dict[str, Any]:
    known = {"InstanceType": one.name, "AvailabilityZone": one.zone}
    overrides = dict(one.override) | known
    return {
        "LaunchTemplateAndOverrides": {
            "LaunchTemplateSpecification": one.specification,
            "Overrides": overrides,
        }
    }


def _merged(specifications: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(str(one["ResourceType"]) for one in specifications)
    return [
        {
            "ResourceType": kind,
            "Tags": [
                tag for one in specifications if one["ResourceType"] == kind for tag in one["Tags"]
            ],
        }
        for kind in kinds
        if kind != "fleet"
    ]


def _passes(group: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    tags = {f"tag:{one['Key']}": one["Value"] for one in group["Tags"]}
    described = tags | {
        "group-name": group["GroupName"],
        "state": group["State"],
        "strategy": group["Strategy"],
    }
    return all(described.get(name) in values for name, values in asked.items())
