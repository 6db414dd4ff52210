"""What tensor parallelism sends, by its formula, and which grids there are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pandas as pd
import pytest

from models.domain.workload import MODES, TENSOR, Mode, grid_shape
from models.step_time.model import StepTimeModel, TrainingData, fit
from models.step_time.serialization import dump, load
from models.step_time.setup_arrays import variant
from models.step_time.tensor import (
    Volumes,
    machine_bytes,
    weight_bytes,
)
from models.step_time.unmeasured import with_compressed
from tasks.node.strategies import grid
from tests.formulas import dense_bytes, dense_elements, sent_elements
from tests.models.planning import workload
from tests.models.synthetic import World

WIDTH = 64
LAYERS = [(float(WIDTH), float(WIDTH))] * 2


def test_the_planner_and_the_nodes_have_the_same_grids() -> None:
    assert grid.TENSOR == TENSOR
    for name, ranks in product(TENSOR, range(1, 70)):
        shape = grid_shape(name, ranks)
        assert (shape is not None) == grid.fits(name, ranks)
        assert shape is None or shape == grid.shape_of(name, ranks)
    assert {mode.switches for mode in MODES if mode.divided} == {"none"}
    assert Mode.of("bf16 tensor-2.5d") == Mode("bf16", "tensor-2.5d")


@pytest.mark.parametrize(("ranks", "side", "depth"), [(4, 2, 1), (8, 2, 2), (16, 4, 1), (64, 4, 4)])
def test_a_layer_takes_three_times_what_its_forward_pass_does_and_the_depths_sum(
    ranks: int, side: int, depth: int
) -> None:
    rows, weights = 8.0 * ranks, float(WIDTH**2)
    name = "tensor-2d" if depth == 1 else "tensor-2.5d"
    forward = (side - 1) / side**2 * (rows * WIDTH / depth + weights)
    ends = 4 * (side - 1) / side * rows / ranks * WIDTH
    summed = 2 * (depth - 1) / depth * weights / side**2
    assert sent_elements(name, ranks, LAYERS, rows) == pytest.approx(
        2 * (3 * forward + summed) + ends
    )
    inner = sent_elements(name, ranks, LAYERS, rows, needs_input_gradient=False)
    first = (side - 1) / side**2 * (rows * WIDTH / depth + weights) + ends / 4
    assert inner == pytest.approx(sent_elements(name, ranks, LAYERS, rows) - first)


def test_the_grid_that_sends_least_goes_from_one_row_to_a_square_to_squares_to_plain_data_parallelism() -> (
    None
):
    best = []
    for rows in (1, 3, 10, 32):
        sent = {name: sent_elements(name, 16, LAYERS * 8, 16.0 * rows) for name in TENSOR}
        sent["ddp"] = dense_elements(LAYERS * 8, 16)
        best.append(min(sent, key=lambda one: sent[one]))
    assert best == [*TENSOR, "ddp"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("tensor-1d", 4), ("tensor-2d", 16), ("tensor-2.5d", 8), ("tensor-2.5d", 18)],
)
def test_of_one_device_a_machine_sends_what_a_rank_does_but_for_begin_and_end(
    name: str, ranks: int
) -> None:
    many, rows = 40, 3.0
    layers = LAYERS * (many // 2)
    volumes = Volumes(weights=many * WIDTH**2, inputs=many * WIDTH, pairs=many * WIDTH)
    one = np.ones(1)
    found = machine_bytes(
        name, volumes, 4 * volumes.weights, ranks=ranks * one, most=one, samples=rows * one
    )
    assert found[0] == pytest.approx(4 * sent_elements(name, ranks, layers, ranks * rows), rel=0.03)
    whole = machine_bytes(
        name, volumes, 4 * volumes.weights + 4e6, ranks=ranks * one, most=one, samples=rows * one
    )
    assert whole[0] - found[0] == pytest.approx(dense_bytes(4e6, ranks, 1)), (
        "of layers that stay whole"
    )


@pytest.mark.parametrize(
    ("name", "ranks"), [("tensor-1d", 4), ("tensor-2d", 16), ("tensor-2.5d", 8)]
)
def test_each_micro_step_gathers_weights_again(name: str, ranks: int) -> None:
    volumes, one = Volumes(weights=1000.0, inputs=1.0, pairs=1.0), np.ones(1)
    again = weight_bytes(name, 1000.0, ranks=ranks * one, most=one)[0]
    least = machine_bytes(name, volumes, 4000.0, ranks=ranks * one, most=one, samples=0.0 * one)[0]
    side = grid_shape(name, ranks)[1]  # type: ignore[index]
    assert again == pytest.approx(
        0.0 if name == "tensor-1d" else 4 * 3 * (side - 1) / side**2 * 1000.0
    )
    assert least - again == pytest.approx(0.0 if name != "tensor-2.5d" else 4 * 1000.0 / 4), (
        "summed over depth once"
    )


def test_what_ranks_of_one_machine_send_each_other_does_not_leave_it() -> None:
    volumes, one = Volumes(weights=0.0, inputs=100.0, pairs=100.0), np.ones(1)

    def sent(name: str, most: float) -> float:
        return float(
            machine_bytes(name, volumes, 0.0, ranks=16 * one, most=most * one, samples=one)[0]
        )

    assert sent("tensor-2d", 4) == sent("tensor-2.5d", 2) == sent("tensor-1d", 16) == 0
    assert sent("tensor-1d", 4) == pytest.approx(4 * 4 * 2 * 12 * 100.0)
    assert sent("tensor-2d", 1) == pytest.approx(4 * 9 * 100.0)


def test_layers_that_stay_whole_send_what_a_ring_does_one_rank_a_machine() -> None:
    one, volumes = np.ones(1), Volumes(weights=10.0, inputs=0.0, pairs=0.0)
    for most, whole in ((1, 1), (8, 1), (16, 0)):
        sent = machine_bytes(
            "tensor-1d", volumes, 4 * 110.0, ranks=16 * one, most=most * one, samples=one
        )
        assert sent[0] == pytest.approx(whole * 4 * 2 * 15 / 16 * 100.0)


JOB = replace(workload("mlp", 96), modes=(Mode(), *(Mode(strategy=one) for one in TENSOR)))


@cache
def learned() -> tuple[TrainingData, StepTimeModel]:
    """All in plain data parallelism; of `mlp` all 4 M weights are divided, as many as activations of 1000 samples."""
    data = World(1).data(70)
    counted = {"divided_weights": 4e6, "divided_inputs": 4e3, "divided_pairs": 4e3}
    facts = (
        data.workloads
        if "workload" in data.workloads
        else pd.DataFrame({"workload": ["conv", "lm", "mlp"]})
    )
    data = replace(
        data,
        workloads=facts.assign(
            **{key: one * (facts["workload"] == "mlp") for key, one in counted.items()}
        ),
    )
    return data, with_compressed(fit(data, seed=0), JOB)


def steps(model: StepTimeModel, cluster: str, batch: int, name: str = "mlp") -> pd.DataFrame:
    """By strategy."""
    named = (
        "ddp",
        *(one for one in TENSOR if grid_shape(one, int(cluster.split("x")[0])) is not None),
    )
    rows = [
        {
            "workload": name,
            "cluster": cluster,
            "batch_per_device": str(batch),
            "strategy": one,
            "precision": "fp32",
        }
        for one in named
    ]
    return model.predict(pd.DataFrame(rows)).assign(strategy=named).set_index("strategy")


def test_before_any_run_few_samples_favour_divided_layers_and_many_do_not_and_little_is_known_of_it() -> (
    None
):
    model = learned()[1]
    few, many = steps(model, "4xs.small", 8), steps(model, "4xs.small", 2000)
    assert few["step_s"]["tensor-1d"] < few["step_s"]["ddp"] < few["step_s"]["tensor-2d"] * 2
    assert many["step_s"]["ddp"] < many["step_s"]["tensor-1d"]
    width = np.log(few["step_high_s"] / few["step_low_s"])
    assert width["tensor-1d"] > width["ddp"] and np.isnan(few["nearest_doublings"]["tensor-1d"])
    pd.testing.assert_frame_equal(steps(load(dump(model)), "4xs.small", 8), few)


def test_of_layers_that_nobody_counted_nothing_is_said_before_a_run() -> None:
    other = replace(JOB, name="conv")
    assert variant("mlp", JOB.modes[1]) in learned()[1].workloads
    assert variant("conv", JOB.modes[1]) not in with_compressed(learned()[1], other).workloads


def test_rows_of_its_own_replace_what_physics_says() -> None:
    data, before = learned()
    factor, clusters = 1.7, ("2xs.small", "3xs.small", "4xs.small", "2xn.medium", "4xn.medium")
    rows = [
        {
            "workload": "mlp",
            "cluster": cluster,
            "batch_per_device": str(batch),
            "strategy": "tensor-1d",
        }
        | {
            "precision": "fp32",
            "step_s": factor * steps(before, cluster, batch)["step_s"]["tensor-1d"],
        }
        for cluster, batch in product(clusters, (16, 48))
    ]
    own = pd.DataFrame(rows).assign(
        provider="local", run_id=[f"own-{at}" for at in range(len(rows))]
    )
    model = fit(replace(data, runs=pd.concat([data.runs, own], ignore_index=True)), seed=0)
    found = model.predict(
        pd.DataFrame([rows[5] | {"cluster": "4xs.small"}]).drop(columns="step_s")
    ).iloc[0]
    assert (
        found["step_s"] == pytest.approx(rows[5]["step_s"], rel=0.1)
        and found["nearest_doublings"] == 0
    )
