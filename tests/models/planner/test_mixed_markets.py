"""Two markets in one cluster: what it costs, how often it is lost, and that it wins where neither market does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.workload import Goal
from models.job.job_conditions import Stated
from models.planner.candidates import mixed_options
from models.planner.enumeration import sold_together
from models.planner.planner import plan
from tests.models.planning import JointModel, offer, workload

MODEL = JointModel(
    lines={"small": (0.0, 0.001)}, gbps={"small": 100.0}, memory={"small": np.nan}, slower=0.0, shared=0.0, own=0.0
)


def test_a_price_on_demand_of_any_zone_holds_beside_each_zone_of_its_region() -> None:
    sold = [
        offer("small", zone="any", region="r1"),
        offer("small", "spot", zone="r1a", region="r1"),
        offer("large", "spot", zone="r1a", region="r1"),
        offer("small", "spot", zone="r1b", region="r1"),
        offer("small", "spot", zone="r2a", region="r2"),
    ]
    found = list(mixed_options(sold_together(sold)))
    assert [(sorted(one.sold), one.sold["small"].zone, one.half) for one in found] == [
        (["small"], "r1a", False),
        (["small"], "r1a", True),
        (["small"], "r1b", False),
        (["small"], "r1b", True),
    ]


@given(count=st.integers(2, 40), half=st.booleans())
def test_members_are_those_that_are_bought(count: int, half: bool) -> None:
    (place,) = [
        one for one in mixed_options(sold_together([offer("small"), offer("small", "spot")])) if one.half == half
    ]
    if count < place.fewest:
        return
    members = place.members("small", count)
    safe = sum(one.market == "on-demand" for one in members)
    assert len(members) == count and 0 < safe < count and safe == (count // 2 if half else 1)
    pools, bought, usd = place.bought(["large", "small"], np.array([[0, count]]))
    assert {pool.market: int(many) for pool, many in zip(pools, bought[0], strict=True)} == {
        "on-demand": safe,
        "spot": count - safe,
    }
    assert float(bought[0] @ usd) == pytest.approx(sum(one.usd_per_hour or 0.0 for one in members))
    conditions = Stated().gangs(pools, bought, 0.0)
    assert conditions.hazard_per_hour[0] == pytest.approx(0.3 * (count - safe))


def test_the_mixture_wins_where_spot_alone_is_late_too_often_and_on_demand_costs_more() -> None:
    """Eight machines for ten hours: an interruption is one too many, and on spot one comes in a sixth of draws."""
    sold = [offer("small", usd_per_hour=1.0), offer("small", "spot", usd_per_hour=0.3, interruptions_per_hour=0.002)]
    slow = Stated(startup_s=0.0, replacement_s=3600.0)  # an hour to find another machine
    goal = Goal(goal="cheapest_within_deadline", hours=11.3, p_required=0.9)
    job = workload("w", 64, None, goal, samples=64 * 4_500_000)

    def won(*offers: object) -> dict[str, int]:
        rows = plan(job, list(offers), MODEL, max_hosts=8, fits=lambda _: "", conditions=slow).rows  # type: ignore[arg-type]
        first = next(row for row in rows if row["goal"] == goal.goal)
        assert first["status"] == "recommended" and first["p_meets_constraint"] >= 0.9
        return {one["market"]: one["count"] for one in first["cluster_offers"]}

    assert won(sold[0]) == {"on-demand": 8}
    assert won(*sold) == {"on-demand": 4, "spot": 4}


def test_a_mixture_that_one_market_alone_beats_is_not_shown() -> None:
    sold = [offer("small"), offer("small", "spot")]
    rows = plan(workload("w", 64), sold, MODEL, max_hosts=4, fits=lambda _: "", top=20).rows
    shown = [{one["market"] for one in row["cluster_offers"]} for row in rows]
    assert {"on-demand"} in shown and {"spot"} in shown and {"on-demand", "spot"} not in shown
