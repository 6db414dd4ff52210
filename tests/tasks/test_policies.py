"""The IAM policies allow what the code calls, and nothing else; each thing only where it is ours."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.ec2_settings import Ec2
from tasks.policies import ACCOUNT, NAMES, policies
from tasks.settings import SettingsError

ROOT = Path(__file__).parents[2]
PROVIDERS = ROOT / "tasks" / "providers"
ACTION = re.compile(r"(ec2|s3|iam|ssm|sts|pricing|servicequotas):[A-Z][A-Za-z]+")
EVERYBODY_MAY = {"sts:GetCallerIdentity"}
# Part of other calls: tags while making things, the machines' role and image while launching them.
IMPLIED = {"ec2:CreateTags", "iam:PassRole"}
EC2 = Ec2(bucket="mine-1", prefix="team/srift", deployment="ours", instance_profile="node-profile")
OUR_TAG = {"StringEquals": {"aws:ResourceTag/srift:deployment": "ours"}}


def called(*files: Path) -> set[str]:
    """Actions whose names stand in the code as strings of their own (docstrings hold more than one word)."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in strings if ACTION.fullmatch(text)}


def statements(name: str) -> list[dict[str, Any]]:
    return list(policies(EC2, account="999988887777")[name]["Statement"])


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allowed(name: str) -> set[str]:
    return {action for one in statements(name) for action in listed(one["Action"])}


def of_action(action: str) -> Iterator[dict[str, Any]]:
    return (one for one in statements("controller-policy") if action in listed(one["Action"]))


def test_the_controller_may_do_what_its_code_calls_and_nothing_else() -> None:
    used = called(*PROVIDERS.glob("ec2*.py")) - EVERYBODY_MAY
    may = allowed("controller-policy") - IMPLIED
    assert used - may == set(), "the code calls what the policy does not allow"
    assert may - used == set(), "the policy allows what no code calls"


def test_every_call_of_aws_carries_the_name_of_its_action() -> None:
    """Clients are made in one file and called through one method there, which takes the action's name."""
    for file in PROVIDERS.glob("ec2*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        methods = [(node.func.attr, node) for node in calls if isinstance(node.func, ast.Attribute)]
        made = [name for name, _ in methods if name in ("client", "_client", "_clients")]
        assert made == [] or file.name == "ec2_api.py"
        for first in (node.args[0] for name, node in methods if name in ("ask", "ask_pages")):
            assert isinstance(first, ast.Name) or ACTION.fullmatch(ast.literal_eval(first)), ast.unparse(first)
    importing = re.compile(r"import boto|from boto")
    makers = [file.name for file in (ROOT / "tasks").rglob("*.py") if importing.search(file.read_text())]
    assert makers == ["ec2_api.py"]


def test_a_machine_may_read_what_is_meant_for_it_and_write_under_its_own_name() -> None:
    read, write = statements("node-policy")
    assert read["Action"] == "s3:GetObject" and write["Action"] == "s3:PutObject"
    assert read["Resource"] == [
        "arn:aws:s3:::mine-1/team/srift/code/*",
        "arn:aws:s3:::mine-1/team/srift/leases/*/${aws:userid}/in/*",
    ]
    assert write["Resource"] == "arn:aws:s3:::mine-1/team/srift/leases/*/${aws:userid}/out/*"


def test_a_machines_s3_reads_and_writes_and_nothing_else() -> None:
    node = ROOT / "tasks" / "node" / "s3.py"
    if not node.exists():
        pytest.skip("the node's S3 client is not here yet")
    text = ast.unparse(ast.parse(node.read_text()))
    methods = set(re.findall(r"'(GET|PUT|POST|DELETE|HEAD)'", text))
    assert methods == {"GET", "PUT"} and "list-type" not in text


def test_only_ec2_may_take_the_machines_role_and_only_machines_may_be_given_it() -> None:
    (trust,) = statements("node-trust")
    assert trust["Principal"] == {"Service": "ec2.amazonaws.com"} and trust["Action"] == "sts:AssumeRole"
    (passing,) = of_action("iam:PassRole")
    assert passing["Resource"] == "arn:aws:iam::999988887777:role/node-profile"
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


@pytest.mark.parametrize("action", ["RunInstances", "CreateFleet", "CreateLaunchTemplate", "CreateSecurityGroup"])
def test_what_is_made_carries_our_tag(action: str) -> None:
    made = {"RunInstances": "instance", "CreateFleet": "fleet", "CreateLaunchTemplate": "launch-template",
            "CreateSecurityGroup": "security-group"}[action]  # fmt: skip
    resource = f"arn:aws:ec2:*:999988887777:{made}/*"
    found = [one for one in of_action(f"ec2:{action}") if resource in listed(one["Resource"])]
    assert found
    for one in found:
        tag = one["Condition"]["StringEquals"]
        assert tag in ({"aws:RequestTag/srift:deployment": "ours"}, OUR_TAG["StringEquals"])
    assert any("aws:RequestTag/srift:deployment" in one["Condition"]["StringEquals"] for one in found)


@pytest.mark.parametrize("action", [
    "TerminateInstances", "DeleteSecurityGroup", "DeleteLaunchTemplate", "DeletePlacementGroup",
    "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress", "RevokeSecurityGroupEgress",
])  # fmt: skip
def test_nothing_is_ended_or_changed_that_does_not_carry_our_tag(action: str) -> None:
    (only,) = of_action(f"ec2:{action}")
    assert only["Condition"] == OUR_TAG


def test_tags_are_written_only_while_something_is_made() -> None:
    (only,) = of_action("ec2:CreateTags")
    tag = only["Condition"]["StringEquals"]
    assert tag["aws:RequestTag/srift:deployment"] == "ours" and "RunInstances" in tag["ec2:CreateAction"]


def test_only_looking_is_allowed_everywhere_and_no_action_has_a_star() -> None:
    for one in (one for name in NAMES for one in statements(name)):
        assert one["Effect"] == "Allow"
        for action in listed(one["Action"]):
            assert "*" not in action
            looks = re.fullmatch(
                r"ec2:(Describe|GetSpotPlacementScores)\w*|pricing:Get\w+|servicequotas:Get\w+", action
            )
            assert one.get("Resource") != "*" or looks, f"{action} everywhere"


def test_every_name_is_filled_in_and_braces_left_are_awss() -> None:
    text = json.dumps(policies(EC2, account="999988887777"))
    assert set(re.findall(r"\{[a-z_:]+\}", text)) == {"{aws:userid}"}
    assert ACCOUNT in json.dumps(policies(EC2)), "where nobody told the account, AWS's example stands"
    with pytest.raises(SettingsError, match="set bucket under"):
        policies(Ec2())
