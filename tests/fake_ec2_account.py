"""An account in memory: moto's instance types, prices, image, subnets, groups and templates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from botocore.exceptions import ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES

from tests.fake_s3 import ROLE

REGIONS, ZONES = ("us-east-1", "eu-west-1"), ("a", "b", "c")
OFFERED = ("g4dn.12xlarge", "g4dn.xlarge")
ON_DEMAND_USD = 3.912
SPOT_USD = {"a": 1.2, "b": 1.4, "c": 1.1}
IMAGE = {
    "ImageId": "ami-0123456789abcdef0",
    "RootDeviceName": "/dev/sda1",
    "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 45}}],
}
# Answers that are always the same, by method of boto3's clients.
ANSWERS = {
    "get_caller_identity": {"Account": "999988887777", "Arn": "arn:aws:iam::999988887777:user/x"},
    "describe_regions": {"Regions": [{"RegionName": region} for region in REGIONS]},
    "get_role": {},
    "get_instance_profile": {"InstanceProfile": {"Roles": [{"RoleId": ROLE}]}},
    "get_parameter": {"Parameter": {"Value": IMAGE["ImageId"]}},
    "describe_images": {"Images": [IMAGE]},
    "get_public_access_block": {},
    "get_bucket_policy_status": {},
    "get_bucket_acl": {"Grants": []},
    "get_service_quota": {"Quota": {"QuotaName": "Running things", "Value": 768.0}},
    "get_spot_placement_scores": {
        "SpotPlacementScores": [{"AvailabilityZoneId": f"az-{zone}", "Score": 5} for zone in ZONES]
    },
    "describe_availability_zones": {
        "AvailabilityZones": [
            {"ZoneId": f"az-{zone}", "ZoneName": f"us-east-1{zone}"} for zone in ("z", *ZONES)
        ]
    },
}


def matches(described, filters):
    """Whether AWS's filters let it through."""
    state = described.get("State")
    values = {
        "instance-id": described.get("InstanceId"),
        "instance-state-name": state and state["Name"],
        "group-name": described.get("GroupName"),
        "subnet-id": described.get("SubnetId"),
        "default-for-az": "true",
    } | {f"tag:{tag['Key']}": tag["Value"] for tag in described.get("Tags", ())}
    return all(values.get(each["Name"]) in each["Values"] for each in filters)


def client_error(code, operation):
    """As boto3 raises it, with a message that must not be repeated."""
    return ClientError({"Error": {"Code": code, "Message": "very-secret-key was wrong"}}, operation)


def product(name, usd):
    """A product of GetProducts; without a price, AWS lists it at 0."""
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{usd or 0.0:.10f}"}}
    yearly = {"unit": "Hrs", "pricePerUnit": {"USD": "0.001"}}
    terms = {"OnDemand": {"1": {"priceDimensions": {"1": dimension}}}}
    terms["Reserved"] = {"1": {"priceDimensions": {"1": yearly}}}
    return json.dumps({"product": {"attributes": {"instanceType": name}}, "terms": terms})


@dataclass
class Account:
    """`usd`: region -> type -> dollars an hour on demand, for types that are offered.

    `spot`: zone -> dollars an hour of every type; `spot_usd`: region -> (type, zone) -> dollars,
    in place of it. `page`: rows in one answer. `subnet_names`: subnet -> zone beside the usual.
    """

    usd: Mapping = field(
        default_factory=lambda: {
            region: dict.fromkeys(OFFERED, ON_DEMAND_USD) for region in REGIONS
        }
    )
    spot: dict = field(
        default_factory=lambda: {f"{r}{z}": usd for r in REGIONS for z, usd in SPOT_USD.items()}
    )
    spot_usd: Mapping | None = None
    page: int = 1000
    tagged: bool = False  # the subnets have our tag
    subnet_names: dict = field(default_factory=dict)
    templates: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    placements: dict = field(default_factory=dict)

    def zone_of(self, subnet):
        return self.subnet_names.get(subnet, subnet.removeprefix("subnet-"))

    def describe_subnets(self, *, region, Filters, **_):
        zones = {f"subnet-{region}{zone}": f"{region}{zone}" for zone in ZONES} | self.subnet_names
        tags = [{"Key": "srift:deployment", "Value": "srift"}] if self.tagged else []
        found = [
            {"SubnetId": name, "AvailabilityZone": zone, "VpcId": "vpc-1", "Tags": tags}
            for name, zone in zones.items()
        ]
        return {"Subnets": [resource for resource in found if matches(resource, Filters)]}

    def describe_instance_types(self, *, region, InstanceTypes=None, NextToken="0", **_):
        rows = [INSTANCE_TYPES[name] for name in InstanceTypes or self.usd.get(region, ())]
        return self._paged("InstanceTypes", rows, NextToken)

    def get_products(self, *, Filters=(), NextToken="0", **_):
        region = "".join(each["Value"] for each in Filters if each["Field"] == "regionCode")
        products = [product(*priced) for priced in self.usd.get(region, {}).items()]
        return self._paged("PriceList", products, NextToken)

    def describe_spot_price_history(self, *, region, now, InstanceTypes=None, NextToken="0", **_):
        zones = [zone for zone in self.spot if zone.startswith(region)]
        known = {
            (name, zone): self.spot[zone] for name in self.usd.get(region, ()) for zone in zones
        }
        if self.spot_usd is not None:
            known = dict(self.spot_usd.get(region, {}))
        rows = [
            {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": str(usd)}
            | {"Timestamp": now}
            for (name, zone), usd in known.items()
            if InstanceTypes is None or name in InstanceTypes
        ]
        return self._paged("SpotPriceHistory", rows, NextToken)

    def _paged(self, key, rows, token):
        first = int(token)
        more = {"NextToken": str(first + self.page)} if len(rows) > first + self.page else {}
        return {key: rows[first : first + self.page], **more}

    def authorize_security_group_ingress(self, *, way="in", **words):
        self.groups[words["region"], words["GroupId"]][way] += words["IpPermissions"]
        return {}

    def authorize_security_group_egress(self, **words):
        return self.authorize_security_group_ingress(way="out", **words)

    def revoke_security_group_egress(self, *, region, GroupId, **_):
        group = self.groups[region, GroupId]
        group["out"] = [rule for rule in group["out"] if rule != "everything"]
        return {}

    def __getattr__(self, method):
        """Creates, describes or deletes launch templates, placement and security groups."""
        verb, _, thing = method.partition("_")
        if thing.rstrip("s") not in _MADE:
            raise AttributeError(method)
        table, key, kind, duplicate = _MADE[thing.rstrip("s")].split()
        made = getattr(self, table)

        def call(*, region, now, **words):
            if verb == "describe":
                here = [each for (place, _), each in made.items() if place == region]
                return {kind: [each for each in here if matches(each, words["Filters"])]}
            if verb == "delete":
                del made[region, words[key]]
                return {}
            full = words | {"Tags": words["TagSpecifications"][0]["Tags"]}
            full |= {"GroupId": f"sg-{words.get('GroupName')}", "in": [], "out": ["everything"]}
            there = made.setdefault((region, full[key]), full)
            if there is not full and (there != full or "ClientToken" not in words):
                raise client_error(duplicate, method)
            return {}

        return call


_MADE = {
    "launch_template": "templates LaunchTemplateName LaunchTemplates IdempotentParameterMismatch",
    "placement_group": "placements GroupName PlacementGroups InvalidPlacementGroup.Duplicate",
    "security_group": "groups GroupId SecurityGroups InvalidGroup.Duplicate",
}
