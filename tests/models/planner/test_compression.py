"""Compressed gradients in the table: chosen where they win by more than is not known of them, else dense, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from models.domain.cluster import Offer
from models.domain.workload import Goal, Mode
from models.planner.candidates import Supply
from models.planner.planner import Plan, candidates, plan
from models.step_time.setup_arrays import SetupArrays, workload_and_mode
from tests.models.planning import GBPS, JointModel, machine, offer, workload

SPARSE, ADASUM, ADASUM_DELTA = (
    Mode(strategy=one) for one in ("ddp-mstopk", "adasum", "adasum-delta")
)


@dataclass(frozen=True, kw_only=True)
class Compressing(JointModel):
    """As JointModel; where something else is sent a step takes `part` of what it does, and up to `width` times."""

    part: float
    width: float

    def least_seconds(self, arrays: SetupArrays) -> np.ndarray:
        return 0.9 * self.predict_arrays(arrays)["step_s"].to_numpy(float)

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        found = super().predict_arrays(arrays)
        compressed = np.array(
            [workload_and_mode(name)[1].sends_otherwise for name in arrays.workloads]
        )
        step_s = found["step_s"] * np.where(compressed, self.part, 1.0)
        high = np.where(compressed, step_s * self.width, found["step_high_s"])
        return found.assign(step_s=step_s, step_high_s=high)


def planned(
    part: float,
    width: float,
    *modes: Mode,
    sold: tuple[Offer, ...] = (offer("small"),),
    vetoes: Mapping[Mode, str] | None = None,
    goals: tuple[Goal, ...] = (),
) -> Plan:
    names = {one.instance_type.name for one in sold}
    model = Compressing(
        lines=dict.fromkeys(names, (0.01, 0.0005)), gbps=GBPS, memory=dict.fromkeys(names, np.nan), slower=0.0,
        shared=0.01, own=0.01, part=part, width=width,
    )  # fmt: skip
    job = replace(workload("mlp", 64), modes=modes)
    job = replace(job, goals=goals or job.goals)
    return plan(
        job,
        Supply(offers=sold, max_hosts=4, fits=lambda cluster: "", vetoes=vetoes or {}),
        model,
        top=9,
    )


def test_what_may_not_be_chosen_is_not_and_the_table_says_why() -> None:
    vetoed = planned(0.5, 1.5, Mode(), SPARSE, vetoes={SPARSE: "ddp-mstopk: not shown"})
    assert {row["strategy"] for row in [*vetoed.rows, *vetoed.frontier]} == {"ddp"}
    for row in vetoed.rows:
        assert row["reason"].endswith("; ddp-mstopk: not shown") is (row["cluster"] != "1xsmall")
    nothing = planned(0.5, 1.5, SPARSE, vetoes={SPARSE: "ddp-mstopk: not shown"}).rows
    assert {(row["status"], row["reason"]) for row in nothing} == {
        ("infeasible", "ddp-mstopk: not shown")
    }


@pytest.mark.parametrize(
    ("width", "vetoes", "why"),
    [
        (1.1, {SPARSE: "ddp-mstopk: not shown"}, "ddp-mstopk: not shown"),
        (
            900.0,
            {},
            "ddp-mstopk: no faster than ddp by more than its uncertainty on the same machines",
        ),
    ],
)
def test_where_only_what_is_not_allowed_would_meet_a_goal_the_reason_names_it_and_why(
    width: float, vetoes: Mapping[Mode, str], why: str
) -> None:
    free = planned(0.02, 1.1, Mode(), SPARSE)
    dense = planned(0.02, 1.1, Mode())
    hours = [min(row["hours"] for row in found.frontier) for found in (free, dense)]
    goal = Goal(goal="cheapest_within_deadline", hours=(hours[0] * hours[1]) ** 0.5, p_required=0.5)
    first = planned(0.02, width, Mode(), SPARSE, vetoes=vetoes, goals=(goal,)).rows[0]
    assert first["status"] == "infeasible" and first["cluster"] is None
    assert first["reason"].endswith(f"in fp32 ddp-mstopk would meet it and is not allowed: {why}")


@pytest.mark.parametrize("name", ["ddp-mstopk", "ps-2"])
def test_what_wins_by_more_than_its_uncertainty_is_chosen_and_what_does_not_is_not_in_the_table(
    name: str,
) -> None:
    surely, perhaps = (planned(0.5, width, Mode(), Mode(strategy=name)) for width in (1.5, 2.5))
    for row in surely.rows:
        alone = row["cluster"] == "1xsmall"
        assert row["strategy"] == ("ddp" if alone else name)
        assert (
            f"{name}: faster than ddp by more than its uncertainty (" in row["reason"]
        ) is not alone
    assert {row["strategy"] for row in [*perhaps.rows, *perhaps.frontier]} == {"ddp"}
    several = [row["reason"] for row in perhaps.rows if row["cluster"] != "1xsmall"]
    assert several and all(
        f"{name}: no faster than ddp by more than its uncertainty (" in one for one in several
    )
    assert all("s at most, against" in one for one in several)


def test_divided_layers_are_chosen_on_machines_that_are_a_grid_of_them_and_the_others_say_why_not() -> (
    None
):
    square = Mode(strategy="tensor-2d")
    surely, perhaps = planned(0.5, 1.5, Mode(), square), planned(0.5, 2.5, Mode(), square)
    assert any(row["strategy"] == "tensor-2d" for row in surely.rows)
    for row in surely.rows:
        assert row["strategy"] == ("tensor-2d" if row["cluster"] == "4xsmall" else "ddp")
        assert ("tensor-2d: faster than ddp by more than" in row["reason"]) is (
            row["cluster"] == "4xsmall"
        )
    assert {row["strategy"] for row in [*perhaps.rows, *perhaps.frontier]} == {"ddp"}
    assert any(
        "tensor-2d: no faster than ddp by more than its uncertainty" in row["reason"]
        for row in perhaps.rows
    )


@pytest.mark.parametrize("mode", [SPARSE, ADASUM])
def test_who_tolerates_nothing_else_gets_it_unsaid(mode: Mode) -> None:
    alone = planned(0.5, 9.0, mode)
    assert {row["strategy"] for row in alone.rows} == {mode.strategy}
    assert not any(
        "uncertainty" in row["reason"] or "not shown" in row["reason"] for row in alone.rows
    )


@pytest.mark.parametrize("beside", [Mode(), Mode(strategy="fsdp"), Mode(strategy="ddp-fp16")])
def test_adasum_is_never_chosen_by_the_seconds_of_its_steps_and_the_table_says_why(
    beside: Mode,
) -> None:
    """A step of it takes a hundredth of a second, surely."""
    found = planned(0.01, 1.0, beside, ADASUM, ADASUM_DELTA)
    assert found.rows and {row["strategy"] for row in [*found.rows, *found.frontier]} == {
        beside.strategy
    }
    for row in found.rows:
        pairs = row["cluster"] in ("2xsmall", "4xsmall")
        for name in ("adasum", "adasum-delta"):
            said = f"{name}: not shown to take fewer steps than ddp" in row["reason"]
            assert said is (pairs and beside.strategy != "fsdp"), (
                "of the others nothing is said: they are not like it"
            )


@pytest.mark.parametrize(
    ("mode", "layouts"),
    [
        (SPARSE, {(1, 1), (4, 4)}),
        (Mode(strategy="ddp-fp16"), {(1, 1), (4, 4), (4,), (1, 4)}),
        (Mode(), {(1,), (4,), (1, 1), (4, 4), (1, 4)}),
        (ADASUM, {(1, 1), (4, 4), (4,)}),
        (
            Mode(strategy="tensor-1d"),
            {(1, 1), (4, 4), (4,)},
        ),  # 64 samples are no equal batches of five
        (Mode(strategy="tensor-2d"), {(4,)}),
        (Mode(strategy="tensor-2.5d"), {(4, 4)}),
    ],
)
def test_only_machines_that_a_strategy_can_train_on_are_considered(
    mode: Mode, layouts: set[tuple[int, ...]]
) -> None:
    sold = [offer("small"), offer("large", instance_type=machine("large", devices=4))]
    model = Compressing(
        lines=dict.fromkeys(("small", "large"), (0.0, 0.001)), gbps=GBPS,
        memory=dict.fromkeys(("small", "large"), np.nan), part=1.0, width=1.0,
    )  # fmt: skip
    job = replace(workload("mlp", 64), modes=(mode,))
    found = candidates(job, Supply(offers=sold, max_hosts=2, fits=lambda cluster: ""), model)
    assert {tuple(sorted(one.layout)) for one in found} == layouts
