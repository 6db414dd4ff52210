"""Doctor, dry run and launch go into the same subnets: those from which a machine reaches S3, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks.campaign import dry_run
from tasks.doctor import aws as doctor_places
from tasks.providers.base import NotSupported, ProviderError
from tasks.providers.ec2.account import Ec2Account
from tasks.providers.ec2.api import Ec2Api
from tasks.providers.ec2.errors import AwsRefused
from tasks.providers.ec2.survey import network_of, private_subnets, public_subnets, s3_endpoints
from tasks.workspace.settings import Settings
from tasks.workspace.workspace import Workspace
from tests.ec2_home import CHOICES, Home
from tests.fake_ec2 import FakeAws, Fault
from tests.fake_ec2_account import PRIVATE

IGW, NAT = {"GatewayId": "igw-1"}, {"NatGatewayId": "nat-1"}
PRIVATELY = CHOICES.model_copy(update={"subnets": "private"})


def subnet(name: str, zone: str = "a", **words: Any) -> dict[str, Any]:
    return {"SubnetId": name, "AvailabilityZone": zone, **words}


def table(name: str, *subnets: str, main: bool = False, **way: str) -> dict[str, Any]:
    ties = [{"SubnetId": one} for one in subnets] + ([{"Main": True}] if main else [])
    routes = [{"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local", "State": "active"}]
    routes += [{"DestinationCidrBlock": "0.0.0.0/0", "State": "active"} | way] if way else []
    return {"RouteTableId": name, "Associations": ties, "Routes": routes}


def endpoint(kind: str, service: str = "s3", **words: Any) -> dict[str, Any]:
    name = f"com.amazonaws.us-east-1.{service}"
    return {"VpcEndpointType": kind, "ServiceName": name, "State": "available", **words}


def inbound(only: bool) -> dict[str, Any]:
    return {"DnsOptions": {"PrivateDnsOnlyForInboundResolverEndpoint": only}}


def test_public_is_what_is_routed_to_an_internet_gateway_by_its_own_table_or_the_main_one() -> None:
    tables = [table("main", main=True, **IGW), table("closed", "s-1"), table("nat", "s-3", **NAT)]
    named = [subnet("s-1"), subnet("s-2"), subnet("s-3", "b"), subnet("s-4", "c", State="pending")]
    assert public_subnets(named, tables) == {"a": "s-2"}
    assert public_subnets(named, [table("main", main=True, **IGW, State="blackhole")]) == {}


def test_of_several_the_one_that_gives_addresses_itself_and_then_the_lowest_id_whatever_their_order() -> (
    None
):
    tables = [table("main", main=True, **IGW)]
    named = [subnet("s-3"), subnet("s-1"), subnet("s-2", MapPublicIpOnLaunch=True)]
    assert public_subnets(named, tables) == public_subnets(named[::-1], tables) == {"a": "s-2"}
    assert (
        public_subnets(named[:2], tables) == public_subnets(named[:2][::-1], tables) == {"a": "s-1"}
    )


@pytest.mark.parametrize(
    ("tables", "endpoints", "found"),
    [
        ([table("main", main=True)], [], {}),
        ([table("main", main=True, **IGW)], [], {}),
        ([table("main", main=True, **NAT)], [], {"a": "s-1"}),
        ([table("main", main=True, TransitGatewayId="tgw-1")], [], {"a": "s-1"}),
        ([table("main", main=True)], [endpoint("Gateway", RouteTableIds=["main"])], {"a": "s-1"}),
        (
            [table("main", main=True, **IGW)],
            [endpoint("Gateway", RouteTableIds=["main"])],
            {"a": "s-1"},
        ),
        ([table("main", main=True)], [endpoint("Gateway", RouteTableIds=["other"])], {}),
        ([table("main", main=True)], [endpoint("Gateway", "dynamodb", RouteTableIds=["main"])], {}),
        (
            [table("main", main=True)],
            [endpoint("Gateway", RouteTableIds=["main"]) | {"State": "deleted"}],
            {},
        ),
        ([table("main", main=True)], [endpoint("Interface", PrivateDnsEnabled=True)], {"a": "s-1"}),
        ([table("main", main=True)], [endpoint("Interface", PrivateDnsEnabled=False)], {}),
        (
            [table("main", main=True)],
            [endpoint("Interface", PrivateDnsEnabled=True, **inbound(False))],
            {"a": "s-1"},
        ),
        (
            [table("main", main=True)],
            [endpoint("Interface", PrivateDnsEnabled=True, **inbound(True))],
            {},
        ),
        (
            [table("main", main=True), table("other", "s-1")],
            [
                endpoint("Gateway", RouteTableIds=["main"]),
                endpoint("Interface", PrivateDnsEnabled=True, **inbound(True)),
            ],
            {},
        ),
        (
            [table("main", main=True)],
            [endpoint("Interface", PrivateDnsEnabled=True) | {"State": "pending"}],
            {},
        ),
    ],
    ids=[
        *(
            "no way",
            "internet gateway",
            "NAT",
            "transit gateway",
            "S3 endpoint",
            "S3 endpoint beside a gateway",
        ),
        *(
            "endpoint of another table",
            "DynamoDB's",
            "deleted",
            "interface endpoint",
            "without private DNS",
        ),
        *(
            "private DNS for all",
            "private DNS for inbound resolvers",
            "the gateway of other tables",
            "pending",
        ),
    ],
)
def test_private_is_what_reaches_s3_without_a_public_address(
    tables: list[dict[str, Any]], endpoints: list[dict[str, Any]], found: dict[str, str]
) -> None:
    assert private_subnets([subnet("s-1")], tables, s3_endpoints(endpoints, "us-east-1")) == found


def test_a_private_subnet_is_taken_before_a_public_one_that_an_endpoint_serves_too() -> None:
    tables = [table("main", main=True, **IGW), table("nat", "s-2", **NAT)]
    endpoints = [endpoint("Gateway", RouteTableIds=["main", "nat"])]
    assert private_subnets([subnet("s-1"), subnet("s-2")], tables, endpoints) == {"a": "s-2"}


def test_launch_doctor_and_dry_run_take_the_same_subnet_where_a_zone_has_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choices, prefix in ((CHOICES, "subnet-us"), (PRIVATELY, PRIVATE)):
        home = Home(tmp_path / choices.subnets, choices=choices)
        home.world.account.pairs, home.world.account.nat = True, choices is PRIVATELY
        cluster = home.two("on-demand")
        prospect = home.prospect(cluster, lease_id="r-1", deadline_s=1800.0)
        assert {one[: len(prefix)] for one in prospect.spec.subnets.values()} == {prefix}
        found: list[Any] = []
        doctor_places._network(Ec2Account(Ec2Api(home.world.clients)), choices, "us-east-1", found)
        assert found[0].subnets == prospect.spec.subnets
        asked: list[Any] = []
        monkeypatch.setattr(
            doctor_places, "_requests", lambda ec2, spec, asked=asked: asked.append(spec) or ()
        )
        settings = Settings.model_construct(
            ec2=choices, campaign=Settings.model_fields["campaign"].default
        )
        list(
            doctor_places.examine_region(
                Ec2Account(Ec2Api(home.world.clients)), settings, "us-east-1"
            )
        )
        assert (asked[0].subnets, asked[0].public) == (prospect.spec.subnets, prospect.spec.public)
        here = Workspace(settings=settings, warehouse=None, provider=home.provider)  # type: ignore[arg-type]
        surveyor, _ = dry_run._surveyor(here, home.world.clients)
        assert (
            surveyor is not None
            and surveyor.account("us-east-1").network.subnets == prospect.spec.subnets
        )
        with home.acquire(cluster):
            assert len(home.world.alive()) == 2 and all(one.leads_out for one in home.world.alive())


def test_nothing_private_is_launched_where_s3_is_out_of_reach_and_the_fix_is_named(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path, choices=PRIVATELY)
    home.world.account.pairs = True
    with pytest.raises(
        NotSupported, match=r"S3 gateway endpoint.*com\.amazonaws\.us-east-1\.s3.*NAT gateway"
    ):
        home.prospect(home.two(), lease_id="r-1", deadline_s=1800.0)
    assert home.world.bought() == 0


def test_an_endpoint_serves_no_bucket_of_another_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FakeAws()
    served = {"VpcEndpoints": [endpoint("Gateway", RouteTableIds=["rtb-1"])]}
    monkeypatch.setattr(type(world.account), "describe_vpc_endpoints", lambda *_, **__: served)
    assert network_of(Ec2Api(world.clients), "us-east-1", PRIVATELY).subnets
    world.s3.region = "eu-west-1"
    with pytest.raises(NotSupported, match="the bucket must lie in that region"):
        network_of(Ec2Api(world.clients), "us-east-1", PRIVATELY)


def test_nothing_is_launched_into_a_local_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it would come first: us-east-1-atl-1a."""
    world = FakeAws()
    plain = world.account.describe_subnets
    zones = ("us-east-1-atl-1a", "us-east-1-wl1-bos-wlz-1")

    def more(**words: Any) -> Any:
        return {
            "Subnets": [subnet(f"subnet-{zone}", zone) for zone in zones]
            + plain(**words)["Subnets"]
        }

    monkeypatch.setattr(
        type(world.account), "describe_subnets", lambda self, **words: more(**words)
    )
    found = network_of(Ec2Api(world.clients), "us-east-1", CHOICES)
    assert sorted(found.subnets) == ["us-east-1a", "us-east-1b", "us-east-1c"]


def test_who_may_not_read_route_tables_goes_by_what_subnets_say_and_is_warned_but_not_for_private_ones(
    tmp_path: Path,
) -> None:
    """An account whose policy is older than this version goes on as before."""
    world = FakeAws(
        faults=[Fault(action="ec2:DescribeRouteTables", code="UnauthorizedOperation", times=9)]
    )
    api = Ec2Api(world.clients)
    with pytest.raises(NotSupported, match="internet gateway"):
        network_of(api, "us-east-1", CHOICES)
    plain = world.account.describe_subnets

    def mapped(**words: Any) -> Any:
        return {
            "Subnets": [one | {"MapPublicIpOnLaunch": True} for one in plain(**words)["Subnets"]]
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(world.account), "describe_subnets", lambda self, **words: mapped(**words)
        )
        found = network_of(api, "us-east-1", CHOICES)
    assert len(found.subnets) == 3 and "ec2:DescribeRouteTables" in found.note
    with pytest.raises(AwsRefused, match="ec2:DescribeRouteTables"):
        network_of(api, "us-east-1", PRIVATELY)


def test_several_machines_whose_network_takes_several_interfaces_are_refused_a_public_address_before_anything(
    tmp_path: Path,
) -> None:
    for choices in (CHOICES, PRIVATELY):
        home = Home(tmp_path / choices.subnets, choices=choices)
        home.world.account.pairs = home.world.account.nat = True
        home.world.account.cards = 4
        one, two = Cluster.of((1, home.offer())), home.two()
        assert home.provider.launches(one) == ""
        why = home.provider.launches(two)
        if choices is PRIVATELY:
            assert why == ""
            with home.acquire(two):
                [first, *others] = home.world.alive()[0].request["NetworkInterfaces"]
                assert first["InterfaceType"] == "interface" and len(others) == 4
            continue
        assert "g4dn.12xlarge has several network cards" in why and 'subnets = "private"' in why
        with pytest.raises(ProviderError, match="several network cards"), home.acquire(two):
            pass
        assert home.world.bought() == 0
        with home.acquire(one):
            [first] = home.world.alive()[0].request["NetworkInterfaces"]
            assert home.world.alive()[0].leads_out
