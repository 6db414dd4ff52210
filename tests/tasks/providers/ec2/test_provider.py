"""The EC2 provider against emulated AWS: types and prices of every page, and what it says where AWS says no."""

from __future__ import annotations

import io
import json
import urllib.request
from datetime import UTC, datetime

import pytest

from models.domain.cluster import ANY_ZONE, Cluster, bucket_hazard
from tasks.providers.base import NotSupported, Provider, ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.settings import Ec2
from tests.ec2_world import NOON, World, emulated

real_advisor = ec2_api.spot_advisor
LISTED = {
    "us-east-1": {
        "g4dn.12xlarge": 3.912,
        "g4dn.xlarge": 0.526,
        "g5.xlarge": None,
        "m5.large": 0.096,
    },
    "eu-west-1": {"g4dn.12xlarge": 4.362},
}
SPOT = {"us-east-1": {("g4dn.12xlarge", "us-east-1a"): 1.2, ("g4dn.12xlarge", "us-east-1b"): 1.4,
                      ("g9.huge", "us-east-1a"): 9.0}}  # fmt: skip
OFFERED = {
    "us-east-1": ("g4dn.12xlarge", "g4dn.xlarge", "g4dn.16xlarge", "g5.xlarge", "m5.large"),
    "eu-west-1": ("g4dn.12xlarge", "m5.large"),
}
NARROW = Ec2(regions=("us-east-1", "eu-west-1"), instance_types=("g4dn.*", "g5.xlarge"))


@pytest.fixture(autouse=True)
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials but those of the test, nothing beyond this process."""
    monkeypatch.setattr(ec2_api, "spot_advisor", dict)


@pytest.mark.parametrize("offered", [OFFERED, None], ids=["few types", "all that moto knows"])
def test_offers_are_what_each_region_offers_lists_and_sells_by_zone(
    offered: dict[str, tuple[str, ...]] | None,
) -> None:
    world = World(LISTED, SPOT, offered)
    world.page = {"GetProducts": 2, "DescribeSpotPriceHistory": 1}
    with emulated():
        offers = Ec2Provider(NARROW, world.clients).offers(NOON)
    found = {(o.instance_type.name, o.market, o.region, o.zone): o.usd_per_hour for o in offers}
    assert found["g4dn.12xlarge", "on-demand", "us-east-1", ANY_ZONE] == 3.912
    assert found["g4dn.12xlarge", "on-demand", "eu-west-1", ANY_ZONE] == 4.362
    assert found["g4dn.12xlarge", "spot", "us-east-1", "us-east-1b"] == 1.4
    assert found["g5.xlarge", "on-demand", "us-east-1", ANY_ZONE] is None, "a price of 0 is unknown"
    assert found["g4dn.16xlarge", "on-demand", "us-east-1", ANY_ZONE] is None, (
        "offered, and not in the price list"
    )
    assert not any(name in ("m5.large", "g9.huge") for name, *_ in found), (
        "asked for, or known to EC2, by nobody"
    )
    assert not any(key[1:3] == ("spot", "eu-west-1") for key in found)
    assert {o.price_as_of for o in offers} == {NOON}
    hazards = {o.market: o.interruptions_per_hour for o in offers}
    assert hazards == {"on-demand": 0.0, "spot": bucket_hazard(None)}


def test_a_type_is_described_once_however_many_regions_offer_it() -> None:
    world = World(LISTED, offered=OFFERED)
    with emulated():
        provider = Ec2Provider(NARROW, world.clients)
        names = [one.name for one in provider.instance_types()]
        provider.offers(NOON)
    assert len(names) == len(set(names)) and "g4dn.12xlarge" in names
    everywhere = [region for action, region in world.asked if action == "DescribeInstanceTypes"]
    assert everywhere == ["us-east-1"], "the second region offers nothing that the first lacks"


def test_the_spot_advisors_bucket_is_the_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    advisor = {"spot_advisor": {"us-east-1": {"Linux": {"g4dn.12xlarge": {"r": 1, "s": 70}}}}}
    monkeypatch.setattr(ec2_api, "spot_advisor", lambda: advisor)
    world = World(LISTED, SPOT, OFFERED)
    monkeypatch.setattr(ec2_api, "boto_clients", lambda: world.clients)
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: True)
    with emulated():
        offers = Ec2Provider(NARROW).offers(NOON)
    spot = {o.instance_type.name: o.interruptions_per_hour for o in offers if o.market == "spot"}
    assert spot == {"g4dn.12xlarge": bucket_hazard(1)}


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        ("GetProducts", "AccessDeniedException", "may not call pricing:GetProducts"),
        ("GetProducts", "ExpiredTokenException", "sign in again"),
        (
            "DescribeSpotPriceHistory",
            "UnauthorizedOperation",
            "may not call ec2:DescribeSpotPriceHistory in us-east-1",
        ),
        ("DescribeInstanceTypeOfferings", "AuthFailure", "does not accept these credentials"),
        ("DescribeInstanceTypeOfferings", "OptInRequired", "take it out of [ec2] regions"),
        ("DescribeInstanceTypes", "RequestExpired", "sign in again"),
        (
            "GetProducts",
            "500",
            "could not serve pricing:GetProducts",
        ),  # a proxy's page, none of AWS's answers
        (
            "DescribeInstanceTypes",
            "ResponseParserError",
            "could not serve ec2:DescribeInstanceTypes",
        ),
        (
            "DescribeInstanceTypes",
            "Bewildering",
            "AWS refused ec2:DescribeInstanceTypes in us-east-1 (Bewildering)",
        ),
    ],
)
def test_a_refusal_is_a_sentence_that_names_the_fix_and_no_secret(
    action: str, code: str, says: str
) -> None:
    world = World(LISTED, SPOT, OFFERED)
    world.refuse[action] = (500, "a proxy's page") if "could not serve" in says else (400, code)
    with emulated(), pytest.raises(ProviderError) as refused:
        Ec2Provider(Ec2(instance_types=("g4dn.*",)), world.clients).offers(NOON)
    assert says in str(refused.value) and code in str(refused.value)
    assert "very-secret-key" not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__, (
        "AWS's words stay out of tracebacks"
    )


def test_without_credentials_it_says_so_and_has_the_package() -> None:
    provider = Ec2Provider(Ec2())
    with pytest.raises(ProviderError, match="AWS_PROFILE"):
        provider.offers(NOON)
    with pytest.raises(ProviderError, match="AWS_PROFILE"):
        provider.instance_types()
    offers = provider.packaged_offers()
    named = {o.instance_type.name: o for o in offers}
    assert {o.market for o in offers} == {"on-demand"} and {o.region for o in offers} == {
        "us-east-1"
    }
    assert named["g4dn.12xlarge"].usd_per_hour and "m5.large" not in named
    assert all(o.price_as_of < datetime.now(UTC) for o in offers)
    assert any("no AWS credentials" in one and "2025-" in one for one in provider.limits())


def test_a_misspelt_profile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ProviderError, match="AWS_PROFILE names a profile"):
        Ec2Provider(Ec2()).offers(NOON)
    assert any("AWS_PROFILE names a profile" in one for one in Ec2Provider(Ec2()).limits())


def test_a_misspelt_region_or_pattern_is_named_with_the_nearest_right_one() -> None:
    wrong = Ec2Provider(
        Ec2(regions=("us-esat-1",), instance_types=("gpus", "p4d.24xlarg", "g5.*", "gpu"))
    )
    said = wrong.limits()
    assert any("'us-esat-1' is no region" in one and "'us-east-1'" in one for one in said)
    [first, second] = [one for one in said if "matches no type" in one]
    assert "'gpus' matches no type" in first and "did you mean 'gpu'" in first
    assert "did you mean 'p4d.24xlarge'" in second
    assert wrong.packaged_offers() == []


def test_it_is_a_provider_that_launches_nothing_without_a_mailbox() -> None:
    provider: Provider = Ec2Provider(
        Ec2(regions=("us-east-1", "us-west-2"), instance_types=("g4dn.xlarge",))
    )
    assert isinstance(provider, Ec2Provider)
    east, west = provider.packaged_offers()
    assert provider.fits(Cluster.of((2, east))) == ""
    assert "one region" in provider.fits(Cluster.of((1, east), (1, west)))
    with (
        pytest.raises(NotSupported, match="srift import"),
        provider.acquire(Cluster.of((1, east)), lease_id="x", deadline_s=1.0, seed=1),
    ):
        pass
    assert (provider.leases(), provider.ended(), provider.reap(NOON)) == ([], [], [])


def test_only_the_markets_that_are_wanted_are_asked_for() -> None:
    world = World(LISTED, SPOT, OFFERED)
    with emulated():
        offers = Ec2Provider(
            Ec2(instance_types=("g4dn.*",), markets=("spot",)), world.clients
        ).offers(NOON)
    assert {o.market for o in offers} == {"spot"}
    assert "GetProducts" not in {action for action, _ in world.asked}
    assert Ec2Provider(Ec2(markets=("spot",))).packaged_offers() == []


def test_the_ordinary_credentials_count_and_are_found_without_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not ec2_api.has_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-key")
    assert ec2_api.has_credentials()
    provider = Ec2Provider(Ec2(instance_types=("g4dn.xlarge",)))
    with emulated():
        (one,) = provider.instance_types()
    assert (one.name, one.device, one.bandwidth_gbps) == ("g4dn.xlarge", "T4", 5.0)
    assert not any("credentials" in sentence for sentence in provider.limits())
    assert "very-secret-key" not in repr(vars(provider))


def test_the_advisor_is_a_prior_that_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"spot_advisor": {"us-east-1": {}}}
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda url, timeout: io.BytesIO(json.dumps(body).encode())
    )
    assert real_advisor() == body
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"<html>"))
    assert real_advisor() == {}

    def unreachable(url: str, timeout: float) -> io.BytesIO:
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    assert real_advisor() == {}
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda url, timeout: pytest.fail("AWS is emulated, the Advisor not"),
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:5000")
    assert real_advisor() == {}


def test_what_the_image_does_not_run_on_is_not_offered_and_said_and_an_unknown_image_leaves_nothing_out() -> (
    None
):
    ours, own = Ec2Provider(Ec2()), Ec2Provider(Ec2(ami_parameter="/ours/ami"))
    [said] = [one for one in ours.limits() if "leaves out" in one]
    assert "p3dn (V100)" in said and "g7e" in said and "https://" in said and "g5 " not in said
    assert "p3dn.24xlarge" not in {one.name for one in ours.packaged_types()}
    [unknown] = [one for one in own.limits() if "/ours/ami" in one]
    assert "whether it runs there or not" in unknown
    assert "p3dn.24xlarge" in {one.name for one in own.packaged_types()}
    assert not any(
        "leaves out" in one for one in Ec2Provider(Ec2(instance_types=("g5.*",))).limits()
    )


def test_a_type_that_is_named_is_advised_about_and_launched_where_the_image_runs_and_all_have_gpus_or_none() -> (
    None
):
    provider = Ec2Provider(Ec2(instance_types=("p3dn.24xlarge", "p4d.24xlarge", "c7i.xlarge")))
    offers = {one.instance_type.name: one for one in provider.packaged_offers()}
    volta, ampere = (
        Cluster.of((1, offers["p3dn.24xlarge"])),
        Cluster.of((1, offers["p4d.24xlarge"])),
    )
    processors, mixed = Cluster.of((2, offers["c7i.xlarge"])), (1, offers["c7i.xlarge"])
    assert "with and without GPUs" in provider.fits(Cluster.of((1, offers["p4d.24xlarge"]), mixed))
    assert (
        provider.fits(Cluster.of((1, offers["p4d.24xlarge"]), (1, offers["p3dn.24xlarge"]))) == ""
    )
    assert provider.fits(processors) == ""
    assert "does not run on p3dn" in provider.launches(volta) and provider.fits(volta) == ""
    assert provider.launches(ampere) == ""
