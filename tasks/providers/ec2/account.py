"""Questions of the doctor about an AWS account. Nothing is launched, and nothing is left behind.

Refusals raise AwsRefused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tasks.providers.base import ProviderError
from tasks.providers.ec2.api import Ec2Api, header_date
from tasks.providers.ec2.errors import DENIED, AwsRefused

# Roles of EC2 itself; an account has them once it has used spot machines and fleets.
SERVICE_ROLES = {
    "AWSServiceRoleForEC2Spot": "spot.amazonaws.com",
    "AWSServiceRoleForEC2Fleet": "ec2fleet.amazonaws.com",
}
_EVERYBODY = ("/AllUsers", "/AuthenticatedUsers")  # ends of the groups that an ACL may name


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The caller, and seconds that our clock is ahead of AWS's; None if AWS gave no time."""

    account: str
    arn: str
    ahead_s: float | None


class Ec2Account:
    """The account behind `api`. `now` is our clock."""

    def __init__(
        self, api: Ec2Api, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.api, self._now = api, now

    def identity(self, region: str) -> Identity:
        """Needs no permission: a refusal means wrong credentials."""
        answer = self.api.ask("sts:GetCallerIdentity", region)
        date = header_date(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
        ahead_s = None if date != date else self._now().timestamp() - date
        return Identity(account=str(answer["Account"]), arn=str(answer["Arn"]), ahead_s=ahead_s)

    def regions(self, region: str) -> dict[str, bool]:
        """Every region of AWS, and whether it is enabled in this account."""
        answer = self.api.ask("ec2:DescribeRegions", region, AllRegions=True)
        return {
            str(found["RegionName"]): found.get("OptInStatus") != "not-opted-in"
            for found in answer["Regions"]
        }

    def bucket_is_public(self, region: str, bucket: str) -> bool:
        """Whether its policy or ACL lets strangers read or write, and nothing blocks that."""
        words, missing = {"Bucket": bucket}, "NoSuchPublicAccessBlockConfiguration"
        action = "s3:GetBucketPublicAccessBlock"
        blocked = self.api.ask_unless((missing,), action, region, **words)
        blocked = blocked.get("PublicAccessBlockConfiguration", {})
        action = "s3:GetBucketPolicyStatus"
        status = self.api.ask_unless(("NoSuchBucketPolicy",), action, region, **words)
        public = status.get("PolicyStatus", {}).get("IsPublic")
        if public and not blocked.get("RestrictPublicBuckets"):
            return True
        grants = self.api.ask("s3:GetBucketAcl", region, **words).get("Grants", [])
        granted = any(
            str(grant.get("Grantee", {}).get("URI", "")).endswith(_EVERYBODY) for grant in grants
        )
        return granted and not blocked.get("IgnorePublicAcls")

    def try_bucket(self, region: str, bucket: str, key: str) -> str:
        """Write, read, list and delete an object; a problem that is not a refusal, or ""."""
        words, content = {"Bucket": bucket, "Key": key}, b"srift doctor deletes this\n"
        self.api.ask("s3:PutObject", region, Body=content, **words)
        try:
            answer = self.api.ask("s3:GetObject", region, **words)
            if answer["Body"].read() != content:
                return f"{key} came back with other content"
            listed = self.api.ask("s3:ListBucket", region, Bucket=bucket, Prefix=key, MaxKeys=1)
            return "" if listed.get("Contents") else f"{key} is missing in the bucket's list"
        finally:
            try:
                self.api.ask("s3:DeleteObject", region, **words)
            except ProviderError as error:
                raise ProviderError(
                    f"{error}; the object {key} was left in bucket {bucket}: delete it"
                ) from None

    def has_role(self, region: str, name: str) -> bool:
        return bool(self.api.ask_unless(("NoSuchEntity",), "iam:GetRole", region, RoleName=name))

    def may(self, action: str, region: str, **words: Any) -> tuple[bool | None, str]:
        """Whether AWS would do `action`, by a dry run, and its refusal; None if unknown."""
        try:
            self.api.ask(action, region, DryRun=True, **words)
        except AwsRefused as error:
            if error.code == "DryRunOperation":
                return True, ""
            return (False if error.code in DENIED else None), str(error)
        return None, f"{action} in {region} was not a dry run"
