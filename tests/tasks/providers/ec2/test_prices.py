"""Prices, placement scores and what is billed beside a machine; a price of 0 or none is unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pandas as pd
import pytest

from models.domain.cluster import Offer, bucket_hazard
from models.job.interruption_rates import fit_hazard
from tasks.providers.ec2 import prices as ec2_prices
from tasks.providers.ec2.api import connect
from tasks.providers.ec2.catalogue import instance_type_of
from tasks.providers.ec2.prices import (
    billed,
    known_price,
    newest_spot_prices,
    on_demand_offers,
    on_demand_prices,
    spot_offers,
)
from tasks.providers.ec2.settings import Ec2
from tests.fake_ec2 import NOON, FakeAws
from tests.models.planning import AS_OF, machine
from tests.tasks.providers.ec2.test_catalogue import answer
from tests.world.market import product

G9 = instance_type_of(answer())


def test_list_prices_by_type() -> None:
    listed = [
        json.loads(product(name, "us-east-1", usd))
        for name, usd in (("a", 0.5), ("b", None), ("c", 3.25))
    ]
    assert on_demand_prices(listed) == {"a": 0.5, "c": 3.25}


def test_of_two_list_prices_the_higher_counts_and_other_units_do_not() -> None:
    twice = [json.loads(product("a", "us-east-1", usd)) for usd in (0.5, 0.55, 0.0)]
    yearly = json.loads(product("a", "us-east-1", 99.0))
    (term,) = yearly["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    dimension["unit"] = "Quantity"
    assert on_demand_prices([*twice, yearly, {}, {"product": {"attributes": {}}}]) == {"a": 0.55}


@pytest.mark.parametrize(
    ("text", "usd"),
    [
        ("0.526", 0.526),
        (1, 1.0),
        ("0", None),
        ("-1", None),
        (None, None),
        ("nan", None),
        ("", None),
    ],
)
def test_a_price_is_positive_or_unknown(text: object, usd: float | None) -> None:
    assert known_price(text) == usd


def test_the_newest_spot_price_of_each_type_and_zone_counts_whatever_the_order() -> None:
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
            ("1a", "0.7", 3),
        )
    ]
    newest = {("a", "1a"): 0.2, ("a", "1b"): None}
    assert newest_spot_prices(rows) == newest == newest_spot_prices(rows[::-1])


def test_an_unknown_price_makes_an_offer_without_one() -> None:
    (offer,) = on_demand_offers([G9], {"other": 1.0}, region="us-east-1", price_as_of=NOON)
    assert offer.usd_per_hour is None
    found = spot_offers(
        [G9],
        {(G9.name, "1a"): None, ("other", "1a"): 1.0},
        {},
        region="us-east-1",
        price_as_of=NOON,
    )
    assert [(o.instance_type.name, o.zone, o.usd_per_hour) for o in found] == [
        (G9.name, "1a", None)
    ]


@pytest.mark.parametrize(
    ("listed", "bucket"),
    [
        ({G9.name: {"r": 1}}, 1),
        ({"b": {"r": 1}}, None),
        ({}, None),
    ],
)
def test_a_spot_offer_says_who_knows_how_often_it_is_interrupted(
    listed: dict[str, Any], bucket: int | None
) -> None:
    """The provider's prior of an unlisted type is the model's."""
    advisor = {"spot_advisor": {"us-east-1": {"Linux": listed}}}
    (spot,) = spot_offers(
        [G9], {(G9.name, "1a"): 1.0}, advisor, region="us-east-1", price_as_of=NOON
    )
    assert spot.interruptions_per_hour == bucket_hazard(bucket) and spot.interruption_source
    nothing = pd.DataFrame({"instance_type": [], "zone": [], "hours": [], "interruptions": []})
    unlisted = fit_hazard(nothing).rates([(G9.name, "1a", bucket_hazard(None))])[0, 0]
    assert (spot.interruptions_per_hour == pytest.approx(unlisted)) == (bucket is None)


FILE: dict[str, Any] = {
    "prices": {"s1.small": {"on_demand_usd_per_hour": 0.5}, "n1.net": {"spot_usd_per_hour": 0.2}},
    "discounts": {"s*": 0.25, "s1.small": 0.9, "m?.med*": {"on_demand": 0.5, "spot": 0.1}},
}
OWN = Ec2.model_validate(FILE)


def of(
    name: str, market: str = "on-demand", usd: float | None = 1.0, region: str = "us-east-1"
) -> Offer:
    kind = replace(machine("small"), name=name)
    return Offer(
        instance_type=kind,
        market=market,
        zone="a",
        region=region,
        usd_per_hour=usd,
        interruptions_per_hour=0.0,
        price_as_of=AS_OF,
    )


@pytest.mark.parametrize(
    ("offer", "usd", "says"),
    [
        (of("s1.small"), 0.5, "[ec2.prices]"),  # a fixed price comes first
        (of("s1.small", usd=None), 0.5, "[ec2.prices]"),  # and makes an unknown one known
        (of("s1.small", "spot"), 1.0, ""),  # a number is of prices on demand
        (of("m1.medium"), 0.5, "discount of 0.5"),
        (of("m1.medium", "spot"), 0.9, "discount of 0.1"),
        (of("m1.medium", usd=None), None, ""),  # of nothing known there is no part
        (of("n1.net", "spot"), 0.2, "[ec2.prices]"),
        (of("n1.net"), 1.0, ""),
        (of("l1.large"), 1.0, ""),
    ],
)
def test_a_price_of_ones_own_is_used_and_said(offer: Offer, usd: float | None, says: str) -> None:
    (found,) = billed([offer], OWN)
    assert found.usd_per_hour == usd
    assert says in found.own_price and bool(found.own_price) == bool(says)
    assert found.public_usd_per_hour == (offer.usd_per_hour if says else None)


def test_billed_twice_is_billed_once_and_other_terms_start_from_what_everybody_pays() -> None:
    (found,) = billed([of("s1.small")], Ec2(discounts=OWN.discounts))
    assert found.usd_per_hour == 0.75
    once = billed([of("m1.medium"), of("s1.small"), of("l1.large")], OWN)
    assert billed(once, OWN) == once
    assert [one.usd_per_hour for one in billed(once, Ec2())] == [1.0, 1.0, 1.0]


def test_a_volume_costs_what_its_region_asks_and_the_dearest_where_that_is_not_known() -> None:
    here, there, nowhere = billed(
        [of("l1.large", region=region) for region in ("us-east-1", "eu-central-1", "xx-nowhere-1")],
        Ec2(volume_gib=730),
    )
    assert here.storage_usd_per_hour == pytest.approx(
        0.08
    ) and there.storage_usd_per_hour == pytest.approx(0.0952)
    assert nowhere.storage_usd_per_hour == pytest.approx(0.152)
    assert (
        here.total_usd_per_hour == pytest.approx(1.08 + here.other_usd_per_hour)
        and here.other_usd_per_hour > 0
    )
    assert of("l1.large").total_usd_per_hour == 1.0


def test_no_region_costs_more_than_the_caps_count() -> None:
    for region in (*ec2_prices.GP3_USD_PER_GIB_MONTH, "xx-nowhere-1"):
        beside = ec2_prices.storage_usd_per_hour(region, 100) + ec2_prices.other_usd_per_hour(
            public=True
        )
        assert beside < ec2_prices.most_usd_per_hour_beside(100)
    address = ec2_prices.other_usd_per_hour(public=True) - ec2_prices.other_usd_per_hour(
        public=False
    )
    assert address == pytest.approx(0.005)
    assert 0.005 < ec2_prices.other_usd_per_hour(public=True) < 0.016


def test_placement_scores_are_by_zone_name() -> None:
    aws = FakeAws()
    found = connect(aws.clients).placement_scores("us-east-1", ["g5.xlarge"], 4)
    assert found == {f"us-east-1{zone}": 5 for zone in "abc"}
