"""Models of nothing but imported runs on GPU machines whose truth is known: unequal layouts, mixed types, bad rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import FloatArray
from models.step_time import serialization
from models.step_time.model import StepTimeModel, TrainingData, fit
from tests.models.step_time.test_model import sound

# relative speed, gigabit/s; each has four devices
TYPES = {"g.small": (1.0, 10.0), "g.large": (2.5, 25.0), "g.wide": (2.5, 100.0)}
# seconds of a step without samples, of a sample, and gradient bytes
WORKLOADS = {"conv": (0.05, 0.004, 1e8), "lm": (0.02, 0.012, 4.4e8), "mlp": (0.01, 0.0005, 2.4e8)}
BATCHES = (8, 16, 32, 64)
NUMBERS = [
    "step_s",
    "step_low_s",
    "step_high_s",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
]
INSTANCE_TYPES = pd.DataFrame(
    [
        {
            "provider": "ec2",
            "name": name,
            "devices": 4,
            "device": "cuda",
            "device_tflops": speed,
            "cores": 32,
        }
        | {"bandwidth_gbps": gbps}
        for name, (speed, gbps) in TYPES.items()
    ]
)
NONE = pd.DataFrame()


def truth(workload: str, types: list[str], layout: list[int], batch: int) -> float:
    """Not the model's form: devices of a machine slow each other a little, half of compute hides communication."""
    base, sample, size = WORKLOADS[workload]
    alone = [
        (base + sample * batch) / TYPES[name][0] * (1 + 0.02 * (n - 1))
        for name, n in zip(types, layout, strict=True)
    ]
    ranks, machines = sum(layout), len(layout)
    rate = 0.6 * 1.25e8 * min(TYPES[name][1] for name in types) if machines > 1 else 6e9
    sent = 2 * (ranks - 1) / ranks * size / rate + 1e-3 * (machines - 1)
    return max(alone) + max(0.0, sent - 0.5 * max(alone))


def random_runs(count: int, seed: int, least: int = 1, most: int = 6) -> pd.DataFrame:
    """`count` runs of up to `most` machines, mostly of one type, often with unequal layouts; 2 % noise."""
    random = np.random.default_rng(seed)
    rows = []
    for at in range(count):
        workload = list(WORKLOADS)[at % 3]
        machines = int(random.integers(least, most + 1))
        kinds = [str(one) for one in random.choice(sorted(TYPES), 2)]
        types = sorted(kinds[int(random.random() < 0.1)] for _ in range(machines))
        even = random.random() < 0.5
        layout = [
            int(one)
            for one in (
                [random.integers(1, 5)] * machines if even else random.integers(1, 5, machines)
            )
        ]
        batch = int(random.choice(BATCHES))
        rows.append(
            {
                "run_id": f"run-{at}",
                "provider": "ec2",
                "workload": workload,
                "cluster": "+".join(f"1x{name}" for name in types),
                "layout": "+".join(str(one) for one in layout),
                "batch_per_device": str(batch),
                "step_s": truth(workload, types, layout, batch)
                * float(np.exp(random.normal(0, 0.02))),
                "gradient_bytes": WORKLOADS[workload][2],
            }
        )
    return pd.DataFrame(rows)


def from_rows(runs: pd.DataFrame, profiles: pd.DataFrame = NONE, devices: int = 4) -> StepTimeModel:
    types = INSTANCE_TYPES.assign(devices=devices)
    data = TrainingData(
        runs=runs,
        profiles=profiles,
        buckets=NONE,
        probes=NONE,
        workloads=NONE,
        instance_types=types,
    )
    return fit(data, seed=0)


FRESH = random_runs(90, 2)


@cache
def clean() -> tuple[pd.DataFrame, StepTimeModel]:
    runs = random_runs(75, 1)
    return runs, from_rows(runs)


def off(predicted: pd.DataFrame) -> FloatArray:
    return np.abs(np.log(predicted["step_s"].to_numpy(float) / FRESH["step_s"].to_numpy(float)))


def test_imported_runs_alone_predict_unequal_layouts_and_mixed_types() -> None:
    predicted = clean()[1].predict(FRESH.drop(columns="step_s"))
    unequal = np.array([len(set(one.split("+"))) > 1 for one in FRESH["layout"]])
    mixed = np.array([len(set(one.split("+"))) > 1 for one in FRESH["cluster"]])
    assert unequal.sum() > 20 and mixed.sum() > 5 and sound(predicted)
    assert np.median(off(predicted)) < 0.06 and np.median(off(predicted)[unequal]) < 0.06
    assert np.median(off(predicted)[mixed]) < 0.12
    inside = (predicted["step_low_s"] <= FRESH["step_s"]) & (
        FRESH["step_s"] <= predicted["step_high_s"]
    )
    assert inside.mean() > 0.75
    one = {
        "workload": "lm",
        "cluster": "2xg.large+1xg.small",
        "layout": "1+3+4",
        "batch_per_device": "16",
    }
    asked = clean()[1].predict(pd.DataFrame([one])).iloc[0]
    assert asked["step_s"] == pytest.approx(
        truth("lm", ["g.large", "g.large", "g.small"], [1, 3, 4], 16), rel=0.2
    )


def test_a_workload_of_one_row_is_predicted_with_more_doubt() -> None:
    runs = clean()[0]
    several = runs["workload"] != "lm"
    few = from_rows(pd.concat([runs[several], runs[~several].iloc[:1]])).predict(FRESH)
    own, full = (FRESH["workload"] == "lm").to_numpy(), clean()[1].predict(FRESH)
    widths = [np.log(one["step_high_s"] / one["step_low_s"])[own] for one in (few, full)]
    assert sound(few) and np.median(widths[0]) > 1.3 * np.median(widths[1])
    assert np.median(off(few)[~own]) < 0.06


def test_rows_of_a_single_batch_leave_the_others_in_doubt() -> None:
    runs = clean()[0]
    runs = runs[runs["batch_per_device"] == "32"]
    predicted = from_rows(runs).predict(FRESH)
    width, at = (
        np.log(predicted["step_high_s"] / predicted["step_low_s"]),
        FRESH["batch_per_device"],
    )
    assert sound(predicted) and np.median(width[at == "8"]) > np.median(width[at == "32"])


def test_rows_that_contradict_each_other_are_met_in_between() -> None:
    runs = clean()[0]
    twice = runs.assign(run_id=runs["run_id"] + "-again", step_s=2 * runs["step_s"])
    predicted = from_rows(pd.concat([runs, twice])).predict(FRESH)
    assert sound(predicted)
    assert 1.2 < np.median(predicted["step_s"] / FRESH["step_s"]) < 1.8
    same = from_rows(pd.concat([runs, runs.assign(run_id=runs["run_id"] + "-again")])).predict(
        FRESH
    )
    widths = [np.log(one["step_high_s"] / one["step_low_s"]).median() for one in (predicted, same)]
    assert widths[0] > 2 * widths[1]


def test_outliers_of_a_factor_of_ten_move_little() -> None:
    runs = clean()[0].copy()
    runs.loc[[3, 30], "step_s"] *= 10
    runs.loc[[17, 52], "step_s"] /= 10
    predicted = from_rows(runs).predict(FRESH)
    assert sound(predicted) and np.median(off(predicted)) < 0.07
    moved = np.abs(np.log(predicted["step_s"] / clean()[1].predict(FRESH)["step_s"]))
    assert np.median(moved) < 0.03


def test_steps_that_are_no_times_are_left_out() -> None:
    runs = clean()[0]
    bad = runs.iloc[:5].assign(step_s=[0.0, -1.0, np.nan, np.inf, -np.inf])
    assert serialization.dump(from_rows(pd.concat([bad, runs]))) == serialization.dump(clean()[1])


def profiles() -> pd.DataFrame:
    rows = []
    for workload, (base, sample, _) in WORKLOADS.items():
        for name, (speed, _) in TYPES.items():
            for batch in BATCHES:
                alone = (base + sample * batch) / speed
                row = {"forward_s": alone / 3, "backward_s": alone * 2 / 3, "optimizer_s": 0.0}
                rows.append({"workload": workload, "instance_type": name, "batch": batch, **row})
    return pd.DataFrame(rows)


def error(found: StepTimeModel, runs: pd.DataFrame) -> float:
    predicted = found.predict(runs.drop(columns="step_s"))
    return float(np.mean(np.abs(predicted["step_s"] / runs["step_s"] - 1)))


def test_a_profile_makes_clusters_of_several_devices_better_known() -> None:
    known, asked = random_runs(150, seed=3), random_runs(120, seed=4, least=2)
    with_profiles, without = (error(from_rows(known, one), asked) for one in (profiles(), NONE))
    assert with_profiles < 0.05 and with_profiles < 1.05 * without


def test_a_curve_that_was_profiled_is_kept() -> None:
    found = from_rows(random_runs(60, seed=3), profiles())
    one = pd.DataFrame(
        [{"workload": "conv", "cluster": "1xg.small", "layout": "1", "batch_per_device": "32"}]
    )
    assert found.predict(one)["compute_s"].iloc[0] == pytest.approx(0.05 + 0.004 * 32, rel=0.02)
