"""The caps hold up to the last second of every deadline; nothing unpriced is launched."""

from dataclasses import replace

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
    worst_usd,
)
from models.domain.cluster import Cluster
from tests.fakes import offer

LAUNCHES = st.tuples(
    st.floats(0.01, 400.0),  # dollars an hour
    st.floats(1.0, 7200.0),  # expected seconds
    st.sampled_from(["refused", "ran", "overran", "stuck"]),
    st.floats(0.0, 1.0),  # share of the time used
)
USD = st.floats(0.0, 200.0)


@given(st.lists(LAUNCHES, max_size=30), USD, USD, USD)
@example([(60.0, 60.0, "overran", 1.0)] * 3, 25.0, 100.0, 80.0)
def test_no_sequence_of_launches_costs_more_than_a_cap(
    launches, campaign_usd, month_usd, before_usd
):
    spent, stuck = 0.0, 0.0
    for usd_per_hour, est_s, ends, used in launches:
        caps = [
            Cap(name="campaign", usd=campaign_usd, spent_usd=spent, committed_usd=stuck),
            Cap(name="month", usd=month_usd, spent_usd=before_usd + spent, committed_usd=stuck),
        ]
        least_s, wished_s = est_s + 300, 2 * est_s + 720
        allowed = allow(usd_per_hour, wished_s=wished_s, least_s=least_s, caps=caps)
        if allowed.refusal or ends == "refused":
            continue
        assert least_s <= allowed.deadline_s <= wished_s
        # a machine whose controller is dead counts whole minutes from its boot
        longest = usd_per_hour * (60 * -(-allowed.deadline_s // 60) + LATE_S) / 3600
        spent += {"ran": used * longest, "overran": longest}.get(ends, 0.0)
        stuck += longest if ends == "stuck" else 0.0
    assert spent + stuck <= campaign_usd + 1e-9
    assert spent + stuck == 0 or before_usd + spent + stuck <= month_usd + 1e-9


def cap(usd, spent=0.0):
    return Cap(name="cap", usd=usd, spent_usd=spent, committed_usd=0.0)


def test_the_worst_case_counts_whole_minutes_and_the_way_out():
    assert billed_s(60.0) == 60.0 + LATE_S and billed_s(60.5) == 120.0 + LATE_S
    assert allow(10.0, wished_s=3600.0, least_s=3600.0, caps=[cap(10.0)]).refusal
    enough = cap(10.0 * billed_s(3600.0) / 3600 + 0.01)
    allowed = allow(10.0, wished_s=3600.0, least_s=3600.0, caps=[enough])
    assert (allowed.refusal, allowed.deadline_s) == ("", 3600.0)


def test_a_deadline_is_shortened_to_the_tightest_cap_but_not_below_the_least():
    caps = [cap(100.0), cap(50.0, spent=20.0)]
    allowed = allow(60.0, wished_s=3600.0, least_s=600.0, caps=caps)
    assert allowed.deadline_s == longest_s(60.0, 30.0) == 900.0
    assert allowed.worst_usd <= 30.0
    assert "31.00" in allow(60.0, wished_s=3600.0, least_s=960.0, caps=caps).refusal


@given(st.floats(0.001, 1000.0), st.floats(0.0, 1000.0))
def test_the_longest_deadline_is_the_last_that_can_be_paid(price, left):
    longest = longest_s(price, left)
    assert longest == 0 or worst_usd(price, longest) <= left
    assert worst_usd(price, longest + 120.0) > left


@pytest.mark.parametrize("price", [None, 0.0, float("nan"), float("inf")])
def test_an_unknown_price_is_refused(price):
    assert allow(price, wished_s=60.0, least_s=1.0, caps=[cap(1e9)]).refusal


def sold(market, zone, usd, region="east"):
    return replace(offer(usd), market=market, zone=zone, region=region)


SPOT, DEMAND = sold("spot", "a", 1.0), sold("on-demand", "*", 3.0)
WEST = sold("spot", "z", 9.0, region="west")
SAVED = replace(sold("on-demand", "*", 1.2), public_usd_per_hour=3.0, price_note="discount")
RAISED = replace(sold("on-demand", "*", 4.0), public_usd_per_hour=3.0, price_note="own")
BELOW_PUBLIC = replace(sold("spot", "a", 0.5), public_usd_per_hour=1.0, price_note="own")


@pytest.mark.parametrize(
    "count, member, offers, margin, expected",
    [
        (2, SPOT, [DEMAND, sold("spot", "b", 1.5), WEST], None, 6.0),
        (1, SPOT, [sold("on-demand", "*", None)], None, None),
        (1, SPOT, [], None, None),
        (1, replace(SPOT, usd_per_hour=None), [DEMAND], None, None),
        (2, SPOT, [sold("spot", "b", 2.0), WEST], 1.25, 5.0),
        (1, SPOT, [sold("spot", "b", 2.0), sold("on-demand", "*", 2.1)], 1.25, 2.1),
        (2, SAVED, [SAVED], None, 6.0),
        (1, RAISED, [RAISED], None, 4.0),
        (1, replace(RAISED, public_usd_per_hour=None), [], None, None),
        (1, BELOW_PUBLIC, [], 1.25, 1.25),
    ],
)
def test_the_dearest_price_bounds_what_a_cluster_costs(count, member, offers, margin, expected):
    assert dearest_usd_per_hour(Cluster.of((count, member)), offers, margin) == expected


def test_the_dearest_price_of_a_type_counts_bids_and_no_discount():
    assert dearest_by_type([SPOT, sold("spot", "b", 2.0)], 1.25) == {"small": 2.5}
    assert dearest_by_type([SPOT]) == {"small": 1.0}
    assert dearest_by_type([SAVED]) == {"small": 3.0}
    assert dearest_by_type([BELOW_PUBLIC], 1.25) == {"small": 1.25}
