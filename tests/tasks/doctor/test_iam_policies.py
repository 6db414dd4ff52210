"""The IAM policies allow exactly what the code calls, on resources of this deployment."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.doctor.aws import examine_ec2
from tasks.doctor.iam_policies import ACCOUNT, NAMES, policies
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import SettingsError, load_settings
from tests.ec2_home import CHOICES, Home, project
from tests.fake_ec2 import KILLED, Fault
from tests.world.policy import allows

TASKS = Path(__file__).parents[3] / "tasks"
ACTION = re.compile(r"(ec2|s3|iam|ssm|sts|pricing|servicequotas):[A-Z][A-Za-z]+")
EVERYBODY_MAY = {"sts:GetCallerIdentity"}
# Part of other calls: tags while making things, the machines' role and image while launching them.
IMPLIED = {"ec2:CreateTags", "ec2:RunInstances", "iam:PassRole"}
EC2 = Ec2(bucket="mine-1", prefix="team/srift", deployment="ours", instance_profile="node-profile")
PRIVATELY = CHOICES.model_copy(update={"subnets": "private"})
OUR_TAG = {"StringEquals": {"aws:ResourceTag/srift:deployment": "ours"}}


def called(*files: Path) -> set[str]:
    """Return the actions that the code names as strings."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    strings = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {text for text in strings if ACTION.fullmatch(text)}


def statements(name: str) -> list[dict[str, Any]]:
    return list(policies(EC2, account="999988887777")[name]["Statement"])


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allowed(name: str) -> set[str]:
    return {action for one in statements(name) for action in listed(one["Action"])}


def of_action(action: str) -> Iterator[dict[str, Any]]:
    return (one for one in statements("controller-policy") if action in listed(one["Action"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a doctor, launches, a replacement, a lost controller and a reaper called."""

    actions: frozenset[str]
    tagging: frozenset[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Each call was held against botocore's model when it was made (tests/aws_model.py)."""
    home = Home(tmp_path_factory.mktemp("calls"), choices=PRIVATELY)
    home.world.account.tagged = True
    with home.acquire(home.mixed()) as running:
        home.world.interrupt(home.world.alive()[0].instance_id)
        running.nodes()
        assert running.replace(0)
    home.provider.placement_scores("us-east-1", ["g4dn.xlarge"], 1)
    home.world.faults = [Fault(action="ec2:DescribeInstances", code=KILLED)]
    home.killed_in(home.two("on-demand"), "r-2")
    home.provider.reap(home.world.now)
    home.world.faults = [
        Fault(action="ec2:AuthorizeSecurityGroupIngress", code="InvalidGroup.NotFound")
    ]
    with home.acquire(home.two("on-demand"), "r-3"):
        assert len(home.world.alive()) == 2
    examine_ec2(load_settings(project(tmp_path_factory.mktemp("doctor"))), home.world.clients)
    calls = home.world.calls
    return Recorded(
        actions=frozenset(action for action, _ in calls),
        tagging=frozenset(action[4:] for action, words in calls if "TagSpecifications" in words),
    )


def test_what_the_code_names_what_was_called_and_what_the_policy_allows_are_the_same(
    recorded: Recorded,
) -> None:
    """A new call must be made here too: no request goes out that no test has seen."""
    named = called(*(TASKS / "providers" / "ec2").glob("*.py"), TASKS / "doctor" / "aws.py")
    assert named - recorded.actions == set()
    assert recorded.actions - named == set()
    may = allowed("controller-policy")
    assert named - EVERYBODY_MAY - may == set()
    assert may - named - IMPLIED == set()


def test_tags_are_written_by_exactly_the_calls_that_make_something(recorded: Recorded) -> None:
    (only,) = of_action("ec2:CreateTags")
    tag = only["Condition"]["StringEquals"]
    assert set(tag["ec2:CreateAction"]) == recorded.tagging | {"RunInstances"}
    assert tag["aws:RequestTag/srift:deployment"] == "ours"


def test_a_machine_may_do_in_s3_what_its_client_does_and_nothing_else() -> None:
    assert allowed("node-policy") == {"s3:GetObject", "s3:PutObject", "s3:ListBucket"}


@pytest.mark.parametrize(
    ("prefix", "may"),
    [
        ("team/srift/data/abcd/", True),
        ("team/srift/", False),
        ("", False),
        ("team/srift/leases/", False),
        (None, False),
    ],
)
def test_a_machine_lists_the_data_and_nothing_else_of_the_bucket(
    prefix: str | None, may: bool
) -> None:
    node = statements("node-policy")
    assert allows(node, "s3:ListBucket", "arn:aws:s3:::mine-1", "AROA:i-1", prefix) is may
    for key, read in (("data/abcd/cats/1.jpg", True), ("database/x", False)):
        resource = f"arn:aws:s3:::mine-1/team/srift/{key}"
        assert allows(node, "s3:GetObject", resource, "AROA:i-1") is read
        assert allows(node, "s3:PutObject", resource, "AROA:i-1") is False


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("leases/r-1/AROA:i-1/out/records/r-1-000.json", True),
        ("leases/r-1/AROA:i-1/out/heartbeat.json", True),
        ("leases/r-1/AROA:i-1/out/records/a.b_c+d.json", True),
        ("leases/r-1/AROA:i-2/out/x.json", False),
        ("leases/r-1/AROA:i-2/out/AROA:i-1/out/x.json", False),
        ("leases/r-1/AROA:i-2/out/records/AROA:i-1/out/x.json", False),
        ("leases/r-1/AROA:i-2/in/AROA:i-1/out/plan.json", False),
        ("leases/r-1/AROA:i-1/in/plan.json", False),
        ("code/AROA:i-1/out/x", False),
    ],
)
def test_a_machine_may_write_what_it_tells_and_nowhere_else_though_a_star_of_iam_spans_slashes(
    key: str, may: bool
) -> None:
    resource = f"arn:aws:s3:::mine-1/team/srift/{key}"
    assert allows(statements("node-policy"), "s3:PutObject", resource, "AROA:i-1") is may
    read = statements("node-policy")[0]
    assert read["Action"] == "s3:GetObject"
    below = ("code/*", "data/*", "leases/*/${aws:userid}/in/*")
    assert read["Resource"] == [f"arn:aws:s3:::mine-1/team/srift/{one}" for one in below]


def test_only_ec2_may_take_the_machines_role_and_only_machines_may_be_given_it() -> None:
    (trust,) = statements("node-trust")
    assert (
        trust["Principal"] == {"Service": "ec2.amazonaws.com"}
        and trust["Action"] == "sts:AssumeRole"
    )
    (passing,) = of_action("iam:PassRole")
    assert passing["Resource"] == "arn:aws:iam::999988887777:role/node-profile"
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


@pytest.mark.parametrize(
    "action", ["RunInstances", "CreateFleet", "CreateLaunchTemplate", "CreateSecurityGroup"]
)
def test_what_is_made_carries_our_tag(action: str) -> None:
    made = {
        "RunInstances": "instance",
        "CreateFleet": "fleet",
        "CreateLaunchTemplate": "launch-template",
        "CreateSecurityGroup": "security-group",
    }[action]
    resource = f"arn:aws:ec2:*:999988887777:{made}/*"
    found = [one for one in of_action(f"ec2:{action}") if resource in listed(one["Resource"])]
    assert found
    for one in found:
        tag = one["Condition"]["StringEquals"]
        assert tag in ({"aws:RequestTag/srift:deployment": "ours"}, OUR_TAG["StringEquals"])
    assert any(
        "aws:RequestTag/srift:deployment" in one["Condition"]["StringEquals"] for one in found
    )


@pytest.mark.parametrize("action", [
    "TerminateInstances", "DeleteSecurityGroup", "DeleteLaunchTemplate", "DeletePlacementGroup",
    "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress", "RevokeSecurityGroupEgress",
])  # fmt: skip
def test_nothing_is_ended_or_changed_that_does_not_carry_our_tag(action: str) -> None:
    (only,) = of_action(f"ec2:{action}")
    assert only["Condition"] == OUR_TAG


def test_only_looking_is_allowed_everywhere_and_no_action_has_a_star() -> None:
    refused = [one["Sid"] for name in NAMES for one in statements(name) if one["Effect"] != "Allow"]
    assert refused == ["NothingBelowAFolderOfAnotherMachine"]
    for one in (one for name in NAMES for one in statements(name) if one["Effect"] == "Allow"):
        for action in listed(one["Action"]):
            assert "*" not in action
            looks = re.fullmatch(
                r"ec2:(Describe|GetSpotPlacementScores)\w*|pricing:Get\w+|servicequotas:Get\w+",
                action,
            )
            assert one.get("Resource") != "*" or looks, f"{action} everywhere"


def test_every_name_is_filled_in_and_braces_left_are_awss() -> None:
    text = json.dumps(policies(EC2, account="999988887777"))
    assert set(re.findall(r"\{[a-z_:]+\}", text)) == {"{aws:userid}"}
    assert ACCOUNT in json.dumps(policies(EC2))
    with pytest.raises(SettingsError):
        policies(Ec2())
