"""A workload of the facts without a row in TRAIN is guessed at where that can be, and the report says so or why not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from models.judging.backtest import PREDICTED, backtest, notes, summary
from models.learning import TrainingData
from models.newcomer import introduced
from tests.models.guessing import NEW, TYPES, asked, data, model, seconds

ONE, OTHER = (one.name for one in TYPES[:2])


@cache
def told() -> TrainingData:
    """The facts also tell of a workload that no row is of."""
    facts = pd.DataFrame([{"workload": "new", "flops_per_sample": 1.5e10, "gradient_bytes": 2e8}])
    return replace(data(), workloads=pd.concat([data().workloads, facts], ignore_index=True))


def rows(*setups: tuple[str, str, int]) -> pd.DataFrame:
    """With what the world would have measured on one device: only errors are made of it."""
    flops = float(NEW.flops_per_sample or 0)
    parts = [asked(*one).assign(step_s=seconds(flops, one[2], float(TYPES[0].device_tflops or 0))) for one in setups]
    return pd.concat(parts, ignore_index=True)


TEST = rows(("new", f"1x{ONE}", 32), ("a", f"1x{ONE}", 32), ("new", f"2x{OTHER}", 64))


def test_a_workload_known_by_its_facts_alone_is_predicted_as_its_first_guess_and_named_as_one() -> None:
    found = backtest(told(), TEST, seed=1)
    assert found["unpredicted"].tolist() == [""] * 3 and found["guessed"].tolist() == [True, False, True]
    guess = introduced(model(), NEW)
    assert guess is not None
    expected = guess.predict(TEST)[["step_s", "step_low_s", "step_high_s"]].to_numpy(float)
    assert np.allclose(found[list(PREDICTED)].to_numpy(float), expected)
    (said,) = notes(told(), TEST, found)
    assert said.startswith("2 of 3 rows are first guesses from flops_per_sample alone") and said.endswith("- new: 2")
    assert summary(TEST, found).set_index("group").loc["new", "rows"] == 2


def test_what_is_missing_for_a_guess_is_named() -> None:
    test = pd.concat([TEST, rows(("new", f"1x{ONE}+1xc.dark", 8), ("dark", f"1x{ONE}", 8))], ignore_index=True)
    found = backtest(told(), test, seed=1)
    assert found["unpredicted"].tolist()[3:] == [
        "workload new (TRAIN has no row of it, and nobody knows the peak rate of the devices of c.dark)",
        "workload dark (TRAIN has no row of it, and nobody knows its flops_per_sample)",
    ]
    assert not found["guessed"].iloc[3:].any() and found[list(PREDICTED)].iloc[3:].isna().all(axis=None)
    untold = data().instance_types.assign(device_tflops=None)
    assert (backtest(replace(told(), instance_types=untold), TEST, seed=1)["unpredicted"] != "").tolist() == [1, 0, 1]


def test_rows_that_tell_nothing_of_the_compute_leave_a_workload_to_its_facts() -> None:
    mixed = asked("new", f"1x{ONE}+1x{OTHER}", 8).assign(step_s=1.0)
    found = backtest(replace(told(), runs=pd.concat([data().runs, mixed], ignore_index=True)), TEST, seed=1)
    assert found["guessed"].tolist() == [True, False, True]


def test_facts_in_the_rows_asked_for_are_facts_too_and_those_of_the_facts_come_first() -> None:
    by_rows = TEST.assign(flops_per_sample=1.5e10, gradient_bytes=2e8)
    own = backtest(data(), by_rows, seed=1)
    assert own["guessed"].tolist() == [True, False, True]
    assert np.array_equal(own[list(PREDICTED)], backtest(told(), TEST, seed=1)[list(PREDICTED)])
    lying = backtest(told(), by_rows.assign(flops_per_sample=9e12, gradient_bytes=9e9), seed=1)
    assert np.array_equal(lying[list(PREDICTED)], own[list(PREDICTED)])


def test_what_was_measured_of_it_in_the_test_rows_stays_unseen() -> None:
    first = backtest(told(), TEST, seed=1)
    assert first.equals(backtest(told(), TEST.assign(step_s=TEST["step_s"][::-1].to_numpy()), seed=1))
