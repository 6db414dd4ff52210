"""Machines of EC2 under a lease: gangs whole or none, nothing bought twice or left running."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks.providers.base import NoCapacity, NotSupported, ProviderError
from tasks.providers.ec2.attempts import SPOT_MARGIN
from tasks.providers.ec2.settings import Ec2
from tests.ec2_home import CHOICES, Home, worst_usd
from tests.fake_ec2 import KILLED, NOON, SILENT, Fault, Killed
from tests.fake_ec2_account import ON_DEMAND_USD, SPOT_USD

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


def refused(home: Home, cluster: Cluster | None = None) -> ProviderError:
    with pytest.raises(ProviderError) as raised, home.acquire(cluster or home.two()):
        pass
    assert "secret" not in str(raised.value)
    return raised.value


def paying(home: Home, **terms: Any) -> Home:
    """The same home under other settings."""
    return Home(home.path, home.world, Ec2.model_validate(CHOICES.model_dump() | terms))


def test_a_spot_cluster_comes_up_in_the_cheapest_zone_and_is_gone_afterwards(home: Home) -> None:
    with home.acquire(home.two(), deadline_s=7200.0) as running:
        assert running.addresses == ["10.0.0.1", "10.0.0.2"]
        assert [node.alive for node in running.nodes()] == [True, True]
        assert {offer.zone for offer in running.cluster.members} == {"us-east-1c"}
        [held] = home.provider.leases()
        assert held.controller_alive and held.cluster == "2xg4dn.12xlarge"
        node = home.reads(home.world.alive()[1].instance_id, "node.json")
        assert node == {"node": 1, "nodes": 2}
        home.world.pass_s(3600 - 7)
        usd = running.usd_so_far()
        assert held.usd_until(home.world.now) == usd > 2 * SPOT_USD["c"]
    assert usd == pytest.approx(2 * SPOT_USD["c"], rel=0.03)
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.market) == ("released", "spot")
    assert ended.usd == pytest.approx(usd, rel=0.01)
    assert home.world.account.templates == {} and home.world.account.groups == {}
    home.provider.forget("r-1")
    assert home.provider.ended() == []


def test_what_is_launched_is_closed_encrypted_tagged_and_ends_itself(home: Home) -> None:
    with home.acquire(home.two("on-demand")):
        one = home.world.alive()[0]
        [group] = home.world.account.groups.values()
    assert one.request["MetadataOptions"]["HttpTokens"] == "required"
    assert "KeyName" not in one.request and "Placement" in one.request
    assert one.request["BlockDeviceMappings"][0]["Ebs"]["Encrypted"]
    assert one.request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert one.request["NetworkInterfaces"][0]["InterfaceType"] == "efa"
    assert one.tags["srift:lease"] == "r-1" and one.tags["srift:deployment"] == "srift"
    assert float(one.tags["srift:deadline"]) == (NOON + timedelta(seconds=1800)).timestamp()
    ends = one.ends_itself_at()
    assert ends is not None and ends <= one.launched_at + timedelta(seconds=1800 + 65)
    assert [set(rule) for rule in group["in"]] == [{"IpProtocol", "UserIdGroupPairs"}]
    assert "everything" not in group["out"]


def test_one_fleet_a_market_and_a_refusal_for_each(home: Home) -> None:
    home.world.capacity = {(zone, one): 1 for zone in ZONES for one in ("spot", "on-demand")}
    assert isinstance(refused(home), NoCapacity)
    assert home.world.count("ec2:CreateFleet") == 2 and home.world.bought() == 0
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.usd, len(ended.refusals)) == ("refused", 0.0, 2)


def test_one_fleet_chooses_among_the_zones_and_a_replacement_stays_in_its_zone(home: Home) -> None:
    home.world.capacity |= {("us-east-1a", "spot"): 0, ("us-east-1c", "spot"): 1}
    with home.acquire(home.two()) as running:
        found = {(offer.zone, offer.usd_per_hour) for offer in running.cluster.members}
        assert found == {("us-east-1b", SPOT_USD["b"])}
        assert home.leases.all()[0].refusals == () and home.world.count("ec2:CreateFleet") == 1
        home.world.interrupt(home.world.alive()[1].instance_id)
        home.world.capacity.clear()
        assert running.replace(1)
        assert {machine.zone for machine in home.world.alive()} == {"us-east-1b"}


def test_a_gang_whose_second_group_is_refused_gives_the_first_back(home: Home) -> None:
    home.world.capacity[("us-east-1c", "spot")] = 2
    with home.acquire(home.mixed()) as running:
        assert {offer.market for offer in running.cluster.members} == {"on-demand"}
        assert len(home.world.alive()) == 3 and home.world.bought() == 5
        assert len({machine.zone for machine in home.world.alive()}) == 1
    [ended] = home.provider.ended()
    assert ended.usd is not None and ended.usd > 2 * SPOT_USD["c"] * 60 / 3600


def test_a_price_above_the_bid_goes_on_demand_and_a_gang_that_comes_short_is_given_back(
    home: Home,
) -> None:
    cluster = home.two()
    home.world.account.spot |= dict.fromkeys(ZONES, 3.0)
    with home.acquire(cluster) as running:
        assert running.cluster.members[0].market == "on-demand"
    home.world.account.spot |= dict.fromkeys(ZONES, 1.0)
    home.world.short = 1
    refused(home)
    assert home.world.alive() == []


@pytest.mark.parametrize(
    ("terms", "usd"),
    [
        ({"discounts": {"g4dn.*": {"spot": 0.25}}}, 0.75 * SPOT_USD["c"]),
        ({"prices": {"g4dn.12xlarge": {"spot_usd_per_hour": 0.6}}}, 0.6),
    ],
)
def test_the_bid_is_of_the_public_price_and_the_bill_of_the_own(
    home: Home, terms: dict[str, Any], usd: float
) -> None:
    home = paying(home, **terms)
    with home.acquire(home.two()) as running:
        assert {machine.market for machine in home.world.alive()} == {"spot"}
        assert [offer.usd_per_hour for offer in running.cluster.members] == [pytest.approx(usd)] * 2
        home.world.pass_s(3600.0)
        spent = running.usd_so_far()
        assert spent is not None and 2 * usd < spent < 2 * (usd + 0.05) * 3607 / 3600
    [attempt, _] = home.attempts(home.two())
    assert attempt.groups[0].bids == {
        zone: pytest.approx(SPOT_MARGIN * SPOT_USD[zone[-1]]) for zone in ZONES
    }


def test_a_discount_on_demand_lowers_the_bill_and_not_the_worst_case(home: Home) -> None:
    def most_usd() -> float:
        return worst_usd(home.attempts(home.two("on-demand")), 100, 1800.0)

    public = most_usd()
    home = paying(home, discounts={"*": 0.6})
    assert most_usd() == public
    with home.acquire(home.two("on-demand")) as running:
        home.world.pass_s(3600.0)
        assert (running.usd_so_far() or 99.0) < 2 * 0.45 * ON_DEMAND_USD
    home = paying(home, prices={"g4dn.12xlarge": {"on_demand_usd_per_hour": 2 * ON_DEMAND_USD}})
    assert most_usd() > 1.9 * public


def test_an_image_that_is_larger_than_the_volume_is_refused_before_anything_is_bought(
    home: Home,
) -> None:
    assert isinstance(refused(paying(home, volume_gib=44)), NotSupported)
    assert home.world.count("ec2:CreateFleet") == 0 and home.leases.ids() == []
    with paying(home, volume_gib=45).acquire(home.two()):
        ebs = home.world.alive()[0].request["BlockDeviceMappings"][0]["Ebs"]
        assert ebs["VolumeSize"] == 45


@pytest.mark.parametrize("name", ["g5g.xlarge", "p3dn.24xlarge"])
def test_a_type_that_the_image_does_not_run_on_is_refused(home: Home, name: str) -> None:
    member = home.offer()
    kind = replace(member.instance_type, name=name, device="V100")
    other = Cluster.of((1, replace(member, instance_type=kind)))
    assert isinstance(refused(home, other), NotSupported)


def test_a_home_without_a_bucket_and_a_cluster_of_two_markets_are_refused(
    home: Home, tmp_path: Path
) -> None:
    bare = Home(tmp_path / "bare", choices=Ec2(instance_types=("g4dn.*",)))
    assert isinstance(refused(bare, home.two()), NotSupported)
    assert len(bare.provider.limits()) == len(home.provider.limits()) + 1
    both = Cluster.of((1, home.offer()), (1, home.offer(market="on-demand")))
    assert isinstance(refused(home, both), NotSupported)


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("code", ["InternalError", SILENT, "RequestLimitExceeded"])
def test_a_fleet_without_an_answer_is_looked_for_by_its_tag(
    home: Home, code: str, shows: bool
) -> None:
    """Nothing else is asked for while its machines may still come."""
    home.world.lag_s, home.world.unheard = 60.0, shows
    if code == "InternalError":
        home.world.fleet_errors = [[code]]
    else:
        home.world.faults = [Fault(action="ec2:CreateFleet", code=code, times=6, after=shows)]
    with home.acquire(home.two()) as running:
        got = {offer.market for offer in running.cluster.members}
        assert got == ({"spot"} if shows else {"on-demand"})
        assert len(home.world.alive()) == 2
    assert home.world.bought() == 2 and home.world.alive() == []


def test_a_fleet_that_fails_for_good_ends_the_launch(home: Home) -> None:
    home.world.fleet_errors = [["InsufficientInstanceCapacity", "NeverHeardOf"]]
    assert "NeverHeardOf" in str(refused(home))
    assert home.world.bought() == 0 and home.world.count("ec2:CreateFleet") == 1


NOT_FOUND_YET = [
    ("ec2:AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
    ("ec2:RevokeSecurityGroupEgress", "InvalidGroup.NotFound"),
    ("ec2:CreateFleet", "InvalidPlacementGroup.Unknown"),
    ("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
]


@pytest.mark.parametrize(("action", "code"), NOT_FOUND_YET)
def test_what_was_just_created_and_is_not_found_yet_is_asked_for_again(
    home: Home, action: str, code: str
) -> None:
    home.world.faults = [Fault(action=action, code=code, times=2)]
    with home.acquire(home.two()):
        assert home.leases.all()[0].refusals == ()
        [group] = home.world.account.groups.values()
        assert "everything" not in group["out"]
    assert home.world.bought() == 2 and home.world.alive() == []


def test_a_machine_that_ec2_does_not_know_yet_is_not_taken_for_gone(home: Home) -> None:
    home.world.lag_s = 60.0
    home.world.boot_s = float("inf")
    home.world.capacity[("us-east-1c", "spot")] = 2
    home.world.faults = [Fault(action="ec2:DescribeInstances", code="AccessDenied")]
    refused(home)
    assert len(home.world.alive()) == 2 and len(home.provider.leases()) == 1
    home.world.pass_s(60.0)
    home.provider.reap(home.world.now)
    assert home.world.alive() == [] and home.provider.leases() == []


@pytest.mark.parametrize("after", [False, True], ids=["before it is served", "after"])
def test_a_controller_killed_at_any_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    whole = Home(tmp_path / "whole")
    cluster = whole.mixed()
    before = len(whole.world.calls)
    with whole.acquire(cluster):
        pass
    calls = whole.world.calls[before:]
    assert len(calls) > 30
    for number in range(after, len(calls), 2):
        home = Home(tmp_path / str(number))
        cluster = home.mixed()
        home.world.faults = [Fault(action="", code=KILLED, skip=number, after=after)]
        with pytest.raises(Killed), home.acquire(cluster):
            pass
        home.die()
        home.world.pass_s(400)
        home.provider.reap(home.world.now)
        assert home.world.bought() <= 3, calls[number]
        assert home.world.alive() == [] and home.provider.leases() == [], calls[number]


def test_a_request_is_in_the_lease_before_it_is_sent(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:CreateFleet", code=KILLED)]
    home.killed_in(home.two())
    [request] = home.leases.all()[0].requests
    assert (request.group, request.size, request.answered) == ("spot.0", 2, False)
    assert request.usd_per_hour > SPOT_MARGIN * max(SPOT_USD.values())


def test_a_machine_that_never_comes_up_is_given_back(home: Home) -> None:
    home.world.boot_s = float("inf")
    refused(home)
    assert home.world.bought() == 4 and home.world.alive() == []


def test_terminating_that_fails_is_said_and_left_to_the_reaper(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=3)]
    with home.acquire(home.two(), "r-0"):
        pass
    assert home.world.alive() == []
    home.provider.forget("r-0")
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="AccessDenied", times=1)]
    refused(home)
    assert len(home.world.alive()) == 2 and len(home.provider.leases()) == 1
    home.provider.reap(home.world.now)
    assert home.world.alive() == []
    assert [one.outcome for one in home.provider.ended()] == ["released"]


def test_nothing_more_is_bought_while_an_attempt_cannot_be_given_back(home: Home) -> None:
    home.world.capacity[("us-east-1c", "spot")] = 2
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="AccessDenied", times=99)]
    refused(home, home.mixed())
    assert home.world.bought() == 2


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        ("iam:GetInstanceProfile", "NoSuchEntity", "instance_profile"),
        ("ssm:GetParameter", "ParameterNotFound", "ami_parameter"),
        ("s3:ListBucket", "NoSuchBucket", "bucket"),
        ("ec2:CreateFleet", "UnauthorizedOperation", "ec2:CreateFleet"),
        ("ec2:DescribeSubnets", "ExpiredToken", "aws sso login"),
    ],
)
def test_what_is_wrong_with_the_account_names_the_fix(
    home: Home, action: str, code: str, says: str
) -> None:
    home.world.faults = [Fault(action=action, code=code)]
    assert says in str(refused(home))
    assert home.world.alive() == [] and home.provider.leases() == []


def test_subnets_are_named_or_tagged_or_the_default_ones_of_one_vpc(home: Home) -> None:
    named = paying(home, subnet_ids=("subnet-0000000a",))
    assert isinstance(refused(named), NotSupported)
    home.world.account.subnet_names = {"subnet-0000000a": "us-east-1b"}
    with named.acquire(home.two()):
        assert {machine.zone for machine in home.world.alive()} == {"us-east-1b"}
        request = home.world.alive()[0].request
        assert request["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is True
    private = paying(home, subnets="private")
    assert isinstance(refused(private), NotSupported)
    home.world.account.tagged = True
    with private.acquire(home.two(), "r-2"):
        request = home.world.alive()[0].request
        assert request["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False
