"""Pilots: what to measure first of a workload that nobody met, what to measure next where the choice is open."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from models.cloud import Offer
from models.workload import Goal
from tasks.pilots import pilots_for
from tests.installed import NOON, DescribedMachines, champion, install

DEADLINE = (Goal(goal="cheapest_within_deadline", hours=1.5),)


def test_a_newcomer_is_profiled_first_at_a_price_and_nothing_is_promised(tmp_path: Path) -> None:
    here = install(tmp_path, "conv", "newcomer")
    (_, newcomer) = here.workloads
    offers = here.provider.offers(NOON)
    found = pilots_for(here, champion(), replace(newcomer, goals=DEADLINE), offers, buyable=offers, count=3)
    assert found["regret"] is None and not found["settled"]
    assert [one["kind"] for one in found["runs"]] == ["profile"] * 3
    assert len({one["cluster"] for one in found["runs"]}) == 3  # a machine of each kind, not one again and again
    assert all(one["usd"] > 0 and one["seconds"] > 0 and one["market"] == "spot" for one in found["runs"])
    assert {one["layout"] for one in found["runs"]} == {"1"} and found["reason"] == ""


def test_pilots_are_runs_that_nobody_made_on_few_machines(tmp_path: Path) -> None:
    here = install(tmp_path)
    (conv, _) = here.workloads
    offers = here.provider.offers(NOON)
    found = pilots_for(here, champion(), replace(conv, goals=DEADLINE), offers, buyable=offers, count=4)
    assert found["regret"] >= 0
    assert len({(one["cluster"], one["batch_per_device"], one["accumulation_steps"]) for one in found["runs"]}) in (
        0,
        4,
    )


def test_where_nothing_is_for_sale_there_are_no_pilots(tmp_path: Path) -> None:
    names = frozenset(one.name for one in DescribedMachines().instance_types())
    here = install(tmp_path, "conv", "newcomer", provider=DescribedMachines(unpriced=names))
    offers = here.provider.offers(NOON)
    for workload in here.workloads:
        asked = replace(workload, goals=DEADLINE)
        found = pilots_for(here, champion(), asked, offers, buyable=offers, count=3)
        assert (found["settled"], found["regret"], found["runs"]) == (None, None, [])
        assert found["reason"].startswith("no pilots can be named: nothing on offer has a price")


class DearSpot(DescribedMachines):
    """As AWS without an account: list prices came with the package, spot prices did not."""

    def offers(self, now: datetime) -> list[Offer]:
        return [one if one.market == "on-demand" else replace(one, usd_per_hour=None) for one in super().offers(now)]


def test_where_the_campaigns_market_has_no_price_pilots_are_priced_in_the_other(tmp_path: Path) -> None:
    here = install(tmp_path, "conv", "newcomer", provider=DearSpot())
    assert here.settings.campaign.market == "spot"
    offers = here.provider.offers(NOON)
    for workload in here.workloads:
        found = pilots_for(here, champion(), replace(workload, goals=DEADLINE), offers, buyable=offers, count=3)
        assert found["runs"] or found["settled"] is not False
        assert all(one["market"] == "on-demand" and one["usd"] > 0 for one in found["runs"])
    assert found["runs"], "of the newcomer"
