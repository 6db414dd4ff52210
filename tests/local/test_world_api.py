"""The emulated EC2 is as hard on its users as AWS is: what moto waves through is refused, what it lacks is there."""

from __future__ import annotations

import boto3
import pytest

from tests.local.emulated import TYPE, ZONE, fleet, needs_machines, refused, run, until
from tests.world import World

pytestmark = [pytest.mark.local, needs_machines]


def test_a_machine_may_do_in_s3_what_its_role_allows_and_no_more(world: World) -> None:
    role_id = world.client("iam").get_role(RoleName=world.profile)["Role"]["RoleId"]
    (one,) = run(world)
    keys = until(lambda: world.account.role_keys(one["InstanceId"]))
    session = boto3.Session(keys.access_key, keys.secret_key, keys.token)
    s3 = session.client("s3", region_name="us-east-1", endpoint_url=world.endpoint)
    mine = f"srift/leases/x/{role_id}:{one['InstanceId']}"
    s3.put_object(Bucket=world.bucket, Key=f"{mine}/out/ready.json", Body=b"{}")
    refusals = {
        refused(lambda: s3.put_object(Bucket=world.bucket, Key=f"{mine}/in/plan.json", Body=b"{}")),
        refused(
            lambda: s3.put_object(
                Bucket=world.bucket, Key=f"srift/leases/x/{role_id}:i-other/out/a", Body=b"{}"
            )
        ),
        refused(lambda: s3.get_object(Bucket=world.bucket, Key=f"{mine}/in/not-there")),
        refused(lambda: s3.list_objects_v2(Bucket=world.bucket)),
    }
    assert refusals == {"AccessDenied"}
    assert refused(
        lambda: session.client(
            "ec2", region_name="us-east-1", endpoint_url=world.endpoint
        ).describe_instances()
    )
    forger = boto3.Session(keys.access_key, "another", keys.token).client(
        "s3", region_name="us-east-1", endpoint_url=world.endpoint
    )
    assert (
        refused(lambda: forger.get_object(Bucket=world.bucket, Key=f"{mine}/in/x"))
        == "SignatureDoesNotMatch"
    )


def test_a_token_buys_once(world: World) -> None:
    first = run(world, ClientToken="only-once")
    assert [one["InstanceId"] for one in run(world, ClientToken="only-once")] == [
        one["InstanceId"] for one in first
    ]
    assert (
        refused(lambda: run(world, ClientToken="only-once", count=2))
        == "IdempotentParameterMismatch"
    )
    assert len(world.account.instances()) == 1


def test_an_answer_may_be_lost_after_the_deed(world: World) -> None:
    world.lose("ec2:RunInstances")
    assert run(world, ClientToken="heard-late"), "boto3 asks again by itself"
    assert len(world.account.instances()) == 1


def test_nonsense_and_want_are_refused(world: World) -> None:
    assert refused(lambda: run(world, InstanceType="g4dn.enormous")) == "InvalidParameterValue"
    assert refused(lambda: run(world, ImageId="ami-00000000000000000")) == "InvalidAMIID.NotFound"
    assert (
        refused(lambda: run(world, Placement={"GroupName": "nobody's"}))
        == "InvalidPlacementGroup.Unknown"
    )
    assert refused(lambda: run(world, "#" * 20_000)) == "InvalidParameterValue"
    assert refused(lambda: run(world, count=300)) == "VcpuLimitExceeded"
    world.lack(TYPE, "on-demand", ZONE)
    assert refused(lambda: run(world)) == "InsufficientInstanceCapacity"
    assert run(world, Placement={})[0]["Placement"]["AvailabilityZone"] != ZONE, (
        "EC2 finds another zone itself"
    )


def test_a_fleet_takes_the_cheapest_or_nothing(world: World) -> None:
    overrides = [{"InstanceType": TYPE, "AvailabilityZone": f"us-east-1{zone}"} for zone in "abcd"]
    usd = {
        one["AvailabilityZone"]: world.account.market.spot(
            TYPE, "us-east-1", one["AvailabilityZone"]
        )
        for one in overrides
    }
    ranked = sorted(usd, key=lambda zone: usd[zone] or 9.9)
    got = fleet(world, "echo up", overrides, 2)
    assert [
        one["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"]
        for one in got["Instances"]
    ] == ranked[:1]
    ids = [i for one in got["Instances"] for i in one["InstanceIds"]]
    assert len(ids) == 2
    lifecycles = {one.lifecycle for one in world.account.instances()}
    assert lifecycles == {"spot"}
    until(lambda: all("up" in world.console(one) for one in ids))
    for zone in ranked:
        world.account.market.room[TYPE, "spot", zone] = 3
    short = fleet(world, "", overrides, 4)
    assert short["Instances"] == [] and {one["ErrorCode"] for one in short["Errors"]} == {
        "InsufficientInstanceCapacity"
    }


def test_placement_groups_quotas_prices_and_scores_are_there(world: World) -> None:
    ec2 = world.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "k", "Value": "v"}]}]
    ec2.create_placement_group(GroupName="near", Strategy="cluster", TagSpecifications=tags)
    assert (
        refused(lambda: ec2.create_placement_group(GroupName="near", Strategy="cluster"))
        == "InvalidPlacementGroup.Duplicate"
    )
    found = ec2.describe_placement_groups(Filters=[{"Name": "tag:k", "Values": ["v"]}])[
        "PlacementGroups"
    ]
    assert [one["GroupName"] for one in found] == ["near"]
    run(world, Placement={"GroupName": "near", "AvailabilityZone": ZONE})
    assert (
        refused(lambda: ec2.delete_placement_group(GroupName="near"))
        == "InvalidPlacementGroup.InUse"
    )
    quota = world.client("service-quotas").get_service_quota(
        ServiceCode="ec2", QuotaCode="L-DB2E81BA"
    )["Quota"]
    assert quota["Value"] == 768.0 and "G and VT" in quota["QuotaName"]
    rows = ec2.describe_spot_price_history(
        InstanceTypes=[TYPE], ProductDescriptions=["Linux/UNIX"]
    )["SpotPriceHistory"]
    assert {one["AvailabilityZone"] for one in rows} >= {"us-east-1a", "us-east-1b"}
    scores = ec2.get_spot_placement_scores(
        InstanceTypes=[TYPE], TargetCapacity=2, RegionNames=["us-east-1"]
    )
    assert {one["Score"] for one in scores["SpotPlacementScores"]} == {9}
