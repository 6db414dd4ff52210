"""The emulated EC2 is as hard on its users as AWS is: what moto waves through is refused, and machines are real."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.world import World
from tests.world.machines import Fate

pytestmark = [pytest.mark.local, pytest.mark.skipif(bool(World.why_not()), reason=World.why_not())]
PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
TYPE, ZONE = "g4dn.xlarge", "us-east-1a"


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    with World(seed=3, minute_s=0.2) as world:
        yield world


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    shared.restore()
    shared.account.market.room.clear()
    alive = [one.id for one in shared.account.instances()]
    if alive:
        shared.client("ec2").terminate_instances(InstanceIds=alive)
    assert shared.alive() == [] and shared.faults() == []


def image(world: World) -> str:
    return str(world.client("ssm").get_parameter(Name=PARAMETER)["Parameter"]["Value"])


def run(world: World, script: str = "", count: int = 1, **words: Any) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {
        "ImageId": image(world), "InstanceType": TYPE, "MinCount": count, "MaxCount": count,
        "UserData": f"#!/bin/sh\n{script}\n", "InstanceInitiatedShutdownBehavior": "terminate",
        "IamInstanceProfile": {"Name": world.profile}, "Placement": {"AvailabilityZone": ZONE},
    }  # fmt: skip
    return list(world.client("ec2").run_instances(**asked | words)["Instances"])


def fleet(world: World, script: str, overrides: list[dict[str, Any]], count: int, **spot: Any) -> dict[str, Any]:
    ec2, name = world.client("ec2"), f"t{time.monotonic_ns()}"
    data = {
        "ImageId": image(world),
        "InstanceType": TYPE,
        "UserData": b64encode(f"#!/bin/sh\n{script}\n".encode()).decode(),
    }
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    return dict(
        ec2.create_fleet(
            Type="instant",
            SpotOptions={"AllocationStrategy": "price-capacity-optimized", **spot},
            TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": "spot"},
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "$Latest"},
                    "Overrides": overrides,
                }
            ],
        )
    )


def said(world: World, instance: dict[str, Any], what: str) -> str:
    until(lambda: what in world.console(instance["InstanceId"]))
    return world.console(instance["InstanceId"])


def until(answer: Callable[[], Any], within_s: float = 15.0) -> Any:
    end = time.monotonic() + within_s
    while not (value := answer()):
        assert time.monotonic() < end, "it did not come to be"
        threading.Event().wait(0.02)
    return value


def state(world: World, instance: dict[str, Any]) -> str:
    return str(world.account.instance(instance["InstanceId"]).state)


def refused(ask: Callable[[], Any]) -> str:
    with pytest.raises(ClientError) as error:
        ask()
    return str(error.value.response["Error"]["Code"])


def test_user_data_runs_as_root_at_the_private_address_of_the_instance(world: World) -> None:
    (one,) = run(world, "id -u; ip -4 addr show dev eth0; echo done")
    text = said(world, one, "done")
    assert text.startswith("0\n") and f"inet {one['PrivateIpAddress']}/16" in text


def test_what_a_machine_writes_is_its_own_and_goes_with_it(world: World) -> None:
    script = (
        "useradd --system srift-of-a-test && id -u srift-of-a-test && mkdir /var/lib/srift-t /opt/srift-t && echo done"
    )
    first, second = run(world, script, count=2)
    for one in (first, second):
        assert "done" in said(world, one, "done"), "the second machine found what the first had written"
    (third,) = run(world, "id srift-of-a-test || ls -d /var/lib/srift-t /opt/srift-t || echo clean")
    assert "clean" in said(world, third, "clean")


def test_machines_of_a_region_reach_each_other(world: World) -> None:
    (first,) = run(world, "exec python3 -m http.server 8000")
    (second,) = run(
        world,
        f"exec 2>&1; until bash -c 'echo >/dev/tcp/{first['PrivateIpAddress']}/8000'; do sleep 0.1; done; echo reached",
    )
    said(world, second, "reached")


def test_the_metadata_service_wants_a_token_and_knows_who_asks(world: World) -> None:
    script = """
python3 - <<'END'
import json, urllib.error, urllib.request
base = "http://169.254.169.254/latest/"
def get(path, **headers):
    try:
        asked = urllib.request.Request(base + "meta-data/" + path, headers=headers)
        return urllib.request.urlopen(asked, timeout=5).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code)
print("without:", get("instance-id"))
ask = urllib.request.Request(base + "api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
token = {"X-aws-ec2-metadata-token": urllib.request.urlopen(ask, timeout=5).read().decode()}
print("id:", get("instance-id", **token))
print("address:", get("local-ipv4", **token))
print("notice:", get("spot/instance-action", **token))
role = get("iam/security-credentials/", **token)
print("keys:", role, json.loads(get("iam/security-credentials/" + role, **token))["Code"])
print("end")
END"""
    (one,) = run(world, script)
    text = said(world, one, "end")
    assert (
        "without: 401" in text and f"id: {one['InstanceId']}" in text and f"address: {one['PrivateIpAddress']}" in text
    )
    assert "notice: 404" in text and f"keys: {world.profile} Success" in text


def test_a_machine_may_do_in_s3_what_its_role_allows_and_no_more(world: World) -> None:
    role_id = world.client("iam").get_role(RoleName=world.profile)["Role"]["RoleId"]
    (one,) = run(world)
    keys = until(lambda: world.account.role_keys(one["InstanceId"]))
    import boto3

    session = boto3.Session(keys.access_key, keys.secret_key, keys.token)
    s3 = session.client("s3", region_name="us-east-1", endpoint_url=world.endpoint)
    mine = f"srift/leases/x/{role_id}:{one['InstanceId']}"
    s3.put_object(Bucket=world.bucket, Key=f"{mine}/out/ready.json", Body=b"{}")
    refusals = {
        refused(lambda: s3.put_object(Bucket=world.bucket, Key=f"{mine}/in/plan.json", Body=b"{}")),
        refused(lambda: s3.put_object(Bucket=world.bucket, Key=f"srift/leases/x/{role_id}:i-other/out/a", Body=b"{}")),
        refused(lambda: s3.get_object(Bucket=world.bucket, Key=f"{mine}/in/not-there")),
        refused(lambda: s3.list_objects_v2(Bucket=world.bucket)),
    }
    assert refusals == {"AccessDenied"}
    assert refused(
        lambda: session.client("ec2", region_name="us-east-1", endpoint_url=world.endpoint).describe_instances()
    )
    forger = boto3.Session(keys.access_key, "another", keys.token).client(
        "s3", region_name="us-east-1", endpoint_url=world.endpoint
    )
    assert refused(lambda: forger.get_object(Bucket=world.bucket, Key=f"{mine}/in/x")) == "SignatureDoesNotMatch"


def test_terminating_ends_the_machine_before_the_answer(world: World) -> None:
    (one,) = run(world, "echo up; sleep 100")
    said(world, one, "up")
    world.client("ec2").terminate_instances(InstanceIds=[one["InstanceId"]])
    assert world.alive() == [] and state(world, one) == "terminated"


@pytest.mark.parametrize(
    "words", ["shutdown -h now", "shutdown -h +1 'the deadline'", "/usr/sbin/shutdown -h now", "poweroff"]
)
def test_a_machine_that_shuts_itself_down_is_terminated(world: World, words: str) -> None:
    (one,) = run(world, f"{words}; sleep 100")
    until(lambda: state(world, one) == "terminated")
    until(lambda: not world.alive())


def test_a_shutdown_that_is_taken_back_does_not_happen_and_stop_is_stop(world: World) -> None:
    (one,) = run(world, "shutdown -h +3; sleep 0.2; shutdown -c; sleep 1; echo alive; shutdown -h now",
                 InstanceInitiatedShutdownBehavior="stop")  # fmt: skip
    said(world, one, "alive")
    until(lambda: state(world, one) == "stopped")


def test_an_interruption_is_told_before_it_happens(world: World) -> None:
    (one,) = run(world, "echo up; sleep 100", InstanceMarketOptions={"MarketType": "spot"})
    said(world, one, "up")
    world.interrupt(one["InstanceId"], in_s=0.5)
    assert '"terminate"' in str(world.metadata.value(one["PrivateIpAddress"], "/latest/meta-data/spot/instance-action"))
    until(lambda: state(world, one) == "terminated")
    assert world.account.instance(one["InstanceId"]).state_reason.code == "Server.SpotInstanceTermination"


def test_a_token_buys_once(world: World) -> None:
    first = run(world, ClientToken="only-once")
    assert [one["InstanceId"] for one in run(world, ClientToken="only-once")] == [one["InstanceId"] for one in first]
    assert refused(lambda: run(world, ClientToken="only-once", count=2)) == "IdempotentParameterMismatch"
    assert len(world.account.instances()) == 1


def test_an_answer_may_be_lost_after_the_deed(world: World) -> None:
    world.refuse("ec2:RunInstances", "lost", after=True)
    assert run(world, ClientToken="heard-late"), "boto3 asks again by itself"
    assert len(world.account.instances()) == 1


def test_nonsense_and_want_are_refused(world: World) -> None:
    assert refused(lambda: run(world, InstanceType="g4dn.enormous")) == "InvalidParameterValue"
    assert refused(lambda: run(world, ImageId="ami-00000000000000000")) == "InvalidAMIID.NotFound"
    assert refused(lambda: run(world, Placement={"GroupName": "nobody's"})) == "InvalidPlacementGroup.Unknown"
    assert refused(lambda: run(world, "#" * 20_000)) == "InvalidParameterValue"
    assert refused(lambda: run(world, count=300)) == "VcpuLimitExceeded"
    world.lack(TYPE, "on-demand", ZONE)
    assert refused(lambda: run(world)) == "InsufficientInstanceCapacity"
    assert run(world, Placement={})[0]["Placement"]["AvailabilityZone"] != ZONE, "EC2 finds another zone itself"


def test_a_fleet_takes_the_cheapest_or_nothing(world: World) -> None:
    overrides = [{"InstanceType": TYPE, "AvailabilityZone": f"us-east-1{zone}"} for zone in "abcd"]
    usd = {
        one["AvailabilityZone"]: world.account.market.spot(TYPE, "us-east-1", one["AvailabilityZone"])
        for one in overrides
    }
    ranked = sorted(usd, key=lambda zone: usd[zone] or 9.9)
    got = fleet(world, "echo up", overrides, 2, SingleAvailabilityZone=True, MinTargetCapacity=2)
    assert [one["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"] for one in got["Instances"]] == ranked[
        :1
    ]
    ids = [i for one in got["Instances"] for i in one["InstanceIds"]]
    assert len(ids) == 2
    lifecycles = {one.lifecycle for one in world.account.instances()}
    assert lifecycles == {"spot"}
    until(lambda: all("up" in world.console(one) for one in ids))
    for zone in ranked:
        world.account.market.room[TYPE, "spot", zone] = 3
    short = fleet(world, "", overrides, 4, SingleAvailabilityZone=True, MinTargetCapacity=4)
    assert short["Instances"] == [] and {one["ErrorCode"] for one in short["Errors"]} == {
        "InsufficientInstanceCapacity"
    }
    partly = fleet(world, "", overrides, 4, SingleAvailabilityZone=True)
    assert sum(len(one["InstanceIds"]) for one in partly["Instances"]) == 3


def test_placement_groups_quotas_prices_and_scores_are_there(world: World) -> None:
    ec2 = world.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "k", "Value": "v"}]}]
    ec2.create_placement_group(GroupName="near", Strategy="cluster", TagSpecifications=tags)
    assert (
        refused(lambda: ec2.create_placement_group(GroupName="near", Strategy="cluster"))
        == "InvalidPlacementGroup.Duplicate"
    )
    found = ec2.describe_placement_groups(Filters=[{"Name": "tag:k", "Values": ["v"]}])["PlacementGroups"]
    assert [one["GroupName"] for one in found] == ["near"]
    run(world, Placement={"GroupName": "near", "AvailabilityZone": ZONE})
    assert refused(lambda: ec2.delete_placement_group(GroupName="near")) == "InvalidPlacementGroup.InUse"
    quota = world.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode="L-DB2E81BA")["Quota"]
    assert quota["Value"] == 768.0 and "G and VT" in quota["QuotaName"]
    rows = ec2.describe_spot_price_history(InstanceTypes=[TYPE], ProductDescriptions=["Linux/UNIX"])["SpotPriceHistory"]
    assert {one["AvailabilityZone"] for one in rows} >= {"us-east-1a", "us-east-1b"}
    scores = ec2.get_spot_placement_scores(InstanceTypes=[TYPE], TargetCapacity=2, RegionNames=["us-east-1"])
    assert {one["Score"] for one in scores["SpotPlacementScores"]} == {9}


def test_some_machines_never_boot_and_some_hang() -> None:
    fates = iter([Fate.NEVER, Fate.HANGS, Fate.BOOTS])
    with World(seed=4, fate=lambda _: next(fates)) as world:
        never, hangs, boots = run(world, "echo up", count=3)
        said(world, boots, "up")
        assert world.console(never["InstanceId"]) == "" and "up" not in world.console(hangs["InstanceId"])
        assert len(world.account.instances("running")) == 3, "EC2 says that all run"
