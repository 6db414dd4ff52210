"""The regression finds what made the data, its draws move together, no bad row breaks it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.step_time.formula import MEAN, NAMES, Line, moved_step_s, step_times
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


def test_draws_have_the_joint_covariance_whatever_else_is_asked(gpus):
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
    assert np.allclose(np.exp(drawn[2:4]), model.draws(setups.iloc[2:4], count=2000, seed=3))


def test_intervals_hold_the_factors_of_calibration_and_the_noise_of_runs(gpus, without_middle):
    model = fitted(gpus[~several_of(gpus)])

    def widths(model):
        """Median widths of the unmeasured cell and of a measured one."""
        cells = (several_of(gpus), gpus["workload"] == "small")
        left, had = (float(width(model.predict(gpus[rows])).median()) for rows in cells)
        return left, had

    for kind in model.regression.widened:
        model.regression.widened[kind] *= 3
    begun, doubted = widths(without_middle), widths(model)
    assert doubted[0] > 1.5 * begun[0] and doubted[1] == begun[1]
    noisy = replace(model, measured=replace(model.measured, run_sd=0.5))
    assert min(widths(noisy)) > 2 * Z_90 * 0.5


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
    rates = {"a": (400, 10), "b": (800, 20), "c": (1600, 40), "d": (600, 30), "new": (900, 60)}
    bounds = {"w1": 0.3, "w2": 0.6, "w3": 0.5}
    rows = [
        (name, kind, batch, np.log(batch) - bound * np.log(memory) - (1 - bound) * np.log(rate))
        for name, bound in bounds.items()
        for kind, (memory, rate) in rates.items()
        for batch in (8.0, 16.0, 32.0)
    ]
    points = pd.DataFrame(rows, columns=["workload", "kind", "batch", "log_s"]).assign(sd=0.01)
    new = points["kind"] == "new"
    asked = points[new]
    doubts = []
    for known, most in ((~new, 0.15), (~new | (points["batch"] == 16), 0.05)):
        sheets = {name: (float(memory), float(rate), 1.0) for name, (memory, rate) in rates.items()}
        model = OneDevice.fit(points[known], sheets=sheets)
        batch = asked["batch"].to_numpy()
        at = model.at(asked["workload"].tolist(), asked["kind"].tolist(), batch)
        assert np.abs(model.predict(at) - asked["log_s"].to_numpy()).max() < most
        doubts.append(np.diag(model.covariance(at, at)).mean())
    assert doubts[1] < 0.5 * doubts[0]
