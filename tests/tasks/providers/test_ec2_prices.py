"""Prices out of AWS's own shapes. What is not said, or said to be 0, is unknown and stays so."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from tasks.providers.ec2_catalogue import instance_type_of
from tasks.providers.ec2_prices import (
    MONTHLY_PART,
    advised_buckets,
    interruptions_per_hour,
    known_price,
    newest_spot_prices,
    on_demand_offers,
    on_demand_prices,
    spot_offers,
)
from tests.ec2_world import NOON
from tests.tasks.providers.test_ec2_catalogue import answer
from tests.world.market import product

G9 = instance_type_of(answer())


def test_list_prices_by_type() -> None:
    listed = [json.loads(product(name, "us-east-1", usd)) for name, usd in (("a", 0.5), ("b", None), ("c", 3.25))]
    assert on_demand_prices(listed) == {"a": 0.5, "c": 3.25}, "a price of 0 is unknown; reserved terms do not count"


def test_of_two_list_prices_the_higher_counts_and_other_units_do_not() -> None:
    twice = [json.loads(product("a", "us-east-1", usd)) for usd in (0.5, 0.55, 0.0)]
    yearly = json.loads(product("a", "us-east-1", 99.0))
    (term,) = yearly["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    dimension["unit"] = "Quantity"
    assert on_demand_prices([*twice, yearly, {}, {"product": {"attributes": {}}}]) == {"a": 0.55}


@pytest.mark.parametrize(
    ("told", "usd"),
    [("0.526", 0.526), (1, 1.0), ("0", None), (0.0, None), ("-1", None), (None, None), ("", None), ("nan", None),
     ("free", None)],
)  # fmt: skip
def test_a_price_is_positive_or_unknown(told: object, usd: float | None) -> None:
    assert known_price(told) == usd


def test_the_newest_spot_price_of_each_type_and_zone_counts_whatever_the_order() -> None:
    rows = [
        {"InstanceType": "a", "AvailabilityZone": zone, "SpotPrice": usd, "Timestamp": NOON - timedelta(hours=age)}
        for zone, usd, age in (("1a", "0.2", 1), ("1a", "0.9", 5), ("1b", "0.3", 9), ("1b", "0.0", 2), ("1a", "0.7", 3))
    ]
    newest = {("a", "1a"): 0.2, ("a", "1b"): None}
    assert newest_spot_prices(rows) == newest == newest_spot_prices(rows[::-1])


def test_an_unknown_price_makes_an_offer_without_one() -> None:
    (offer,) = on_demand_offers([G9], {"other": 1.0}, region="us-east-1", price_as_of=NOON)
    assert offer.usd_per_hour is None
    found = spot_offers([G9], {(G9.name, "1a"): None, ("other", "1a"): 1.0}, {}, region="us-east-1", price_as_of=NOON)
    assert [(o.instance_type.name, o.zone, o.usd_per_hour) for o in found] == [(G9.name, "1a", None)]


def test_the_advisors_buckets_are_hazards_in_order_and_the_unknown_counts_as_the_worst() -> None:
    hazards = [interruptions_per_hour(bucket) for bucket in range(len(MONTHLY_PART))]
    assert hazards == sorted(hazards) and hazards[0] > 0
    assert interruptions_per_hour(None) == interruptions_per_hour(7) == interruptions_per_hour(-1) == hazards[-1]
    # over a month, the part of machines that the bucket states is interrupted
    month = 730.0
    assert 1 - 2.718281828 ** (-hazards[1] * month) == pytest.approx(MONTHLY_PART[1], rel=1e-6)


def test_the_advisor_is_read_by_region_and_may_be_absent() -> None:
    body = {"spot_advisor": {"us-east-1": {"Linux": {"a": {"s": 70, "r": 2}, "b": {"s": 1}}, "Windows": {}}}}
    assert advised_buckets(body, "us-east-1") == {"a": 2}
    assert advised_buckets(body, "eu-west-1") == advised_buckets({}, "us-east-1") == {}
