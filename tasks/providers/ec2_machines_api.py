"""EC2's machines and what they need: asked for, looked at, ended. Every call names its action as IAM policies do.

Requests come whole from `ec2_request`; nothing is decided here. All methods raise AwsRefused with the fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from tasks.providers.ec2_api import Answer, Ec2Api
from tasks.providers.ec2_errors import AwsRefused, refused

ALIVE = ("pending", "running", "stopping", "stopped")  # what may cost money, or come back to do so


class MachinesApi(Ec2Api):
    """Questions about prices, and orders of machines."""

    def run_instances(self, region: str, request: Answer) -> list[Answer]:
        """The instances, of this request or of an earlier one with the same token."""
        return list(self.ask("ec2:RunInstances", region, **request)["Instances"])

    def create_launch_template(self, region: str, request: Answer) -> None:
        """Again is no error."""
        with _allowing("there"):
            self.ask("ec2:CreateLaunchTemplate", region, **request)

    def create_fleet(self, region: str, request: Answer) -> Answer:
        """The answer: `FleetId`, `Instances` and `Errors`."""
        return self.ask("ec2:CreateFleet", region, **request)

    def create_placement_group(self, region: str, request: Answer) -> None:
        """Again is no error."""
        with _allowing("there"):
            self.ask("ec2:CreatePlacementGroup", region, **request)

    def security_group(self, region: str, create: Answer, rules: dict[str, list[Answer]]) -> str:
        """The id of the group, made or found by its name, with `rules` (see `ec2_request.rules`) and no others."""
        try:
            group = str(self.ask("ec2:CreateSecurityGroup", region, **create)["GroupId"])
        except AwsRefused as error:
            if error.kind != "there":
                raise
            filters = [_filter("group-name", create["GroupName"]), _filter("vpc-id", create["VpcId"])]
            group = str(self.ask("ec2:DescribeSecurityGroups", region, Filters=filters)["SecurityGroups"][0]["GroupId"])
        for rule in rules["ingress"]:
            with _allowing("there"):
                self.ask("ec2:AuthorizeSecurityGroupIngress", region, GroupId=group, IpPermissions=[_to(rule, group)])
        for rule in rules["egress"]:
            with _allowing("there"):
                self.ask("ec2:AuthorizeSecurityGroupEgress", region, GroupId=group, IpPermissions=[_to(rule, group)])
        with _allowing("gone"):  # every new group lets everything out
            self.ask("ec2:RevokeSecurityGroupEgress", region, GroupId=group, IpPermissions=rules["revoked"])
        return group

    def instances(
        self, region: str, *, ids: Sequence[str] = (), tags: dict[str, str] | None = None, states: Sequence[str] = ()
    ) -> list[Answer]:
        """By id, or by tags and states. Ids that EC2 no longer knows are left out, as machines long gone are."""
        filters = [_filter(f"tag:{name}", value) for name, value in (tags or {}).items()]
        filters += [_filter("instance-state-name", *states)] if states else []
        filters += [_filter("instance-id", *ids)] if ids else []
        pages = self.ask_pages("ec2:DescribeInstances", region, Filters=filters)
        return [one for page in pages for group in page["Reservations"] for one in group["Instances"]]

    def terminate(self, region: str, ids: Iterable[str]) -> None:
        """All of them; those that are gone are no error. One that EC2 does not know makes it refuse the others too."""
        wanted = sorted(set(ids))
        if not wanted:
            return
        try:
            self.ask("ec2:TerminateInstances", region, InstanceIds=wanted)
        except AwsRefused as error:
            if error.kind != "gone":
                raise
            for one in wanted if len(wanted) > 1 else ():
                with _allowing("gone"):
                    self.ask("ec2:TerminateInstances", region, InstanceIds=[one])

    def subnets(self, region: str, vpc: str | None) -> list[Answer]:
        """Of `vpc`, or of the default one."""
        filters = [_filter("vpc-id", vpc) if vpc else _filter("default-for-az", "true")]
        pages = self.ask_pages("ec2:DescribeSubnets", region, Filters=filters)
        return [one for page in pages for one in page["Subnets"]]

    def zones_offering(self, region: str, name: str) -> set[str]:
        """Zones of the region that have instance type `name`."""
        pages = self.ask_pages("ec2:DescribeInstanceTypeOfferings", region, LocationType="availability-zone",
                               Filters=[_filter("instance-type", name)])  # fmt: skip
        return {str(one["Location"]) for page in pages for one in page["InstanceTypeOfferings"]}

    def image(self, region: str, parameter: str) -> Answer:
        """The machine image that the public parameter names now, as DescribeImages gives it."""
        found = self.ask("ssm:GetParameter", region, Name=parameter)["Parameter"]["Value"]
        images = self.ask("ec2:DescribeImages", region, ImageIds=[str(found)])["Images"]
        if not images or images[0].get("State", "available") != "available":
            raise refused("InvalidAMIID.NotFound", action="ec2:DescribeImages", region=region)
        return dict(images[0])

    def role_id(self, region: str, instance_profile: str) -> str:
        """The id of the role in `instance_profile`: the first half of what its machines call themselves."""
        profile = self.ask("iam:GetInstanceProfile", region, InstanceProfileName=instance_profile)["InstanceProfile"]
        return str(profile["Roles"][0]["RoleId"])

    def quota(self, region: str, code: str) -> tuple[str, float]:
        """Name and value of a quota of EC2."""
        words = {"ServiceCode": "ec2", "QuotaCode": code}
        found = self.ask("servicequotas:GetServiceQuota", region, **words)["Quota"]
        return str(found["QuotaName"]), float(found["Value"])

    def spot_prices_of(self, region: str, names: Sequence[str], at: datetime) -> list[Answer]:
        """As `spot_prices`, for some types."""
        pages = self.ask_pages("ec2:DescribeSpotPriceHistory", region, StartTime=at, InstanceTypes=list(names),
                               ProductDescriptions=["Linux/UNIX"])  # fmt: skip
        return [row for page in pages for row in page["SpotPriceHistory"]]

    def leftovers(self, region: str, deployment: str) -> dict[str, list[Answer]]:
        """Groups and templates with our tag, by kind: they cost nothing, and fill up quotas."""
        filters = [_filter("tag:srift:deployment", deployment)]
        templates = self.ask_pages("ec2:DescribeLaunchTemplates", region, Filters=filters)
        groups = self.ask_pages("ec2:DescribeSecurityGroups", region, Filters=filters)
        return {
            "template": [one for page in templates for one in page["LaunchTemplates"]],
            "placement": self.ask("ec2:DescribePlacementGroups", region, Filters=filters)["PlacementGroups"],
            "security": [one for page in groups for one in page["SecurityGroups"]],
        }

    def delete_launch_template(self, region: str, name: str) -> None:
        """One that is gone is no error."""
        with _allowing("gone"):
            self.ask("ec2:DeleteLaunchTemplate", region, LaunchTemplateName=name)

    def delete_placement_group(self, region: str, name: str) -> None:
        """One that is gone is no error, nor is one in use: its machines take minutes to leave it."""
        with _allowing("gone", "busy"):
            self.ask("ec2:DeletePlacementGroup", region, GroupName=name)

    def delete_security_group(self, region: str, group: str) -> None:
        """As `delete_placement_group`."""
        with _allowing("gone", "busy"):
            self.ask("ec2:DeleteSecurityGroup", region, GroupId=group)


@contextmanager
def _allowing(*kinds: str) -> Iterator[None]:
    """Pass over refusals of some kinds."""
    try:
        yield
    except AwsRefused as error:
        if error.kind not in kinds:
            raise


def _filter(name: str, *values: str) -> Answer:
    return {"Name": name, "Values": list(values)}


def _to(rule: Answer, group: str) -> Answer:
    """A rule about the cluster itself names the group, which has an id only now."""
    return rule if "IpRanges" in rule else rule | {"UserIdGroupPairs": [{"GroupId": group}]}
