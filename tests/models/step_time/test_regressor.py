"""The regression finds what made the data, its draws move together, no bad row breaks it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.step_time.formula import MEAN, NAMES, Line, moved_step_s, step_times
from models.step_time.machine_specs import data_sheets
from tests.models.step_time.cases import error, fitted, inside, sound, width


def several_of(rows):
    """Mask of `middle` on several fast devices."""
    own = (rows["workload"] == "middle") & rows["cluster"].str.endswith("fast")
    return own & (rows["layout"] != "1")


@pytest.fixture(scope="module")
def without_middle(gpus):
    """`middle` is known by one fast device."""
    return fitted(gpus[~several_of(gpus)])


def test_a_workload_known_by_one_device_is_predicted_and_pilots_narrow_the_interval(
    gpus, without_middle
):
    held = several_of(gpus)
    pilots = held & gpus["batch_per_device"].eq("16")
    asked = gpus[held & ~pilots]
    before = without_middle.predict(asked)
    assert error(before, asked["step_s"]).mean() < 0.10 and inside(before, asked["step_s"]) > 0.8
    after = fitted(gpus[~held | pilots]).predict(asked)
    assert width(after).median() < 0.7 * width(before).median()
    assert error(after, asked["step_s"]).mean() < 0.06


def test_draws_have_the_joint_covariance(gpus):
    large = gpus["workload"] == "large"
    model = fitted(gpus[~large | (gpus["layout"] == "1")])
    setups = gpus[large & (gpus["layout"] != "1")].drop(columns="step_s").iloc[::4]
    drawn = np.log(model.draws(setups, count=2000, seed=3))
    mean, covariance, noise = model.joint(setups)
    assert np.allclose(drawn.mean(axis=1), mean, atol=1e-9) and (noise > 0).all()
    covariance = covariance + np.diag(noise)
    spread = np.sqrt(np.diag(covariance))
    assert np.allclose(drawn.std(axis=1) / spread, 1, atol=0.15)
    stated = covariance / np.multiply.outer(spread, spread)
    assert np.abs(np.corrcoef(drawn) - stated).mean() < 0.07


def test_intervals_hold_the_noise_of_runs(gpus, without_middle):
    noisy = replace(without_middle, run_sd=0.5)
    assert width(noisy.predict(gpus)).min() > 2 * Z_90 * 0.5


@pytest.mark.parametrize("case", ["one row", "contradictory", "not numbers", "alone"])
def test_bad_or_few_rows_give_sound_predictions(gpus, case):
    bad = gpus["step_s"].where(gpus.index % 7 != 0, 0.0).where(gpus.index % 11 != 0)
    rows = {
        "one row": gpus.iloc[[0]],
        "contradictory": pd.concat([gpus, gpus.assign(step_s=100 * gpus["step_s"])]),
        "not numbers": gpus.assign(step_s=bad.where(gpus.index % 13 != 0, np.inf)),
        "alone": gpus[gpus["layout"] == "1"],
    }[case]
    model, asked = fitted(rows), gpus[gpus["workload"].isin(set(rows["workload"]))]
    if case == "one row":
        asked = asked[asked["cluster"].str.endswith("fast")]
    assert sound(model.predict(asked))
    assert np.isfinite(model.draws(asked, count=4, seed=0)).all()


def test_rows_without_gradient_bytes_are_learned_from(gpus):
    found = fitted(gpus, facts=("workload",)).predict(gpus)
    assert error(found, gpus["step_s"]).median() < 0.15


def test_each_parameter_moves_the_step_as_the_whole_equation_does():
    random, rows, by = np.random.default_rng(1), 40, 0.01
    numbers = {name: random.uniform(1.0, 4.0, rows) for name in Line.__slots__}
    wide = ("alone_s", "middle_s", "optimizer_s", "count")
    numbers |= {name: random.uniform(0.5, 2.0, (rows, 2)) for name in wide}
    numbers["gradient_bytes"] *= 1e8
    numbers["devices"] = random.integers(2, 5, (rows, 2)) * 1.0
    numbers["machines"] = random.integers(2, 5, rows) * 1.0
    line = Line(**numbers)
    values = MEAN + random.normal(0, 0.5, (rows, len(NAMES)))
    found, before = moved_step_s(line, values, by=by), step_times(line, values).step_s
    for at, name in enumerate(NAMES):
        moved = values.copy()
        moved[:, at] += by
        assert np.array_equal(found[:, at], step_times(line, moved).step_s), name
        assert not np.array_equal(found[:, at], before), name


def test_a_kind_is_known_by_its_data_sheet_and_better_by_its_rows():
    sheets = data_sheets().loc[["t4", "v100", "a10g", "a100", "l40s"]]
    bounds = {"w1": 0.3, "w2": 0.6, "w3": 0.5}
    rows = [
        (name, f"1x{kind}", batch, batch * memory**-bound * rate ** (bound - 1))
        for name, bound in bounds.items()
        for kind, memory, rate in zip(
            sheets.index, sheets["bandwidth_gbytes_s"], sheets["fp32_tflops"], strict=True
        )
        for batch in (8, 16, 32)
    ]
    runs = pd.DataFrame(rows, columns=["workload", "cluster", "batch_per_device", "step_s"])
    types = sheets.reset_index(names="name").assign(
        device=sheets.index, device_tflops=sheets["fp32_tflops"].to_numpy(), devices=1
    )
    new = runs["cluster"] == "1xl40s"
    asked, widths = runs[new], []
    for known, most in ((~new, 0.15), (~new | (runs["batch_per_device"] == 16), 0.05)):
        found = fitted(runs[known], types=types).predict(asked)
        assert np.log(found["step_s"] / asked["step_s"]).abs().max() < most
        widths.append(width(found).mean())
    assert widths[1] < 0.7 * widths[0]
