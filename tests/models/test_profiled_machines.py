"""Profiles of devices that share a machine: their curves are kept, and what sharing costs is learned from runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from models.step_time import StepTimeModel, TrainingData, fit
from tests.models.test_physics import BATCHES, INSTANCE_TYPES, TYPES, WORKLOADS, random_runs

NONE = pd.DataFrame()


def profiles() -> pd.DataFrame:
    rows = []
    for workload, (base, sample, _) in WORKLOADS.items():
        for name, (speed, _) in TYPES.items():
            for batch in BATCHES:
                alone = (base + sample * batch) / speed
                row = {"forward_s": alone / 3, "backward_s": alone * 2 / 3, "optimizer_s": 0.0}
                rows.append({"workload": workload, "instance_type": name, "batch": batch, **row})
    return pd.DataFrame(rows)


def model(runs: pd.DataFrame, profiles: pd.DataFrame, devices: int = 4) -> StepTimeModel:
    types = INSTANCE_TYPES.assign(devices=devices)
    data = TrainingData(runs=runs, profiles=profiles, buckets=NONE, probes=NONE, workloads=NONE, instance_types=types)
    return fit(data, seed=0)


def error(found: StepTimeModel, runs: pd.DataFrame) -> float:
    predicted = found.predict(runs.drop(columns="step_s"))
    return float(np.mean(np.abs(predicted["step_s"] / runs["step_s"] - 1)))


def test_a_profile_makes_clusters_of_several_devices_better_known() -> None:
    known, asked = random_runs(150, seed=3), random_runs(120, seed=4, least=2)
    with_profiles, without = (error(model(known, one), asked) for one in (profiles(), NONE))
    assert with_profiles < 0.05 and with_profiles < 1.05 * without


def test_only_machines_of_one_device_go_by_the_timeline() -> None:
    runs = random_runs(12, seed=5).assign(layout="")
    assert model(runs, profiles()).physics.profiled == frozenset()
    assert model(runs, profiles(), devices=1).physics.profiled == frozenset(WORKLOADS)


def test_a_curve_that_was_profiled_is_kept() -> None:
    found = model(random_runs(60, seed=3), profiles())
    one = pd.DataFrame([{"workload": "conv", "cluster": "1xg.small", "layout": "1", "batch_per_device": "32"}])
    assert found.predict(one)["compute_s"].iloc[0] == pytest.approx(0.05 + 0.004 * 32, rel=0.02)
