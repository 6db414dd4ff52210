"""Attempts and their requests: prices, zones, tokens, network cards, valid for botocore."""

from dataclasses import replace

import pytest
from botocore import xform_name

from models.domain.cluster import Cluster
from tasks.providers.ec2.attempts import attempts
from tasks.providers.ec2.requests import LaunchSpec, requests_of, security_group
from tasks.providers.ec2.settings import Ec2
from tests import aws_model
from tests.fakes import offer

ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
BOTH = ("on-demand", "spot")


def offered(name, market, zone, usd):
    plain = offer(usd)
    kind = replace(plain.instance_type, name=name, provider="ec2")
    return replace(plain, instance_type=kind, market=market, zone=zone, region="us-east-1")


SPOT = [
    offered("g4dn.xlarge", "spot", zone, usd)
    for zone, usd in zip(ZONES, (0.20, 0.18, 0.50), strict=True)
]
ON_DEMAND = offered("p4d.24xlarge", "on-demand", "any", 32.77)
OFFERS = [*SPOT, offered("g4dn.xlarge", "on-demand", "any", 0.526), ON_DEMAND]
WANTED, P4D = Cluster.of((2, SPOT[0])), Cluster.of((2, ON_DEMAND))


def kind(*efa_cards):
    """A description of an instance type whose cards `efa_cards` support EFA."""
    cards = [{"InterfaceTypes": ["interface", *(["efa"] * (at in efa_cards))]} for at in range(5)]
    efa = {"EfaSupported": bool(efa_cards), "EfaInfo": {"MaximumEfaInterfaces": 5}}
    groups = {"SupportedStrategies": ["cluster"]}
    return {"NetworkInfo": efa | {"NetworkCards": cards}, "PlacementGroupInfo": groups}


SPEC = LaunchSpec(
    choices=Ec2(), region="us-east-1", vpc="vpc-1",
    subnets={zone: f"subnet-{zone[-1]}" for zone in ZONES},
    types={"g4dn.xlarge": kind(), "p4d.24xlarge": kind(0)},
    image={"ImageId": "ami-1"}, role_id="AROA", controller="abc", lease_id="r-1",
    deadline_unix=1_800_000_000,
)  # fmt: skip


def attempts_of(cluster=WANTED):
    return attempts(cluster, OFFERS, ZONES, BOTH)


def requests(spec=SPEC, cluster=WANTED):
    """Of the first attempt, each valid for botocore."""
    found = requests_of(spec, attempts_of(cluster)[0], security="sg-1", user_data="#!/bin/sh\n")
    by_name = {action.partition(":")[2]: request for action, request in found}
    for name, request in by_name.items():
        aws_model.valid("ec2", xform_name(name), request)
    return by_name


def interfaces(spec, cluster=P4D):
    data = requests(spec, cluster)["CreateLaunchTemplate"]["LaunchTemplateData"]
    found = data["NetworkInterfaces"]
    assert all(
        interface["Groups"] == ["sg-1"] and "SubnetId" not in interface for interface in found
    )
    return found


def test_only_allowed_markets_and_known_prices_are_attempted():
    assert [attempt.market for attempt in attempts(WANTED, OFFERS, ZONES, ("spot",))] == ["spot"]
    assert [attempt.market for attempt in attempts_of(P4D)] == ["on-demand"]
    unknown = [replace(offer, usd_per_hour=None) for offer in OFFERS]
    assert attempts(Cluster.of((1, unknown[0])), unknown, ZONES, BOTH) == []
    [spot, _] = attempts(WANTED, OFFERS, [*ZONES[1:], "us-east-1f"], BOTH)
    assert list(spot.clusters) == ZONES[1:]


@pytest.mark.parametrize("cluster", [WANTED, P4D], ids=["spot", "on-demand"])
def test_a_fleet_is_all_or_none_in_one_zone_and_spot_up_to_a_price(cluster):
    found = requests(cluster=cluster)
    assert list(found) == ["CreatePlacementGroup", "CreateLaunchTemplate", "CreateFleet"]
    fleet, spot = found["CreateFleet"], cluster is WANTED
    options = fleet["SpotOptions" if spot else "OnDemandOptions"]
    assert ("SpotOptions" in fleet) == spot and fleet["Type"] == "instant"
    assert options["MinTargetCapacity"] == 2
    assert fleet["TargetCapacitySpecification"]["SpotTargetCapacity"] == (2 if spot else 0)
    [config] = fleet["LaunchTemplateConfigs"]
    prices = [(override["SubnetId"], override.get("MaxPrice")) for override in config["Overrides"]]
    most = ("0.2500", "0.2250", "0.5260") if spot else (None, None, None)
    assert prices == list(zip(SPEC.subnets.values(), most, strict=True))
    assert "CreatePlacementGroup" not in requests(cluster=Cluster.of((1, cluster.members[0])))


@pytest.mark.parametrize(
    "cards, expected",
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
def test_every_network_card_is_attached_in_private_subnets(cards, expected):
    """EC2 refuses words about a public address beside several interfaces."""
    types = {"p4d.24xlarge": kind(*cards)}
    found = interfaces(replace(SPEC, choices=Ec2(subnets="private"), types=types))
    kinds = [
        (interface.get("NetworkCardIndex", 0), interface["DeviceIndex"], interface["InterfaceType"])
        for interface in found
    ]
    assert kinds == expected
    assert len(found) == 1 or not any(
        "AssociatePublicIpAddress" in interface for interface in found
    )
    [first] = interfaces(replace(SPEC, types=types), Cluster.of((1, ON_DEMAND)))
    assert first.get("InterfaceType") == ("efa" if 0 in cards else None)
    assert first["AssociatePublicIpAddress"] is True


def test_everything_created_has_all_tags():
    names = ("deployment", "lease", "node-group", "deadline", "controller")
    for request in (*requests().values(), security_group(SPEC)):
        for kind in request["TagSpecifications"]:
            assert {f"srift:{name}" for name in names} <= {tag["Key"] for tag in kind["Tags"]}


def test_the_same_request_has_the_same_token_and_any_other_another():
    tokens = set()
    for spec in (SPEC, replace(SPEC, lease_id="r-2"), replace(SPEC, controller="def")):
        for attempt in attempts_of():
            first, second = (
                list(requests_of(spec, attempt, security="sg-1", user_data="x")) for _ in range(2)
            )
            assert first == second
            made = (request for action, request in first if "Placement" not in action)
            tokens |= {request["ClientToken"] for request in made}
    assert len(tokens) == 3 * 4 and all(len(token) <= 64 for token in tokens)
