"""Machines of EC2 under a lease: gangs whole or none, nothing bought twice or left running."""

from contextlib import suppress
from datetime import timedelta

import pytest

from tasks.providers.base import NoCapacity, NotSupported, ProviderError
from tasks.providers.ec2.attempts import SPOT_MARGIN
from tests.ec2_home import Home
from tests.fake_ec2 import KILLED, NOON, SILENT, Killed
from tests.fake_ec2_account import SPOT_USD

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


def refused(home, cluster=None):
    with pytest.raises(ProviderError) as raised, home.acquire(cluster):
        pass
    assert "secret" not in str(raised.value)
    return raised.value


def ended_usd(home):
    [ended] = home.provider.ended()
    return ended.usd


def test_a_spot_cluster_comes_up_in_the_cheapest_zone_and_is_gone_afterwards(home, aws):
    with home.acquire(home.two(), deadline_s=7200.0) as running:
        assert running.addresses == ["10.0.0.1", "10.0.0.2"]
        assert [node.alive for node in running.nodes()] == [True, True]
        assert {offer.zone for offer in running.cluster.members} == {"us-east-1c"}
        [held] = home.provider.leases()
        assert held.controller_alive and held.cluster == "2xg4dn.12xlarge"
        aws.pass_s(3600 - 7)
        usd = running.usd_so_far()
        assert held.usd_until(aws.now) == usd > 2 * SPOT_USD["c"]
    assert ended_usd(home) == pytest.approx(2 * SPOT_USD["c"], rel=0.03)
    assert home.left() == []
    assert aws.account.templates == aws.account.groups == {}
    home.provider.forget("r-1")
    assert home.provider.ended() == []


def test_what_is_launched_is_closed_encrypted_tagged_and_ends_itself(home):
    with home.acquire(home.two("on-demand")):
        machine = home.world.alive()[0]
        [group] = home.world.account.groups.values()
    request = machine.request
    assert request["MetadataOptions"] == {
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
        "HttpEndpoint": "enabled",
        "HttpProtocolIpv6": "disabled",
    }
    assert "KeyName" not in request and "Placement" in request
    assert request["BlockDeviceMappings"][0]["Ebs"]["Encrypted"]
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert request["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is True
    assert machine.tags["srift:lease"] == "r-1" and machine.tags["srift:deployment"] == "srift"
    assert float(machine.tags["srift:deadline"]) == (NOON + timedelta(seconds=1800)).timestamp()
    ends = machine.ends_itself_at()
    assert ends <= machine.launched_at + timedelta(seconds=1800 + 65)
    assert [set(rule) for rule in group["in"]] == [{"IpProtocol", "UserIdGroupPairs"}]
    assert [rule.get("FromPort") for rule in group["out"]] == [None, 443]


def test_one_fleet_a_market_and_a_refusal_for_each(home, aws):
    aws.capacity = {(zone, market): 1 for zone in ZONES for market in ("spot", "on-demand")}
    assert isinstance(refused(home), NoCapacity)
    assert aws.count("ec2:CreateFleet") == 2 and aws.bought() == 0
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.usd, len(ended.refusals)) == ("refused", 0.0, 2)


def test_one_fleet_chooses_among_the_zones_and_a_replacement_stays_in_its_zone(home, aws):
    aws.capacity |= {("us-east-1a", "spot"): 0, ("us-east-1c", "spot"): 1}
    with home.acquire() as running:
        assert {offer.usd_per_hour for offer in running.cluster.members} == {SPOT_USD["b"]}
        assert aws.count("ec2:CreateFleet") == 1
        aws.interrupt(aws.alive()[1].instance_id)
        aws.capacity.clear()
        assert running.replace(1)
        assert {machine.zone for machine in aws.alive()} == {"us-east-1b"}


def test_a_gang_whose_second_group_is_refused_gives_the_first_back(home, aws):
    aws.capacity["us-east-1c", "spot"] = 2
    with home.acquire(home.mixed()) as running:
        assert {offer.market for offer in running.cluster.members} == {"on-demand"}
        assert len(aws.alive()) == 3 and aws.bought() == 5
        assert len({machine.zone for machine in aws.alive()}) == 1
    assert ended_usd(home) > 2 * SPOT_USD["c"] * 60 / 3600


@pytest.mark.parametrize("trouble", [{"short": 1}, {"boot_s": float("inf")}])
def test_a_gang_that_comes_short_or_never_runs_is_given_back(home, aws, trouble):
    cluster = home.two()
    for name, value in trouble.items():
        setattr(aws, name, value)
    refused(home, cluster)
    assert aws.bought() > 1 and aws.alive() == []


@pytest.mark.parametrize(
    "terms, usd",
    [
        ({"discounts": {"g4dn.*": {"spot": 0.25}}}, 0.75 * SPOT_USD["c"]),
        ({"prices": {"g4dn.12xlarge": {"spot_usd_per_hour": 0.6}}}, 0.6),
    ],
)
def test_the_bid_is_of_the_public_price_and_the_bill_of_the_own(home, terms, usd):
    home.choose(**terms)
    with home.acquire() as running:
        assert {machine.market for machine in home.world.alive()} == {"spot"}
        assert [offer.usd_per_hour for offer in running.cluster.members] == [pytest.approx(usd)] * 2
        home.world.pass_s(3600.0)
        assert 2 * usd < running.usd_so_far() < 2 * (usd + 0.05) * 3607 / 3600
    [attempt, _] = home.attempts(home.two())
    assert attempt.groups[0].bids == {
        zone: pytest.approx(SPOT_MARGIN * SPOT_USD[zone[-1]]) for zone in ZONES
    }


def test_bids_are_within_the_price_that_the_caps_allow_for(home, aws):
    home.choose(markets=("spot",))
    cluster, allowed = home.two(), 2 * SPOT_MARGIN * max(SPOT_USD.values())
    home.provider = home.controller()  # asks for prices again
    aws.account.spot = {zone: 2 * usd for zone, usd in aws.account.spot.items()}
    with suppress(NoCapacity), home.acquire(cluster, most=allowed):
        pass
    [request] = [words for name, words in aws.calls if name == "ec2:CreateFleet"]
    bids = [override["MaxPrice"] for override in request["LaunchTemplateConfigs"][0]["Overrides"]]
    assert bids and 2 * max(map(float, bids)) <= allowed
    with pytest.raises(NoCapacity), home.acquire(cluster, "r-2", most=0.1):
        pass


def test_what_cannot_be_launched_is_refused_before_anything_is_bought(home):
    for terms in ({"volume_gib": 44}, {"bucket": None}, {"subnet_ids": ("subnet-00000000",)}):
        home.choose(**({"bucket": "mailbox", "volume_gib": 45} | terms))
        assert isinstance(refused(home), NotSupported), terms
    assert home.world.count("ec2:CreateFleet") == 0 and home.leases.ids() == []


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("code", ["InternalError", SILENT, "RequestLimitExceeded"])
def test_a_fleet_without_an_answer_is_looked_for_by_its_tag(home, aws, code, shows):
    """Nothing else is asked for while its machines may still come."""
    aws.lag_s, aws.unheard = 200.0, shows
    if code == "InternalError":
        aws.fleet_errors = [[code]]
    else:
        aws.fails("ec2:CreateFleet", code, times=6, after=shows)
    with home.acquire() as running:
        got = {offer.market for offer in running.cluster.members}
        assert got == ({"spot"} if shows else {"on-demand"})
        assert len(aws.alive()) == 2
    assert aws.bought() == 2 and aws.alive() == []


def test_a_fleet_that_fails_for_good_ends_the_launch(home, aws):
    aws.fleet_errors = [["InsufficientInstanceCapacity", "NeverHeardOf"]]
    assert "NeverHeardOf" in str(refused(home))
    assert aws.bought() == 0 and aws.count("ec2:CreateFleet") == 1


@pytest.mark.parametrize(
    "action, code",
    [
        ("ec2:RevokeSecurityGroupEgress", "InvalidGroup.NotFound"),
        ("ec2:CreateFleet", "InvalidPlacementGroup.Unknown"),
        ("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
    ],
)
def test_what_was_just_created_and_is_not_found_yet_is_asked_for_again(home, aws, action, code):
    aws.fails(action, code, times=2)
    with home.acquire():
        assert home.leases.known()[0].refusals == ()
        [group] = aws.account.groups.values()
        assert "everything" not in group["out"]
    assert aws.bought() == 2 and aws.alive() == []


def test_a_machine_that_ec2_does_not_know_yet_is_not_taken_for_gone(home, aws):
    aws.lag_s = 60.0
    aws.boot_s = float("inf")
    aws.capacity["us-east-1c", "spot"] = 2
    aws.fails("ec2:DescribeInstances", "AccessDenied")
    refused(home)
    assert len(aws.alive()) == 2 and len(home.provider.leases()) == 1
    aws.pass_s(60.0)
    home.reap()
    assert home.left() == []


@pytest.mark.parametrize("after", [False, True], ids=["before it is served", "after"])
def test_a_controller_killed_at_any_call_leaves_nothing(tmp_path, monkeypatch, after):
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
        home.world.fails("", KILLED, skip=number, after=after)
        with pytest.raises(Killed), home.acquire(cluster):
            pass
        home.die()
        home.world.pass_s(400)
        home.reap()
        assert home.world.bought() <= 3, calls[number]
        assert home.left() == [], calls[number]


def test_a_request_is_in_the_lease_before_it_is_sent(home):
    home.world.fails("ec2:CreateFleet", KILLED)
    home.killed_in(home.two())
    [request] = home.leases.known()[0].requests
    assert (request.group, request.size, request.answered) == ("spot.0", 2, False)
    assert request.usd_per_hour > SPOT_MARGIN * max(SPOT_USD.values())


def test_terminating_that_fails_is_left_to_the_reaper(home, aws):
    cluster = home.two()
    aws.fails("ec2:TerminateInstances", "AccessDenied")
    refused(home, cluster)
    assert len(aws.alive()) == 2 and len(home.provider.leases()) == 1
    home.reap()
    assert aws.alive() == []
    assert [ended.outcome for ended in home.provider.ended()] == ["released"]


def test_nothing_more_is_bought_while_an_attempt_cannot_be_given_back(home, aws):
    aws.capacity["us-east-1c", "spot"] = 2
    aws.fails("ec2:TerminateInstances", "AccessDenied", times=99)
    refused(home, home.mixed())
    assert aws.bought() == 2


@pytest.mark.parametrize("public", [True, False])
def test_subnets_are_named_or_tagged(home, aws, public):
    if public:
        aws.account.subnet_names = {"subnet-0000000a": "us-east-1b"}
        home.choose(subnet_ids=("subnet-0000000a",))
    else:
        home.choose(subnets="private")
        assert isinstance(refused(home), NotSupported)
        aws.account.tagged = True
    with home.acquire():
        [interface] = aws.alive()[0].request["NetworkInterfaces"]
        assert interface["AssociatePublicIpAddress"] is public
        if public:
            assert {machine.zone for machine in aws.alive()} == {"us-east-1b"}
