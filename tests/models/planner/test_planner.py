"""A mixture of markets wins where neither alone does; where nothing can be had a reader learns what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from models.domain.cluster import Offer
from models.domain.workload import Goal, Mode
from models.job.job_conditions import JobConditions, Stated
from models.planner.candidates import Supply
from models.planner.explanations import obstacle
from models.planner.planner import plan
from models.planner.ranking import Row
from models.step_time.setup_arrays import SetupArrays
from tests.models.planning import CORES, GBPS, JointModel, machine, offer, workload

PLAIN = Mode()

MODEL = JointModel(
    lines={"small": (0.0, 0.001)},
    gbps={"small": 100.0},
    memory={"small": np.nan},
    slower=0.0,
    shared=0.0,
    own=0.0,
)


def supply(
    offers: Sequence[Offer], max_hosts: int, job_conditions: JobConditions | None = None
) -> Supply:
    return Supply(
        offers=offers,
        max_hosts=max_hosts,
        fits=lambda cluster: "",
        job_conditions=job_conditions or Stated(),
    )


def test_the_mixture_wins_where_spot_alone_is_late_too_often_and_on_demand_costs_more() -> None:
    """Eight machines for ten hours: an interruption is one too many, and on spot one comes in a sixth of draws."""
    sold = [
        offer("small", usd_per_hour=1.0),
        offer("small", "spot", usd_per_hour=0.3, interruptions_per_hour=0.002),
    ]
    slow = Stated(startup_s=0.0, replacement_s=3600.0)  # an hour to find another machine
    goal = Goal(goal="cheapest_within_deadline", hours=11.3, p_required=0.9)
    job = workload("w", 64, None, goal, samples=64 * 4_500_000)

    def won(offers: Sequence[Offer]) -> dict[str, int]:
        first = plan(job, supply(offers, 8, slow), MODEL).rows[0]
        assert (
            first["goal"] == goal.goal
            and first["status"] == "recommended"
            and first["p_meets_constraint"] >= 0.9
        )
        return {one["market"]: one["count"] for one in first["cluster_offers"]}

    assert won(sold[:1]) == {"on-demand": 8}
    assert won(sold) == {"on-demand": 4, "spot": 4}


def test_a_mixture_that_one_market_alone_beats_is_not_shown() -> None:
    rows = plan(
        workload("w", 64), supply([offer("small"), offer("small", "spot")], 4), MODEL, top=20
    ).rows
    assert {row["market"] for row in rows} == {"on-demand", "spot"}


def sold(devices: int, name: str = "small") -> Offer:
    return offer(name, instance_type=machine(name, devices=devices))


def reasons(
    offers: Sequence[Offer], least: int, most: int | None = None, *, gib_a_sample: float = 0.001
) -> set[str]:
    """Of the planner's rows; each device of the world has 2 GiB."""
    model = JointModel(
        lines=dict.fromkeys(CORES, (0.01, 0.002)),
        gbps=GBPS,
        memory=dict.fromkeys(CORES, gib_a_sample * 2**30),
    )
    job = workload("mlp", least, most, Goal(goal="cheapest_within_deadline", hours=9.0))
    rows: list[Row] = plan(job, supply(offers, 2), model).rows
    return {str(row["reason"]) for row in rows if row["status"] == "infeasible"}


@dataclass(frozen=True, kw_only=True)
class Modes(JointModel):
    """As JointModel; checkpointing takes a quarter of the memory and half as long again, fsdp one in so many ranks."""

    def peak_bytes(
        self,
        workload: str,
        instance_type: str,
        batch: int,
        ranks: int = 1,
        *,
        mode: Mode = PLAIN,
        accumulates: bool = False,
    ) -> float:
        part = 0.25 if "checkpointing" in mode.switches else 1 / ranks if mode.sharded else 1.0
        return (
            super().peak_bytes(workload, instance_type, batch)
            * part
            * (1.5 if accumulates else 1.0)
        )

    def least_seconds(self, arrays: SetupArrays) -> np.ndarray:
        return 0.9 * self.predict_arrays(arrays)["step_s"].to_numpy(float)

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        found = super().predict_arrays(arrays)
        slower = [
            1.5 if "checkpointing" in name else 1.2 if "fsdp" in name else 1.0
            for name in arrays.workloads
        ]
        return found.assign(
            **{name: found[name] * slower for name in ("step_s", "step_low_s", "step_high_s")}
        )


@pytest.mark.parametrize(
    ("other", "gib_a_sample", "least", "said"),
    [
        ((), 0.05, 32, None),  # 1.6 of 2 GiB
        (
            (),
            0.08,
            32,
            "made to fit by 2 micro-steps: fp32 in one micro-step needs 2.56 GiB of the 2 GiB of a device of small;",
        ),
        (
            (Mode(switches="checkpointing"),),
            0.3,
            16,
            "made to fit by fp32 checkpointing: fp32 in one micro-step needs",
        ),
        ((Mode(switches="checkpointing"),), 0.05, 32, None),
        (
            (Mode(switches="checkpointing"),),
            1.2,
            8,
            "made to fit by fp32 checkpointing in 2 micro-steps: fp32 in one micro-step needs 9.6 GiB",
        ),
    ],
)
def test_what_makes_a_workload_fit_is_said_with_the_seconds_that_it_costs(
    other: tuple[Mode, ...], gib_a_sample: float, least: int, said: str | None
) -> None:
    lines, memory = {"small": (0.01, 0.0005)}, {"small": gib_a_sample * 2.0**30}
    model = Modes(lines=lines, gbps=GBPS, memory=memory, slower=0.0, shared=0.01, own=0.01)
    job = replace(workload("mlp", least), modes=(Mode(), *other))
    rows = plan(job, supply([offer("small")], 1), model).rows
    assert rows and all(row["cluster"] == "1xsmall" for row in rows)
    for row in rows:
        assert ("made to fit" in row["reason"]) is (said is not None)
        assert said is None or said in row["reason"]
    if "checkpointing:" in str(said):
        assert (
            "s a step against" in rows[0]["reason"]
            and "if that fitted (+50 %)" in rows[0]["reason"]
        )


def test_sharing_out_makes_fit_what_no_machine_holds_alone() -> None:
    model = Modes(lines=MODEL.lines, gbps=GBPS, memory={"small": 2.0**31}, slower=0.0)
    plain, shared = (
        replace(workload("mlp", 2), modes=modes)
        for modes in ((Mode(),), (Mode(), Mode(strategy="fsdp")))
    )
    sold = supply(
        [replace(offer("small"), instance_type=replace(machine("small"), device_memory_gib=1.9))], 4
    )
    assert {row["status"] for row in plan(plain, sold, model).rows} == {"infeasible"}
    first = plan(shared, sold, model).rows[0]
    assert (first["cluster"], first["strategy"]) == ("2xsmall", "fsdp")
    assert (
        "made to fit by fp32 fsdp: fp32 in one micro-step needs 2 GiB of the 1.9 GiB"
        in first["reason"]
    )


@pytest.mark.parametrize(
    ("devices", "least", "most", "says"),
    [
        (
            (8,),
            100,
            100,
            "batch of 100 equally among its devices (8 on each); a global batch of 96 or 104 would do",
        ),
        (
            (8,),
            5,
            5,
            "batch of 5 equally among its devices (8 on each); a global batch of 8 would do",
        ),
        ((8, 6), 100, 100, "(6 or 8 on each); a global batch of 96 or 102 would do"),
        (
            (8,),
            90,
            100,
            "batch of 90 or 100 equally among its devices (8 on each); a global batch of 96 would do",
        ),
    ],
)
def test_a_batch_that_the_devices_cannot_share_is_reported_with_the_nearest_that_they_can(
    devices: tuple[int, ...], least: int, most: int, says: str
) -> None:
    offers = [sold(many, name) for many, name in zip(devices, ("small", "medium"), strict=False)]
    (reason,) = reasons(offers, least, most)
    assert reason.endswith(says) and "memory" not in reason
    for named in (
        reason.partition("; a global batch of ")[2].removesuffix(" would do").split(" or ")
    ):
        assert not reasons(offers, int(named)), "what would do did not"


def test_a_device_too_small_for_one_sample_is_reported_with_what_it_takes() -> None:
    (reason,) = reasons([sold(8), sold(1, "medium")], 96, gib_a_sample=3.0)
    assert (
        "about 3 GiB are needed, and the largest has 2 GiB" in reason
        and "global batch" not in reason
    )
    assert not reasons([sold(8), sold(1, "medium")], 96, gib_a_sample=1.9), "in accumulation steps"


def test_machines_that_hold_no_sample_or_cannot_be_had_share_no_batch() -> None:
    model = replace(MODEL, memory={"small": np.nan, "medium": 3.0 * 2**30})
    both = supply([sold(8), sold(3, "medium")], 2)
    found = obstacle(workload("w", 100), both, model)
    assert found.endswith("(8 on each); a global batch of 96 or 104 would do"), (
        "what nobody knows is allowed"
    )
    for nothing in (replace(both, fits=lambda cluster: "not here"), replace(both, offers=[])):
        assert obstacle(workload("w", 100), nothing, model) == ""
