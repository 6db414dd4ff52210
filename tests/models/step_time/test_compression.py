"""Gradients that are compressed or combined: bytes as the formula has them, steps before any run and after."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from models.domain.workload import ADASUM, COMBINED, COMPRESSED, SERVED, Mode
from models.step_time.compression import (
    DENSITY,
    sent_between,
)
from models.step_time.dataset import by_variant, sent_part, training_rows
from models.step_time.model import StepTimeModel, TrainingData, fit
from models.step_time.rows import one_device_points
from models.step_time.serialization import dump, load
from models.step_time.setup_arrays import read_setups, variant
from models.step_time.unmeasured import with_compressed
from tasks.node.strategies import adasum
from tasks.node.strategies import compression as node
from tests.formulas import adasum_bytes, dense_bytes, sparse_bytes
from tests.models.planning import workload
from tests.models.synthetic import WORKLOADS, World

JOB = replace(
    workload("mlp", 96),
    modes=(Mode(), *(Mode(strategy=one) for one in (*COMPRESSED, *COMBINED, *SERVED))),
)


@cache
def learned() -> tuple[TrainingData, StepTimeModel]:
    """All in plain data parallelism."""
    data = World(1).data(70)
    return data, fit(data, seed=0)


@cache
def extended() -> StepTimeModel:
    return with_compressed(learned()[1], JOB)


def asked(strategy: str, cluster: str = "2xs.small", name: str = "mlp") -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "workload": name,
                "cluster": cluster,
                "batch_per_device": "48",
                "strategy": strategy,
                "precision": "fp32",
            }
        ]
    )


def step(model: StepTimeModel, strategy: str, cluster: str = "2xs.small") -> pd.Series:
    return model.predict(asked(strategy, cluster)).iloc[0]


def test_nodes_and_model_name_the_same_strategies_and_send_as_much() -> None:
    assert (node.COMPRESSED, node.DENSITY) == (COMPRESSED, DENSITY)
    assert adasum.ADASUM == COMBINED


@pytest.mark.parametrize(("machines", "devices"), [(2, 1), (8, 1), (2, 4), (1, 4)])
def test_adasum_sends_what_a_ring_does_and_its_dots_and_between_machines_as_a_hierarchy(
    machines: int, devices: int
) -> None:
    size, ranks = 1e8, machines * devices
    part = sent_between(ADASUM, np.array([float(machines)]), np.array([float(ranks)]))[0]
    whole = part * 2 * (ranks - 1) / ranks * size
    assert whole == pytest.approx(devices * dense_bytes(size, machines, devices))
    levels = int(np.log2(ranks))
    dots = adasum_bytes(size, 100, ranks) - 2 * (ranks - 1) / ranks * size
    assert dots == pytest.approx(100 * 24 * sum(range(1, levels + 1)))


@pytest.mark.parametrize(("machines", "devices"), [(2, 1), (4, 1), (2, 4), (8, 8)])
def test_sparse_wins_below_a_density_of_one_by_the_machines_and_the_step_time_counts_the_same_bytes(
    machines: int, devices: int
) -> None:
    size, ranks = 1e8, machines * devices
    dense = dense_bytes(size, machines, devices)
    assert sparse_bytes(size, machines, devices, 1 / machines) == pytest.approx(dense)
    assert sparse_bytes(size, machines, devices, 0.99 / machines) < dense
    part = sent_between("ddp-mstopk", np.array([float(machines)]), np.array([float(ranks)]))[0]
    whole = part * 2 * (ranks - 1) / ranks * size
    assert whole == pytest.approx(devices * sparse_bytes(size, machines, devices))


@pytest.mark.parametrize(("machines", "devices"), [(2, 1), (4, 1), (4, 2)])
def test_servers_on_all_machines_send_what_a_ring_of_them_does_for_each_device(
    machines: int, devices: int
) -> None:
    size, ranks = 1e8, machines * devices
    ring = 2 * (ranks - 1) / ranks * size

    def sent(servers: int) -> float:
        return (
            ring
            * sent_between(f"ps-{servers}", np.array([float(machines)]), np.array([float(ranks)]))[
                0
            ]
        )

    whole = devices * dense_bytes(size, machines, devices)
    assert sent(machines) == pytest.approx(devices * whole), (
        "nothing is summed inside a machine first"
    )
    assert (
        sent(1)
        == pytest.approx(machines * sent(machines))
        == pytest.approx(2 * (ranks - devices) * size)
    )


@pytest.mark.parametrize(("strategy", "part"), [("fsdp", 2.0), ("zero2", 1.5)])
def test_gloo_sums_at_all_ranks_what_one_keeps(strategy: str, part: float) -> None:
    """Bytes of gradients gathered once or twice, half an all-reduce each, and summed as by an all-reduce."""
    setups = read_setups(by_variant(replace(learned()[0], runs=asked(strategy))).runs, {})
    rows, _, _ = learned()[1].facts.lay_out(setups)
    assert rows.line.sent_between[0] * sent_part(
        variant("mlp", Mode(strategy=strategy))
    ) == pytest.approx(part)


def test_one_device_runs_tell_of_every_mode_and_a_slow_link_is_not_taken_for_computing() -> None:
    runs = pd.DataFrame(
        [
            ("mlp", "1xs.small", "48", 0.2, "ddp"),
            ("mlp", "2xs.small", "48", 5.0, "fsdp"),
            ("conv", "2xs.small", "48", 5.0, "fsdp"),  # of which no run of one device tells
        ],
        columns=["workload", "cluster", "batch_per_device", "step_s", "strategy"],
    ).assign(provider="local", precision="fp32")
    nothing = learned()[0].profiles.iloc[:0]
    data = by_variant(replace(learned()[0], runs=runs, profiles=nothing))
    points, _, _ = one_device_points(
        training_rows(data, seed=0), data.profiles, learned()[1].machines
    )
    seconds = {
        name: np.exp(own["log_s"].to_numpy()).tolist()
        for name, own in points.groupby("workload", sort=False)
    }
    mode = Mode(strategy="fsdp")
    assert seconds["mlp"] == seconds[variant("mlp", mode)] == pytest.approx([0.2])
    assert seconds[variant("conv", mode)][0] > 1.0, "a guess"


def test_before_any_run_physics_says_where_compression_pays_and_how_little_is_known_of_it() -> None:
    plain, model = learned()[1], extended()
    for cluster in ("1xs.large", "2xs.small", "4xs.small"):
        pd.testing.assert_frame_equal(
            model.predict(asked("ddp", cluster)), plain.predict(asked("ddp", cluster))
        )
    slow = {
        one: step(model, one) for one in ("ddp", *COMPRESSED)
    }  # 16 MB over 0.2 Gbit/s take more than half a second
    assert slow["ddp-mstopk"]["step_high_s"] < slow["ddp"]["step_s"]
    assert slow["ddp-mstopk"]["step_s"] < slow["ddp-fp16"]["step_s"] < slow["ddp"]["step_s"]
    slow |= {one: step(model, one) for one in COMBINED}
    assert slow["ddp"]["step_s"] < slow["adasum"]["step_s"] == slow["adasum-delta"]["step_s"]
    slow |= {one: step(model, one) for one in ("ps-2", "ps-1")}
    assert slow["ps-2"]["step_s"] == pytest.approx(slow["ddp"]["step_s"], rel=0.02), (
        "on two machines"
    )
    assert slow["ps-2"]["step_s"] < slow["ps-1"]["step_s"], "one sends twice what two do"
    for one in (*COMPRESSED, *COMBINED, "ps-1"):
        width = {name: np.log(row["step_high_s"] / row["step_low_s"]) for name, row in slow.items()}
        assert width[one] > width["ddp"], "nothing was measured of it"
        assert np.isnan(slow[one]["nearest_doublings"])
    gained = {
        cluster: step(model, "ddp-mstopk", cluster)["step_s"]
        / step(model, "ddp", cluster)["step_s"]
        for cluster in ("2xs.small", "2xn.medium")
    }
    assert gained["2xs.small"] < gained["2xn.medium"], "of a faster link there is less to gain"


def test_without_the_mode_that_one_device_trains_in_nothing_is_said() -> None:
    model = learned()[1]
    other = replace(JOB, modes=(Mode("bf16", "ddp-mstopk"),))
    assert (
        with_compressed(model, other) is model
        and with_compressed(model, replace(JOB, modes=(Mode(),))) is model
    )
    assert with_compressed(extended(), JOB) is extended()
    with pytest.raises(
        ValueError, match="workload 'mlp' was never measured in fp32 ddp-mstopk; known in: fp32"
    ):
        model.predict(asked("ddp-mstopk"))


def test_least_seconds_hold_and_a_model_read_back_says_the_same() -> None:
    model = extended()
    rows = pd.concat(
        [
            asked(one, cluster)
            for one in (*COMPRESSED, *COMBINED)
            for cluster in ("2xs.small", "4xn.medium")
        ]
    )
    rows = rows.reset_index(drop=True)
    predicted = model.predict(rows)
    assert (model.least_seconds(model._read(rows)) <= predicted["step_s"]).all()
    pd.testing.assert_frame_equal(load(dump(model)).predict(rows), predicted)
    drawn = model.draws(rows, count=400, seed=0)
    np.testing.assert_allclose(np.exp(np.log(drawn).mean(axis=1)), predicted["step_s"], rtol=1e-6)


@pytest.mark.parametrize("name", ["ddp-mstopk", "adasum"])
def test_rows_of_its_own_replace_what_physics_says(name: str) -> None:
    data, factor = learned()[0], 1.7
    clusters = ("2xs.small", "3xs.small", "4xs.small", "2xn.medium", "4xn.medium")
    own = pd.concat(
        [
            asked(name, one).assign(
                step_s=factor * step(extended(), name, one)["step_s"], run_id=f"own-{one}"
            )
            for one in clusters
        ]
    )
    model = fit(
        replace(data, runs=pd.concat([data.runs, own.assign(provider="local")], ignore_index=True)),
        seed=0,
    )
    assert variant("mlp", Mode(strategy=name)) in model.workloads
    found, before = step(model, name), step(extended(), name)
    assert found["step_s"] == pytest.approx(factor * before["step_s"], rel=0.1)
    assert found["nearest_doublings"] == 0 and WORKLOADS["mlp"].gradient_bytes == 16_000_000


def test_what_is_kept_takes_memory_on_every_device() -> None:
    model = extended()
    plain = model.peak_bytes("mlp", "s.small", 8, 2)
    kept = model.peak_bytes(variant("mlp", Mode(strategy="ddp-powersgd")), "s.small", 8, 2)
    assert (
        model.peak_bytes(variant("mlp", Mode(strategy="ddp-mstopk")), "s.small", 8, 2)
        > kept
        > plain
    )
    for one in COMBINED:
        assert model.peak_bytes(variant("mlp", Mode(strategy=one)), "s.small", 8, 2) > plain
    assert model.peak_bytes(variant("mlp", Mode(strategy="ddp-fp16")), "s.small", 8, 2) == plain
