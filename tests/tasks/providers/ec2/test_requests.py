"""The ladder and the requests of each rung: decided beforehand, printable, the same words for the same thing."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.cluster import Cluster, InstanceType, Offer
from tasks.providers.ec2 import requests as ec2_request
from tasks.providers.ec2.capacity_ladder import SPOT_MARGIN, Rung, ladder, spot_ties
from tasks.providers.ec2.catalogue import TypeFacts, facts_of, quota_of, vcpus_by_quota, vcpus_held
from tasks.providers.ec2.requests import LaunchSpec, requests_of, shortened
from tests.ec2_home import Prospect

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
BOTH = ("on-demand", "spot")


def kind(name: str) -> InstanceType:
    return InstanceType(
        name=name, provider="ec2", devices=1, device="T4", cores=4, memory_gib=16, device_memory_gib=16,
        bandwidth_gbps=5,
    )  # fmt: skip


def offer(name: str, market: str, zone: str, usd: float | None) -> Offer:
    return Offer(
        instance_type=kind(name), market=market, zone=zone, region=zone[:9] if zone != "any" else "us-east-1",
        usd_per_hour=usd, interruptions_per_hour=0.0, price_as_of=NOON,
    )  # fmt: skip


OFFERS = [
    offer("g4dn.xlarge", "on-demand", "any", 0.526),
    *(
        offer("g4dn.xlarge", "spot", zone, usd)
        for zone, usd in zip(ZONES, (0.20, 0.18, 0.50), strict=True)
    ),
    offer("p4d.24xlarge", "on-demand", "any", 32.77),
]
ASKED = Cluster.of((2, OFFERS[1]))
PLAIN = TypeFacts(name="g4dn.xlarge", vcpus=4, arm=False, efa=False, grouped=True)
EFA = TypeFacts(name="p4d.24xlarge", vcpus=96, arm=False, efa=True, grouped=True)
SPEC = LaunchSpec(
    region="us-east-1", vpc="vpc-1", subnets={zone: f"subnet-{zone[-1]}" for zone in ZONES},
    types={"g4dn.xlarge": PLAIN, "p4d.24xlarge": EFA}, image_id="ami-1", root_device="/dev/sda1",
    volume_gib=100, instance_profile="srift-node", deployment="srift", controller="abc", lease_id="r-1",
    deadline_unix=1_800_000_000,
)  # fmt: skip


def rungs_of(cluster: Cluster = ASKED) -> list[Rung]:
    return ladder(cluster, OFFERS, ZONES, BOTH)[0]


def test_the_ladder_is_as_asked_then_other_zones_by_price_then_on_demand() -> None:
    rungs = rungs_of()
    assert [(one.markets, "".join(place.zone[-1] for place in one.places)) for one in rungs] == [
        ("spot", "abc"), ("on-demand", "a"), ("on-demand", "b"), ("on-demand", "c"),
    ]  # fmt: skip
    assert [one.number for one in rungs] == list(range(4))
    assert rungs[0].most_usd[0] == pytest.approx(SPOT_MARGIN * 0.20)
    assert rungs[0].places[2].most_usd[0] == pytest.approx(0.526), (
        "a bid above the price on demand is no bargain"
    )
    mixed = rungs_of(Cluster.of((1, OFFERS[1]), (1, OFFERS[4])))
    assert [(one.markets, one.zones) for one in mixed[:3]] == [
        ("on-demand+spot", zone) for zone in ZONES
    ], "several requests lie in one zone only if each names it"


def test_a_fleet_that_chose_a_zone_is_the_rung_there_at_its_prices() -> None:
    [rung, *_] = rungs_of()
    there = rung.located(ZONES[1])
    assert (there.zones, there.number, there.cluster.usd_per_hour) == (
        ZONES[1],
        rung.number,
        pytest.approx(2 * 0.18),
    )
    assert there.most_usd == rung.places[1].most_usd and there.places == (there,)
    assert rung.located("us-east-1f").zones == ZONES[0], "what cannot be is as asked"


def test_zones_of_equal_spot_price_come_by_score_and_others_by_price_all_the_same() -> None:
    sold = [
        one if one.market != "spot" or one.zone == ZONES[0] else replace(one, usd_per_hour=0.3)
        for one in OFFERS
    ]
    two = Cluster.of((2, OFFERS[1]), (1, OFFERS[0]))
    assert spot_ties(ladder(two, sold, ZONES, BOTH)[0]) and not spot_ties(rungs_of(two))
    assert not spot_ties(ladder(ASKED, sold, ZONES, BOTH)[0]), (
        "one fleet chooses among them by itself"
    )
    rungs, _ = ladder(two, sold, ZONES, BOTH, {ZONES[1]: 3, ZONES[2]: 9})
    assert [one.zone for one in rungs] == [ZONES[0], ZONES[2], ZONES[1], *ZONES], (
        "on demand they come by name"
    )
    rungs, _ = ladder(two, OFFERS, ZONES, ("spot",), {ZONES[1]: 3, ZONES[2]: 9})
    assert [one.zone for one in rungs] == ZONES, "a lower price comes first"


def test_only_markets_that_are_allowed_and_prices_that_are_known_are_rungs() -> None:
    assert {one.markets for one in ladder(ASKED, OFFERS, ZONES, ("spot",))[0]} == {"spot"}
    unknown = [replace(one, usd_per_hour=None) for one in OFFERS]
    rungs, missing = ladder(Cluster.of((1, unknown[1])), unknown, ZONES, BOTH)
    assert rungs == [] and any("no known price" in one for one in missing)
    rungs, missing = ladder(ASKED, OFFERS, ZONES[1:], BOTH)
    assert rungs[0].zone == "us-east-1b" and any(
        "us-east-1a has no subnet" in one for one in missing
    )


def test_a_cluster_of_both_markets_stays_one_until_all_of_it_is_on_demand() -> None:
    rungs = rungs_of(Cluster.of((2, OFFERS[1]), (1, OFFERS[0])))
    assert [one.markets for one in rungs] == ["on-demand+spot"] * 3 + ["on-demand"] * 3
    assert [one.size for one in rungs[0].groups] == [2, 1]
    assert [one.size for one in rungs[3].groups] == [3]


def test_spot_is_a_fleet_of_all_or_none_in_one_zone_up_to_a_price() -> None:
    requests = dict(requests_of(SPEC, rungs_of()[0], security="sg-1", user_data="#!/bin/sh\n"))
    assert list(requests) == [
        "ec2:CreatePlacementGroup",
        "ec2:CreateLaunchTemplate",
        "ec2:CreateFleet",
    ]
    alone = dict(
        requests_of(SPEC, rungs_of(Cluster.of((1, OFFERS[1])))[0], security="s", user_data="x")
    )
    assert list(alone) == ["ec2:CreateLaunchTemplate", "ec2:CreateFleet"], (
        "one machine lies in no placement group"
    )
    fleet = requests["ec2:CreateFleet"]
    assert (
        fleet["Type"] == "instant"
        and fleet["SpotOptions"]["AllocationStrategy"] == "price-capacity-optimized"
    )
    assert (
        fleet["SpotOptions"]["MinTargetCapacity"]
        == fleet["TargetCapacitySpecification"]["TotalTargetCapacity"]
        == 2
    )
    assert fleet["SpotOptions"]["SingleAvailabilityZone"]
    assert fleet["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"InstanceType": "g4dn.xlarge", "SubnetId": f"subnet-{zone}", "MaxPrice": most}
        for zone, most in (("a", "0.2500"), ("b", "0.2250"), ("c", "0.5260"))
    ]
    again = ec2_request.create_fleet(
        SPEC, rungs_of()[0], rungs_of()[0].groups[0], name="0.0", attempt=1
    )
    assert (
        again == fleet | {"ClientToken": again["ClientToken"]}
        and again["ClientToken"] != fleet["ClientToken"]
    )


def test_on_demand_is_one_call_with_an_efa_interface_where_the_type_has_one() -> None:
    cluster = Cluster.of((2, OFFERS[4]))
    [_, (action, request)] = requests_of(
        SPEC, rungs_of(cluster)[0], security="sg-1", user_data="#!/bin/sh\n"
    )
    assert action == "ec2:RunInstances" and request["MinCount"] == request["MaxCount"] == 2
    [interface] = request["NetworkInterfaces"]
    assert (interface["InterfaceType"], interface["Groups"], interface["SubnetId"]) == (
        "efa",
        ["sg-1"],
        "subnet-a",
    )
    assert interface["AssociatePublicIpAddress"] is True
    assert "SecurityGroupIds" not in request and "KeyName" not in request
    assert request["MetadataOptions"] == {
        "HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled",
        "HttpProtocolIpv6": "disabled",
    }  # fmt: skip


@pytest.mark.parametrize("public", [True, False])
def test_a_public_address_is_asked_for_or_refused_and_never_left_to_the_subnet(
    public: bool,
) -> None:
    requests = dict(
        requests_of(replace(SPEC, public=public), rungs_of()[0], security="sg-1", user_data="x")
    )
    [interface] = requests["ec2:CreateLaunchTemplate"]["LaunchTemplateData"]["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is public and interface["Groups"] == ["sg-1"]
    assert "SubnetId" not in interface, "the fleet names it"


@pytest.mark.parametrize(
    ("cards", "interfaces"),
    [
        ((0,), [(0, 0, "efa")]),
        (
            (0, 1, 2),
            [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only"), (2, 0, "efa-only")],
        ),
        ((1, 2), [(0, 0, "interface"), (1, 0, "efa-only"), (2, 0, "efa-only")]),
    ],
    ids=["one card", "all take an EFA", "the first takes none"],
)
def test_every_network_card_is_attached_and_without_an_address_where_there_are_several(
    cards: tuple[int, ...], interfaces: list[tuple[int, int, str]]
) -> None:
    """As AWS recommends for P5 and P6: EC2 refuses words about a public address beside several interfaces."""
    wide = replace(SPEC, public=False, types={"p4d.24xlarge": replace(EFA, efa_cards=cards)})
    for cluster in (Cluster.of((2, OFFERS[4])), Cluster.of((1, OFFERS[4]))):
        requests = dict(requests_of(wide, rungs_of(cluster)[0], security="sg-1", user_data="x"))
        found = requests["ec2:RunInstances"]["NetworkInterfaces"]
        kinds = [
            (one.get("NetworkCardIndex", 0), one["DeviceIndex"], one["InterfaceType"])
            for one in found
        ]
        assert kinds == interfaces
        assert all(one["SubnetId"] == "subnet-a" and one["Groups"] == ["sg-1"] for one in found)
        assert len(found) == 1 or not any("AssociatePublicIpAddress" in one for one in found)


def test_one_machine_with_a_public_address_has_its_first_card_alone() -> None:
    for cards, kind_of in (((0, 1), "efa"), ((1, 2), None)):
        spec = replace(SPEC, types={"p4d.24xlarge": replace(EFA, efa_cards=cards)})
        requests = dict(
            requests_of(spec, rungs_of(Cluster.of((1, OFFERS[4])))[0], security="s", user_data="x")
        )
        [interface] = requests["ec2:RunInstances"]["NetworkInterfaces"]
        assert (
            interface.get("InterfaceType") == kind_of
            and interface["AssociatePublicIpAddress"] is True
        )


def test_every_made_thing_has_all_tags() -> None:
    wanted = {
        "srift:deployment",
        "srift:lease",
        "srift:node-group",
        "srift:deadline",
        "srift:controller",
    }
    for rung in rungs_of():
        requests = [
            *requests_of(SPEC, rung, security="sg-1", user_data="x"),
            ("", ec2_request.security_group(SPEC)),
        ]
        for _, request in requests:
            for kind_of in request["TagSpecifications"]:
                assert wanted <= {tag["Key"] for tag in kind_of["Tags"]}


def test_the_same_is_asked_in_the_same_words_and_anything_else_under_another_token() -> None:
    tokens = set()
    for spec in (SPEC, replace(SPEC, lease_id="r-2"), replace(SPEC, controller="def")):
        for rung in rungs_of():
            first = list(requests_of(spec, rung, security="sg-1", user_data="x"))
            assert first == list(requests_of(spec, rung, security="sg-1", user_data="x"))
            tokens |= {
                request["ClientToken"] for action, request in first if "Placement" not in action
            }
    assert len(tokens) == 3 * (2 + 3) and all(len(token) <= 64 for token in tokens)


def test_a_shortened_request_has_a_digest_for_the_user_data() -> None:
    requests = list(requests_of(SPEC, rungs_of()[0], security="sg-1", user_data="long"))
    assert (
        "long" not in (text := json.dumps(shortened([request for _, request in requests])))
        and "sha256" in text
    )


@given(st.integers(1, 8), st.floats(60, 86_400), st.floats(0.01, 100), st.integers(0, 5))
def test_the_worst_case_bounds_every_rung_to_its_end(
    size: int, deadline_s: float, usd: float, place: int
) -> None:
    cluster = Cluster.of((size, replace(OFFERS[1], usd_per_hour=usd)))
    for markets in (BOTH, ("spot",)):
        rungs, said = ladder(cluster, OFFERS, ZONES, markets)
        places = [place for rung in rungs for place in rung.places]
        price = sum(places[place % len(places)].most_usd) + size * SPEC.usd_per_hour_more
        worst = Prospect(spec=SPEC, rungs=rungs, said=said).worst_usd(deadline_s)
        assert worst > price * deadline_s / 3600, "whichever zone a fleet chooses"


@pytest.mark.parametrize(
    ("name", "market", "code"),
    [
        ("g5.xlarge", "on-demand", "L-DB2E81BA"),
        ("vt1.3xlarge", "spot", "L-3819A6DF"),
        ("gr6.4xlarge", "spot", "L-3819A6DF"),
        ("gr6f.4xlarge", "on-demand", "L-DB2E81BA"),
        ("p4d.24xlarge", "on-demand", "L-417A185B"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("p5.48xlarge", "spot", "L-C4BD4855"),
        ("m5.large", "on-demand", "L-1216C47A"),
        ("c7i.large", "spot", "L-34B43A08"),
        ("trn1.32xlarge", "spot", None),
    ],
)
def test_each_family_and_market_has_its_quota(name: str, market: str, code: str | None) -> None:
    assert quota_of(name, market) == code


def test_quotas_count_vcpus_wanted_and_held() -> None:
    facts = {"g4dn.xlarge": PLAIN}
    assert vcpus_by_quota(ASKED.members, facts) == {"L-3819A6DF": 8}
    cpu = {"CoreCount": 2, "ThreadsPerCore": 2}
    held = vcpus_held(
        [{"InstanceType": "g5.xlarge", "CpuOptions": cpu, "InstanceLifecycle": "spot"}] * 2
    )
    assert held == {"L-3819A6DF": 8}


def test_facts_are_read_from_the_description() -> None:
    answer = {
        "InstanceType": "g5g.xlarge",
        "VCpuInfo": {"DefaultVCpus": 4},
        "ProcessorInfo": {"SupportedArchitectures": ["arm64"]},
        "NetworkInfo": {"EfaSupported": False},
        "PlacementGroupInfo": {"SupportedStrategies": ["cluster"]},
    }
    assert facts_of(answer) == TypeFacts(
        name="g5g.xlarge", vcpus=4, arm=True, efa=False, grouped=True
    )
