"""The packaged types and prices: unknown prices are unknown, and estimates are named."""

import pandas as pd

from tasks.providers.ec2.catalogue import device_tflops
from tasks.providers.ec2.market import packaged_offers
from tasks.providers.ec2.prices import ESTIMATED
from tasks.providers.ec2.settings import Ec2
from tasks.providers.ec2.snapshot import read_snapshot
from tests.snapshot import combined, estimated
from tests.tasks.providers.ec2.test_catalogue import answer


def test_no_price_in_it_is_zero_and_unknown_ones_are_offered_unpriced():
    prices = [usd for prices in read_snapshot().usd.values() for usd in prices.values()]
    assert None in prices and all(usd is None or usd > 0 for usd in prices)
    east, west = (
        packaged_offers(Ec2(regions=(region,)), region) for region in ("us-east-1", "us-west-2")
    )
    assert len(east) > 30 and all(offer.usd_per_hour for offer in east)
    assert any(offer.usd_per_hour is None for offer in west)
    as_of = read_snapshot().prices_as_of
    assert {(offer.price_as_of, offer.price_source) for offer in east} == {(as_of, "")}
    assert {(offer.price_as_of, offer.price_source) for offer in west} == {(as_of, ESTIMATED)}
    assert read_snapshot().usd["us-east-1"]["p5.48xlarge"] == 55.04


def test_packaged_types_have_the_digests_of_described_types():
    whole = [kind for kind in read_snapshot().instance_types if " 1/" not in kind.device]
    assert {kind.device_tflops for kind in whole} > {35.0, 66.9, None}
    assert all(kind.device_tflops == device_tflops(kind.device) for kind in whole)


def test_sources_are_combined_by_type_and_region_without_surcharges():
    listed = {"us-east-1": 2.2, "us-east-2": 0.0, "us-west-2": 2.0, "eu-west-1": 2.4}
    larger = {"us-east-1": 4.0, "eu-west-1": 5.28, "us-gov-west-1": 2.0, "us-west-2-lax-1": 3.0}
    offered = {"us-east-2": {"g9.2xlarge"}, "eu-west-2": {"other"}}
    new = pd.Series({"g9.2xlarge": 1.0, "g9.large": 5.0})
    usd = estimated({"g9.2xlarge": listed, "g9.large": larger}, new)
    assert usd.pop("g9.large") == {"us-east-1": 5.0, "eu-west-1": 6.0}
    [(*_, found)] = combined([answer()], offered, usd).values()
    assert found == {"eu-west-1": 1.2, "us-east-1": 1.0, "us-east-2": None, "us-west-2": 1.0}
