"""The packaged types and prices: unknown prices are unknown."""

from tasks.providers.ec2.market import packaged_offers
from tasks.providers.ec2.settings import Ec2
from tasks.providers.ec2.snapshot import packaged
from tests.snapshot import combined
from tests.tasks.providers.ec2.test_catalogue import answer


def test_no_price_in_it_is_zero_and_unknown_ones_are_offered_unpriced():
    prices = [usd for prices in packaged().usd.values() for usd in prices.values()]
    assert None in prices and all(usd is None or usd > 0 for usd in prices)
    offers = packaged_offers(Ec2(), "us-east-1")
    assert len(offers) > 30 and any(offer.usd_per_hour is None for offer in offers)
    assert {offer.price_as_of for offer in offers} == {packaged().prices_as_of}


def test_sources_are_combined_by_type_and_region():
    listed = {"us-east-1": 1.5, "eu-west-1": 0.0, "us-gov-west-1": 2.0, "us-west-2-lax-1": 3.0}
    offered = {"us-east-1": {"g9.2xlarge"}, "eu-west-1": {"g9.2xlarge"}, "eu-west-2": {"other"}}
    rows = combined([answer()], offered, {"g9.2xlarge": listed})
    assert rows["g9.2xlarge"][-1] == {"eu-west-1": None, "us-east-1": 1.5}
