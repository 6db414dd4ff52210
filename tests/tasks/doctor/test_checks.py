"""The doctor finds what is wrong with an account before any machine is requested."""

import json

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.doctor import checks as doctor
from tasks.doctor.aws import examine_ec2
from tasks.doctor.checks import examine, refuse_unless_well
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.api import boto_clients
from tasks.workspace.settings import load_settings
from tests.ec2_home import project
from tests.fake_ec2 import FakeAws
from tests.fake_ec2_account import IMAGE

LAUNCHES, PERMISSIONS, QUOTAS = (
    f"{what} in us-east-1" for what in ("launches", "permissions", "quotas")
)
DRY = [
    f"ec2:Create{name}" for name in ["Fleet", "LaunchTemplate", "SecurityGroup", "PlacementGroup"]
]
ROLES = {"role AWSServiceRoleForEC2Spot", "role AWSServiceRoleForEC2Fleet"}


@pytest.fixture
def aws(ec2_project, monkeypatch):
    made = FakeAws()
    monkeypatch.setattr(ec2_api, "boto_clients", lambda: made.clients)
    monkeypatch.setattr(ec2_api, "AwsClock", lambda: made.clock)
    yield made
    assert all(words.get("DryRun") for action, words in made.calls if action in DRY)
    assert made.bought() == 0 and made.s3.objects == {}


@pytest.fixture
def examined(aws, tmp_path):
    """What is wrong, by check, with these lines below [ec2]."""

    def wrong(*lines):
        found = examine_ec2(load_settings(project(tmp_path, *lines)))
        return {finding.check: finding.says for finding in found if finding.status == "wrong"}

    return wrong


def test_an_account_that_is_set_up_is_well(aws):
    settings = load_settings()
    found = examine(settings, "ec2")
    assert {finding.check for finding in found if finding.status == "ok"} >= ROLES | {
        *("settings", "identity", "clock", "regions", "bucket"),
        *("live prices", "bucket is private", "bucket can be used", LAUNCHES, PERMISSIONS, QUOTAS),
    }
    refuse_unless_well(settings, "ec2", 5.0)


REFUSALS = """
sts:GetCallerIdentity, ExpiredToken, identity, sign in
ec2:DescribeRegions, UnauthorizedOperation, regions, ec2:DescribeRegions
s3:GetBucketLocation, NoSuchBucket, bucket, [ec2] bucket
s3:GetBucketLocation, AccessDenied, bucket, s3:GetBucketLocation
s3:PutObject, AccessDenied, bucket can be used, s3:PutObject
s3:GetObject, AccessDenied, bucket can be used, s3:GetObject
s3:ListBucket, AccessDenied, bucket can be used, s3:ListBucket
iam:GetInstanceProfile, NoSuchEntity, launches in us-east-1, instance_profile
ssm:GetParameter, ParameterNotFound, launches in us-east-1, ami_parameter
ec2:DescribeSubnets, UnauthorizedOperation, launches in us-east-1, ec2:DescribeSubnets
ec2:CreateFleet, UnauthorizedOperation, permissions in us-east-1, ec2:CreateFleet
ec2:CreateLaunchTemplate, UnauthorizedOperation, permissions in us-east-1, ec2:CreateLaunchTemplate
ec2:CreateSecurityGroup, UnauthorizedOperation, permissions in us-east-1, ec2:CreateSecurityGroup
ec2:CreatePlacementGroup, UnauthorizedOperation, permissions in us-east-1, ec2:CreatePlacementGroup
"""


@pytest.mark.parametrize("row", REFUSALS.strip().splitlines())
def test_a_refusal_is_one_finding_that_stops_a_refresh(aws, examined, row):
    action, code, check, word = row.split(", ")
    aws.fails(action, code, times=99)
    found = examined()
    assert list(found) == [check] and word in found[check]
    with pytest.raises(ProviderError) as refused:
        refuse_unless_well(load_settings(), "ec2", 5.0)
    assert "very-secret-key" not in str(refused.value)


@pytest.mark.parametrize(
    "action, check",
    [
        ("pricing:GetProducts", "live prices"),
        ("ec2:DescribeSpotPriceHistory", "live prices"),
        ("servicequotas:GetServiceQuota", QUOTAS),
    ],
)
def test_prices_and_quotas_that_may_not_be_read_are_a_note(aws, action, check):
    aws.fails(action, "AccessDenied", times=9)
    [found] = [check for check in examine_ec2(load_settings()) if check.status != "ok"]
    assert (found.status, found.check) == ("note", check) and action in found.says


def test_without_credentials_nothing_is_asked(aws, examined, monkeypatch):
    monkeypatch.setattr(ec2_api, "boto_clients", boto_clients)
    assert "AWS_PROFILE" in examined()["identity"] and aws.calls == []


def images(**changes):
    return {"Images": [IMAGE | changes]}


EVERYBODY = {"URI": "http://acs.amazonaws.com/groups/global/AllUsers"}
OFF = {"RegionName": "us-east-1", "OptInStatus": "not-opted-in"}


@pytest.mark.parametrize(
    "method, answer, check",
    [
        ("describe_regions", {"Regions": []}, "regions"),
        ("describe_regions", {"Regions": [OFF]}, "regions"),
        ("get_bucket_location", {"LocationConstraint": "eu-west-1"}, "bucket"),
        ("get_bucket_policy_status", {"PolicyStatus": {"IsPublic": True}}, "bucket is private"),
        ("get_bucket_acl", {"Grants": [{"Grantee": EVERYBODY}]}, "bucket is private"),
        ("list_objects_v2", {}, "bucket can be used"),
        ("get_instance_profile", {"InstanceProfile": {"Roles": []}}, LAUNCHES),
        ("describe_images", images(Architecture="arm64"), LAUNCHES),
        ("describe_images", images(State="pending"), LAUNCHES),
        ("describe_images", images(BlockDeviceMappings=[{"Ebs": {"VolumeSize": 200}}]), LAUNCHES),
        ("get_service_quota", {"Quota": {"QuotaName": "All G", "Value": 0.0}}, QUOTAS),
    ],
)
def test_an_unusable_region_bucket_profile_image_or_quota_is_wrong(
    aws, examined, method, answer, check
):
    aws.answers[method] = answer
    assert list(examined()) == [check]
    if check == "bucket is private":
        blocked = {"IgnorePublicAcls": True, "RestrictPublicBuckets": True}
        aws.answers["get_public_access_block"] = {"PublicAccessBlockConfiguration": blocked}
        assert examined() == {}


@pytest.mark.parametrize("code", ["NoSuchEntity", "AccessDenied"])
def test_a_missing_service_role_comes_with_its_command(aws, examined, code):
    aws.fails("iam:GetRole", code, times=9)
    found = examined()
    assert found.keys() == ROLES
    assert "spot.amazonaws.com" in found["role AWSServiceRoleForEC2Spot"]
    assert examined('markets = ["on-demand"]', "[campaign]", 'market = "on-demand"') == {}


@pytest.mark.parametrize("ahead_s, found", [(3, []), (250, ["clock"]), (-250, ["clock"])])
def test_a_wrong_clock_is_found(aws, examined, ahead_s, found):
    aws.s3.skew_s = -ahead_s
    assert list(examined()) == found


def test_a_refresh_that_buys_nothing_needs_no_account(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail())
    settings = load_settings(project(tmp_path))
    refuse_unless_well(settings, "ec2", 0.0)
    refuse_unless_well(settings, "local", 1.0)


def test_the_command_exits_1_if_something_is_wrong_and_prints_policies(aws):
    words = ["doctor", "--provider", "ec2", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 0
    aws.fails("s3:GetBucketLocation", "NoSuchBucket", times=9)
    ill = CliRunner().invoke(app, words)
    body = json.loads(ill.stdout)
    assert ill.exit_code == 1 and not body["well"]
    assert {"check", "status", "says"} == set(body["findings"][0])
    assert "grant select" in CliRunner().invoke(app, ["doctor", "--print-grants"]).stdout
    policies = json.loads(CliRunner().invoke(app, ["doctor", "--print-policies"]).stdout)
    assert "arn:aws:s3:::mailbox/srift/code/*" in json.dumps(policies["node-policy"])
    assert "arn:aws:iam::999988887777:role/srift-node" in json.dumps(policies["controller-policy"])
