"""Where no cluster takes the global batch, a reader learns whether memory or division is to blame, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from models.domain.cluster import Cluster, Offer
from models.domain.workload import Goal
from models.planner.explanations import obstacle
from models.planner.planner import plan
from tests.models.planning import CORES, GBPS, JointModel, machine, offer, workload


def sold(devices: int, name: str = "small") -> Offer:
    return replace(offer(name), instance_type=machine(name, devices=devices))


def reasons(offers: Sequence[Offer], least: int, most: int | None = None, *, gib_a_sample: float = 0.001) -> set[str]:
    """Of the planner's rows; each device of the world has 2 GiB."""
    model = JointModel(
        lines=dict.fromkeys(CORES, (0.01, 0.002)), gbps=GBPS, memory=dict.fromkeys(CORES, gib_a_sample * 2**30)
    )
    job = workload("mlp", least, most, Goal(goal="cheapest_within_deadline", hours=9.0))
    found = plan(job, offers, model, max_hosts=2, fits=lambda cluster: "")
    return {str(row["reason"]) for row in found.rows if row["status"] == "infeasible"}


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


def test_devices_that_hold_no_sample_are_not_among_those_that_could_share_a_batch() -> None:
    def peak(name: str, batch: int) -> float:
        return 3.0 * 2**30 if name == "medium" else float("nan")

    found = obstacle([100], [sold(8), sold(3, "medium")], fits=lambda cluster: "", peak_bytes=peak)
    assert found.endswith("(8 on each); a global batch of 96 or 104 would do"), "what nobody knows is allowed"


def test_machines_that_cannot_be_had_are_neither_too_small_nor_too_many_to_share() -> None:
    def refused(cluster: Cluster) -> str:
        return "not here"

    assert obstacle([100], [sold(8)], fits=refused, peak_bytes=lambda name, batch: 1e30) == ""
    assert obstacle([100], [], fits=refused, peak_bytes=lambda name, batch: 1e30) == ""
