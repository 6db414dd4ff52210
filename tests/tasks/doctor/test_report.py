"""The doctor finds what is wrong with an account before any machine is requested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.doctor import report as doctor
from tasks.doctor.report import Finding, examine, refuse_unless_well
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.workspace.settings import Settings, load_settings
from tests.ec2_home import project
from tests.fake_ec2 import FakeAws, Fault

REGION = "us-east-1"
DRY = ("CreateFleet", "CreateLaunchTemplate", "CreateSecurityGroup", "CreatePlacementGroup")
IMAGE = f"launches in {REGION}"


@pytest.fixture
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAws]:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    made = FakeAws()
    monkeypatch.setattr(ec2_api, "boto_clients", lambda: made.clients)
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: True)
    monkeypatch.setattr(ec2_api, "AwsClock", lambda: made.clock)
    yield made
    asked = [words for action, words in made.calls if action[4:] in DRY]
    assert all(words.get("DryRun") for words in asked)
    assert made.bought() == 0 and made.s3.objects == {}


def settings(tmp_path: Path, *lines: str) -> Settings:
    return load_settings(project(tmp_path, *lines))


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.says for one in findings if one.status == "wrong"}


def examined(tmp_path: Path, *lines: str) -> dict[str, str]:
    return wrong(examine(settings(tmp_path, *lines), "ec2"))


def test_an_account_that_is_set_up_is_well(aws: FakeAws, tmp_path: Path) -> None:
    found = examine(settings(tmp_path), "ec2")
    assert wrong(found) == {}
    assert {one.check for one in found} >= {
        *("settings", "identity", "clock", "regions", "bucket", IMAGE),
        *("bucket is private", "bucket can be used", f"quotas in {REGION}"),
        *("role AWSServiceRoleForEC2Spot", f"permissions in {REGION}"),
    }
    refuse_unless_well(settings(tmp_path), "ec2", 5.0)


REFUSALS = [  # action, AWS's code, check, a word of the fix
    ("sts:GetCallerIdentity", "ExpiredToken", "identity", "sign in"),
    ("sts:GetCallerIdentity", "InvalidClientTokenId", "identity", "AWS_ACCESS_KEY_ID"),
    ("ec2:DescribeRegions", "UnauthorizedOperation", "regions", "ec2:DescribeRegions"),
    ("s3:GetBucketLocation", "NoSuchBucket", "bucket", "[ec2] bucket"),
    ("s3:GetBucketLocation", "AccessDenied", "bucket", "s3:GetBucketLocation"),
    ("s3:PutObject", "AccessDenied", "bucket can be used", "s3:PutObject"),
    ("s3:GetObject", "AccessDenied", "bucket can be used", "s3:GetObject"),
    ("s3:ListBucket", "AccessDenied", "bucket can be used", "s3:ListBucket"),
    ("iam:GetInstanceProfile", "NoSuchEntity", IMAGE, "instance_profile"),
    ("ssm:GetParameter", "ParameterNotFound", IMAGE, "ami_parameter"),
    ("ec2:DescribeImages", "InvalidAMIID.NotFound", IMAGE, "ami_parameter"),
    ("ec2:DescribeSubnets", "UnauthorizedOperation", IMAGE, "ec2:DescribeSubnets"),
    *((f"ec2:{name}", "UnauthorizedOperation", f"permissions in {REGION}", "ec2:") for name in DRY),
]


@pytest.mark.parametrize(("action", "code", "check", "word"), REFUSALS)
def test_a_refusal_is_one_finding_that_stops_a_refresh(
    aws: FakeAws, tmp_path: Path, action: str, code: str, check: str, word: str
) -> None:
    aws.faults = [Fault(action=action, code=code, times=99)]
    found = examined(tmp_path)
    assert list(found) == [check] and word in found[check]
    with pytest.raises(ProviderError) as refused:
        refuse_unless_well(settings(tmp_path), "ec2", 5.0)
    assert "very-secret-key" not in str(refused.value)


def test_without_credentials_nothing_is_asked(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    assert "AWS_PROFILE" in examined(tmp_path)["identity"] and aws.calls == []


@pytest.mark.parametrize("region", ["us-esat-1", "ap-east-1"])
def test_a_wrong_region_is_named(aws: FakeAws, tmp_path: Path, region: str) -> None:
    off = {"RegionName": "ap-east-1", "OptInStatus": "not-opted-in"}
    here = {"RegionName": REGION, "OptInStatus": "opt-in-not-required"}
    aws.answers["describe_regions"] = {"Regions": [here, off]}
    assert region in examined(tmp_path, f'regions = ["{REGION}", "{region}"]')["regions"]


def image(**changes: Any) -> dict[str, Any]:
    sound = {"ImageId": "ami-1", "Name": "x", "State": "available", "Architecture": "x86_64"}
    return {"Images": [sound | changes]}


@pytest.mark.parametrize(
    ("method", "answer", "check"),
    [
        ("get_bucket_location", {"LocationConstraint": "eu-west-1"}, "bucket"),
        ("get_bucket_policy_status", {"PolicyStatus": {"IsPublic": True}}, "bucket is private"),
        ("list_objects_v2", {}, "bucket can be used"),
        ("get_instance_profile", {"InstanceProfile": {"Roles": []}}, IMAGE),
        ("describe_images", image(Architecture="arm64"), IMAGE),
        ("describe_images", image(State="pending"), IMAGE),
        ("describe_images", image(BlockDeviceMappings=[{"Ebs": {"VolumeSize": 200}}]), IMAGE),
    ],
)
def test_an_unusable_bucket_profile_or_image_is_wrong(
    aws: FakeAws, tmp_path: Path, method: str, answer: dict[str, Any], check: str
) -> None:
    aws.answers[method] = answer
    assert list(examined(tmp_path)) == [check]


def test_a_public_bucket_is_wrong_unless_access_is_blocked(aws: FakeAws, tmp_path: Path) -> None:
    everybody = {"URI": "http://acs.amazonaws.com/groups/global/AllUsers"}
    aws.answers["get_bucket_acl"] = {"Grants": [{"Grantee": everybody}]}
    assert list(examined(tmp_path)) == ["bucket is private"]
    blocked = {"IgnorePublicAcls": True, "RestrictPublicBuckets": True}
    aws.answers["get_public_access_block"] = {"PublicAccessBlockConfiguration": blocked}
    assert examined(tmp_path) == {}


@pytest.mark.parametrize("code", ["NoSuchEntity", "AccessDenied"])
def test_a_missing_service_role_comes_with_its_command(
    aws: FakeAws, tmp_path: Path, code: str
) -> None:
    aws.faults = [Fault(action="iam:GetRole", code=code, times=9)]
    found = examined(tmp_path)
    assert found.keys() == {"role AWSServiceRoleForEC2Spot", "role AWSServiceRoleForEC2Fleet"}
    assert "spot.amazonaws.com" in found["role AWSServiceRoleForEC2Spot"]
    on_demand = ('markets = ["on-demand"]', "[campaign]", 'market = "on-demand"')
    assert examined(tmp_path, *on_demand) == {}


def test_private_subnets_need_their_tag(aws: FakeAws, tmp_path: Path) -> None:
    private = 'subnets = "private"'
    assert list(examined(tmp_path, private)) == [IMAGE]
    aws.account.tagged = True
    assert examined(tmp_path, private) == {}
    templates = [words for action, words in aws.calls if action == "ec2:CreateLaunchTemplate"]
    (interface,) = templates[-1]["LaunchTemplateData"]["NetworkInterfaces"]
    assert not interface["AssociatePublicIpAddress"]


def test_a_quota_below_the_smallest_type_is_wrong(aws: FakeAws, tmp_path: Path) -> None:
    quota = {"QuotaName": "All G and VT Spot Instance Requests", "Value": 0.0}
    aws.answers["get_service_quota"] = {"Quota": quota}
    assert list(examined(tmp_path)) == [f"quotas in {REGION}"]
    refused = Fault(action="servicequotas:GetServiceQuota", code="AccessDeniedException", times=9)
    aws.faults = [refused]
    assert examined(tmp_path) == {}


@pytest.mark.parametrize(("ahead_s", "well"), [(0, True), (3, True), (250, False), (-250, False)])
def test_a_wrong_clock_is_found(aws: FakeAws, tmp_path: Path, ahead_s: int, well: bool) -> None:
    aws.s3.skew_s = -ahead_s
    assert ("clock" not in examined(tmp_path)) == well


def test_a_refresh_that_buys_nothing_needs_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail())
    refuse_unless_well(settings(tmp_path), "ec2", 0.0)
    refuse_unless_well(settings(tmp_path), "local", 1.0)


def test_the_command_exits_1_if_something_is_wrong_and_prints_policies(
    aws: FakeAws, tmp_path: Path
) -> None:
    settings(tmp_path)
    words = ["doctor", "--provider", "ec2", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 0
    aws.faults = [Fault(action="s3:GetBucketLocation", code="NoSuchBucket", times=9)]
    ill = CliRunner().invoke(app, words)
    body = json.loads(ill.stdout)
    assert ill.exit_code == 1 and not body["well"]
    assert {"check", "status", "says"} == set(body["findings"][0])
    printed = CliRunner().invoke(app, ["doctor", "--print-policies"])
    policies = json.loads(printed.stdout)
    assert "arn:aws:s3:::mailbox/srift/code/*" in json.dumps(policies["node-policy"])
    assert "arn:aws:iam::999988887777:role/srift-node" in json.dumps(policies["controller-policy"])
