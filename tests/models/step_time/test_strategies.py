"""Strategies before any run: bytes by their formulas, steps by physics; then their own runs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from models.domain.workload import COMBINED, COMPRESSED, SERVED, TENSOR, Mode, grid_shape
from models.step_time.bytes_sent import DENSITY, Volumes, sent_between, tensor_bytes
from models.step_time.model import fit, with_compressed
from tasks.node.strategies import adasum, grid
from tasks.node.strategies import compression as node
from tests.formulas import dense_bytes, sent_elements, sparse_bytes
from tests.models.planning import workload
from tests.models.step_time.cases import setup, width

JOB = replace(
    workload("mlp", 96),
    modes=tuple(Mode(strategy=name) for name in ("ddp", *COMPRESSED, *COMBINED, *SERVED, *TENSOR)),
)
WIDTH = 64.0
UNIT = np.ones(1)


@pytest.fixture(scope="module")
def data(known):
    """All 4 M weights of `mlp` are divided, as many as the activations of 1,000 samples."""
    counted = {"weights": 4e6, "inputs": 4e3, "pairs": 4e3}
    facts = pd.DataFrame({"workload": ["conv", "lm", "mlp"]})
    divided = {f"divided_{name}": [0.0, 0.0, share] for name, share in counted.items()}
    merged = facts.assign(**divided).merge(known[0].workloads, how="left")
    return replace(known[0], workloads=merged)


@pytest.fixture(scope="module")
def model(data):
    return with_compressed(fit(data, seed=0), JOB)


def step(model, strategy, cluster="2xs.small", batch=48):
    return model.predict(setup("mlp", cluster, batch).assign(strategy=strategy)).iloc[0]


def test_nodes_and_model_have_the_same_strategies_and_grids():
    assert (node.COMPRESSED, node.DENSITY) == (COMPRESSED, DENSITY)
    assert adasum.ADASUM == COMBINED and grid.TENSOR == TENSOR
    for name, ranks in product(TENSOR, range(1, 70)):
        assert grid_shape(name, ranks) == grid.shape_of(name, ranks)


@pytest.mark.parametrize(("machines", "devices"), [(2, 1), (8, 1), (2, 4), (8, 8)])
def test_bytes_between_machines_are_those_of_the_papers(machines, devices):
    ranks, size = machines * devices, 1e8

    def sent(strategy):
        share = sent_between(strategy, machines * UNIT, ranks * UNIT)[0]
        return float(share * 2 * (ranks - 1) / ranks * size)

    dense = devices * dense_bytes(size, machines, devices)
    assert sent("adasum") == pytest.approx(dense)
    assert sent("ddp-mstopk") == pytest.approx(devices * sparse_bytes(size, machines, devices))
    assert sent(f"ps-{1}") == pytest.approx(2 * (ranks - devices) * size)
    assert sent("ps-2") == pytest.approx(sent("ps-1") / 2)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("tensor-1d", 4), ("tensor-2d", 16), ("tensor-2.5d", 8), ("tensor-2.5d", 18)],
)
def test_machines_of_one_device_send_the_elements_of_a_rank(name, ranks):
    layers = [(WIDTH, WIDTH)] * 40
    volumes = Volumes(weights=40 * WIDTH**2, inputs=40 * WIDTH, pairs=40 * WIDTH)
    found, twice = (
        tensor_bytes(
            name,
            volumes,
            4 * volumes.weights,
            ranks=ranks * UNIT,
            most=UNIT,
            samples=3 * UNIT,
            micro_steps=steps * UNIT,
        )[0]
        for steps in (1, 2)
    )
    assert found == pytest.approx(4 * sent_elements(name, ranks, layers, 3 * ranks), rel=0.03)
    side = grid_shape(name, ranks)[1]  # type: ignore[index]
    expected = 0.0 if name == "tensor-1d" else 12 * (side - 1) / side**2 * volumes.weights
    assert twice - found == pytest.approx(expected)


def test_before_any_run_physics_says_where_a_strategy_pays(known, model):
    setups = setup("mlp", "2xs.small", 48).assign(strategy="ddp")
    pd.testing.assert_frame_equal(model.predict(setups), known[2].predict(setups))
    rows = {
        mode.strategy: step(model, mode.strategy) for mode in JOB.modes if "2" not in mode.strategy
    }
    seconds = {name: row["step_s"] for name, row in rows.items()}
    # 16 MB over 0.2 Gbit/s take more than half a second
    assert rows["ddp-mstopk"]["step_high_s"] < seconds["ddp"] < seconds["adasum"]
    assert seconds["ddp-mstopk"] < seconds["ddp-fp16"] < seconds["ddp"]
    assert step(model, "ps-2")["step_s"] == pytest.approx(seconds["ddp"], rel=0.02)
    assert seconds["ps-1"] > 1.1 * seconds["ddp"]
    for name in (*COMPRESSED, *COMBINED, "ps-1"):
        assert width(rows[name]) > width(rows["ddp"]) and np.isnan(rows[name]["nearest_doublings"])
    small, large = (
        [step(model, name, "4xs.small", batch)["step_s"] for name in ("tensor-1d", "ddp")]
        for batch in (8, 2000)
    )
    assert small[0] < small[1] and large[0] > large[1]


@pytest.mark.parametrize("name", ["ddp-mstopk", "adasum", "tensor-1d"])
def test_own_runs_replace_physics(data, model, name):
    clusters = ("2xs.small", "4xs.small", "2xn.medium", "4xn.medium")
    sparse_runs = pd.concat(
        [
            setup("mlp", cluster, batch).assign(
                strategy=name, step_s=1.7 * step(model, name, cluster, batch)["step_s"]
            )
            for cluster, batch in product(clusters, (24, 48))
        ]
    )
    runs = pd.concat([data.runs, sparse_runs.assign(provider="local")], ignore_index=True)
    found = step(fit(replace(data, runs=runs), seed=0), name)
    assert found["step_s"] == pytest.approx(1.7 * step(model, name)["step_s"], rel=0.1)
    assert found["nearest_doublings"] == 0
