"""Models of imported GPU runs alone: unequal layouts, mixed types, contradictory rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from models.step_time.model import StepTimeModel, TrainingData, fit
from tests.models.step_time.cases import NONE, error, inside, sound, width

TYPES = {"g.small": (1.0, 10.0), "g.large": (2.5, 25.0), "g.wide": (2.5, 100.0)}  # speed, Gbit/s
# Seconds of a step without samples, of a sample, and gradient bytes.
WORKLOADS = {"conv": (0.05, 0.004, 1e8), "lm": (0.02, 0.012, 4.4e8), "mlp": (0.01, 0.0005, 2.4e8)}


def truth(workload: str, types: list[str], layout: list[int], batch: int) -> float:
    """Devices of a machine slow each other a little; half of compute hides communication."""
    base, sample, size = WORKLOADS[workload]
    compute = max(
        (base + sample * batch) / TYPES[name][0] * (1 + 0.02 * (count - 1))
        for name, count in zip(types, layout, strict=True)
    )
    ranks, machines = sum(layout), len(layout)
    rate = 0.6 * 1.25e8 * min(TYPES[name][1] for name in types) if machines > 1 else 6e9
    sent = 2 * (ranks - 1) / ranks * size / rate + 1e-3 * (machines - 1)
    return compute + max(0.0, sent - 0.5 * compute)


def random_runs(count: int, seed: int) -> pd.DataFrame:
    """Runs of up to six machines, mostly of one type, often with unequal layouts; 2 % noise."""
    random, rows = np.random.default_rng(seed), []
    for at in range(count):
        workload, machines = list(WORKLOADS)[at % 3], int(random.integers(1, 7))
        kinds = random.choice(sorted(TYPES), 2).tolist()
        types = sorted(kinds[int(random.random() < 0.1)] for _ in range(machines))
        layout = random.integers(1, 5, machines).tolist()
        if random.random() < 0.5:
            layout = layout[:1] * machines
        batch = int(random.choice((8, 16, 32, 64)))
        step = truth(workload, types, layout, batch) * np.exp(random.normal(0, 0.02))
        cluster, text = "+".join(f"1x{name}" for name in types), "+".join(map(str, layout))
        rows.append((workload, cluster, text, str(batch), step, WORKLOADS[workload][2]))
    columns = ["workload", "cluster", "layout", "batch_per_device", "step_s", "gradient_bytes"]
    return pd.DataFrame(rows, columns=columns).assign(provider="ec2")


def from_rows(runs: pd.DataFrame) -> StepTimeModel:
    types = pd.DataFrame.from_dict(TYPES, orient="index", columns=["device_tflops", "gbps"])
    types = types.rename(columns={"gbps": "bandwidth_gbps"}).rename_axis("name").reset_index()
    data = TrainingData(
        runs=runs,
        profiles=NONE,
        buckets=NONE,
        probes=NONE,
        workloads=NONE,
        instance_types=types.assign(devices=4, device="cuda", cores=32),
    )
    return fit(data, seed=0)


RUNS, FRESH = random_runs(75, 1), random_runs(90, 2)


@pytest.fixture(scope="module")
def predicted() -> pd.DataFrame:
    return from_rows(RUNS).predict(FRESH)


def test_unequal_layouts_and_mixed_types_are_predicted(predicted: pd.DataFrame) -> None:
    off = error(predicted, FRESH["step_s"])
    unequal, mixed = (
        np.array([len(set(one.split("+"))) > 1 for one in FRESH[name]])
        for name in ("layout", "cluster")
    )
    assert unequal.sum() > 20 and mixed.sum() > 5 and sound(predicted)
    assert off.median() < 0.06 and off[unequal].median() < 0.06 and off[mixed].median() < 0.12
    assert inside(predicted, FRESH["step_s"]) > 0.75


def test_a_workload_of_one_row_is_predicted_with_more_doubt(predicted: pd.DataFrame) -> None:
    others, lm = RUNS[RUNS["workload"] != "lm"], FRESH["workload"] == "lm"
    few = from_rows(pd.concat([others, RUNS[RUNS["workload"] == "lm"].iloc[:1]])).predict(FRESH)
    assert sound(few) and width(few)[lm].median() > 1.3 * width(predicted)[lm].median()
    assert error(few, FRESH["step_s"])[~lm].median() < 0.06


def test_contradictory_rows_meet_in_between_with_wide_intervals() -> None:
    twice, same = (
        from_rows(pd.concat([RUNS, RUNS.assign(step_s=factor * RUNS["step_s"])])).predict(FRESH)
        for factor in (2, 1)
    )
    assert sound(twice) and 1.2 < (twice["step_s"] / FRESH["step_s"]).median() < 1.8
    assert width(twice).median() > 2 * width(same).median()
