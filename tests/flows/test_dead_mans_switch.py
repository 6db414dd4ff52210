"""deployments/dead-mans-switch.yaml: its code against emulated EC2, its rights, its template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

from tasks.providers.ec2.settings import Ec2

FILE = Path(__file__).parents[2] / "deployments" / "dead-mans-switch.yaml"
REGIONS = ("us-east-1", "eu-west-1")
HOUR = 3600.0


class _CloudFormation(yaml.SafeLoader):
    """YAML with the short forms of CloudFormation's functions, as {"Ref": ...}."""


def _function(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return {suffix: loader.construct_scalar(node)}
    return {suffix: loader.construct_sequence(node, deep=True)}  # type: ignore[arg-type]


_CloudFormation.add_multi_constructor("!", _function)
TEMPLATE: dict[str, Any] = yaml.load(FILE.read_text(), _CloudFormation)
SOURCE: str = TEMPLATE["Resources"]["Switch"]["Properties"]["Code"]["ZipFile"]


@pytest.fixture
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DEPLOYMENT", "ours")
    monkeypatch.setenv("REGIONS", ",".join(REGIONS))
    monkeypatch.setenv("GRACE_MINUTES", "5")
    monkeypatch.setenv("OLDEST_HOURS", "169")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with mock_aws():
        yield


def launch(deadline: int, region: str = "us-east-1", deployment: str | None = "ours") -> str:
    tags = [{"Key": "srift:deadline", "Value": str(deadline)}]
    if deployment is not None:
        tags.append({"Key": "srift:deployment", "Value": deployment})
    made = boto3.client("ec2", region_name=region).run_instances(
        ImageId="ami-12c6146b",
        InstanceType="t3.nano",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    return str(made["Instances"][0]["InstanceId"])


def alive(region: str) -> set[str]:
    found = boto3.client("ec2", region_name=region).describe_instances()["Reservations"]
    instances = [one for reservation in found for one in reservation["Instances"]]
    return {one["InstanceId"] for one in instances if one["State"]["Name"] == "running"}


def code(now: float) -> dict[str, Any]:
    """Return the Lambda's own functions at a given time."""
    space: dict[str, Any] = {}
    exec(compile(SOURCE, str(FILE), "exec"), space)
    space["time"] = SimpleNamespace(time=lambda: now)
    return space


def now_unix() -> int:
    return int(datetime.now(UTC).timestamp())


def test_overdue_machines_of_this_deployment_are_ended_in_every_region(aws: None) -> None:
    now = now_unix()
    overdue = {launch(now - 301), launch(now - 9999, "eu-west-1")}
    kept = {
        launch(now + 60),
        launch(now - 200),  # within the grace
        launch(now - 9999, deployment="another's"),
        launch(now - 9999, deployment=None),
    }
    handler = code(now)["handler"]
    assert set(handler({}, None)["ended"]) == overdue
    assert alive("us-east-1") == kept and alive("eu-west-1") == set()
    assert handler({}, None)["ended"] == []


@pytest.mark.parametrize(
    "deadline", [None, "", "soon", "nan", "-1", "12", "1e9", "\u0661" * 10, "9999999999"]
)
def test_an_unreadable_deadline_counts_by_age(deadline: str | None) -> None:
    now = now_unix()
    tags = [] if deadline is None else [{"Key": "srift:deadline", "Value": deadline}]
    for age_h, ended in ((168, False), (169, True)):
        started = datetime.fromtimestamp(now - age_h * HOUR, UTC)
        instance = {"LaunchTime": started, "Tags": tags}
        assert bool(code(now)["why"](instance, now, 300.0, 169 * HOUR)) == ended


def test_no_launch_may_be_that_old() -> None:
    longest = max(one.le for one in Ec2.model_fields["max_minutes"].metadata if hasattr(one, "le"))
    assert TEMPLATE["Parameters"]["OldestHours"]["Default"] * 60 > longest


def test_a_failing_region_and_machine_do_not_save_the_others(
    aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = now_unix()
    guarded, overdue = launch(now - 9999), launch(now - 9999, "eu-west-1")
    boto3.client("ec2", region_name="us-east-1").modify_instance_attribute(
        InstanceId=guarded, DisableApiTermination={"Value": True}
    )
    monkeypatch.setenv("REGIONS", "no-such-region-9,us-east-1, eu-west-1")
    real = boto3.client

    def client(service: str, region_name: str) -> Any:
        if region_name == "no-such-region-9":
            raise RuntimeError
        return real(service, region_name=region_name)

    monkeypatch.setattr(boto3, "client", client)
    with pytest.raises(RuntimeError, match=f"no-such-region-9.*{guarded}"):
        code(now)["handler"]({}, None)
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert overdue not in alive("eu-west-1")


def test_its_role_may_end_only_what_carries_the_tag() -> None:
    (policy,) = TEMPLATE["Resources"]["Role"]["Properties"]["Policies"]
    look, end, log = policy["PolicyDocument"]["Statement"]
    called = set(re.findall(r"ec2\.([a-z]+_[a-z]+s)\(", SOURCE))
    assert called == {"terminate_instances"} and 'get_paginator("describe_instances")' in SOURCE
    assert (look["Action"], end["Action"]) == ("ec2:DescribeInstances", "ec2:TerminateInstances")
    tag = {"aws:ResourceTag/srift:deployment": {"Ref": "Deployment"}}
    assert end["Condition"] == {"StringEquals": tag}
    assert log["Resource"] != "*"
