"""The doctor finds what is wrong with an account before any machine is requested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.doctor import report as doctor
from tasks.doctor.aws import _clock
from tasks.doctor.report import Finding, examine, refuse_unless_well
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.account import Ec2Account
from tasks.workspace.home import Wrong
from tasks.workspace.settings import Settings, load_settings
from tests.account import BUCKET, DRY, REGION, Account, account, project

LAUNCHES = ("run_instances", "create_fleet", "request_spot_instances")
IMAGE = f"launches in {REGION}"


@pytest.fixture
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Account]:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with account() as made:
        monkeypatch.setattr(ec2_api, "boto_clients", lambda: made.clients)
        monkeypatch.setattr(ec2_api, "has_credentials", lambda: True)
        yield made
        asked = [words for method, words in made.asked if method in LAUNCHES]
        assert all(words.get("DryRun") for words in asked)
        assert made.plain("ec2").describe_instances()["Reservations"] == []
        assert made.keys() == []


def settings(tmp_path: Path, *lines: str) -> Settings:
    return load_settings(project(tmp_path, *lines))


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.says for one in findings if one.status == "wrong"}


def examined(tmp_path: Path, *lines: str) -> dict[str, str]:
    return wrong(examine(settings(tmp_path, *lines), "ec2"))


def test_an_account_that_is_set_up_is_well(aws: Account, tmp_path: Path) -> None:
    found = examine(settings(tmp_path), "ec2")
    assert wrong(found) == {}
    assert {one.check for one in found} >= {
        *("settings", "identity", "clock", "regions", "bucket", IMAGE),
        *("bucket is private", "bucket can be used", f"quotas in {REGION}"),
        *("role AWSServiceRoleForEC2Spot", f"permissions in {REGION}"),
    }
    refuse_unless_well(settings(tmp_path), "ec2", 5.0)


REFUSALS = [  # method, AWS's code, check, a word of the fix
    ("get_caller_identity", "ExpiredToken", "identity", "sign in"),
    ("get_caller_identity", "InvalidClientTokenId", "identity", "AWS_ACCESS_KEY_ID"),
    ("describe_regions", "UnauthorizedOperation", "regions", "ec2:DescribeRegions"),
    ("get_bucket_location", "NoSuchBucket", "bucket", "[ec2] bucket"),
    ("get_bucket_location", "AccessDenied", "bucket", "s3:GetBucketLocation"),
    ("put_object", "AccessDenied", "bucket can be used", "s3:PutObject"),
    ("get_object", "AccessDenied", "bucket can be used", "s3:GetObject"),
    ("list_objects_v2", "AccessDenied", "bucket can be used", "s3:ListBucket"),
    ("get_instance_profile", "NoSuchEntity", IMAGE, "instance_profile"),
    ("get_parameter", "ParameterNotFound", IMAGE, "ami_parameter"),
    ("describe_images", "InvalidAMIID.NotFound", IMAGE, "ami_parameter"),
    ("describe_subnets", "UnauthorizedOperation", IMAGE, "ec2:DescribeSubnets"),
    *((method, "UnauthorizedOperation", f"permissions in {REGION}", "ec2:") for method in DRY),
]


@pytest.mark.parametrize(("method", "code", "check", "word"), REFUSALS)
def test_a_refusal_is_one_finding_that_stops_a_refresh(
    aws: Account, tmp_path: Path, method: str, code: str, check: str, word: str
) -> None:
    aws.refuse[method] = code
    found = examined(tmp_path)
    assert list(found) == [check] and word in found[check]
    with pytest.raises(ProviderError) as refused:
        refuse_unless_well(settings(tmp_path), "ec2", 5.0)
    assert "very-secret-key" not in str(refused.value)


def test_without_credentials_nothing_is_asked(
    aws: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    assert "AWS_PROFILE" in examined(tmp_path)["identity"] and aws.asked == []


@pytest.mark.parametrize("region", ["us-esat-1", "ap-east-1"])
def test_a_wrong_region_is_named(aws: Account, tmp_path: Path, region: str) -> None:
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
    aws: Account, tmp_path: Path, method: str, answer: dict[str, Any], check: str
) -> None:
    aws.answers[method] = answer
    assert list(examined(tmp_path)) == [check]
    del aws.answers[method]


def test_a_public_bucket_is_wrong_unless_access_is_blocked(aws: Account, tmp_path: Path) -> None:
    aws.plain("s3").put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    assert list(examined(tmp_path)) == ["bucket is private"]
    names = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    aws.plain("s3").put_public_access_block(
        Bucket=BUCKET, PublicAccessBlockConfiguration=dict.fromkeys(names, True)
    )
    assert examined(tmp_path) == {}


@pytest.mark.parametrize("code", ["NoSuchEntity", "AccessDenied"])
def test_a_missing_service_role_comes_with_its_command(
    aws: Account, tmp_path: Path, code: str
) -> None:
    aws.refuse["get_role"] = code
    found = examined(tmp_path)
    assert found.keys() == {"role AWSServiceRoleForEC2Spot", "role AWSServiceRoleForEC2Fleet"}
    assert "spot.amazonaws.com" in found["role AWSServiceRoleForEC2Spot"]
    on_demand = ('markets = ["on-demand"]', "[campaign]", 'market = "on-demand"')
    assert examined(tmp_path, *on_demand) == {}


def test_private_subnets_need_their_tag(aws: Account, tmp_path: Path) -> None:
    private = 'subnets = "private"'
    assert list(examined(tmp_path, private)) == [IMAGE]
    ec2 = aws.plain("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    ec2.create_tags(Resources=[subnet], Tags=[{"Key": "srift:deployment", "Value": "srift"}])
    assert examined(tmp_path, private) == {}
    templates = [words for method, words in aws.asked if method == "create_launch_template"]
    (interface,) = templates[-1]["LaunchTemplateData"]["NetworkInterfaces"]
    assert not interface["AssociatePublicIpAddress"]


def test_a_quota_below_the_smallest_type_is_wrong(aws: Account, tmp_path: Path) -> None:
    quota = {"QuotaName": "All G and VT Spot Instance Requests", "Value": 0.0}
    aws.answers["get_service_quota"] = {"Quota": quota}
    assert list(examined(tmp_path)) == [f"quotas in {REGION}"]
    aws.refuse["get_service_quota"] = "AccessDeniedException"
    assert examined(tmp_path) == {}


@pytest.mark.parametrize(("ahead_s", "well"), [(0, True), (3, True), (250, False), (-250, False)])
def test_a_wrong_clock_is_found(aws: Account, tmp_path: Path, ahead_s: int, well: bool) -> None:
    headers = {"date": "Fri, 20 Nov 2026 12:00:00 GMT"}
    answer = {"Account": "1", "Arn": "a", "ResponseMetadata": {"HTTPHeaders": headers}}
    aws.answers["get_caller_identity"] = answer
    now = datetime.fromtimestamp(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp() + ahead_s, UTC)
    asked = Ec2Account(ec2_api.Ec2Api(aws.clients), lambda: now)
    ec2 = settings(tmp_path).ec2
    with nullcontext() if well else pytest.raises(Wrong):
        _clock(asked, ec2)


def test_a_refresh_that_buys_nothing_needs_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail())
    refuse_unless_well(settings(tmp_path), "ec2", 0.0)
    refuse_unless_well(settings(tmp_path), "local", 1.0)


def test_the_command_exits_1_if_something_is_wrong_and_prints_policies(
    aws: Account, tmp_path: Path
) -> None:
    settings(tmp_path)
    words = ["doctor", "--provider", "ec2", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 0
    aws.refuse["get_bucket_location"] = "NoSuchBucket"
    ill = CliRunner().invoke(app, words)
    body = json.loads(ill.stdout)
    assert ill.exit_code == 1 and not body["well"]
    assert {"check", "status", "says"} == set(body["findings"][0])
    printed = CliRunner().invoke(app, ["doctor", "--print-policies"])
    policies = json.loads(printed.stdout)
    assert f"arn:aws:s3:::{BUCKET}/srift/code/*" in json.dumps(policies["node-policy"])
    assert "arn:aws:iam::123456789012:role/srift-node" in json.dumps(policies["controller-policy"])
