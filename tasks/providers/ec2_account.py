"""What an AWS account allows and has, asked question by question. Asks for no machine and leaves nothing behind.

Each method asks what its name says and returns the answer as plain values; a refusal of AWS's comes out as AwsRefused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from tasks.providers.base import ProviderError
from tasks.providers.ec2_api import Ec2Api
from tasks.providers.ec2_errors import AwsRefused

# Roles by which EC2 itself buys spot machines and fleets; an account has them once it has ever used them.
SERVICE_ROLES = {
    "AWSServiceRoleForEC2Spot": "spot.amazonaws.com",
    "AWSServiceRoleForEC2Fleet": "ec2fleet.amazonaws.com",
}
_DENIED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
_EVERYBODY = ("/AllUsers", "/AuthenticatedUsers")  # ends of the groups that an ACL may name


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks, as AWS sees it, and how many seconds our clock is ahead of AWS's (None where it gave no time)."""

    account: str
    arn: str
    ahead_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A machine image. `root_gib` is the least size of its volume."""

    image_id: str
    name: str
    state: str
    architecture: str
    root_device: str
    root_gib: int


class Ec2Account:
    """The account behind `api`. `now` is our own clock."""

    def __init__(self, api: Ec2Api, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._api, self._now = api, now

    def identity(self, region: str) -> Identity:
        """Needs no permission: where this is refused, the credentials are wrong."""
        answer = self._api.ask("sts:GetCallerIdentity", region)
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        ahead_s = None
        with suppress(TypeError, ValueError):
            ahead_s = (self._now() - parsedate_to_datetime(date)).total_seconds()
        return Identity(account=str(answer["Account"]), arn=str(answer["Arn"]), ahead_s=ahead_s)

    def regions(self, region: str) -> dict[str, bool]:
        """Every region of AWS, and whether this account has it enabled."""
        answer = self._api.ask("ec2:DescribeRegions", region, AllRegions=True)
        return {str(one["RegionName"]): one.get("OptInStatus") != "not-opted-in" for one in answer["Regions"]}

    def bucket_region(self, region: str, bucket: str) -> str:
        """Where the bucket is. Refused with NoSuchBucket where there is none of that name."""
        answer = self._api.ask("s3:GetBucketLocation", region, Bucket=bucket)
        stated = answer.get("LocationConstraint")
        return {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(stated, str(stated))

    def bucket_is_public(self, region: str, bucket: str) -> bool:
        """Whether strangers may read or write: by its policy or its list of grants, where those are not blocked."""
        blocked = self._unless(
            "NoSuchPublicAccessBlockConfiguration", "s3:GetBucketPublicAccessBlock", region, Bucket=bucket
        ).get("PublicAccessBlockConfiguration", {})
        if blocked.get("RestrictPublicBuckets") and blocked.get("IgnorePublicAcls"):
            return False
        status = self._unless("NoSuchBucketPolicy", "s3:GetBucketPolicyStatus", region, Bucket=bucket)
        if status.get("PolicyStatus", {}).get("IsPublic") and not blocked.get("RestrictPublicBuckets"):
            return True
        grants = self._api.ask("s3:GetBucketAcl", region, Bucket=bucket).get("Grants", [])
        granted = any(str(one.get("Grantee", {}).get("URI", "")).endswith(_EVERYBODY) for one in grants)
        return granted and not blocked.get("IgnorePublicAcls")

    def try_bucket(self, region: str, bucket: str, key: str) -> str:
        """Write, list, read and delete one small object. Empty, or what went wrong beside a refusal."""
        words, content = {"Bucket": bucket, "Key": key}, b"srift doctor was here, and deletes this\n"
        self._api.ask("s3:PutObject", region, Body=content, **words)
        try:
            answer = self._api.ask("s3:GetObject", region, **words)
            if answer["Body"].read() != content:
                return f"what was written to {key} comes back as something else"
            listed = self._api.ask("s3:ListBucket", region, Bucket=bucket, Prefix=key, MaxKeys=1)
            return "" if listed.get("Contents") else f"what was written to {key} is not in the bucket's list"
        finally:
            try:
                self._api.ask("s3:DeleteObject", region, **words)
            except ProviderError as error:
                raise ProviderError(f"{error}; the object {key} was left in bucket {bucket}: delete it") from None

    def profile_roles(self, region: str, profile: str) -> list[str]:
        """Names of the roles in an instance profile. Refused with NoSuchEntity where there is no such profile."""
        answer = self._api.ask("iam:GetInstanceProfile", region, InstanceProfileName=profile)
        return [str(role["RoleName"]) for role in answer["InstanceProfile"]["Roles"]]

    def has_role(self, region: str, name: str) -> bool:
        """Whether the account has the role `name`."""
        return bool(self._unless("NoSuchEntity", "iam:GetRole", region, RoleName=name))

    def image(self, region: str, parameter: str) -> Image | None:
        """The image whose id stands in the SSM parameter now; None where it is gone."""
        value = str(self._api.ask("ssm:GetParameter", region, Name=parameter)["Parameter"]["Value"])
        found = self._unless("InvalidAMIID.NotFound", "ec2:DescribeImages", region, ImageIds=[value]).get("Images")
        if not found:
            return None
        (one, *_) = found
        sizes = [disk.get("Ebs", {}).get("VolumeSize", 0) for disk in one.get("BlockDeviceMappings", [])]
        return Image(
            image_id=value,
            name=str(one.get("Name", "")),
            state=str(one.get("State", "")),
            architecture=str(one.get("Architecture", "")),
            root_device=str(one.get("RootDeviceName") or "/dev/sda1"),
            root_gib=int(sizes[0] if sizes else 0),
        )

    def vpc(self, region: str, vpc: str | None) -> str | None:
        """The id of `vpc`, or of the default one where it is None; None where there is none."""
        words: dict[str, Any] = {"VpcIds": [vpc]} if vpc else {"Filters": [{"Name": "is-default", "Values": ["true"]}]}
        found = self._unless("InvalidVpcID.NotFound", "ec2:DescribeVpcs", region, **words).get("Vpcs")
        return str(found[0]["VpcId"]) if found else None

    def subnets(self, region: str, vpc: str) -> dict[str, list[str]]:
        """Subnets of a VPC that give their machines a public address, by zone: without one, S3 is not reached."""
        pages = self._api.ask_pages("ec2:DescribeSubnets", region, Filters=[{"Name": "vpc-id", "Values": [vpc]}])
        found: dict[str, list[str]] = {}
        for one in (subnet for page in pages for subnet in page["Subnets"]):
            found.setdefault(str(one["AvailabilityZone"]), [])
            if one.get("MapPublicIpOnLaunch") and one.get("State", "available") == "available":
                found[str(one["AvailabilityZone"])].append(str(one["SubnetId"]))
        return found

    def quota(self, region: str, code: str) -> tuple[str, float]:
        """Name and value of a quota of EC2."""
        answer = self._api.ask("servicequotas:GetServiceQuota", region, ServiceCode="ec2", QuotaCode=code)
        return str(answer["Quota"]["QuotaName"]), float(answer["Quota"]["Value"])

    def may(self, action: str, region: str, **words: Any) -> tuple[bool | None, str]:
        """Whether AWS would do `action`, and its refusal; None where it does not come to that. Nothing is done."""
        try:
            self._api.ask(action, region, DryRun=True, **words)
        except AwsRefused as error:
            if error.code == "DryRunOperation":
                return True, ""
            return (False if error.code in _DENIED else None), str(error)
        return None, f"{action} in {region} was no dry run, though one was asked for"

    def _unless(self, code: str, action: str, region: str, **words: Any) -> dict[str, Any]:
        """The answer; empty where AWS refuses with `code`, which says that there is none."""
        try:
            return self._api.ask(action, region, **words)
        except AwsRefused as error:
            if error.code != code:
                raise
            return {}
