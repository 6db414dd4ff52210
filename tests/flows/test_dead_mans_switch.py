"""deployments/dead-mans-switch.yaml: its code against emulated EC2, its rights, its template."""

import re
import time
from datetime import UTC, datetime
from pathlib import Path

import boto3
import pytest
import yaml
from moto.cloudformation.utils import yaml_tag_constructor

from tasks.providers.ec2.settings import Ec2

FILE = Path(__file__).parents[2] / "deployments/dead-mans-switch.yaml"
HOUR = 3600.0
HERE, ELSEWHERE = "us-east-1", "eu-west-1"


class _CloudFormation(yaml.SafeLoader):
    """YAML with the short forms of CloudFormation's functions, as {"Ref": ...}."""


_CloudFormation.add_multi_constructor("", yaml_tag_constructor)
TEMPLATE = yaml.load(FILE.read_text(), _CloudFormation)
SOURCE = TEMPLATE["Resources"]["Switch"]["Properties"]["Code"]["ZipFile"]
LAMBDA = {}
exec(compile(SOURCE, FILE, "exec"), LAMBDA)


@pytest.fixture
def aws(no_credentials, moto, monkeypatch):
    variables = {"DEPLOYMENT": "ours", "GRACE_MINUTES": "5", "OLDEST_HOURS": "169"}
    variables |= {"REGIONS": f"{HERE},{ELSEWHERE}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def launch(overdue_s, region=HERE, deployment="ours"):
    """Start a machine whose deadline was so many seconds ago."""
    values = {"srift:deadline": str(int(time.time() - overdue_s)), "srift:deployment": deployment}
    tags = [{"Key": key, "Value": value} for key, value in values.items() if value]
    made = boto3.client("ec2", region_name=region).run_instances(
        ImageId="ami-12c6146b",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    return made["Instances"][0]["InstanceId"]


def alive(region):
    found = boto3.client("ec2", region_name=region).describe_instances()["Reservations"]
    instances = [machine for reservation in found for machine in reservation["Instances"]]
    return {machine["InstanceId"] for machine in instances if machine["State"]["Name"] == "running"}


def test_overdue_machines_of_this_deployment_are_ended_in_every_region(aws):
    overdue = {launch(400), launch(9999, ELSEWHERE)}
    kept = {
        launch(-60),
        launch(200),
        launch(9999, deployment="another"),
        launch(9999, deployment=""),
    }
    assert set(LAMBDA["handler"]({}, None)["ended"]) == overdue
    assert alive(HERE) == kept and alive(ELSEWHERE) == set()
    assert LAMBDA["handler"]({}, None)["ended"] == []


@pytest.mark.parametrize(
    "deadline", [None, "", "soon", "nan", "-1", "12", "1e9", "\u0661" * 10, "9999999999"]
)
def test_an_unreadable_deadline_counts_by_age(deadline):
    now = int(time.time())
    tags = [] if deadline is None else [{"Key": "srift:deadline", "Value": deadline}]
    for age_h, ended in ((168, False), (169, True)):
        instance = {"LaunchTime": datetime.fromtimestamp(now - age_h * HOUR, UTC), "Tags": tags}
        assert bool(LAMBDA["why"](instance, now, 300.0, 169 * HOUR)) == ended


def test_no_launch_may_be_that_old():
    longest = max(
        bound.le for bound in Ec2.model_fields["max_minutes"].metadata if hasattr(bound, "le")
    )
    assert TEMPLATE["Parameters"]["OldestHours"]["Default"] * 60 > longest


def test_a_failing_region_and_machine_do_not_save_the_others(aws, monkeypatch):
    guarded, overdue = launch(9999), launch(9999, ELSEWHERE)
    real = boto3.client
    real("ec2", region_name=HERE).modify_instance_attribute(
        InstanceId=guarded, DisableApiTermination={"Value": True}
    )

    def client(service, region_name):
        if region_name == "nowhere":
            raise RuntimeError
        return real(service, region_name=region_name)

    with monkeypatch.context() as patched:
        patched.setenv("REGIONS", f"nowhere,{HERE}, {ELSEWHERE}")
        patched.setattr(boto3, "client", client)
        with pytest.raises(RuntimeError, match=f"nowhere.*{guarded}"):
            LAMBDA["handler"]({}, None)
    assert overdue not in alive(ELSEWHERE)


def test_its_role_may_end_only_what_carries_the_tag():
    [policy] = TEMPLATE["Resources"]["Role"]["Properties"]["Policies"]
    look, end, log = policy["PolicyDocument"]["Statement"]
    assert set(re.findall(r"ec2\.([a-z]+_[a-z]+s)\(", SOURCE)) == {"terminate_instances"}
    assert (look["Action"], end["Action"]) == ("ec2:DescribeInstances", "ec2:TerminateInstances")
    tag = {"aws:ResourceTag/srift:deployment": {"Ref": "Deployment"}}
    assert end["Condition"] == {"StringEquals": tag} and log["Resource"] != "*"
