"""The doctor finds what is wrong with an account before any machine is asked for, says the fix, and leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.doctor import aws as doctor_ec2
from tasks.doctor import report as doctor
from tasks.doctor.report import Finding, examine, refuse_unless_well
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.account import Ec2Account
from tasks.workspace.settings import Settings, SettingsError, load_settings
from tests.account import BUCKET, DRY, REGION, Account, account, project

LAUNCHES = ("run_instances", "create_fleet", "request_spot_instances")


@pytest.fixture
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Account]:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with account() as made:
        monkeypatch.setattr(ec2_api, "boto_clients", lambda: made.clients)
        monkeypatch.setattr(ec2_api, "has_credentials", lambda: True)
        yield made
        launched = [
            words for method, words in made.asked if method in LAUNCHES and not words.get("DryRun")
        ]
        assert launched == [], "a machine was asked for"
        assert made.plain("ec2").describe_instances()["Reservations"] == []
        assert made.keys() == [], "something was left in the bucket"


def settings(tmp_path: Path, *lines: str) -> Settings:
    return load_settings(project(tmp_path, *lines))


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.says for one in findings if one.status == "wrong"}


def test_an_account_that_is_set_up_is_well(aws: Account, tmp_path: Path) -> None:
    found = examine(settings(tmp_path), "ec2")
    assert wrong(found) == {}
    checks = {one.check for one in found}
    assert checks >= {"settings", "credentials", "identity", "clock", "regions", "bucket", "bucket is private",
                      "bucket can be used", "instance profile", f"image in {REGION}", f"network in {REGION}",
                      f"quotas in {REGION}", "role AWSServiceRoleForEC2Spot"}  # fmt: skip
    [keys] = [one for one in found if one.check == "encryption keys"]
    assert keys.status == "note"
    assert all(
        right in keys.says for right in ("kms:GenerateDataKey", "kms:Decrypt", "kms:CreateGrant")
    )
    refuse_unless_well(settings(tmp_path), "ec2", 5.0)


REFUSALS = [  # method, AWS's code, the check, what is said
    ("get_caller_identity", "ExpiredToken", "identity", "sign in again"),
    (
        "get_caller_identity",
        "InvalidClientTokenId",
        "identity",
        "AWS_ACCESS_KEY_ID",
    ),
    ("describe_regions", "UnauthorizedOperation", "regions", "ec2:DescribeRegions"),
    ("get_bucket_location", "NoSuchBucket", "bucket", "check [ec2] bucket"),
    ("get_bucket_location", "AccessDenied", "bucket", "s3:GetBucketLocation"),
    ("put_object", "AccessDenied", "bucket can be used", "s3:PutObject"),
    ("get_object", "AccessDenied", "bucket can be used", "s3:GetObject"),
    ("list_objects_v2", "AccessDenied", "bucket can be used", "s3:ListBucket"),
    ("get_instance_profile", "NoSuchEntity", "instance profile", "check [ec2] instance_profile"),
    ("get_parameter", "ParameterNotFound", f"image in {REGION}", "check [ec2] ami_parameter"),
    ("describe_images", "InvalidAMIID.NotFound", f"image in {REGION}", "check [ec2] ami_parameter"),
    (
        "describe_subnets",
        "UnauthorizedOperation",
        f"network in {REGION}",
        "ec2:DescribeSubnets",
    ),
    *((method, "UnauthorizedOperation", f"permissions in {REGION}", "ec2:") for method in DRY),
]


@pytest.mark.parametrize(
    ("method", "code", "check", "says"), REFUSALS, ids=[f"{one[0]} {one[1]}" for one in REFUSALS]
)
def test_a_refusal_is_one_line_with_its_fix_and_stops_a_refresh_before_any_machine(
    aws: Account, tmp_path: Path, method: str, code: str, check: str, says: str
) -> None:
    aws.refuse[method] = code
    found = wrong(examine(settings(tmp_path), "ec2"))
    assert list(found) == [check] and says in found[check]
    with pytest.raises(ProviderError) as refused:
        refuse_unless_well(settings(tmp_path), "ec2", 5.0)
    assert says in str(refused.value) and "very-secret-key" not in str(refused.value)


def test_no_credentials_is_the_first_thing_to_put_right(
    aws: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    assert "AWS_PROFILE" in wrong(examine(settings(tmp_path), "ec2"))["credentials"]
    assert aws.asked == []


def expiry(tmp_path: Path) -> Finding:
    (found,) = [
        one for one in examine(settings(tmp_path), "ec2") if one.check == "bucket empties itself"
    ]
    return found


def test_a_bucket_that_keeps_what_leases_leave_gets_a_rule_that_the_doctor_then_finds(
    aws: Account, tmp_path: Path
) -> None:
    before = expiry(tmp_path)
    assert (
        before.status == "note"
        and f"--bucket {BUCKET}" in before.says
        and "replaces" in before.says
    )
    s3 = aws.plain("s3")
    rules = json.loads(before.says.partition("--lifecycle-configuration '")[2].rstrip("'"))
    of_some = {"Prefix": "srift/leases/", "Tags": [{"Key": "a", "Value": "b"}]}
    for change, status in (
        ({"Status": "Disabled"}, "note"),
        ({"Filter": {"Prefix": "another/"}}, "note"),
        ({"Filter": {"And": of_some}}, "note"),
        ({}, "ok"),
    ):
        changed = {"Rules": [rules["Rules"][0] | change]}
        s3.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=changed)
        assert expiry(tmp_path).status == status, change
    assert "after 30 days" in expiry(tmp_path).says
    aws.refuse["get_bucket_lifecycle_configuration"] = "AccessDenied"
    found = expiry(tmp_path)
    assert (
        found.status == "note"
        and "s3:GetLifecycleConfiguration" in found.says
        and "Expiration" in found.says
    )
    refuse_unless_well(settings(tmp_path), "ec2", 5.0)


def test_types_that_nobody_knows_and_own_prices_of_them_are_noted_and_stop_nothing(
    aws: Account, tmp_path: Path
) -> None:
    lines = (
        'discounts = { "g5.*" = 0.1, "g7x.*" = 0.2 }',
        'prices = { "p5.48xlarg" = { spot_usd_per_hour = 9.0 } }',
    )
    found = examine(settings(tmp_path, *lines), "ec2")
    says = [one.says for one in found if one.check == "instance types"]
    assert len(says) == 2 and wrong(found) == {}
    assert "'p5.48xlarg'" in says[0] and "'g7x.*'" in says[1]
    named = settings(tmp_path)
    assert [one.status for one in examine(named, "ec2") if one.check == "instance types"] == ["ok"]
    for types, said in (
        (("p4d.24xlarg", "g4dn.*"), "'p4d.24xlarg'"),
        (("gpu",), "ami_parameter"),
    ):
        other = named.model_copy(
            update={"ec2": named.ec2.model_copy(update={"instance_types": types})}
        )
        found = examine(other, "ec2")
        (note,) = [
            one.says for one in found if one.check == "instance types" and one.status == "note"
        ]
        assert said in note and wrong(found) == {}


@pytest.mark.parametrize(
    ("region", "says"), [("us-esat-1", "no region us-esat-1"), ("ap-east-1", "is not enabled")]
)
def test_a_wrong_region_is_named(aws: Account, tmp_path: Path, region: str, says: str) -> None:
    off = {"RegionName": "ap-east-1", "OptInStatus": "not-opted-in"}
    aws.answers["describe_regions"] = {
        "Regions": [{"RegionName": REGION, "OptInStatus": "opt-in-not-required"}, off]
    }
    assert (
        says
        in wrong(examine(settings(tmp_path, f'regions = ["{REGION}", "{region}"]'), "ec2"))[
            "regions"
        ]
    )


def image(**changes: Any) -> dict[str, Any]:
    sound = {"ImageId": "ami-1", "Name": "x", "State": "available", "Architecture": "x86_64"}
    return {"Images": [sound | changes]}


def volumes(*gib: int) -> list[dict[str, Any]]:
    return [{"Ebs": {"VolumeSize": one}} for one in gib]


@pytest.mark.parametrize(
    ("method", "answer", "check", "says"),
    [
        ("get_bucket_location", {"LocationConstraint": "eu-west-1"}, "bucket", "lies in eu-west-1"),
        (
            "get_bucket_policy_status",
            {"PolicyStatus": {"IsPublic": True}},
            "bucket is private",
            "strangers",
        ),
        ("list_objects_v2", {}, "bucket can be used", "not in the bucket's list"),
        (
            "get_instance_profile",
            {"InstanceProfile": {"Roles": []}},
            "instance profile",
            "holds no role",
        ),
        ("describe_images", image(Architecture="arm64"), f"image in {REGION}", "is for arm64"),
        ("describe_images", image(State="pending"), f"image in {REGION}", "ami_parameter"),
        (
            "describe_images",
            image(BlockDeviceMappings=volumes(200)),
            f"image in {REGION}",
            "volume_gib",
        ),
        (
            "describe_images",
            image(BlockDeviceMappings=volumes(8, 200)),
            f"image in {REGION}",
            "volume_gib",
        ),
    ],
)
def test_a_bucket_a_profile_or_an_image_that_will_not_do_is_wrong(
    aws: Account, tmp_path: Path, method: str, answer: dict[str, Any], check: str, says: str
) -> None:
    aws.answers[method] = answer
    assert says in wrong(examine(settings(tmp_path), "ec2"))[check]
    del aws.answers[method]  # for what the fixture asks afterwards


def test_a_bucket_open_to_strangers_is_wrong(aws: Account, tmp_path: Path) -> None:
    aws.plain("s3").put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    assert "strangers may read" in wrong(examine(settings(tmp_path), "ec2"))["bucket is private"]
    blocked = dict.fromkeys(("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy"), True)
    blocked["RestrictPublicBuckets"] = True
    aws.plain("s3").put_public_access_block(Bucket=BUCKET, PublicAccessBlockConfiguration=blocked)
    assert wrong(examine(settings(tmp_path), "ec2")) == {}


def test_what_cannot_be_deleted_again_is_said(aws: Account, tmp_path: Path) -> None:
    aws.refuse["delete_object"] = "AccessDenied"
    says = wrong(examine(settings(tmp_path), "ec2"))["bucket can be used"]
    (left,) = aws.keys()
    assert left in says and "delete it" in says
    aws.plain("s3").delete_object(Bucket=BUCKET, Key=left)


@pytest.mark.parametrize(("code", "more"), [("NoSuchEntity", ""), ("AccessDenied", "iam:GetRole")])
def test_a_service_role_that_is_missing_or_not_shown_is_made_by_the_command_that_is_printed(
    aws: Account, tmp_path: Path, code: str, more: str
) -> None:
    """IAM judges a role that is not there by its bare name: a policy for its path is answered with AccessDenied."""
    aws.refuse["get_role"] = code
    says = wrong(examine(settings(tmp_path), "ec2"))
    assert set(says) == {"role AWSServiceRoleForEC2Spot", "role AWSServiceRoleForEC2Fleet"}
    for check, service in (("Spot", "spot"), ("Fleet", "ec2fleet")):
        said = says[f"role AWSServiceRoleForEC2{check}"]
        assert (
            f"create-service-linked-role --aws-service-name {service}.amazonaws.com" in said
            and more in said
        )
    on_demand = settings(tmp_path, 'markets = ["on-demand"]', "[campaign]", 'market = "on-demand"')
    assert wrong(examine(on_demand, "ec2")) == {}
    aws.refuse["get_role"] = "ExpiredToken"
    assert (
        "sign in again"
        in wrong(examine(settings(tmp_path), "ec2"))["role AWSServiceRoleForEC2Spot"]
    )


def test_subnets_that_are_not_there_are_wrong(aws: Account, tmp_path: Path) -> None:
    for line in ('subnet_ids = ["subnet-12345678"]', 'subnets = "private"'):
        assert (
            "subnet_ids" in wrong(examine(settings(tmp_path, line), "ec2"))[f"network in {REGION}"]
        )


def test_a_quota_that_no_type_fits_under_is_named(aws: Account, tmp_path: Path) -> None:
    aws.answers["get_service_quota"] = {
        "Quota": {"QuotaName": "All G and VT Spot Instance Requests", "Value": 0.0}
    }
    says = wrong(examine(settings(tmp_path), "ec2"))[f"quotas in {REGION}"]
    assert "'All G and VT Spot Instance Requests'" in says and "Service Quotas" in says
    aws.refuse["get_service_quota"] = "AccessDeniedException"
    found = examine(settings(tmp_path), "ec2")
    assert wrong(found) == {} and [
        one.status for one in found if one.check == f"quotas in {REGION}"
    ] == ["note"]


def test_a_clock_that_is_off_is_wrong_before_aws_refuses_it(aws: Account) -> None:
    date = "Fri, 20 Nov 2026 12:00:00 GMT"
    headers = {"ResponseMetadata": {"HTTPHeaders": {"date": date}}}
    aws.answers["get_caller_identity"] = {"Account": "1", "Arn": "arn:aws:iam::1:user/x"} | headers
    noon = datetime(2026, 11, 20, 12, tzinfo=UTC)
    for ahead_s, status in ((0.0, "ok"), (3.0, "ok"), (250.0, "wrong"), (-250.0, "wrong")):
        now = noon + timedelta(seconds=ahead_s)
        asking = Ec2Account(ec2_api.Ec2Api(aws.clients), lambda now=now: now)  # type: ignore[misc]
        (_, clock) = doctor_ec2._identity(asking, REGION)
        assert clock.status == status, clock.says


def test_without_a_bucket_that_is_said_and_the_rest_is_checked(
    aws: Account, tmp_path: Path
) -> None:
    made = settings(tmp_path)
    made = made.model_copy(update={"ec2": made.ec2.model_copy(update={"bucket": None})})
    assert list(wrong(examine(made, "ec2"))) == ["settings"]


def test_a_refresh_that_buys_nothing_needs_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail("asked all the same"))
    refuse_unless_well(settings(tmp_path), "ec2", 0.0)
    refuse_unless_well(settings(tmp_path), "local", 1.0)


def test_local_machines_have_limits_that_doctor_names(tmp_path: Path) -> None:
    found = examine(settings(tmp_path), "local")
    assert wrong(found).keys() == {"instance types"}, "none is stated in this srift.toml"
    with pytest.raises(SettingsError, match="did you mean 'local'"):
        examine(settings(tmp_path), "loca")


def test_the_command_prints_a_line_a_finding_or_the_policies_and_ends_with_1_where_something_is_wrong(
    aws: Account, tmp_path: Path
) -> None:
    settings(tmp_path)
    well = CliRunner().invoke(app, ["doctor", "--provider", "ec2"])
    assert well.exit_code == 0 and "all is well" in well.output, well.output
    aws.refuse["get_bucket_location"] = "NoSuchBucket"
    ill = CliRunner().invoke(app, ["doctor", "--provider", "ec2", "--json"])
    assert ill.exit_code == 1, ill.output
    body = json.loads(ill.stdout)
    assert not body["well"] and {"check", "status", "says"} == set(body["findings"][0])
    assert "very-secret-key" not in well.output + ill.output
    printed = CliRunner().invoke(app, ["doctor", "--print-policies"])
    assert printed.exit_code == 0, printed.output
    policies = json.loads(printed.stdout)
    assert f"arn:aws:s3:::{BUCKET}/srift/code/*" in json.dumps(policies["node-policy"])
    assert "arn:aws:iam::123456789012:role/srift-node" in json.dumps(policies["controller-policy"])


def test_private_subnets_are_found_by_their_tag(aws: Account, tmp_path: Path) -> None:
    ec2 = aws.plain("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    ec2.create_tags(Resources=[subnet], Tags=[{"Key": "srift:deployment", "Value": "srift"}])
    assert wrong(examine(settings(tmp_path, 'subnets = "private"'), "ec2")) == {}
    templates = [words for method, words in aws.asked if method == "create_launch_template"]
    interfaces = templates[-1]["LaunchTemplateData"]["NetworkInterfaces"]
    assert not interfaces[0]["AssociatePublicIpAddress"]
