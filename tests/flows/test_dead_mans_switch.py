"""AWS's own stop for what is overdue: its code against emulated EC2, its rights, and the form of its template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import yaml
from botocore.session import Session
from botocore.validate import ParamValidator
from moto import mock_aws

from tasks.providers.ec2.requests import LaunchSpec, tags
from tasks.providers.ec2.settings import Ec2

FILE = Path(__file__).parents[2] / "deployments" / "dead-mans-switch.yaml"
REGIONS = ("us-east-1", "eu-west-1")
SPEC = LaunchSpec(region="us-east-1", vpc="vpc-1", subnets={}, types={}, image_id="ami-1", root_device="/dev/sda1",
                volume_gib=100, instance_profile="srift-node", deployment="ours", controller="c",
                lease_id="r-1", deadline_unix=0)  # fmt: skip
HOUR = 3600.0


class _Cloudformation(yaml.SafeLoader):
    """YAML with the short forms of CloudFormation's functions, as its long ones: {"Fn::Sub": ...}."""


def _function(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    plain = isinstance(node, yaml.ScalarNode)
    value = loader.construct_scalar(node) if plain else loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]
    return {suffix if suffix == "Ref" else f"Fn::{suffix}": value}


_Cloudformation.add_multi_constructor("!", _function)
TEMPLATE: dict[str, Any] = yaml.load(FILE.read_text(), _Cloudformation)
SOURCE: str = TEMPLATE["Resources"]["Switch"]["Properties"]["Code"]["ZipFile"]


@pytest.fixture
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"DEPLOYMENT": "ours", "REGIONS": ",".join(REGIONS), "GRACE_MINUTES": "5", "OLDEST_HOURS": "169",
                        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "x"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with mock_aws():
        yield


def launched(region: str = "us-east-1", **changes: str | None) -> str:
    """A machine with the tags of a launch of ours, some of them changed (None: left out)."""
    named = {one["Key"]: one["Value"] for one in tags(SPEC, "0.0")}
    named |= {f"srift:{key}": value for key, value in changes.items()}  # type: ignore[misc]
    marked = [{"Key": key, "Value": value} for key, value in named.items() if value is not None]
    made = boto3.client("ec2", region_name=region).run_instances(
        ImageId="ami-12c6146b", InstanceType="t3.nano", MinCount=1, MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": marked}],
    )  # fmt: skip
    return str(made["Instances"][0]["InstanceId"])


def alive(region: str = "us-east-1") -> set[str]:
    found = boto3.client("ec2", region_name=region).describe_instances()["Reservations"]
    return {
        i["InstanceId"]
        for r in found
        for i in r["Instances"]
        if i["State"]["Name"] in ("pending", "running")
    }


def code(now: float) -> dict[str, Any]:
    """The Lambda's own text, run at that moment."""
    space: dict[str, Any] = {}
    exec(compile(SOURCE, str(FILE), "exec"), space)
    space["time"] = SimpleNamespace(time=lambda: now)
    return space


def run(now: float) -> Any:
    return code(now)["handler"]({}, None)


def why(deadline: str | None, age_s: float) -> str:
    """Why a machine that was launched `age_s` ago is ended; empty where it is not."""
    now = now_unix()
    marked = [] if deadline is None else [{"Key": "srift:deadline", "Value": deadline}]
    instance = {"LaunchTime": datetime.fromtimestamp(now - age_s, UTC), "Tags": marked}
    return str(code(now)["why"](instance, now, 300.0, 169 * HOUR))


def now_unix() -> int:
    return int(datetime.now(UTC).timestamp())


def test_what_is_past_its_deadline_is_ended_in_every_region_and_nothing_else(aws: None) -> None:
    now = now_unix()
    overdue = launched(deadline=str(now - 301))
    elsewhere = launched("eu-west-1", deadline=str(now - 9999))
    kept = {
        launched(deadline=str(now + 60)),
        launched(deadline=str(now - 200)),  # its own timer and the reaper come first
        launched(deadline=str(now - 9999), deployment="another's"),
        launched(deadline=str(now - 9999), deployment=None),
    }
    assert set(run(now)["ended"]) == {overdue, elsewhere}
    assert alive() == kept and alive("eu-west-1") == set()
    assert run(now)["ended"] == [], "what was ended is not asked about again"


GARBLED = (
    None,
    "",
    "soon",
    "nan",
    "-1",
    "12",
    "1e9",
    "\u0661" * 10,
    "1763899200000",
    "0x5",
    "9999999999",
)


@pytest.mark.parametrize("garbled", GARBLED)
def test_a_deadline_that_cannot_be_read_ends_nothing_until_it_is_older_than_any_launch(
    garbled: str | None,
) -> None:
    """Nor does one in another century keep a machine for ever."""
    assert why(garbled, 168 * HOUR) == "" and "older" in why(garbled, 169 * HOUR)


def test_a_machine_without_any_tag_is_judged_too() -> None:
    now = now_unix()
    assert (
        code(now)["why"]({"LaunchTime": datetime.fromtimestamp(now, UTC)}, now, 300.0, 169 * HOUR)
        == ""
    )


def test_no_launch_of_ours_is_older_than_that(aws: None) -> None:
    longest = max(one.le for one in Ec2.model_fields["max_minutes"].metadata if hasattr(one, "le"))
    assert TEMPLATE["Parameters"]["OldestHours"]["Default"] * 60 > longest


def test_one_machine_and_one_region_that_refuse_do_not_save_the_others_and_the_run_fails(
    aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = now_unix()
    guarded, overdue = (
        launched(deadline=str(now - 9999)),
        launched("eu-west-1", deadline=str(now - 9999)),
    )
    ec2 = boto3.client("ec2", region_name="us-east-1")
    ec2.modify_instance_attribute(InstanceId=guarded, DisableApiTermination={"Value": True})
    monkeypatch.setenv("REGIONS", "no-such-region-9,us-east-1, eu-west-1")
    real = boto3.client

    def client(service: str, region_name: str) -> Any:
        if region_name == "no-such-region-9":
            raise RuntimeError("there is no such region")
        return real(service, region_name=region_name)

    monkeypatch.setattr(boto3, "client", client)
    with pytest.raises(RuntimeError, match=f"no-such-region-9: there is no such region; {guarded}"):
        run(now)
    monkeypatch.undo()
    assert overdue not in alive("eu-west-1")


def test_it_may_do_what_its_code_calls_on_what_carries_our_tag_and_nothing_else() -> None:
    (policy,) = TEMPLATE["Resources"]["Role"]["Properties"]["Policies"]
    look, end, log = policy["PolicyDocument"]["Statement"]
    called = set(re.findall(r"ec2\.([a-z_]+)\(", SOURCE)) | set(
        re.findall(r'get_paginator\("(\w+)"\)', SOURCE)
    )
    assert called - {"get_paginator"} == {"describe_instances", "terminate_instances"}
    assert (look["Action"], end["Action"]) == ("ec2:DescribeInstances", "ec2:TerminateInstances")
    assert end["Condition"] == {
        "StringEquals": {"aws:ResourceTag/srift:deployment": {"Ref": "Deployment"}}
    }
    assert log["Action"] == ["logs:CreateLogStream", "logs:PutLogEvents"] and log["Resource"] != "*"


def resolved(value: Any, parameters: dict[str, Any]) -> Any:
    """With parameters filled in, and attributes of other resources as words."""
    if isinstance(value, list):
        return [resolved(one, parameters) for one in value]
    if not isinstance(value, dict):
        return value
    if "Ref" in value:
        return parameters.get(value["Ref"], f"the {value['Ref']}")
    if "Fn::Join" in value:
        between, parts = resolved(value["Fn::Join"], parameters)
        return between.join(parts)
    if "Fn::GetAtt" in value or "Fn::Sub" in value:
        return "arn:aws:iam::123456789012:role/x"
    return {key: resolved(one, parameters) for key, one in value.items()}


def test_what_the_template_makes_is_what_aws_knows_and_runs_every_ten_minutes() -> None:
    assert set(TEMPLATE) == {"AWSTemplateFormatVersion", "Description", "Parameters", "Resources"}
    assert len(SOURCE) <= 4096, "CloudFormation takes no longer inline code"
    named = {*TEMPLATE["Parameters"], *TEMPLATE["Resources"]}
    text = json.dumps(TEMPLATE["Resources"])
    for name in [
        *re.findall(r'"Ref": "([^"]+)"', text),
        *re.findall(r'"Fn::GetAtt": "(\w+)\.', text),
    ]:
        assert name in named, name
    defaults = {name: one["Default"] for name, one in TEMPLATE["Parameters"].items()}
    made = {name: one | {"Properties": resolved(one["Properties"], defaults | {"Regions": list(REGIONS)})}
            for name, one in TEMPLATE["Resources"].items()}  # fmt: skip
    kinds = {"AWS::IAM::Role", "AWS::Logs::LogGroup", "AWS::Lambda::Function", "AWS::Events::Rule",
             "AWS::Lambda::Permission"}  # fmt: skip
    assert {one["Type"] for one in made.values()} == kinds
    function = made["Switch"]["Properties"]
    variables = {name: str(value) for name, value in function["Environment"]["Variables"].items()}
    assert variables == {
        "DEPLOYMENT": "srift", "REGIONS": ",".join(REGIONS), "GRACE_MINUTES": "5", "OLDEST_HOURS": "169",
    }  # fmt: skip
    code = {"ZipFile": function["Code"]["ZipFile"].encode()}
    accepted(
        "lambda",
        "CreateFunction",
        function | {"FunctionName": "x", "Code": code, "Environment": {"Variables": variables}},
    )
    rule = dict(made["Schedule"]["Properties"])
    targets = rule.pop("Targets")
    accepted("events", "PutRule", rule | {"Name": "x"})
    accepted("events", "PutTargets", {"Rule": "x", "Targets": targets})
    assert (rule["ScheduleExpression"], rule["State"]) == ("rate(10 minutes)", "ENABLED")
    accepted("lambda", "AddPermission", made["MayCall"]["Properties"] | {"StatementId": "x"})
    runtimes = Session().get_service_model("lambda").shape_for("Runtime").enum
    assert function["Runtime"] in runtimes


def accepted(service: str, operation: str, words: dict[str, Any]) -> None:
    """By botocore's own model of the call."""
    shape = Session().get_service_model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(words, shape)
    assert not report.has_errors(), report.generate_report()
