"""A mixture of markets wins where neither alone does; where nothing can be had a reader learns what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from models.domain.cluster import Offer
from models.domain.workload import Goal
from models.job.job_conditions import Circumstances, Stated
from models.planner.candidates import Supply
from models.planner.explanations import obstacle
from models.planner.planner import plan
from models.planner.ranking import Row
from tests.models.planning import CORES, GBPS, JointModel, machine, offer, workload

MODEL = JointModel(
    lines={"small": (0.0, 0.001)}, gbps={"small": 100.0}, memory={"small": np.nan}, slower=0.0, shared=0.0, own=0.0
)


def supply(offers: Sequence[Offer], max_hosts: int, circumstances: Circumstances | None = None) -> Supply:
    return Supply(offers=offers, max_hosts=max_hosts, fits=lambda cluster: "", circumstances=circumstances or Stated())


def test_the_mixture_wins_where_spot_alone_is_late_too_often_and_on_demand_costs_more() -> None:
    """Eight machines for ten hours: an interruption is one too many, and on spot one comes in a sixth of draws."""
    sold = [offer("small", usd_per_hour=1.0), offer("small", "spot", usd_per_hour=0.3, interruptions_per_hour=0.002)]
    slow = Stated(startup_s=0.0, replacement_s=3600.0)  # an hour to find another machine
    goal = Goal(goal="cheapest_within_deadline", hours=11.3, p_required=0.9)
    job = workload("w", 64, None, goal, samples=64 * 4_500_000)

    def won(offers: Sequence[Offer]) -> dict[str, int]:
        first = plan(job, supply(offers, 8, slow), MODEL).rows[0]
        assert first["goal"] == goal.goal and first["status"] == "recommended" and first["p_meets_constraint"] >= 0.9
        return {one["market"]: one["count"] for one in first["cluster_offers"]}

    assert won(sold[:1]) == {"on-demand": 8}
    assert won(sold) == {"on-demand": 4, "spot": 4}


def test_a_mixture_that_one_market_alone_beats_is_not_shown() -> None:
    rows = plan(workload("w", 64), supply([offer("small"), offer("small", "spot")], 4), MODEL, top=20).rows
    assert {row["market"] for row in rows} == {"on-demand", "spot"}


def sold(devices: int, name: str = "small") -> Offer:
    return offer(name, instance_type=machine(name, devices=devices))


def reasons(offers: Sequence[Offer], least: int, most: int | None = None, *, gib_a_sample: float = 0.001) -> set[str]:
    """Of the planner's rows; each device of the world has 2 GiB."""
    model = JointModel(
        lines=dict.fromkeys(CORES, (0.01, 0.002)), gbps=GBPS, memory=dict.fromkeys(CORES, gib_a_sample * 2**30)
    )
    job = workload("mlp", least, most, Goal(goal="cheapest_within_deadline", hours=9.0))
    rows: list[Row] = plan(job, supply(offers, 2), model).rows
    return {str(row["reason"]) for row in rows if row["status"] == "infeasible"}


@pytest.mark.parametrize(
    ("devices", "least", "most", "says"),
    [
        ((8,), 100, 100, "batch of 100 equally among its devices (8 on each); a global batch of 96 or 104 would do"),
        ((8,), 5, 5, "batch of 5 equally among its devices (8 on each); a global batch of 8 would do"),
        ((8, 6), 100, 100, "(6 or 8 on each); a global batch of 96 or 102 would do"),
        ((8,), 90, 100, "batch of 90 or 100 equally among its devices (8 on each); a global batch of 96 would do"),
    ],
)
def test_a_batch_that_the_devices_cannot_share_is_told_with_the_nearest_that_they_can(
    devices: tuple[int, ...], least: int, most: int, says: str
) -> None:
    offers = [sold(many, name) for many, name in zip(devices, ("small", "medium"), strict=False)]
    (reason,) = reasons(offers, least, most)
    assert reason.endswith(says) and "memory" not in reason
    for named in reason.partition("; a global batch of ")[2].removesuffix(" would do").split(" or "):
        assert not reasons(offers, int(named)), "what would do did not"


def test_a_device_too_small_for_one_sample_is_told_with_what_it_takes() -> None:
    (reason,) = reasons([sold(8), sold(1, "medium")], 96, gib_a_sample=3.0)
    assert "about 3 GiB are needed, and the largest has 2 GiB" in reason and "global batch" not in reason
    assert not reasons([sold(8), sold(1, "medium")], 96, gib_a_sample=1.9), "in accumulation steps"


def test_machines_that_hold_no_sample_or_cannot_be_had_share_no_batch() -> None:
    model = replace(MODEL, memory={"small": np.nan, "medium": 3.0 * 2**30})
    both = supply([sold(8), sold(3, "medium")], 2)
    found = obstacle(workload("w", 100), both, model)
    assert found.endswith("(8 on each); a global batch of 96 or 104 would do"), "what nobody knows is allowed"
    for nothing in (replace(both, fits=lambda cluster: "not here"), replace(both, offers=[])):
        assert obstacle(workload("w", 100), nothing, model) == ""
