"""Thinning keeps small workloads and rare machines; runs are corrected to nominal speed."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.step_time import dataset
from models.step_time.dataset import (
    TrainingData,
    at_nominal_speed,
    slowness,
    thinned,
    training_rows,
)
from tests.models.step_time.cases import NONE
from tests.models.synthetic import World


def setups(*rows):
    """So many setups of (workload, cluster, layout)."""
    frame = pd.DataFrame(rows, columns=["workload", "cluster", "layout", "count"])
    return frame.loc[frame.index.repeat(frame["count"])].reset_index(drop=True)


def kept(frame, most, by, seed=0):
    return frame.iloc[thinned(frame, most=most, seed=seed)].groupby(by).size().to_dict()


@pytest.mark.parametrize("seed", range(3))
def test_large_workloads_give_way_and_rare_layouts_and_types_stay(seed):
    names = ("huge", 5000), ("large", 700), ("small", 5)
    frame = setups(*((name, "2xq", "1+1", count) for name, count in names))
    assert kept(frame, 205, "workload", seed) == {"huge": 100, "large": 100, "small": 5}
    assert thinned(frame, most=len(frame), seed=seed).tolist() == list(range(len(frame)))
    common = [("w", f"{n}xq", "+".join(["1"] * n), 2) for n in range(2, 400)]
    rare = [("w", "1xq", "1", 600), ("w", "1xrare", "1", 2), ("w", "1xq+1xrare", "1+1", 2)]
    found = kept(setups(*common, *rare), 100, "cluster", seed)
    assert (found["1xrare"], found["1xq+1xrare"], found["1xq"]) == (2, 2, 48)


def test_thinned_rows_have_every_workload_and_type_in_any_order(monkeypatch):
    monkeypatch.setattr(dataset, "_MOST_SETUPS", 40)
    data = World(3).data(60)
    busy = [data.runs.assign(workload="conv", accumulation_steps=steps) for steps in range(1, 10)]
    pilot = data.runs.iloc[:1].assign(workload="pilot", cluster="1xs.rare", batch_per_device="8")
    runs = pd.concat([*busy, data.runs, pilot.assign(layout="1")])
    whole = training_rows(replace(data, runs=runs), seed=1)
    assert 35 <= len(whole.step_s) <= 40 and "s.rare" in whole.types
    assert set(whole.setups.workloads.distinct) == {*data.runs["workload"], "pilot"}
    shuffled = training_rows(replace(data, runs=runs.sample(frac=1, random_state=4)), seed=1)
    assert shuffled.step_s.tolist() == whole.step_s.tolist()


def drifting(beta, repeats=1, count=240):
    """Runs and a profile at slow and fast hours, and the runs' seconds at nominal speed."""
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
        reference_s=[[one, one] for one in 0.02 * reference],
        usual_reference_s=[[0.02, 0.02]] * count,
        reference_spread=0.02,
        reference_blocks=4,
    )
    profile = {"workload": "w", "instance_type": "q", "batch": 8, "forward_s": 0.3}
    profile |= {"backward_s": 0.6, "peak_bytes": 1.0, "reference_s": 0.03}
    profiles = pd.DataFrame([profile | {"usual_reference_s": 0.02}])
    frames = dict.fromkeys(TrainingData.__slots__, NONE)
    return TrainingData(**frames | {"runs": runs, "profiles": profiles}), nominal


@pytest.mark.parametrize(("beta", "repeats"), [(1.0, 1), (0.6, 4)])
def test_runs_are_corrected_to_nominal_speed_once(beta, repeats):
    data, nominal = drifting(beta, repeats)
    corrected = at_nominal_speed(data)
    off = [np.abs(one.runs["step_s"] / nominal - 1).max() for one in (corrected, data)]
    assert off[0] < 0.02 < off[1] and at_nominal_speed(corrected) is corrected
    assert (corrected.runs["sync_s"] / corrected.runs["step_s"]).to_numpy() == pytest.approx(0.2)
    assert corrected.profiles["forward_s"][0] == pytest.approx(0.3 / 1.5**beta, rel=0.02)
    assert corrected.profiles["peak_bytes"][0] == 1.0
    rows = training_rows(corrected, seed=0)
    assert np.sort(rows.step_s) == pytest.approx(np.sort(nominal[::repeats]), rel=0.02)
    between = np.log(data.runs["reference_s"].str[0]).std()
    assert rows.speed_sd == pytest.approx(beta * between, rel=0.08)


def test_runs_without_fixed_work_beside_most_of_them_stay():
    runs = drifting(0.8)[0].runs
    few = runs["reference_s"].where(runs.index % 2 == 0, None)
    for own in (runs.assign(reference_s=few), runs.drop(columns="reference_s")):
        data = replace(drifting(0.8)[0], runs=own)
        assert at_nominal_speed(data) is data and training_rows(data, seed=0).speed_sd == 0


@pytest.mark.parametrize("column", ["noisy", "equal"])
def test_hours_that_differ_less_than_the_reference_correct_nothing(column):
    data, _ = drifting(1.0)
    noisy = data.runs.assign(reference_spread=5.0)
    equal = data.runs.assign(reference_s=[[0.02, 0.02]] * len(data.runs))
    runs = noisy if column == "noisy" else equal
    assert at_nominal_speed(replace(data, runs=runs)).runs["step_s"].equals(runs["step_s"])


def test_slowness_is_the_mean_over_machines_and_unknown_without_one_of_them():
    rows = pd.DataFrame(
        {
            "reference_s": [[0.2, 0.1], [0.4, 0.1], None, [0.1], [0.0, 0.1], 0.3, pd.NA],
            "usual_reference_s": [*([[0.1, 0.1]] * 5), 0.1, 0.1],
        }
    )
    expected = [2**0.5, 2.0, np.nan, np.nan, np.nan, 3.0, np.nan]
    assert slowness(rows) == pytest.approx(expected, nan_ok=True)
