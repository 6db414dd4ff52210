"""Offers go into the warehouse and come out as they were; a provider that does not answer leaves the last ones."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from models.cloud import InstanceType, Offer
from tasks import prices
from tasks.installation import Installation, offers_of_market
from tasks.providers.base import ProviderError
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


class WithPackage(DescribedMachines):
    """Machines that carry prices of a day before noon, for one type at 9 dollars."""

    def packaged_types(self) -> list[InstanceType]:
        return self.instance_types()

    def packaged_offers(self) -> list[Offer]:
        first = DescribedMachines.offers(replace(self, down=""), NOON - timedelta(days=1))[0]
        return [replace(first, usd_per_hour=9.0), replace(first, zone="b", usd_per_hour=None)]


def test_who_cannot_be_asked_answers_from_the_package_at_first(tmp_path: Path) -> None:
    here = install(tmp_path, provider=WithPackage(down="no credentials"))
    assert len(prices.offers_now(here, NOON)) == 2, "a dry run has them too"
    prices.note_definitions.fn(here, NOON)
    said = prices.snapshot_offers.fn(here, "refresh-1", NOON)
    assert "2 offers" in said and "1 unpriced" in said and "no credentials" in said and "2026-11-19" in said
    assert sorted((o.usd_per_hour or 0, o.zone) for o in prices.current_offers(here)) == [(0, "b"), (9.0, "a")]
    again = prices.snapshot_offers.fn(here, "refresh-2", NOON)
    assert "the last snapshot stays in use (prices of 2026-11-19)" in again, "the same is not stored twice"


def test_prices_that_were_asked_for_are_never_replaced_by_older_ones_of_the_package(tmp_path: Path) -> None:
    machines = WithPackage()
    here = install(tmp_path, provider=machines)
    prices.note_definitions.fn(here, NOON)
    prices.snapshot_offers.fn(here, "refresh-1", NOON)
    machines.down = "expired"
    said = prices.snapshot_offers.fn(here, "refresh-2", NOON + timedelta(hours=1))
    assert "expired; the last snapshot stays in use (prices of 2026-11-20)" in said
    assert {o.price_as_of for o in prices.current_offers(here)} == {NOON}
    assert {o.price_as_of for o in prices.offers_now(here, NOON)} == {NOON}


def test_definitions_stay_as_they_were_noted_when_nobody_can_be_asked(tmp_path: Path) -> None:
    class Forgetful(WithPackage):
        def instance_types(self) -> list[InstanceType]:
            if self.down:
                raise ProviderError(self.down)
            return DescribedMachines.instance_types(self)[:2]

        def packaged_types(self) -> list[InstanceType]:
            return [replace(one, cores=99.0) for one in DescribedMachines.instance_types(self)]

    machines = Forgetful()
    here = install(tmp_path, provider=machines)
    prices.note_definitions.fn(here, NOON)
    before = mart(here.warehouse, "instance_types", provider="local").set_index("name")["digest"].to_dict()
    machines.down = "expired"
    prices.note_definitions.fn(here, NOON + timedelta(hours=1))
    after = mart(here.warehouse, "instance_types", provider="local").set_index("name")
    assert len(before) == 2 and len(after) == 5, "what was never noted comes from the package"
    assert {name: after.loc[name, "digest"] for name in before} == before


def test_where_no_price_was_ever_known_that_is_said(tmp_path: Path) -> None:
    here = install(tmp_path, provider=DescribedMachines(down="expired"))
    with pytest.raises(ProviderError, match="expired"):
        prices.offers_now(here, NOON)
    prices.note_definitions.fn(here, NOON)
    assert prices.snapshot_offers.fn(here, "refresh-1", NOON) == "prices: expired; and none were ever known"
