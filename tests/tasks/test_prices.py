"""Offers go into the warehouse and come out as they were; a provider that does not answer leaves the last ones."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tasks import prices
from tasks.installation import Installation, offers_of_market
from tests.installed import NOON, DescribedMachines, install
from warehouse.reads import mart


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    here = install(tmp_path, provider=DescribedMachines(unpriced=frozenset({"s.whole"})))
    prices.note_definitions.fn(here, NOON)
    return here


def test_offers_come_back_as_they_were(here: Installation) -> None:
    said = prices.snapshot_offers.fn(here, "refresh-1", NOON)
    assert said == "prices: 10 offers of 5 instance types, 2 unpriced"
    key = lambda offer: (offer.instance_type.name, offer.market)  # noqa: E731
    assert sorted(prices.current_offers(here), key=key) == sorted(here.provider.offers(NOON), key=key)
    assert [o.usd_per_hour for o in prices.current_offers(here) if o.instance_type.name == "s.whole"] == [None, None]


def test_the_newest_snapshot_counts_and_silence_keeps_the_last(tmp_path: Path, here: Installation) -> None:
    prices.snapshot_offers.fn(here, "refresh-1", NOON)
    later = NOON + timedelta(hours=1)
    machines = here.provider
    assert isinstance(machines, DescribedMachines)
    machines.unpriced = frozenset()
    prices.snapshot_offers.fn(here, "refresh-2", later)
    assert {offer.price_as_of for offer in prices.current_offers(here)} == {later}
    assert all(offer.usd_per_hour for offer in prices.current_offers(here))
    machines.down = "the price list did not answer"
    said = prices.snapshot_offers.fn(here, "refresh-3", later + timedelta(hours=1))
    assert "the price list did not answer" in said and "last snapshot" in said
    assert {offer.price_as_of for offer in prices.current_offers(here)} == {later}


def test_definitions_are_noted_once(here: Installation) -> None:
    prices.note_definitions.fn(here, NOON + timedelta(hours=1))
    with here.warehouse.read() as connection:
        assert connection.execute("select count(*) from raw_instance_types").fetchall() == [(5,)]
    workloads = mart(here.warehouse, "workloads", provider="local")
    assert workloads.set_index("workload")["samples"].to_dict() == {"conv": 200_000, "lm": 100_000}


def test_a_market_is_chosen_by_name(here: Installation) -> None:
    offers = here.provider.offers(NOON)
    assert {offer.market for offer in offers_of_market(offers, "spot")} == {"spot"}
    assert offers_of_market(offers, "any") == offers


def test_a_market_without_a_price_is_named_with_what_to_set(tmp_path: Path, here: Installation) -> None:
    machines = here.provider
    assert isinstance(machines, DescribedMachines)
    machines.unpriced = frozenset(one.name for one in machines.instance_types())
    said = prices.snapshot_offers.fn(here, "refresh-1", NOON)
    assert "no instance type has a price on the spot market" in said
    assert "spot_usd_per_hour" in said and 'market = "on-demand"' in said
    assert "give one a usd_per_hour" in prices.nothing_to_buy(machines.offers(NOON), "on-demand")
