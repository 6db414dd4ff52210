"""The EC2 provider's types and prices, live and packaged, and its refusals."""

import io
import json
import urllib.request
from pathlib import Path

import pytest

from models.domain.cluster import ANY_ZONE, Cluster
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.settings import Ec2
from tests.fake_ec2 import NOON, FakeAws
from tests.fake_ec2_account import Account

real_advisor = ec2_api.spot_advisor
EAST, WEST = "us-east-1", "eu-west-1"
USD = {
    EAST: {"g4dn.12xlarge": 3.912, "g4dn.xlarge": 0.526, "g5.xlarge": 0.0, "m5.large": 0.1},
    WEST: {"g4dn.12xlarge": 4.362},
}
SPOT = {
    EAST: {
        ("g4dn.12xlarge", "us-east-1a"): 1.2,
        ("g4dn.12xlarge", "us-east-1b"): 1.4,
        ("g9.huge", "us-east-1a"): 9.0,
    }
}
NARROW = Ec2(regions=(EAST, WEST), instance_types=("g4dn.*", "g5.xlarge"))


def provider_of(choices, clients=None):
    """A provider with a home that nobody has used."""
    return Ec2Provider(choices, clients, home=Path("/no/home"), node_package=Path("/no/package"))


@pytest.fixture(autouse=True)
def aws(no_credentials, monkeypatch):
    monkeypatch.setattr(ec2_api, "spot_advisor", dict)
    return FakeAws(account=Account(usd=USD, spot_usd=SPOT, page=1))


def test_offers_are_what_each_region_offers_lists_and_sells_by_zone(aws):
    offers = provider_of(NARROW, aws.clients).offers(NOON)
    found = {(o.instance_type.name, o.market, o.region, o.zone): o.usd_per_hour for o in offers}
    assert found == {
        ("g4dn.12xlarge", "on-demand", EAST, ANY_ZONE): 3.912,
        ("g4dn.xlarge", "on-demand", EAST, ANY_ZONE): 0.526,
        ("g5.xlarge", "on-demand", EAST, ANY_ZONE): None,
        ("g4dn.12xlarge", "on-demand", WEST, ANY_ZONE): 4.362,
        ("g4dn.12xlarge", "spot", EAST, "us-east-1a"): 1.2,
        ("g4dn.12xlarge", "spot", EAST, "us-east-1b"): 1.4,
    }
    assert {o.price_as_of for o in offers} == {NOON}
    spot = provider_of(NARROW.model_copy(update={"markets": ("spot",)}), aws.clients)
    request_count = aws.count("pricing:GetProducts")
    assert spot.offers(NOON) == [offer for offer in offers if offer.market == "spot"]
    assert aws.count("pricing:GetProducts") == request_count and spot.packaged_offers() == []
    scores = spot.placement_scores(EAST, ["g5.xlarge"], 4)
    assert scores == {f"us-east-1{zone}": 5 for zone in "abc"}


@pytest.mark.parametrize(
    "action, code, says",
    [
        ("pricing:GetProducts", "AccessDeniedException", "--print-policies"),
        ("ec2:DescribeInstanceTypes", "OptInRequired", "[ec2] regions"),
        ("ec2:DescribeInstanceTypes", "Bewildering", "Bewildering"),
    ],
)
def test_a_refusal_names_action_code_and_fix_and_no_secret(aws, action, code, says):
    aws.fails(action, code, times=9)
    with pytest.raises(ProviderError) as refused:
        provider_of(NARROW, aws.clients).offers(NOON)
    assert all(text in str(refused.value) for text in (action, code, says))
    assert "very-secret-key" not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__


@pytest.mark.parametrize("profile, says", [("", "AWS_PROFILE"), ("me", "ProfileNotFound")])
def test_without_credentials_it_has_the_package(monkeypatch, profile, says):
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    provider = provider_of(Ec2())
    with pytest.raises(ProviderError, match=says):
        provider.offers(NOON)
    assert any(says in limit for limit in provider.limits())
    named = {o.instance_type.name: o for o in provider.packaged_offers()}
    assert {(o.market, o.region) for o in named.values()} == {("on-demand", EAST)}
    assert named["g4dn.12xlarge"].usd_per_hour and "m5.large" not in named


def test_unknown_names_and_types_without_an_image_are_limits():
    wrong = Ec2(regions=("us-esat-1",), instance_types=("gpus", "p4d.24xlarg", "g5.*", "gpu"))
    provider, right = provider_of(wrong), provider_of(Ec2())
    for name in ("us-esat-1", "gpus", "p4d.24xlarg"):
        assert any(name in limit for limit in provider.limits()), name
    assert len(right.limits()) == len(provider.limits()) - 3 and provider.packaged_offers() == []
    names = {offer.instance_type.name for offer in right.packaged_offers()}
    assert names and "p3dn.24xlarge" not in names
    assert len(provider_of(Ec2(bucket="mine-1")).limits()) == len(right.limits()) - 1


def test_boto3_finds_the_ordinary_credentials_and_parses_what_aws_sends(request):
    request.getfixturevalue("moto")
    provider = provider_of(Ec2(instance_types=("g4dn.xlarge",)))
    [kind] = provider.instance_types()
    assert (kind.name, kind.device, kind.bandwidth_gbps) == ("g4dn.xlarge", "T4", 5.0)
    assert "very-secret-key" not in repr(vars(provider))


BODY = {"spot_advisor": {"us-east-1": {}}}


@pytest.mark.parametrize(
    "sent, found", [(json.dumps(BODY).encode(), BODY), (b"<html>", {})], ids=["file", "no file"]
)
def test_the_advisor_is_a_prior_that_may_be_missing(monkeypatch, sent, found):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(sent))
    assert real_advisor() == found


def test_a_cluster_is_launched_if_the_image_and_the_network_serve_it():
    names = ("p3dn.24xlarge", "p4d.24xlarge", "c7i.xlarge")
    public = provider_of(Ec2(regions=(EAST, "us-west-2"), instance_types=names))
    private = provider_of(Ec2(instance_types=names, subnets="private"))
    offers = {(offer.instance_type.name, offer.region): offer for offer in public.packaged_offers()}
    volta, ampere, processor = (offers[name, EAST] for name in names)
    assert public.fits(Cluster.of((1, ampere), (1, volta))) == ""
    for other in (processor, offers["p4d.24xlarge", "us-west-2"]):
        assert public.fits(Cluster.of((1, ampere), (1, other))) != ""
    assert public.launches(Cluster.of((1, volta))) != ""
    assert public.launches(Cluster.of((1, ampere))) == ""
    pair = Cluster.of((2, ampere))  # several network cards have no public address
    assert public.launches(pair) != "" and private.launches(pair) == ""
