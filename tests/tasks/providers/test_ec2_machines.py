"""Machines of EC2 under a lease: the ladder climbed, gangs whole or none, nothing bought twice or left running."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from models.cloud import Cluster
from tasks.ec2_settings import Ec2
from tasks.providers.base import NoCapacity, NotSupported, ProviderError, RunningCluster
from tasks.providers.ec2_launch import LadderUsedUp
from tests.ec2_home import Home
from tests.fake_ec2 import KILLED, NOON, SILENT, Fault, Killed
from tests.fake_ec2_account import ARM, SPOT_USD


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_spot_cluster_comes_up_in_its_zone_and_is_gone_afterwards(home: Home) -> None:
    with home.acquire(home.two(), deadline_s=7200.0) as running:
        same: RunningCluster = running
        assert same.addresses == ["10.0.0.1", "10.0.0.2"]
        assert [one.alive for one in running.nodes()] == [True, True]
        assert {one.zone for one in running.cluster.members} == {"us-east-1a"}
        [held] = home.provider.leases()
        assert held.controller_alive and held.cluster == "2xg4dn.12xlarge"
        assert [one.instance_id for one in home.world.alive()] == [
            one.instance_id for one in running._launcher.lease.current
        ]
        assert home.world.s3.read("r-1", home.world.alive()[1].instance_id, "node.json") == {"node": 1, "nodes": 2}
        home.world.pass_s(3600 - 7)
        usd = running.usd_so_far()
    assert usd == pytest.approx(2 * SPOT_USD["a"], rel=0.03), "an hour of two machines, with their volumes"
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.market) == ("released", "spot") and ended.usd == pytest.approx(usd, rel=0.01)
    assert home.world.account.templates == {} and home.world.account.groups == {}
    home.provider.forget("r-1")
    assert home.provider.ended() == []


def test_what_is_launched_is_closed_encrypted_tagged_and_ends_itself(home: Home) -> None:
    with home.acquire(home.two("on-demand")):
        one = home.world.alive()[0]
        [group] = home.world.account.groups.values()
    assert one.request["MetadataOptions"]["HttpTokens"] == "required" and "KeyName" not in one.request
    assert one.request["BlockDeviceMappings"][0]["Ebs"]["Encrypted"]
    assert one.request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert one.request["NetworkInterfaces"][0]["InterfaceType"] == "efa" and "Placement" in one.request
    assert one.tags["srift:lease"] == "r-1" and one.tags["srift:deployment"] == "srift"
    assert float(one.tags["srift:deadline"]) == (NOON + timedelta(seconds=1800)).timestamp()
    ends = one.ends_itself_at()
    assert ends is not None and ends <= one.launched_at + timedelta(seconds=1800 + 65)
    assert [set(rule) for rule in group["in"]] == [{"IpProtocol", "UserIdGroupPairs"}], "admits itself alone"
    assert "everything" not in group["out"]


def test_every_rung_refused_is_no_capacity_with_a_refusal_each_and_nothing_alive(home: Home) -> None:
    for zone in "abc":
        home.world.capacity |= {(f"us-east-1{zone}", "spot"): 1, (f"us-east-1{zone}", "on-demand"): 1}
    with pytest.raises(LadderUsedUp) as refused, home.acquire(home.two()):
        pass
    rungs = [(one.market, one.zone) for one in refused.value.refusals]
    assert rungs[0] == ("spot", "us-east-1a"), "as asked, before the cheaper ones"
    assert rungs[1:3] == [("spot", "us-east-1c"), ("spot", "us-east-1b")], "then by price"
    assert {market for market, _ in rungs[3:]} == {"on-demand"} and len(rungs) == 6
    assert all(one.code == "InsufficientInstanceCapacity" for one in refused.value.refusals)
    assert "secret" not in str(refused.value)
    assert home.world.bought() == 0 and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.usd, len(ended.refusals)) == ("refused", 0.0, 6), "kept until they are rows"


def test_a_gang_whose_second_group_is_refused_gives_the_first_back(home: Home) -> None:
    home.world.capacity[("us-east-1a", "spot")] = 2
    with home.acquire(home.mixed()) as running:
        assert {one.zone for one in running.cluster.members} == {"us-east-1c"}
        assert len(home.world.alive()) == 3 and home.world.bought() == 5
        assert [one.zone for one in running.refusals] == ["us-east-1a"]
        assert [one.zone for one in home.world.alive()] == ["us-east-1c"] * 3
    [ended] = home.provider.ended()
    assert ended.usd is not None and ended.usd > 2 * SPOT_USD["a"] * 60 / 3600, "those given back cost a minute each"


def test_a_quota_refusal_goes_to_the_other_market_at_once(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:CreateFleet", code="MaxSpotInstanceCountExceeded", times=9)]
    with home.acquire(home.two()) as running:
        assert {one.market for one in running.cluster.members} == {"on-demand"}
    assert home.world.count("ec2:CreateFleet") == 1


def test_a_price_above_the_bid_climbs_on(home: Home) -> None:
    cluster = home.two()
    home.world.account.spot["us-east-1a"] = 3.0
    with home.acquire(cluster) as running:
        assert running.cluster.members[0].zone == "us-east-1c"
        assert running.refusals[0].code == "SpotMaxPriceTooLow"


@pytest.mark.parametrize("after", [False, True], ids=["not served", "served"])
@pytest.mark.parametrize("code", ["RequestLimitExceeded", SILENT])
def test_throttling_and_silence_are_tried_again_with_the_same_token(home: Home, code: str, after: bool) -> None:
    home.world.faults = [Fault(action="ec2:CreateFleet", code=code, times=3, after=after)]
    with home.acquire(home.two()) as running:
        assert len(running.addresses) == 2
    assert home.world.bought() == 2


def test_silence_to_the_end_is_an_error_and_what_was_bought_unheard_is_ended(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:RunInstances", code=SILENT, times=99, after=True)]
    with pytest.raises(ProviderError, match="did not answer"), home.acquire(home.two("on-demand")):
        pass
    assert home.world.bought() == 2 and home.world.alive() == []
    assert len(home.provider.leases()) == 1, "it may be served late: the reaper looks again"
    assert home.provider.ended() == []
    home.world.pass_s(300)
    home.provider.reap(home.world.now)
    assert home.provider.leases() == []


@pytest.mark.parametrize("action", ["ec2:RunInstances", "ec2:CreateFleet"])
def test_a_controller_killed_between_asking_and_hearing_buys_nothing_twice(home: Home, action: str) -> None:
    cluster = home.two("on-demand" if action == "ec2:RunInstances" else "spot")
    home.world.faults = [Fault(action=action, code=KILLED, after=True)]
    home.killed_in(cluster)
    assert home.world.bought() == 2
    with home.acquire(cluster) as running:
        assert len(running.addresses) == 2
        assert home.world.bought() == 2, "the same machines, taken up again"
    assert home.world.alive() == []


@pytest.mark.parametrize("after", [False, True], ids=["before it is served", "after"])
@pytest.mark.parametrize("resumed", [False, True], ids=["then the reaper", "then another controller"])
def test_a_controller_killed_at_any_call_buys_nothing_twice_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, resumed: bool
) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    whole = Home(tmp_path / "whole")
    cluster = whole.mixed()
    before = len(whole.world.calls)
    with whole.acquire(cluster):
        pass
    calls = whole.world.calls[before:]
    assert len(calls) > 30
    for number, call in enumerate(calls):
        home = Home(tmp_path / str(number))
        cluster = home.mixed()
        home.world.faults = [Fault(action="", code=KILLED, skip=number, after=after)]
        with pytest.raises(Killed), home.acquire(cluster):
            pass
        home.die()
        if resumed:
            with suppress(ProviderError), home.acquire(cluster):
                assert len(home.world.alive()) == 3
        else:
            home.world.pass_s(130)
        home.provider.reap(home.world.now)
        assert home.world.bought() <= 3, (number, call)
        assert home.world.alive() == [] and home.provider.leases() == [], (number, call)


@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_what_was_asked_for_and_never_served_is_not_served_late_with_the_time_it_had_then(
    home: Home, market: str
) -> None:
    cluster, asked_at = home.two(market), home.world.now
    home.world.faults = [Fault(action="ec2:RunInstances" if market == "on-demand" else "ec2:CreateFleet", code=KILLED)]
    home.killed_in(cluster)
    home.world.pass_s(600)
    with home.acquire(cluster):
        ends = [one.ends_itself_at() for one in home.world.alive()]
        assert len(ends) == 2 and all(at and at <= asked_at + timedelta(seconds=1800 + 65) for at in ends)


def test_a_lease_that_is_held_is_not_taken_twice(home: Home) -> None:
    cluster = home.two()
    with home.acquire(cluster), pytest.raises(ProviderError, match="exists already"), home.acquire(cluster):
        pass
    assert home.world.bought() == 2


def test_a_machine_that_never_comes_up_is_given_back_and_the_next_zone_asked(home: Home) -> None:
    home.world.boot_s = float("inf")
    with pytest.raises(NoCapacity, match="not running after 300 s"), home.acquire(home.two(), deadline_s=7200):
        pass
    assert home.world.alive() == []


def test_terminating_that_fails_a_few_times_is_tried_again(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=3)]
    with home.acquire(home.two()):
        pass
    assert home.world.alive() == []


def test_terminating_that_goes_on_failing_is_said_and_left_to_the_reaper(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=6)]
    with pytest.raises(ProviderError, match=r"could not be ended.*srift reap"), home.acquire(home.two()):
        pass
    assert len(home.world.alive()) == 2 and len(home.provider.leases()) == 1
    [sentence] = home.provider.reap(home.world.now)
    assert "2 machines in us-east-1 were ended" in sentence
    assert home.world.alive() == [] and [one.outcome for one in home.provider.ended()] == ["released"]


def test_climbing_stops_where_a_rung_cannot_be_given_back(home: Home) -> None:
    home.world.capacity[("us-east-1a", "spot")] = 2
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=99)]
    with pytest.raises(ProviderError, match="nothing more is asked for"), home.acquire(home.mixed()):
        pass
    assert home.world.bought() == 2


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(action="iam:GetInstanceProfile", code="NoSuchEntity"), "instance_profile"),
        (Fault(action="ec2:DescribeImages", code="InvalidAMIID.NotFound"), "ami_parameter"),
        (Fault(action="ssm:GetParameter", code="ParameterNotFound"), "ami_parameter"),
        (Fault(action="s3:ListBucket", code="NoSuchBucket"), "bucket"),
        (Fault(action="ec2:RunInstances", code="UnauthorizedOperation"), "may not call ec2:RunInstances"),
        (Fault(action="ec2:DescribeSubnets", code="ExpiredToken"), "sign in again"),
    ],
)
def test_what_is_wrong_with_the_account_is_said_with_the_fix(home: Home, fault: Fault, says: str) -> None:
    home.world.faults = [fault]
    with pytest.raises(ProviderError, match=says) as refused, home.acquire(home.two("on-demand")):
        pass
    assert "very-secret-key" not in str(refused.value)
    assert home.world.alive() == [] and home.provider.leases() == []


def test_quotas_are_read_before_asking_and_named(home: Home) -> None:
    home.world.account.vcpus = {"L-3819A6DF": 48.0, "L-DB2E81BA": 64.0}
    says = r"96 vCPUs are wanted and the quota .*L-3819A6DF.* is 48"
    with pytest.raises(NoCapacity, match=says) as refused, home.acquire(home.two()):
        pass
    assert "L-DB2E81BA" in str(refused.value) and home.world.count("ec2:CreateFleet") == 0
    assert "L-DB2E81BA" in home.provider.over_quota(home.two("on-demand"))


def test_an_arm_type_and_a_home_without_a_bucket_are_refused_with_a_sentence(home: Home, tmp_path: Path) -> None:
    member = home.offer()
    arm = Cluster.of((1, replace(member, instance_type=replace(member.instance_type, name=ARM))))
    with pytest.raises(NotSupported, match="ARM"), home.acquire(arm):
        pass
    bare = Home(tmp_path / "bare", choices=Ec2(instance_types=("g4dn.*",)))
    with pytest.raises(NotSupported, match=r"\[ec2\] bucket"), bare.acquire(home.two()):
        pass
    assert any("bucket" in one for one in bare.provider.limits())
    assert not any("bucket" in one for one in home.provider.limits())


def test_a_prospect_is_every_request_and_the_worst_case_and_costs_nothing(home: Home) -> None:
    cluster = home.two()
    seen = home.provider.prospect(cluster, lease_id="r-1", deadline_s=1800.0)
    assert str(seen.rungs[0]) == "2xg4dn.12xlarge spot in us-east-1a"
    assert home.world.bought() == 0 and home.provider.leases() == []
    with home.acquire(cluster) as running:
        home.world.pass_s(1800.0)
        usd = running.usd_so_far()
        assert usd is not None and usd < seen.worst_usd(1800.0)
    dearest = 2 * 3.912 * 1800 / 3600
    assert dearest < seen.worst_usd(1800.0) < 1.5 * dearest


def test_what_is_accepted_and_does_not_happen_is_seen(home: Home) -> None:
    with pytest.raises(ProviderError, match="do not end: i-"), home.acquire(home.two()):
        home.world.immortal = True
    assert len(home.provider.leases()) == 1
    home.world.immortal = False
    home.provider.reap(home.world.now)
    assert home.world.alive() == []


def test_a_gang_that_comes_short_is_given_back(home: Home) -> None:
    home.world.short = 1
    with home.acquire(home.two()) as running:
        assert {one.market for one in running.cluster.members} == {"on-demand"}
        assert len(home.world.alive()) == 2


def test_a_controller_killed_while_giving_a_rung_back_leaves_none_of_it(home: Home) -> None:
    home.world.capacity[("us-east-1a", "spot")] = 2
    home.world.faults = [Fault(action="ec2:TerminateInstances", code=KILLED)]
    cluster = home.mixed()
    home.killed_in(cluster)
    with home.acquire(cluster) as running:
        assert [one.zone for one in home.world.alive()] == ["us-east-1c"] * 3
        assert len(running.addresses) == 3
