"""Machines of EC2 under a lease: the ladder climbed, gangs whole or none, nothing bought twice or left running."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks.providers.base import NoCapacity, NotSupported, ProviderError, RunningCluster
from tasks.providers.ec2.capacity_ladder import SPOT_MARGIN
from tasks.providers.ec2.leases import Machine
from tasks.providers.ec2.settings import Ec2
from tasks.providers.ec2.termination import BACKOFF_S, LATEST, end_machines, lease_tags
from tests.ec2_home import CHOICES, Home
from tests.fake_ec2 import KILLED, NOON, SILENT, Fault, Killed
from tests.fake_ec2_account import ARM, SPOT_USD, Account


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_spot_cluster_comes_up_in_its_zone_and_is_gone_afterwards(home: Home) -> None:
    with home.acquire(home.two(), deadline_s=7200.0) as running:
        same: RunningCluster = running
        assert same.addresses == ["10.0.0.1", "10.0.0.2"]
        assert [one.alive for one in running.nodes()] == [True, True]
        assert {one.zone for one in running.cluster.members} == {"us-east-1c"}, (
            "the cheapest: the fleet's choice"
        )
        [held] = home.provider.leases()
        assert held.controller_alive and held.cluster == "2xg4dn.12xlarge"
        assert [one.instance_id for one in home.world.alive()] == [
            one.instance_id for one in running._launcher.lease.current
        ]
        assert home.world.s3.read("r-1", home.world.alive()[1].instance_id, "node.json") == {
            "node": 1,
            "nodes": 2,
        }
        home.world.pass_s(3600 - 7)
        usd = running.usd_so_far()
        assert held.usd_until(home.world.now) == usd > 2 * SPOT_USD["c"], (
            "with volumes, addresses and requests"
        )
    assert usd == pytest.approx(2 * SPOT_USD["c"], rel=0.03), (
        "an hour of two machines, with their volumes"
    )
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.market) == ("released", "spot") and ended.usd == pytest.approx(
        usd, rel=0.01
    )
    assert home.world.account.templates == {} and home.world.account.groups == {}
    home.provider.forget("r-1")
    assert home.provider.ended() == []


def test_what_is_launched_is_closed_encrypted_tagged_and_ends_itself(home: Home) -> None:
    with home.acquire(home.two("on-demand")):
        one = home.world.alive()[0]
        [group] = home.world.account.groups.values()
    assert (
        one.request["MetadataOptions"]["HttpTokens"] == "required" and "KeyName" not in one.request
    )
    assert one.request["BlockDeviceMappings"][0]["Ebs"]["Encrypted"]
    assert one.request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert (
        one.request["NetworkInterfaces"][0]["InterfaceType"] == "efa" and "Placement" in one.request
    )
    assert one.tags["srift:lease"] == "r-1" and one.tags["srift:deployment"] == "srift"
    assert float(one.tags["srift:deadline"]) == (NOON + timedelta(seconds=1800)).timestamp()
    ends = one.ends_itself_at()
    assert ends is not None and ends <= one.launched_at + timedelta(seconds=1800 + 65)
    assert [set(rule) for rule in group["in"]] == [{"IpProtocol", "UserIdGroupPairs"}], (
        "admits itself alone"
    )
    assert "everything" not in group["out"]


def test_every_rung_refused_is_no_capacity_with_a_refusal_each_and_nothing_alive(
    home: Home,
) -> None:
    for zone in "abc":
        home.world.capacity |= {
            (f"us-east-1{zone}", "spot"): 1,
            (f"us-east-1{zone}", "on-demand"): 1,
        }
    with pytest.raises(NoCapacity) as refused, home.acquire(home.two()):
        pass
    [lease] = home.leases.all()
    rungs = [(one.market, one.zone) for one in lease.refusals]
    assert rungs[0] == ("spot", "us-east-1a or us-east-1c or us-east-1b"), "as asked, then by price"
    assert {market for market, _ in rungs[1:]} == {"on-demand"} and len(rungs) == 4
    assert all(one.code == "InsufficientInstanceCapacity" for one in lease.refusals)
    assert "secret" not in str(refused.value)
    assert home.world.bought() == 0 and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert (ended.outcome, ended.usd, len(ended.refusals)) == ("refused", 0.0, 4), (
        "kept until they are rows"
    )


def test_a_gang_whose_second_group_is_refused_gives_the_first_back(home: Home) -> None:
    home.world.capacity[("us-east-1a", "spot")] = 2
    with home.acquire(home.mixed()) as running:
        assert {one.zone for one in running.cluster.members} == {"us-east-1c"}
        assert len(home.world.alive()) == 3 and home.world.bought() == 5
        assert [one.zone for one in running._launcher.lease.refusals] == ["us-east-1a"]
        assert [one.zone for one in home.world.alive()] == ["us-east-1c"] * 3
    [ended] = home.provider.ended()
    assert ended.usd is not None and ended.usd > 2 * SPOT_USD["a"] * 60 / 3600, (
        "those given back cost a minute each"
    )


def test_a_quota_refusal_goes_to_the_other_market_at_once(home: Home) -> None:
    home.world.faults = [
        Fault(action="ec2:CreateFleet", code="MaxSpotInstanceCountExceeded", times=9)
    ]
    with home.acquire(home.two()) as running:
        assert {one.market for one in running.cluster.members} == {"on-demand"}
    assert home.world.count("ec2:CreateFleet") == 1


def test_a_price_above_the_bid_climbs_on(home: Home) -> None:
    cluster = home.two()
    home.world.account.spot |= dict.fromkeys(("us-east-1a", "us-east-1b", "us-east-1c"), 3.0)
    with home.acquire(cluster) as running:
        assert running.cluster.members[0].market == "on-demand"
        assert running._launcher.lease.refusals[0].code == "SpotMaxPriceTooLow"


def paying(home: Home, **terms: Any) -> Home:
    """The same home under terms of its own."""
    return Home(home.path, home.world, Ec2.model_validate(CHOICES.model_dump() | terms))


@pytest.mark.parametrize(
    ("terms", "usd"),
    [
        ({"discounts": {"g4dn.*": {"spot": 0.25}}}, 0.75 * SPOT_USD["c"]),
        ({"prices": {"g4dn.12xlarge": {"spot_usd_per_hour": 0.6}}}, 0.6),
    ],
)
def test_under_an_own_spot_price_the_bid_is_of_the_public_one_and_the_bill_of_the_own(
    home: Home, terms: dict[str, Any], usd: float
) -> None:
    home = paying(home, **terms)
    with home.acquire(home.two()) as running:
        assert running._launcher.lease.refusals == () and {
            one.market for one in home.world.alive()
        } == {"spot"}
        assert [one.usd_per_hour for one in running.cluster.members] == [pytest.approx(usd)] * 2
        home.world.pass_s(3600.0)
        spent, hours = running.usd_so_far(), 3600.0 + 7.0
        assert spent is not None and 2 * usd < spent < 2 * (usd + 0.05) * hours / 3600
    bids = [
        place.most_usd[0]
        for place in home.prospect(home.two(), lease_id="x", deadline_s=60.0).rungs[0].places
    ]
    assert sorted(bids) == pytest.approx(
        [SPOT_MARGIN * public for public in sorted(SPOT_USD.values())]
    )


def test_a_discount_on_demand_lowers_the_bill_and_not_the_worst_case(home: Home) -> None:
    def worst_usd() -> float:
        return home.prospect(home.two("on-demand"), lease_id="x", deadline_s=1800.0).worst_usd(
            1800.0
        )

    public = worst_usd()
    home = paying(home, discounts={"*": 0.6})
    assert worst_usd() == public
    with home.acquire(home.two("on-demand")) as running:
        home.world.pass_s(3600.0)
        assert (running.usd_so_far() or 99.0) < 2 * 0.45 * 3.912
    home = paying(home, prices={"g4dn.12xlarge": {"on_demand_usd_per_hour": 2 * 3.912}})
    assert worst_usd() > 1.9 * public


def test_an_image_that_is_larger_than_the_volume_is_refused_before_anything_is_bought(
    home: Home,
) -> None:
    home = paying(home, volume_gib=44)
    with (
        pytest.raises(NotSupported, match="volume_gib is 44: set it to at least 45"),
        home.acquire(home.two()),
    ):
        pass
    assert home.world.count("ec2:CreateFleet") == 0 and home.leases.ids() == []
    with paying(home, volume_gib=45).acquire(home.two()):
        [size] = {
            one.request["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for one in home.world.alive()
        }
        assert size == 45


def test_one_fleet_chooses_among_the_zones_and_what_it_got_is_listed_by_zone_and_price(
    home: Home,
) -> None:
    """No capacity in two zones is no refusal: nothing had to be asked twice."""
    home.world.capacity |= {("us-east-1a", "spot"): 0, ("us-east-1c", "spot"): 1}
    with home.acquire(home.two()) as running:
        assert {one.zone for one in home.world.alive()} == {"us-east-1b"}
        assert {(one.zone, one.usd_per_hour) for one in running.cluster.members} == {
            ("us-east-1b", SPOT_USD["b"])
        }
        assert {one.zone for one in running._launcher.lease.current} == {"us-east-1b"}
        assert running._launcher.lease.refusals == () and home.world.count("ec2:CreateFleet") == 1
        home.world.interrupt(home.world.alive()[1].instance_id)
        home.world.capacity.clear()
        assert running.replace(1)
        assert {one.zone for one in home.world.alive()} == {"us-east-1b"}, "a gang lies in one zone"


@pytest.mark.parametrize(
    "code", ["RequestLimitExceeded", "InternalError", "InvalidLaunchTemplateName.NotFoundException"]
)
def test_a_fleet_that_another_try_may_mend_is_asked_for_again_under_another_token(
    home: Home, code: str
) -> None:
    home.world.fleet_errors = [[code], ["InsufficientInstanceCapacity", code]]
    with home.acquire(home.two()) as running:
        assert running._launcher.lease.refusals == () and {
            one.market for one in running.cluster.members
        } == {"spot"}
        [asked] = running._launcher.lease.asked
        assert (asked.attempt, asked.answered, home.world.count("ec2:CreateFleet")) == (2, True, 3)
    assert home.world.bought() == 2


def test_a_controller_killed_between_two_fleets_asks_for_the_second_again_and_buys_nothing_twice(
    home: Home,
) -> None:
    cluster = home.two()
    home.world.fleet_errors = [["InternalError"]]
    home.world.faults = [Fault(action="ec2:CreateFleet", code=KILLED, skip=1, after=True)]
    home.killed_in(cluster)
    assert home.world.bought() == 2
    with home.acquire(cluster) as running:
        assert len(running.addresses) == 2 and home.world.bought() == 2


def test_fleets_that_go_on_failing_are_lack_of_capacity_and_the_next_rung_is_asked_for(
    home: Home,
) -> None:
    home.world.fleet_errors = [["InternalError"]] * 9
    with home.acquire(home.two()) as running:
        assert {one.market for one in running.cluster.members} == {"on-demand"}
        assert [one.code for one in running._launcher.lease.refusals] == ["InternalError"]
    assert home.world.count("ec2:CreateFleet") == 3


def test_a_fleets_code_that_nobody_knows_ends_the_launch_and_is_named(home: Home) -> None:
    home.world.fleet_errors = [["InsufficientInstanceCapacity", "NeverHeardOf"]]
    with pytest.raises(ProviderError, match="NeverHeardOf"), home.acquire(home.two()):
        pass
    assert home.world.bought() == 0 and home.world.count("ec2:RunInstances") == 0
    assert "secret" not in str(home.provider.leases())


@pytest.mark.parametrize("after", [False, True], ids=["not served", "served"])
@pytest.mark.parametrize("code", ["RequestLimitExceeded", SILENT])
def test_throttling_and_silence_are_tried_again_with_the_same_token(
    home: Home, code: str, after: bool
) -> None:
    home.world.faults = [Fault(action="ec2:CreateFleet", code=code, times=3, after=after)]
    with home.acquire(home.two()) as running:
        assert len(running.addresses) == 2
    assert home.world.bought() == 2


NOT_FOUND_YET = [
    ("ec2:AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
    ("ec2:AuthorizeSecurityGroupEgress", "InvalidGroup.NotFound"),
    ("ec2:RevokeSecurityGroupEgress", "InvalidGroup.NotFound"),
    ("ec2:RunInstances", "InvalidGroup.NotFound"),
    ("ec2:RunInstances", "InvalidPlacementGroup.Unknown"),
    ("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
]


@pytest.mark.parametrize(("action", "code"), NOT_FOUND_YET)
def test_what_was_just_made_and_is_not_found_yet_is_asked_for_again_a_bounded_number_of_times(
    home: Home, action: str, code: str
) -> None:
    cluster = home.two("spot" if action == "ec2:CreateFleet" else "on-demand")
    home.world.faults = [Fault(action=action, code=code, times=99)]
    with pytest.raises(ProviderError, match=code), home.acquire(cluster):
        pass
    assert home.world.count(action) == len(BACKOFF_S) + 1
    assert home.world.bought() == 0 and home.provider.leases() == []
    home.world.faults = [Fault(action=action, code=code, times=2)]
    with home.acquire(cluster, "r-2") as running:
        assert len(running.addresses) == 2 and running._launcher.lease.refusals == ()
        [group] = home.world.account.groups.values()
        assert "everything" not in group["out"], "a new group lets everything out"
    assert home.world.bought() == 2 and home.world.alive() == []


def test_a_group_that_is_there_and_not_shown_yet_is_asked_for_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe, hidden = Account.describe_security_groups, [True]

    def shown_late(self: Account, **words: Any) -> Any:
        return {"SecurityGroups": []} if hidden and hidden.pop() else describe(self, **words)

    monkeypatch.setattr(Account, "describe_security_groups", shown_late)
    home.world.faults = [Fault(action="ec2:AuthorizeSecurityGroupIngress", code="InternalError")]
    with home.acquire(home.two()) as running:
        assert len(running.addresses) == 2


def test_a_machine_that_ec2_does_not_know_yet_is_not_taken_for_gone(home: Home) -> None:
    home.world.lag_s = 60.0
    home.world.capacity[("us-east-1a", "spot")] = 2
    with pytest.raises(ProviderError, match="do not end: i-"), home.acquire(home.mixed()):
        pass
    assert len(home.world.alive()) == 2 and len(home.provider.leases()) == 1
    home.world.pass_s(60.0)
    home.provider.reap(home.world.now)
    assert home.world.alive() == [] and home.provider.leases() == []


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


def test_a_controller_killed_between_asking_and_hearing_buys_nothing_twice(home: Home) -> None:
    cluster = home.two("on-demand")  # of spot machines the next test tells
    home.world.faults = [Fault(action="ec2:RunInstances", code=KILLED, after=True)]
    home.killed_in(cluster)
    assert home.world.bought() == 2
    with (
        home.acquire(cluster) as running,
        pytest.raises(ProviderError, match="exists already"),
        home.acquire(cluster),
    ):
        pass
    assert len(running.addresses) == 2
    assert home.world.bought() == 2, "the same machines, taken up again, and nobody else's"
    assert home.world.alive() == []


@pytest.mark.parametrize("after", [False, True], ids=["before it is served", "after"])
@pytest.mark.parametrize(
    "resumed", [False, True], ids=["then the reaper", "then another controller"]
)
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
    home.world.faults = [
        Fault(
            action="ec2:RunInstances" if market == "on-demand" else "ec2:CreateFleet", code=KILLED
        )
    ]
    home.killed_in(cluster)
    home.world.pass_s(600)
    with home.acquire(cluster):
        ends = [one.ends_itself_at() for one in home.world.alive()]
        assert len(ends) == 2 and all(
            at and at <= asked_at + timedelta(seconds=1800 + 65) for at in ends
        )


def asking_long(home: Home, code: str) -> None:
    """Throttled over and over: the last of three fleets is asked for more than two minutes after the first request."""
    home.world.lag_s = 20.0
    home.world.fleet_errors = [["InternalError"], ["InternalError"]]
    actions = [("ec2:CreateLaunchTemplate", 0), *(("ec2:CreateFleet", skip) for skip in range(3))]
    home.world.faults = [
        Fault(action=one, code="RequestLimitExceeded", times=5, skip=skip) for one, skip in actions
    ]
    home.world.faults.append(Fault(action="ec2:CreateFleet", code=code, after=True, skip=2))


@pytest.mark.parametrize("code", [SILENT, KILLED])
def test_machines_of_a_launch_of_many_tries_are_remembered(home: Home, code: str) -> None:
    asking_long(home, code)
    if code == SILENT:
        with pytest.raises(ProviderError), home.acquire(home.two()):
            pass
        assert len(home.world.alive()) == 2, "they show twenty seconds later"
    else:
        home.killed_in(home.two())
        [sentence] = home.provider.reap(home.world.now)
        assert "may still have been served" in sentence
    assert len(home.provider.leases()) == 1
    home.world.pass_s(130)
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    assert home.world.alive() == [] and (ended.usd or 0.0) > 0.0


SERVED_UNHEARD = {  # seconds that boto3 repeats a request that is not answered, and the answers
    "being throttled is no answer to the request before": (
        0.0,
        [(SILENT, 1, True), ("RequestLimitExceeded", 5, False)],
    ),
    "the last of many is served at its end": (120.0, [(SILENT, 5, False), (SILENT, 1, True)]),
}


@pytest.mark.parametrize("how", SERVED_UNHEARD)
def test_a_request_that_may_have_been_served_unheard_keeps_the_lease(home: Home, how: str) -> None:
    takes_s, answers = SERVED_UNHEARD[how]
    cluster, home.world.lag_s = home.two("on-demand"), 60.0 if not takes_s else 20.0

    def slow(_: Any) -> bool:
        home.world.pass_s(takes_s)
        return True

    home.world.faults = [
        Fault(action="ec2:RunInstances", code=code, times=times, after=after, when=slow)
        for code, times, after in answers
    ]
    with pytest.raises(ProviderError), home.acquire(cluster):
        pass
    assert len(home.provider.leases()) == 1 and len(home.world.alive()) == 2


def test_a_lease_of_an_older_version_tells_when_it_was_asked_for(home: Home) -> None:
    home.world.faults = [Fault(action="ec2:CreateFleet", code=KILLED, after=True)]
    home.killed_in(home.two())
    file = home.leases.directory("r-1") / "lease.json"
    body = json.loads(file.read_text())
    for one in body["asked"]:
        assert one.pop("tried_at")
    file.write_text(json.dumps(body))
    [lease] = home.leases.all()
    assert [one.newest_at for one in lease.asked] == [one.asked_at for one in lease.asked]


def test_a_machine_that_was_served_late_counts_until_its_own_end(home: Home) -> None:
    cluster = home.two("on-demand")
    home.world.faults = [
        Fault(action="ec2:RunInstances", code="RequestLimitExceeded", times=5),
        Fault(action="ec2:RunInstances", code=KILLED, after=True),
    ]
    home.killed_in(cluster)
    [late] = {one.launched_at for one in home.world.alive()}
    [lease] = home.leases.all()
    [asked] = lease.asked
    assert late - asked.asked_at == timedelta(seconds=sum(BACKOFF_S))
    shown = replace(
        lease,
        machines=tuple(
            Machine(
                rank=0, instance_id=one.instance_id, instance_type="", market="", zone="", usd_per_hour=1.0,
                launched_at=late, group=asked.group,
            )
            for one in home.world.alive()
        ),
    )  # fmt: skip
    ends = {one.ends_itself_at() for one in home.world.alive()}
    home.world.pass_s(9000.0)
    home.world.forget()
    over, _ = end_machines(home.provider._machines.api, shown, lease_tags("r-1", "srift", "c"))
    [until] = {one.ended_at for one in over.machines}
    assert until == lease.deadline_at + LATEST + timedelta(seconds=sum(BACKOFF_S)) and all(
        one <= until for one in ends
    )


def test_a_machine_that_never_comes_up_is_given_back_and_the_next_zone_asked(home: Home) -> None:
    home.world.boot_s = float("inf")
    with (
        pytest.raises(NoCapacity, match="not running after 300 s"),
        home.acquire(home.two(), deadline_s=7200),
    ):
        pass
    assert home.world.alive() == []


def test_terminating_that_fails_is_tried_again_and_then_said_and_left_to_the_reaper(
    home: Home,
) -> None:
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=3)]
    with home.acquire(home.two(), "r-0"):
        pass
    assert home.world.alive() == []
    home.provider.forget("r-0")
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=6)]
    with (
        pytest.raises(ProviderError, match=r"could not be ended.*srift reap"),
        home.acquire(home.two()),
    ):
        pass
    assert len(home.world.alive()) == 2 and len(home.provider.leases()) == 1
    [sentence] = home.provider.reap(home.world.now)
    assert "2 machines in us-east-1 were ended" in sentence
    assert home.world.alive() == [] and [one.outcome for one in home.provider.ended()] == [
        "released"
    ]


def test_climbing_stops_where_a_rung_cannot_be_given_back(home: Home) -> None:
    home.world.capacity[("us-east-1a", "spot")] = 2
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="InternalError", times=99)]
    with (
        pytest.raises(ProviderError, match="nothing more is asked for"),
        home.acquire(home.mixed()),
    ):
        pass
    assert home.world.bought() == 2


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(action="iam:GetInstanceProfile", code="NoSuchEntity"), "instance_profile"),
        (Fault(action="ec2:DescribeImages", code="InvalidAMIID.NotFound"), "ami_parameter"),
        (Fault(action="ssm:GetParameter", code="ParameterNotFound"), "ami_parameter"),
        (Fault(action="s3:ListBucket", code="NoSuchBucket"), "bucket"),
        (
            Fault(action="ec2:RunInstances", code="UnauthorizedOperation"),
            "may not call ec2:RunInstances",
        ),
        (Fault(action="ec2:DescribeSubnets", code="ExpiredToken"), "sign in again"),
    ],
)
def test_what_is_wrong_with_the_account_is_said_with_the_fix(
    home: Home, fault: Fault, says: str
) -> None:
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
    assert "L-DB2E81BA" in home.provider._machines.surveyor.over_quota(home.two("on-demand"))


def test_an_arm_type_and_a_home_without_a_bucket_are_refused_with_a_sentence(
    home: Home, tmp_path: Path
) -> None:
    member = home.offer()
    arm = Cluster.of((1, replace(member, instance_type=replace(member.instance_type, name=ARM))))
    with pytest.raises(NotSupported, match="ARM"), home.acquire(arm):
        pass
    volta = Cluster.of(
        (1, replace(member, instance_type=replace(member.instance_type, name="p3dn.24xlarge")))
    )
    with pytest.raises(NotSupported, match="does not run on p3dn"), home.acquire(volta):
        pass
    bare = Home(tmp_path / "bare", choices=Ec2(instance_types=("g4dn.*",)))
    with pytest.raises(NotSupported, match=r"\[ec2\] bucket"), bare.acquire(home.two()):
        pass
    assert any("bucket" in one for one in bare.provider.limits())
    assert not any("bucket" in one for one in home.provider.limits())


def test_a_prospect_is_every_request_and_the_worst_case_and_costs_nothing(home: Home) -> None:
    cluster = home.two()
    seen = home.prospect(cluster, lease_id="r-1", deadline_s=1800.0)
    assert str(seen.rungs[0]) == "2xg4dn.12xlarge spot in us-east-1a or us-east-1c or us-east-1b"
    assert home.world.bought() == 0 and home.provider.leases() == []
    with home.acquire(cluster) as running:
        home.world.pass_s(1800.0)
        usd = running.usd_so_far()
        assert usd is not None and usd < seen.worst_usd(1800.0)
    dearest = 2 * 3.912 * 1800 / 3600
    assert dearest < seen.worst_usd(1800.0) < 1.5 * dearest


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
