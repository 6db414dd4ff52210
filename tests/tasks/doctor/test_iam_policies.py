"""The IAM policies allow exactly what the code calls, on resources of this deployment."""

import ast
import json
import re
from pathlib import Path

import pytest

from tasks.doctor.aws import examine_ec2
from tasks.doctor.iam_policies import ACCOUNT, NAMES, policies
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import SettingsError, load_settings
from tests.ec2_home import CHOICES, Home, project
from tests.fake_ec2 import KILLED
from tests.world.policy import allows, listed

TASKS = Path(__file__).parents[3] / "tasks"
ACTION = re.compile(r"(ec2|s3|iam|ssm|sts|pricing|servicequotas):[A-Z][A-Za-z]+")
EVERYBODY_MAY = {"sts:GetCallerIdentity"}
# Part of other calls: tags while making things, the machines' role and image while launching them.
IMPLIED = {"ec2:CreateTags", "ec2:RunInstances", "iam:PassRole"}
EC2 = Ec2(bucket="mine-1", prefix="team/srift", deployment="ours", instance_profile="node-profile")
POLICIES = policies(EC2, account="999988887777")
OURS, MADE_OURS = (
    {"StringEquals": {f"aws:{kind}Tag/srift:deployment": "ours"}}
    for kind in ("Resource", "Request")
)


def called(*files):
    """The actions that the code names as strings."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    strings = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return {text for text in strings if ACTION.fullmatch(text)}


def allowed(name):
    return {
        action
        for statement in POLICIES[name]["Statement"]
        for action in listed(statement["Action"])
    }


def of_action(action):
    every = POLICIES["controller-policy"]["Statement"]
    return [statement for statement in every if action in listed(statement["Action"])]


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What a doctor, launches, a replacement, a lost controller and a reaper called."""
    private = CHOICES.model_copy(update={"subnets": "private"})
    home = Home(tmp_path_factory.mktemp("calls"), choices=private)
    world = home.world
    world.account.tagged = True
    with home.acquire(home.mixed()) as running:
        world.interrupt(world.alive()[0].instance_id)
        running.nodes()
        assert running.replace(0)
    home.provider.placement_scores("us-east-1", ["g4dn.xlarge"], 1)
    world.fails("ec2:DescribeInstances", KILLED)
    home.killed_in(home.two("on-demand"), "r-2")
    home.reap()
    list(examine_ec2(load_settings(project(tmp_path_factory.mktemp("doctor"))), world.clients))
    return world.calls


def test_what_the_code_names_what_was_called_and_what_the_policy_allows_are_the_same(calls):
    """A new call must be made here too: no request goes out that no test has seen."""
    named = called(*(TASKS / "providers/ec2").glob("*.py"), TASKS / "doctor/aws.py")
    assert named == {action for action, _ in calls}
    assert named - EVERYBODY_MAY == allowed("controller-policy") - IMPLIED


def test_tags_are_written_by_exactly_the_calls_that_make_something(calls):
    [only] = of_action("ec2:CreateTags")
    tag = only["Condition"]["StringEquals"]
    tagging = {f"ec2:{name}" for name in tag["ec2:CreateAction"]} - {"ec2:RunInstances"}
    assert tagging == {action for action, words in calls if "TagSpecifications" in words}
    assert tag["aws:RequestTag/srift:deployment"] == "ours"


# Each key below the prefix, and what a machine may do with it.
KEYS = """
leases/r-1/AROA:i-1/out/records/r-1-000.json s3:PutObject
leases/r-1/AROA:i-1/out/records/a.b_c+d.json s3:PutObject
leases/r-1/AROA:i-1/in/plan.json s3:GetObject
data/abcd/cats/1.jpg s3:GetObject
code/x.tar.gz s3:GetObject
leases/r-1/AROA:i-2/out/x.json
leases/r-1/AROA:i-2/out/AROA:i-1/out/x.json
leases/r-1/AROA:i-2/out/records/AROA:i-1/out/x.json
leases/r-1/AROA:i-2/in/AROA:i-1/out/plan.json
database/x
"""


@pytest.mark.parametrize("row", KEYS.strip().splitlines())
def test_a_machine_reads_its_orders_and_writes_its_folder_though_a_star_of_iam_spans_slashes(
    row,
):
    key, _, action = row.partition(" ")
    node, resource = POLICIES["node-policy"]["Statement"], f"arn:aws:s3:::mine-1/team/srift/{key}"
    for each in ("s3:GetObject", "s3:PutObject"):
        assert allows(node, each, resource, "AROA:i-1") is (each == action)


def test_a_machine_lists_the_data_and_nothing_else_of_the_bucket():
    node = POLICIES["node-policy"]["Statement"]
    assert allowed("node-policy") == {"s3:GetObject", "s3:PutObject", "s3:ListBucket"}
    prefixes = ("team/srift/data/abcd/", "team/srift/", "", None)
    bucket = "s3:ListBucket", "arn:aws:s3:::mine-1", "AROA:i-1"
    assert [allows(node, *bucket, prefix) for prefix in prefixes] == [True, False, False, False]


def test_only_ec2_may_take_the_machines_role_and_only_machines_may_be_given_it():
    [trust] = POLICIES["node-trust"]["Statement"]
    assert trust["Principal"] == {"Service": "ec2.amazonaws.com"}
    assert trust["Action"] == "sts:AssumeRole"
    [passing] = of_action("iam:PassRole")
    assert passing["Resource"] == "arn:aws:iam::999988887777:role/node-profile"
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


MAKES = """
RunInstances instance
CreateFleet fleet
CreateLaunchTemplate launch-template
CreateSecurityGroup security-group
"""


@pytest.mark.parametrize("row", MAKES.strip().splitlines())
def test_what_is_made_carries_our_tag(row):
    action, made = row.split()
    resource = f"arn:aws:ec2:*:999988887777:{made}/*"
    found = [
        statement
        for statement in of_action(f"ec2:{action}")
        if resource in listed(statement["Resource"])
    ]
    conditions = [statement["Condition"] for statement in found]
    assert MADE_OURS in conditions and all(
        condition in (OURS, MADE_OURS) for condition in conditions
    )


ENDS_OR_CHANGES = """
TerminateInstances DeleteSecurityGroup DeleteLaunchTemplate DeletePlacementGroup
AuthorizeSecurityGroupIngress AuthorizeSecurityGroupEgress RevokeSecurityGroupEgress
"""


@pytest.mark.parametrize("action", ENDS_OR_CHANGES.split())
def test_nothing_is_ended_or_changed_that_does_not_carry_our_tag(action):
    [only] = of_action(f"ec2:{action}")
    assert only["Condition"] == OURS


def test_only_looking_is_allowed_everywhere_and_no_action_has_a_star():
    every = [statement for name in NAMES for statement in POLICIES[name]["Statement"]]
    refused = [statement["Sid"] for statement in every if statement["Effect"] != "Allow"]
    assert refused == ["NothingBelowAFolderOfAnotherMachine"]
    looks = re.compile(r"ec2:(Describe|GetSpotPlacementScores)\w*|(pricing|servicequotas):Get\w+")
    for statement in every:
        for action in listed(statement["Action"]) if statement["Effect"] == "Allow" else ():
            assert "*" not in action
            assert statement.get("Resource") != "*" or looks.fullmatch(action), action


def test_every_name_is_filled_in_and_braces_left_are_awss():
    assert set(re.findall(r"\{[a-z_:]+\}", json.dumps(POLICIES))) == {"{aws:userid}"}
    assert ACCOUNT in json.dumps(policies(EC2))
    with pytest.raises(SettingsError):
        policies(Ec2())
