"""Prices, placement scores and what is billed beside a machine; a price of 0 or none is unknown."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from models.domain.cluster import bucket_hazard
from tasks.providers.ec2 import prices
from tasks.providers.ec2.catalogue import instance_type_of
from tasks.providers.ec2.prices import apply_terms, other_usd_per_hour
from tasks.providers.ec2.settings import Ec2
from tests.fake_ec2 import NOON
from tests.fake_ec2_account import product
from tests.fakes import offer
from tests.tasks.providers.ec2.test_catalogue import answer

G9 = instance_type_of(answer())


def test_of_two_list_prices_the_higher_counts_and_other_units_do_not():
    usd = (("a", 0.5), ("a", 0.55), ("a", 0.0), ("b", None), ("c", 3.25))
    listed = [json.loads(product(name, price)) for name, price in usd]
    yearly = product("a", 99.0).replace('"Hrs"', '"Quantity"')
    listed += [json.loads(yearly), {"product": {"attributes": {}}, "terms": {}}]
    assert prices.on_demand_prices(listed) == {"a": 0.55, "c": 3.25}


@pytest.mark.parametrize(
    "text, usd", [("0.526", 0.526), ("0", None), ("-1", None), (None, None), ("nan", None)]
)
def test_a_price_is_positive_or_unknown(text, usd):
    assert prices.known_price(text) == usd


def test_the_newest_spot_price_of_each_type_and_zone_counts_whatever_the_order():
    rows = [
        {
            "InstanceType": "a",
            "AvailabilityZone": zone,
            "SpotPrice": usd,
            "Timestamp": NOON - timedelta(hours=age),
        }
        for zone, usd, age in (
            ("1a", "0.2", 1),
            ("1a", "0.9", 5),
            ("1b", "0.3", 9),
            ("1b", "0.0", 2),
        )
    ]
    newest = {("a", "1a"): 0.2, ("a", "1b"): None}
    assert prices.newest_spot_prices(rows) == newest == prices.newest_spot_prices(rows[::-1])


@pytest.mark.parametrize("bucket", [1, None])
def test_a_spot_offer_says_how_often_its_type_is_interrupted(bucket):
    listed = {} if bucket is None else {G9.name: {"r": bucket}}
    advisor = {"spot_advisor": {"us-east-1": {"Linux": listed}}}
    known = {(G9.name, "1a"): None, ("other", "1a"): 1.0}
    [spot] = prices.spot_offers([G9], known, advisor, region="us-east-1", price_as_of=NOON)
    assert (spot.zone, spot.usd_per_hour) == ("1a", None)
    assert spot.interruptions_per_hour == bucket_hazard(bucket) and spot.interruption_source


FILE = {
    "prices": {"s1.small": {"on_demand_usd_per_hour": 0.5}, "n1.net": {"spot_usd_per_hour": 0.2}},
    "discounts": {"s*": 0.25, "s1.small": 0.9, "m?.med*": {"on_demand": 0.5, "spot": 0.1}},
}
TERMS = Ec2.model_validate(FILE)


def of(name, market="on-demand", usd=1.0, region="us-east-1"):
    return replace(offer(usd), instance_type=replace(G9, name=name), market=market, region=region)


@pytest.mark.parametrize(
    "public, usd, says",
    [
        (of("s1.small"), 0.5, "[ec2.prices]"),  # a fixed price comes first
        (of("s1.small", usd=None), 0.5, "[ec2.prices]"),  # and makes an unknown one known
        (of("s1.small", "spot"), 1.0, ""),  # a number is of prices on demand
        (of("m1.medium"), 0.5, "discount of 0.5"),
        (of("m1.medium", "spot"), 0.9, "discount of 0.1"),
        (of("m1.medium", usd=None), None, ""),  # of nothing known there is no part
        (of("n1.net"), 1.0, ""),
    ],
)
def test_an_own_price_is_used_and_said_and_billed_once(public, usd, says):
    [found] = once = apply_terms([public], TERMS)
    assert found.usd_per_hour == usd
    assert says in found.price_note and bool(found.price_note) == bool(says)
    assert found.public_usd_per_hour == (public.usd_per_hour if says else None)
    assert apply_terms(once, TERMS) == once
    assert apply_terms(once, Ec2())[0].usd_per_hour == public.usd_per_hour


def test_a_volume_costs_what_its_region_asks_and_caps_count_the_dearest():
    for region, usd in (("us-east-1", 0.08), ("eu-central-1", 0.0952), ("xx-nowhere-1", 0.152)):
        [found] = apply_terms([of("l1.large", region=region)], Ec2(volume_gib=730))
        assert found.storage_usd_per_hour == pytest.approx(usd)
        beside = found.storage_usd_per_hour + found.other_usd_per_hour
        assert found.total_usd_per_hour == pytest.approx(1.0 + beside)
        assert beside < prices.most_usd_per_hour_beside(Ec2(volume_gib=730), region, region)
    address = other_usd_per_hour(public=True) - other_usd_per_hour(public=False)
    assert address == pytest.approx(0.005) and other_usd_per_hour(public=True) < 0.016


@pytest.mark.parametrize(
    "subnets, regions, usd_per_gb",
    [
        ("public", ("us-east-1", "us-east-1"), 0.09),
        ("private", ("us-east-1", "us-east-1"), 0.183),
        ("public", ("us-east-1", ""), 0.174),
    ],
)
def test_uploads_cost_what_their_route_to_the_controller_does(subnets, regions, usd_per_gb):
    beside = prices.most_usd_per_hour_beside(Ec2(subnets=subnets), *regions)
    rest = 100 * 0.152 / 730 + 0.005 + prices.MOST_REQUESTS_USD_PER_HOUR
    assert beside - rest == pytest.approx(1.629 * usd_per_gb, abs=0.001)
