"""Whatever launches do, up to the last second of their deadlines, the caps hold; and nothing unpriced is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.campaign.budget import (
    LATE_S,
    Cap,
    allow,
    billed_s,
    dearest_by_type,
    dearest_usd_per_hour,
    longest_s,
    month_start,
    worst_usd,
)
from models.domain.cluster import Cluster, Offer
from tests.fakes import offer

CENT = 0.01
ENDS = ("refused", "ran", "overran", "stuck", "stuck")


@dataclass(frozen=True, kw_only=True)
class Try:
    """One launch that is wished for, and what would become of it."""

    usd_per_hour: float
    est_s: float
    ends: str
    used: float  # of its time, where it ran


tries = st.builds(
    Try,
    usd_per_hour=st.floats(0.01, 400.0),
    est_s=st.floats(1.0, 7200.0),
    ends=st.sampled_from(ENDS),
    used=st.floats(0.0, 1.0),
)


@given(
    st.lists(tries, max_size=30),
    st.floats(0.0, 200.0),
    st.floats(0.0, 200.0),
    st.floats(0.0, 150.0),
)
@example([Try(usd_per_hour=60.0, est_s=60.0, ends="overran", used=1.0)] * 3, 25.0, 100.0, 80.0)
def test_no_sequence_of_launches_refusals_and_overruns_costs_more_than_a_cap(
    wishes: list[Try], campaign_usd: float, month_usd: float, before_usd: float
) -> None:
    spent, stuck = 0.0, 0.0
    for wish in wishes:
        caps = [
            Cap(name="campaign", usd=campaign_usd, spent_usd=spent, committed_usd=stuck),
            Cap(name="month", usd=month_usd, spent_usd=before_usd + spent, committed_usd=stuck),
        ]
        allowed = allow(
            wish.usd_per_hour, wished_s=2 * wish.est_s + 720, least_s=wish.est_s + 300, caps=caps
        )
        if allowed.refusal or wish.ends == "refused":
            continue
        assert wish.est_s + 300 <= allowed.deadline_s <= 2 * wish.est_s + 720
        # A machine counts whole minutes from when it booted: the controller is dead, and nobody else ends it.
        longest = wish.usd_per_hour * (60 * -(-allowed.deadline_s // 60) + LATE_S) / 3600
        spent += {"ran": wish.used * longest, "overran": longest}.get(wish.ends, 0.0)
        stuck += (
            longest if wish.ends == "stuck" else 0.0
        )  # it will not be let go of: held to its end
    assert spent + stuck <= campaign_usd + 1e-9
    assert spent + stuck == 0 or before_usd + spent + stuck <= month_usd + 1e-9


def cap(usd: float, spent: float = 0.0, committed: float = 0.0) -> Cap:
    return Cap(name="the cap", usd=usd, spent_usd=spent, committed_usd=committed)


def test_the_worst_case_counts_in_whole_minutes_as_the_machines_own_clock_has_it() -> None:
    hour = 3600.0
    assert allow(10.0, wished_s=hour, least_s=hour, caps=[cap(10.0)]).refusal, (
        "an hour, and then the way out"
    )
    allowed = allow(
        10.0, wished_s=hour, least_s=hour, caps=[cap(10.0 * billed_s(hour) / hour + CENT)]
    )
    assert (allowed.refusal, allowed.deadline_s) == ("", hour)

    assert billed_s(60.0) == 60.0 + LATE_S and billed_s(60.5) == 120.0 + LATE_S


def test_a_wish_is_shortened_to_what_can_be_paid_but_not_below_what_makes_sense() -> None:
    allowed = allow(60.0, wished_s=3600.0, least_s=600.0, caps=[cap(100.0), cap(50.0, spent=20.0)])
    assert allowed.deadline_s == longest_s(60.0, 30.0) == 1560.0
    assert allowed.worst_usd <= 30.0
    refused = allow(60.0, wished_s=3600.0, least_s=1620.0, caps=[cap(100.0), cap(50.0, spent=20.0)])
    assert (
        "$31.00" in refused.refusal
        and "only $30.00 are left of the cap 50.00 (20.00 spent" in refused.refusal
    )


@given(st.floats(0.001, 1000.0), st.floats(0.0, 1000.0))
def test_the_longest_deadline_is_the_last_that_can_be_paid(price: float, left: float) -> None:
    longest = longest_s(price, left)
    assert longest == 0 or worst_usd(price, longest) <= left
    assert worst_usd(price, longest + 120.0) > left


@pytest.mark.parametrize("price", [None, 0.0, float("nan"), float("inf")])
def test_what_has_no_price_is_not_launched(price: float | None) -> None:
    assert "not known" in allow(price, wished_s=60.0, least_s=1.0, caps=[cap(1e9)]).refusal


def test_what_is_committed_is_as_good_as_gone() -> None:
    caps = [cap(50.0, spent=10.0, committed=45.0)]
    assert caps[0].left_usd == 0.0
    assert "45.00 committed" in allow(1.0, wished_s=60.0, least_s=60.0, caps=caps).refusal


def here(market: str, zone: str, usd: float | None, region: str = "east") -> Offer:
    return replace(offer(usd), market=market, zone=zone, region=region)


def test_spot_may_come_to_the_price_on_demand_or_of_the_dearest_zone_of_its_region() -> None:
    spot = here("spot", "a", 1.0)
    listed = [
        here("on-demand", "*", 3.0),
        here("spot", "b", 1.5),
        here("spot", "z", 9.0, region="west"),
    ]
    assert dearest_usd_per_hour(Cluster.of((2, spot)), listed) == 6.0
    assert dearest_usd_per_hour(Cluster.of((1, spot)), [*listed, here("spot", "c", 4.0)]) == 4.0
    assert dearest_usd_per_hour(Cluster.of((1, listed[0])), listed) == 3.0

    # without a price on demand nobody knows how far spot may rise
    assert dearest_usd_per_hour(Cluster.of((1, spot)), [here("on-demand", "*", None)]) is None
    assert dearest_usd_per_hour(Cluster.of((1, spot)), []) is None
    unpriced = replace(spot, usd_per_hour=None)
    assert dearest_usd_per_hour(Cluster.of((1, unpriced)), [here("on-demand", "*", 3.0)]) is None


def test_where_nothing_is_bought_on_demand_spot_rises_as_far_as_is_bid() -> None:
    spot = here("spot", "a", 1.0)
    zones = [here("spot", "b", 2.0), here("spot", "z", 9.0, region="west")]
    assert dearest_usd_per_hour(Cluster.of((2, spot)), zones, 1.25) == 5.0
    assert (
        dearest_usd_per_hour(Cluster.of((1, spot)), [*zones, here("on-demand", "*", 2.1)], 1.25)
        == 2.1
    )
    assert dearest_usd_per_hour(Cluster.of((1, here("on-demand", "*", None))), zones, 1.25) is None
    assert dearest_by_type([spot, zones[0]], 1.25) == {"small": 2.5} and dearest_by_type(
        [spot]
    ) == {"small": 1.0}


def test_a_month_begins_with_its_first_moment() -> None:
    assert month_start(datetime(2026, 11, 20, 12, 30, 1, 5, tzinfo=UTC)) == datetime(
        2026, 11, 1, tzinfo=UTC
    )


def test_an_own_price_counts_where_it_is_the_dearer_alone() -> None:
    saved = replace(here("on-demand", "*", 1.2), public_usd_per_hour=3.0, own_price="own discount")
    raised = replace(here("on-demand", "*", 4.0), public_usd_per_hour=3.0, own_price="own price")
    spot = replace(here("spot", "a", 0.5), public_usd_per_hour=1.0, own_price="own price")
    assert dearest_usd_per_hour(Cluster.of((2, saved)), [saved]) == 6.0
    assert dearest_usd_per_hour(Cluster.of((1, raised)), [raised]) == 4.0
    assert dearest_usd_per_hour(Cluster.of((1, spot)), [saved]) == 3.0
    assert dearest_usd_per_hour(Cluster.of((1, spot)), [], 1.25) == 1.25
    assert dearest_by_type([saved]) == {"small": 3.0} and dearest_by_type([spot], 1.25) == {
        "small": 1.25
    }
