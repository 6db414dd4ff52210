"""Attempts and their requests: prices, zones, tokens, network cards, valid for botocore."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.cluster import Cluster, InstanceType, Offer
from tasks.providers.ec2 import requests as ec2_request
from tasks.providers.ec2.attempts import SPOT_MARGIN, Attempt, attempts
from tasks.providers.ec2.catalogue import TypeFacts, quota_of
from tasks.providers.ec2.requests import LaunchSpec, Request, requests_of, shortened
from tasks.providers.ec2.settings import Ec2
from tests import aws_model
from tests.ec2_home import worst_usd

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
BOTH = ("on-demand", "spot")


def offer(name: str, market: str, zone: str, usd: float | None) -> Offer:
    kind = InstanceType(
        name=name, provider="ec2", devices=1, device="T4", cores=4, memory_gib=16,
        device_memory_gib=16, bandwidth_gbps=5,
    )  # fmt: skip
    return Offer(
        instance_type=kind, market=market, zone=zone, region="us-east-1", usd_per_hour=usd,
        interruptions_per_hour=0.0, price_as_of=NOON,
    )  # fmt: skip


SPOT = [
    offer("g4dn.xlarge", "spot", zone, usd)
    for zone, usd in zip(ZONES, (0.20, 0.18, 0.50), strict=True)
]
OFFERS = [
    *SPOT,
    offer("g4dn.xlarge", "on-demand", "any", 0.526),
    offer("p4d.24xlarge", "on-demand", "any", 32.77),
]
ASKED, P4D = Cluster.of((2, OFFERS[0])), Cluster.of((2, OFFERS[4]))
EFA = TypeFacts(efa_cards=(0,), grouped=True)
SPEC = LaunchSpec(
    region="us-east-1", vpc="vpc-1", subnets={zone: f"subnet-{zone[-1]}" for zone in ZONES},
    types={"g4dn.xlarge": TypeFacts(efa_cards=(), grouped=True), "p4d.24xlarge": EFA},
    image_id="ami-1", root_device="/dev/sda1", choices=Ec2(),
    role_id="AROA", controller="abc", lease_id="r-1",
    deadline_unix=1_800_000_000,
)  # fmt: skip


def attempts_of(cluster: Cluster = ASKED) -> list[Attempt]:
    return attempts(cluster, OFFERS, ZONES, BOTH)


def requests(spec: LaunchSpec = SPEC, cluster: Cluster = ASKED) -> dict[str, Request]:
    """Of the first attempt, each valid for botocore."""
    found = requests_of(spec, attempts_of(cluster)[0], security="sg-1", user_data="#!/bin/sh\n")
    by_action = dict(found)
    for action, request in by_action.items():
        name = action.partition(":")[2]
        method = "".join(f"_{one.lower()}" if one.isupper() else one for one in name)
        aws_model.valid("ec2", method.lstrip("_"), request)
    return by_action


def interfaces(spec: LaunchSpec, cluster: Cluster = P4D) -> list[Request]:
    data = requests(spec, cluster)["ec2:CreateLaunchTemplate"]["LaunchTemplateData"]
    found: list[Request] = data["NetworkInterfaces"]
    assert all(one["Groups"] == ["sg-1"] and "SubnetId" not in one for one in found)
    return found


def test_the_market_asked_for_comes_first_then_on_demand() -> None:
    spot, on_demand = attempts_of()
    assert (spot.market, on_demand.market) == ("spot", "on-demand")
    assert list(spot.clusters) == list(on_demand.clusters) == ZONES
    assert list(spot.groups[0].bids.values()) == pytest.approx(
        [SPOT_MARGIN * 0.20, SPOT_MARGIN * 0.18, 0.526]
    )
    there = spot.clusters[ZONES[1]]
    assert {offer.zone for offer in there.members} == {ZONES[1]}
    assert there.usd_per_hour == pytest.approx(2 * 0.18)


def test_only_allowed_markets_and_known_prices_are_attempted() -> None:
    assert [attempt.market for attempt in attempts(ASKED, OFFERS, ZONES, ("spot",))] == ["spot"]
    assert [attempt.market for attempt in attempts_of(P4D)] == ["on-demand"]
    unknown = [replace(one, usd_per_hour=None) for one in OFFERS]
    assert attempts(Cluster.of((1, unknown[0])), unknown, ZONES, BOTH) == []
    [spot, _] = attempts(ASKED, OFFERS, [*ZONES[1:], "us-east-1f"], BOTH)
    assert list(spot.clusters) == ZONES[1:]


def test_spot_is_a_fleet_of_all_or_none_in_one_zone_up_to_a_price() -> None:
    found = requests()
    assert list(found) == [
        "ec2:CreatePlacementGroup",
        "ec2:CreateLaunchTemplate",
        "ec2:CreateFleet",
    ]
    alone = requests(cluster=Cluster.of((1, OFFERS[0])))
    assert "ec2:CreatePlacementGroup" not in alone
    fleet = found["ec2:CreateFleet"]
    assert fleet["Type"] == "instant" and "OnDemandOptions" not in fleet
    options = fleet["SpotOptions"]
    assert options["SingleAvailabilityZone"] and options["MinTargetCapacity"] == 2
    assert fleet["TargetCapacitySpecification"]["SpotTargetCapacity"] == 2
    assert fleet["LaunchTemplateConfigs"][0]["Overrides"] == [
        {"InstanceType": "g4dn.xlarge", "SubnetId": f"subnet-{zone}", "MaxPrice": most}
        for zone, most in (("a", "0.2500"), ("b", "0.2250"), ("c", "0.5260"))
    ]


def test_on_demand_is_a_fleet_without_a_price() -> None:
    found = requests(cluster=P4D)
    fleet, data = found["ec2:CreateFleet"], found["ec2:CreateLaunchTemplate"]["LaunchTemplateData"]
    assert "SpotOptions" not in fleet and fleet["OnDemandOptions"]["SingleAvailabilityZone"]
    assert fleet["OnDemandOptions"]["MinTargetCapacity"] == 2
    overrides = fleet["LaunchTemplateConfigs"][0]["Overrides"]
    assert len(overrides) == 3 and all("MaxPrice" not in one for one in overrides)
    assert data["MetadataOptions"] == {
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
        "HttpEndpoint": "enabled",
        "HttpProtocolIpv6": "disabled",
    }


@pytest.mark.parametrize(
    ("cards", "expected"),
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
def test_every_network_card_is_attached_in_private_subnets(
    cards: tuple[int, ...], expected: list[tuple[int, int, str]]
) -> None:
    """EC2 refuses words about a public address beside several interfaces."""
    types = {"p4d.24xlarge": replace(EFA, efa_cards=cards)}
    found = interfaces(replace(SPEC, choices=Ec2(subnets="private"), types=types))
    kinds = [
        (one.get("NetworkCardIndex", 0), one["DeviceIndex"], one["InterfaceType"]) for one in found
    ]
    assert kinds == expected
    assert len(found) == 1 or not any("AssociatePublicIpAddress" in one for one in found)
    [first] = interfaces(replace(SPEC, types=types), Cluster.of((1, OFFERS[4])))
    assert first.get("InterfaceType") == ("efa" if 0 in cards else None)
    assert first["AssociatePublicIpAddress"] is True


def test_everything_created_has_all_tags() -> None:
    names = ("deployment", "lease", "node-group", "deadline", "controller")
    for request in (*requests().values(), ec2_request.security_group(SPEC)):
        for kind in request["TagSpecifications"]:
            assert {f"srift:{name}" for name in names} <= {tag["Key"] for tag in kind["Tags"]}


def test_the_same_request_has_the_same_token_and_any_other_another() -> None:
    tokens = set()
    for spec in (SPEC, replace(SPEC, lease_id="r-2"), replace(SPEC, controller="def")):
        for attempt in attempts_of():
            first = list(requests_of(spec, attempt, security="sg-1", user_data="x"))
            assert first == list(requests_of(spec, attempt, security="sg-1", user_data="x"))
            made = (request for action, request in first if "Placement" not in action)
            tokens |= {request["ClientToken"] for request in made}
    assert len(tokens) == 3 * 4 and all(len(token) <= 64 for token in tokens)


def test_a_shortened_request_has_a_digest_for_the_user_data() -> None:
    text = json.dumps([shortened(one) for one in requests().values()])
    assert "IyEvYmluL3No" not in text and "sha256" in text


@given(st.integers(1, 8), st.floats(60, 86_400), st.floats(0.01, 100), st.sampled_from(ZONES))
def test_the_worst_case_bounds_every_attempt_to_its_end(
    size: int, deadline_s: float, usd: float, zone: str
) -> None:
    cluster = Cluster.of((size, replace(OFFERS[0], usd_per_hour=usd)))
    for markets in (BOTH, ("spot",)):
        found = attempts(cluster, OFFERS, ZONES, markets)
        worst = worst_usd(found, SPEC.choices.volume_gib, deadline_s)
        for one in found:
            price = size * (one.groups[0].bids[zone] + SPEC.usd_per_hour_more)
            assert worst > price * deadline_s / 3600


@pytest.mark.parametrize(
    ("name", "market", "code"),
    [
        ("g5.xlarge", "on-demand", "L-DB2E81BA"),
        ("gr6f.4xlarge", "spot", "L-3819A6DF"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("p5.48xlarge", "spot", "L-C4BD4855"),
        ("p5.48xlarge", "on-demand", "L-417A185B"),
        ("c7i.large", "spot", "L-34B43A08"),
        ("trn1.32xlarge", "spot", None),
    ],
)
def test_each_family_and_market_has_its_quota(name: str, market: str, code: str | None) -> None:
    assert quota_of(name, market) == code
