"""The EC2 provider's types and prices, live and packaged, and its refusals."""

from __future__ import annotations

import io
import json
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from moto import mock_aws

from models.domain.cluster import ANY_ZONE, Cluster, bucket_hazard
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.api import Clients
from tasks.providers.ec2.provider import Ec2Provider, notes_on_types
from tasks.providers.ec2.settings import Ec2
from tests.fake_ec2 import NOON, FakeAws, Fault
from tests.fake_ec2_account import Account

real_advisor = ec2_api.spot_advisor
USD: dict[str, dict[str, float | None]] = {
    "us-east-1": {"g4dn.12xlarge": 3.912, "g4dn.xlarge": 0.526, "g5.xlarge": 0.0, "m5.large": 0.1},
    "eu-west-1": {"g4dn.12xlarge": 4.362},
}
SPOT = {
    "us-east-1": {
        ("g4dn.12xlarge", "us-east-1a"): 1.2,
        ("g4dn.12xlarge", "us-east-1b"): 1.4,
        ("g9.huge", "us-east-1a"): 9.0,
    }
}
NARROW = Ec2(regions=("us-east-1", "eu-west-1"), instance_types=("g4dn.*", "g5.xlarge"))


def provider_of(choices: Ec2, clients: Clients | None = None) -> Ec2Provider:
    """A provider with a home that nobody has used."""
    return Ec2Provider(choices, clients, home=Path("/no/home"), node_package=Path("/no/package"))


@pytest.fixture(autouse=True)
def aws(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    monkeypatch.setattr(ec2_api, "spot_advisor", dict)
    return FakeAws(account=Account(usd=USD, spot_usd=SPOT, page=1))


def test_offers_are_what_each_region_offers_lists_and_sells_by_zone(aws: FakeAws) -> None:
    provider = provider_of(NARROW, aws.clients)
    offers = provider.offers(NOON)
    found = {(o.instance_type.name, o.market, o.region, o.zone): o.usd_per_hour for o in offers}
    assert found == {
        ("g4dn.12xlarge", "on-demand", "us-east-1", ANY_ZONE): 3.912,
        ("g4dn.xlarge", "on-demand", "us-east-1", ANY_ZONE): 0.526,
        ("g5.xlarge", "on-demand", "us-east-1", ANY_ZONE): None,
        ("g4dn.12xlarge", "on-demand", "eu-west-1", ANY_ZONE): 4.362,
        ("g4dn.12xlarge", "spot", "us-east-1", "us-east-1a"): 1.2,
        ("g4dn.12xlarge", "spot", "us-east-1", "us-east-1b"): 1.4,
    }
    assert {o.price_as_of for o in offers} == {NOON}
    hazards = {o.market: o.interruptions_per_hour for o in offers}
    assert hazards == {"on-demand": 0.0, "spot": bucket_hazard(None)}
    assert aws.count("ec2:DescribeInstanceTypes") == 1


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        ("pricing:GetProducts", "AccessDeniedException", "--print-policies"),
        ("ec2:DescribeSpotPriceHistory", "ExpiredTokenException", "aws sso login"),
        ("ec2:DescribeInstanceTypeOfferings", "OptInRequired", "[ec2] regions"),
        ("ec2:DescribeInstanceTypes", "Bewildering", "Bewildering"),
    ],
)
def test_a_refusal_names_action_code_and_fix_and_no_secret(
    aws: FakeAws, action: str, code: str, says: str
) -> None:
    aws.faults = [Fault(action=action, code=code, times=9)]
    with pytest.raises(ProviderError) as refused:
        provider_of(NARROW, aws.clients).offers(NOON)
    assert all(one in str(refused.value) for one in (action, code, says))
    assert "very-secret-key" not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__


def test_without_credentials_it_has_the_package() -> None:
    provider = provider_of(Ec2())
    for question in (lambda: provider.offers(NOON), provider.instance_types):
        with pytest.raises(ProviderError, match="AWS_PROFILE"):
            question()
    named = {o.instance_type.name: o for o in provider.packaged_offers()}
    assert {(o.market, o.region) for o in named.values()} == {("on-demand", "us-east-1")}
    assert named["g4dn.12xlarge"].usd_per_hour and "m5.large" not in named
    assert all(o.price_as_of < datetime.now(UTC) for o in named.values())
    assert any("AWS_PROFILE" in one for one in provider.limits())


def test_a_profile_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ProviderError, match="ProfileNotFound"):
        provider_of(Ec2()).offers(NOON)
    assert any("ProfileNotFound" in one for one in provider_of(Ec2()).limits())


def test_unknown_regions_and_patterns_are_named() -> None:
    wrong = Ec2(regions=("us-esat-1",), instance_types=("gpus", "p4d.24xlarg", "g5.*", "gpu"))
    provider = provider_of(wrong)
    said = [one for one in notes_on_types(wrong) if "matches no" in one]
    assert len(said) == 3 and set(said) <= {*provider.limits()}
    assert provider.packaged_offers() == []


def test_it_launches_nothing_without_a_bucket() -> None:
    regions = ("us-east-1", "us-west-2")
    provider = provider_of(Ec2(regions=regions, instance_types=("g4dn.xlarge",)))
    east, west = provider.packaged_offers()
    assert provider.fits(Cluster.of((2, east))) == ""
    assert provider.fits(Cluster.of((1, east), (1, west))) != ""
    with (
        pytest.raises(ProviderError),
        provider.acquire(Cluster.of((1, east)), lease_id="x", deadline_s=1.0, seed=1),
    ):
        pass
    assert (provider.leases(), provider.ended(), len(provider.reap(NOON))) == ([], [], 1)


def test_only_the_wanted_markets_are_asked_for(aws: FakeAws) -> None:
    choices = Ec2(instance_types=("g4dn.*",), markets=("spot",))
    assert {o.market for o in provider_of(choices, aws.clients).offers(NOON)} == {"spot"}
    assert aws.count("pricing:GetProducts") == 0
    assert provider_of(choices).packaged_offers() == []


def test_boto3_finds_the_ordinary_credentials_and_parses_what_aws_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not ec2_api.has_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-key")
    provider = provider_of(Ec2(instance_types=("g4dn.xlarge",)))
    with mock_aws():
        (one,) = provider.instance_types()
    assert (one.name, one.device, one.bandwidth_gbps) == ("g4dn.xlarge", "T4", 5.0)
    assert not any("AWS_PROFILE" in sentence for sentence in provider.limits())
    assert "very-secret-key" not in repr(vars(provider))


def test_the_advisor_is_a_prior_that_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"spot_advisor": {"us-east-1": {}}}
    for text, found in ((json.dumps(body), body), ("<html>", {})):
        answer = io.BytesIO(text.encode())
        monkeypatch.setattr(urllib.request, "urlopen", lambda *_, one=answer, **__: one)
        assert real_advisor() == found

    def unreachable(*_: object, **__: object) -> io.BytesIO:
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    assert real_advisor() == {}
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:5000")
    assert real_advisor() == {}


def test_types_that_the_image_does_not_run_on_are_not_offered() -> None:
    [said] = notes_on_types(Ec2())
    assert "p3dn" in said and "g7e" in said
    assert len(notes_on_types(Ec2(ami_parameter="/ours/ami"))) == 1
    assert "p3dn.24xlarge" not in {kind.name for kind in provider_of(Ec2()).packaged_types()}


def test_a_cluster_is_launched_if_the_image_and_the_network_serve_it() -> None:
    names = ("p3dn.24xlarge", "p4d.24xlarge", "c7i.xlarge")
    provider = provider_of(Ec2(instance_types=names))
    private = provider_of(Ec2(instance_types=names, subnets="private"))
    offers = {offer.instance_type.name: offer for offer in provider.packaged_offers()}
    volta, ampere, processor = (offers[name] for name in names)
    assert provider.fits(Cluster.of((1, ampere), (1, volta))) == ""
    assert provider.launches(Cluster.of((1, volta))) != ""
    assert provider.launches(Cluster.of((1, ampere))) == ""
    assert provider.fits(Cluster.of((1, ampere), (1, processor))) != ""
    pair = Cluster.of((2, ampere))  # several network cards have no public address
    assert provider.launches(pair) != "" and private.launches(pair) == ""
