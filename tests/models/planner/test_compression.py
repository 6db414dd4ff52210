"""A strategy that exchanges otherwise is chosen only if it is surely faster than DDP."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from models.domain.workload import Goal, Mode
from models.planner.candidates import Supply
from models.planner.planner import candidates, plan
from tests.models.planning import GBPS, JointModel, machine, offer, workload

SPARSE, ADASUM = Mode(strategy="ddp-mstopk"), Mode(strategy="adasum")
GOALS = (Goal(goal="cheapest"), Goal(goal="fastest"))


@dataclass(frozen=True, kw_only=True)
class Compressing(JointModel):
    """Other exchanges take `step_ratio` of DDP's step, and at most `width` times that."""

    step_ratio: float
    width: float

    def predict_arrays(self, arrays):
        found = super().predict_arrays(arrays)
        other = np.array([mode.sends_otherwise for mode in arrays.modes])[arrays.mode]
        step_s = found["step_s"] * np.where(other, self.step_ratio, 1.0)
        high = np.where(other, step_s * self.width, found["step_high_s"])
        return found.assign(step_s=step_s, step_high_s=high)


def compressing(step_ratio, width, *names):
    return Compressing(
        lines=dict.fromkeys(names, (0.01, 0.0005)),
        gbps=GBPS,
        sample_bytes=dict.fromkeys(names, np.nan),
        slower=0.0,
        shared=0.01,
        setup_sd=0.01,
        step_ratio=step_ratio,
        width=width,
    )


def planned(step_ratio, width, *modes, vetoes=None):
    job = replace(workload("mlp", 64, None, *GOALS), modes=modes)
    supply = Supply(
        offers=[offer("small")], max_hosts=4, fits=lambda cluster: "", vetoes=vetoes or {}
    )
    return plan(job, supply, compressing(step_ratio, width, "small"), top=9)


def strategies(found):
    return {row["strategy"] for row in [*found.rows, *found.frontier]}


def test_a_vetoed_mode_is_not_chosen_and_rows_say_why():
    vetoed = planned(0.5, 1.5, Mode(), SPARSE, vetoes={SPARSE: "no proof"})
    assert strategies(vetoed) == {"ddp"}
    for row in vetoed.rows:
        assert ("no proof" in row["reason"]) is (row["cluster"] != "1xsmall")
    (row, _) = planned(0.5, 1.5, SPARSE, vetoes={SPARSE: "no proof"}).rows
    assert (row["status"], row["reason"]) == ("infeasible", "no proof")


@pytest.mark.parametrize("name", ["ddp-mstopk", "ps-1"])
def test_it_is_chosen_if_it_wins_by_more_than_its_uncertainty(name):
    surely, perhaps = (planned(0.5, width, Mode(), Mode(strategy=name)) for width in (1.5, 2.5))
    for row in surely.rows:
        assert row["strategy"] == ("ddp" if row["cluster"] == "1xsmall" else name)
    assert strategies(perhaps) == {"ddp"}
    assert any(f"{name}: no faster" in row["reason"] for row in perhaps.rows)


@pytest.mark.parametrize("mode", [SPARSE, ADASUM])
def test_a_mode_without_a_dense_rival_is_used(mode):
    assert strategies(planned(0.5, 9.0, mode)) == {mode.strategy}


@pytest.mark.parametrize("beside", [Mode(), Mode(strategy="fsdp"), Mode(strategy="ddp-fp16")])
def test_adasum_is_never_chosen_beside_another(beside):
    assert strategies(planned(0.01, 1.0, beside, ADASUM)) == {beside.strategy}


@pytest.mark.parametrize(
    ("strategy", "layouts"),
    [
        ("ddp-mstopk", {(1, 1), (4, 4)}),
        ("ddp-fp16", {(1, 1), (4, 4), (4,), (1, 4)}),
        ("adasum", {(1, 1), (4, 4), (4,)}),
        ("tensor-2d", {(4,)}),
        ("tensor-2.5d", {(4, 4)}),
    ],
)
def test_only_machines_that_can_train_so_are_considered(strategy, layouts):
    sold = [
        offer("small"),
        offer("large", instance_type=machine("large", devices=4)),
    ]
    job = replace(workload("mlp", 64), modes=(Mode(strategy=strategy),))
    supply = Supply(offers=sold, max_hosts=2, fits=lambda cluster: "")
    found = candidates(job, supply, compressing(1.0, 1.0, "small", "large"))
    assert {tuple(sorted(setup.layout)) for setup in found} == layouts
