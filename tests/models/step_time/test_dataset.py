"""Runs are corrected to nominal speed."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.step_time.dataset import at_nominal_speed, pool_runs, slowness
from tests.frames import data_of


def drifting(beta, repeats=1):
    """Runs and a profile at slow and fast hours, and the runs' seconds at nominal speed."""
    count = 240
    hours = np.exp(0.25 * np.sin(np.arange(count) / 9.0))
    nominal = 0.1 * np.repeat(1.0 + np.arange(count // repeats) % 40, repeats)
    reference = hours * np.exp(0.005 * np.random.default_rng(3).standard_normal(count))
    step_s = nominal * hours**beta
    runs = pd.DataFrame({"step_s": step_s, "sync_s": 0.2 * step_s}).assign(
        workload="w",
        cluster="2xq",
        layout="1+1",
        accumulation_steps=1,
        provider="local",
        batch_per_device=[str(1 + at // repeats) for at in range(count)],
        reference_s=[[seconds, seconds] for seconds in 0.02 * reference],
        usual_reference_s=[[0.02, 0.02]] * count,
        reference_spread=0.02,
        reference_blocks=4,
    )
    profile = runs.iloc[:1].assign(
        instance_type="q", batch=8, forward_s=0.3, backward_s=0.6, peak_bytes=1.0, reference_s=0.03
    )
    return data_of(runs=runs, profiles=profile.assign(usual_reference_s=0.02)), nominal


@pytest.mark.parametrize(("beta", "repeats"), [(1.0, 1), (0.6, 4)])
def test_runs_are_corrected_to_nominal_speed_once(beta, repeats):
    data, nominal = drifting(beta, repeats)
    corrected = at_nominal_speed(data)
    off = [abs(dataset.runs["step_s"] / nominal - 1).max() for dataset in (corrected, data)]
    assert off[0] < 0.02 < off[1] and at_nominal_speed(corrected) is corrected
    assert (corrected.runs["sync_s"] / corrected.runs["step_s"]).to_numpy() == pytest.approx(0.2)
    assert corrected.profiles["forward_s"][0] == pytest.approx(0.3 / 1.5**beta, rel=0.02)
    assert corrected.profiles["peak_bytes"][0] == 1.0
    setups = pool_runs(corrected.runs, {})
    assert np.sort(setups["step_s"]) == pytest.approx(np.sort(nominal[::repeats]), rel=0.02)
    between = np.log(data.runs["reference_s"].str[0]).std()
    assert corrected.runs["speed_sd"].iloc[0] == pytest.approx(beta * between, rel=0.08)


@pytest.mark.parametrize(
    "known",
    [
        {"reference_spread": 5.0},
        {"reference_s": 0.02},
        {"reference_s": lambda runs: runs["reference_s"].where(runs.index % 2 == 0, None)},
    ],
)
def test_too_few_or_too_equal_references_correct_nothing(known):
    data, _ = drifting(1.0)
    runs = data.runs.assign(usual_reference_s=0.02, reference_s=data.runs["reference_s"].str[0])
    runs = runs.assign(**known)
    assert at_nominal_speed(replace(data, runs=runs)).runs["step_s"].equals(runs["step_s"])


def test_slowness_is_the_mean_over_machines_and_unknown_without_one_of_them():
    recorded = [[0.2, 0.1], [0.4, 0.1], None]
    rows = pd.DataFrame({"reference_s": recorded, "usual_reference_s": [[0.1, 0.1]] * 3})
    expected = [2**0.5, 2.0, np.nan]
    assert slowness(rows) == pytest.approx(expected, nan_ok=True)
