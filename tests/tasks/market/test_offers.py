"""Offers are stored and read back; a silent provider leaves the last ones."""

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from tasks.market import offers as prices
from tasks.providers.base import ProviderError
from tasks.providers.ec2.prices import apply_terms
from tasks.providers.ec2.settings import Ec2
from tests.installed import NOON, DescribedMachines, install, priced


@pytest.fixture
def here(tmp_path):
    return priced(tmp_path, DescribedMachines(unpriced=frozenset({"s.whole"})))


def by_type(offer):
    return offer.instance_type.name, offer.market


def test_offers_come_back_as_they_were(here):
    found = prices.current_offers(here)
    assert sorted(found, key=by_type) == sorted(here.provider.offers(NOON), key=by_type)


def test_the_newest_snapshot_counts_and_silence_keeps_it_before_the_package(tmp_path):
    machines = WithPackage(unpriced=frozenset({"s.whole"}))
    here, later = priced(tmp_path, machines), NOON + timedelta(hours=1)
    machines.unpriced = frozenset()
    prices.snapshot_offers(here, "refresh-2", later)
    machines.down = "the price list did not answer"
    message = prices.snapshot_offers(here, "refresh-3", later + timedelta(hours=1))
    assert machines.down in message
    for found in (prices.current_offers(here), prices.offers_now(here, NOON)):
        assert {offer.price_as_of for offer in found} == {later}
    assert all(offer.usd_per_hour for offer in prices.current_offers(here))


class WithPackage(DescribedMachines):
    """Machines that carry prices of a day before noon, for one type at 9 dollars."""

    def packaged_offers(self):
        first = DescribedMachines.offers(replace(self, down=""), NOON - timedelta(days=1))[0]
        return [replace(first, usd_per_hour=9.0), replace(first, zone="b", usd_per_hour=None)]


def test_without_an_answer_the_package_counts_until_there_is_a_snapshot(tmp_path):
    here = install(tmp_path, provider=WithPackage(down="no credentials"))
    assert len(prices.offers_now(here, NOON)) == 2
    prices.note_definitions(here, NOON)
    message = prices.snapshot_offers(here, "refresh-1", NOON)
    assert "2 offers" in message
    found = [(offer.usd_per_hour, offer.zone) for offer in prices.current_offers(here)]
    assert sorted(found, key=str) == [(9.0, "a"), (None, "b")]
    assert "2 offers" not in prices.snapshot_offers(here, "refresh-2", NOON)


def test_definitions_stay_as_they_were_noted_when_nobody_can_be_asked(tmp_path):
    class Forgetful(WithPackage):
        def instance_types(self):
            if self.down:
                raise ProviderError(self.down)
            return DescribedMachines.instance_types(self)[:2]

        def packaged_offers(self):
            offer, _ = super().packaged_offers()
            kinds = (replace(kind, cores=99.0) for kind in DescribedMachines.instance_types(self))
            return [replace(offer, instance_type=kind) for kind in kinds]

    def digests():
        frame = here.warehouse.select("instance_types", {"provider": "local"})
        return dict(zip(frame["name"], frame["digest"], strict=True))

    machines = Forgetful()
    here = priced(tmp_path, machines)
    before = digests()
    machines.down = "expired"
    prices.note_definitions(here, NOON + timedelta(hours=1))
    assert len(before) == 2 and len(digests()) == 5 and before.items() <= digests().items()


@dataclass
class OwnTerms(DescribedMachines):
    """Machines that are billed by `terms`, as EC2's are."""

    terms: Ec2 = field(default_factory=Ec2)

    def offers(self, now):
        return self.billed(
            [
                replace(offer, interruption_source="published")
                for offer in DescribedMachines.offers(self, now)
            ]
        )

    def billed(self, offers):
        return apply_terms(offers, self.terms)


def test_a_snapshot_keeps_what_everybody_pays_and_a_change_of_ones_own_prices_counts_at_once(
    tmp_path,
):
    machines = OwnTerms(
        terms=Ec2.model_validate({"discounts": {"s.*": {"on_demand": 0.5, "spot": 0.1}}})
    )
    here = priced(tmp_path, machines)

    def paid(offers):
        large = [offer for offer in offers if offer.instance_type.name == "s.large"]
        return {offer.market: offer.usd_per_hour for offer in large}

    found = prices.current_offers(here)
    assert sorted(found, key=by_type) == sorted(machines.offers(NOON), key=by_type)
    assert paid(found) == pytest.approx({"on-demand": 0.0625, "spot": 0.045})
    stored = here.warehouse.select("offers", {"instance_type": "s.large"})
    public = {"on-demand": 0.125, "spot": 0.05}
    assert dict(zip(stored["market"], stored["usd_per_hour"], strict=True)) == public
    machines.terms = Ec2()
    found = prices.current_offers(here)
    assert paid(found) == public and all(offer.storage_usd_per_hour > 0 for offer in found)


def test_offers_are_listed_in_order_with_unknown_prices_last(here):
    rows = prices.list_offers(here, ())
    columns = "instance_type devices device device_memory_gib cores memory_gib bandwidth_gbps"
    columns += " market region zone usd_per_hour interrupted_a_day price_as_of price_source"
    assert len(rows) == 10 and [*rows[0]] == columns.split()
    known = [row["usd_per_hour"] for row in rows[:-2]]
    assert known == sorted(known) and [row["usd_per_hour"] for row in rows[-2:]] == [None, None]
    assert {row["market"] for row in rows if row["interrupted_a_day"] is None} == {"on-demand"}
    found = prices.list_offers(here, (("market", "spot"), ("instance_type", "S.W")))
    assert [(row["instance_type"], row["market"]) for row in found] == [("s.whole", "spot")]
    with pytest.raises(ProviderError, match="hole"):
        prices.list_offers(here, (("instance_type", "s.hole"),))
