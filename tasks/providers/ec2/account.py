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
from tasks.providers.ec2.api import Ec2Api
from tasks.providers.ec2.catalogue import least_gib
from tasks.providers.ec2.errors import DENIED, AwsRefused
from tasks.providers.ec2.survey import Network, network_of

# Roles by which EC2 itself buys spot machines and fleets; an account has them once it has ever used them.
SERVICE_ROLES = {
    "AWSServiceRoleForEC2Spot": "spot.amazonaws.com",
    "AWSServiceRoleForEC2Fleet": "ec2fleet.amazonaws.com",
}
_EVERYBODY = ("/AllUsers", "/AuthenticatedUsers")  # ends of the groups that an ACL may name


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks, as AWS sees it, and how many seconds our clock is ahead of AWS's (None where it gave no time)."""

    account: str
    arn: str
    ahead_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A machine image. `least_gib` is the least size of a machine's volume."""

    image_id: str
    name: str
    state: str
    architecture: str
    root_device: str
    least_gib: int


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
        return self._api.bucket_region(region, bucket)

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

    def expiry_days(self, region: str, bucket: str, prefix: str) -> float | None:
        """After how many days objects below `prefix` are deleted by the bucket's own rules; None where they stay."""
        found = self._unless("NoSuchLifecycleConfiguration", "s3:GetLifecycleConfiguration", region, Bucket=bucket).get(
            "Rules", []
        )
        days = [
            float(rule["Expiration"]["Days"])
            for rule in found
            if rule.get("Status") == "Enabled" and "Days" in rule.get("Expiration", {}) and _covers(rule, prefix)
        ]
        return min(days, default=None)

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
        return Image(
            image_id=value,
            name=str(one.get("Name", "")),
            state=str(one.get("State", "")),
            architecture=str(one.get("Architecture", "")),
            root_device=str(one.get("RootDeviceName") or "/dev/sda1"),
            least_gib=least_gib(one),
        )

    def network(self, region: str, *, vpc: str | None, public: bool, bucket: str | None) -> Network:
        """See `network_of`."""
        return network_of(self._api, region, vpc=vpc, public=public, bucket=bucket)

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
            return (False if error.code in DENIED else None), str(error)
        return None, f"{action} in {region} was no dry run, though one was asked for"

    def _unless(self, code: str, action: str, region: str, **words: Any) -> dict[str, Any]:
        """The answer; empty where AWS refuses with `code`, which says that there is none."""
        try:
            return self._api.ask(action, region, **words)
        except AwsRefused as error:
            if error.code != code:
                raise
            return {}


def _covers(rule: dict[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule holds for all objects below `prefix`: one that asks for tags or sizes does not."""
    chosen = rule.get("Filter") or {"Prefix": rule.get("Prefix", "")}
    return set(chosen) == {"Prefix"} and prefix.startswith(str(chosen["Prefix"]))
