"""A workload of which only facts are known: a wide first guess, and nothing that was known before changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.newcomer import all_introduced, introduced
from models.step_time import StepTimeModel, fit
from tests.models.guessing import NEW, TYPES, asked, data, model, seconds


@pytest.mark.parametrize("kind", [one.name for one in TYPES])
def test_the_guess_is_near_where_networks_behave_and_its_interval_says_how_little_is_known(kind: str) -> None:
    guessing = introduced(model(), NEW)
    assert guessing is not None
    (found,) = guessing.predict(asked("new", f"1x{kind}", 32)).to_dict("records")
    tflops = next(float(one.device_tflops or 0) for one in TYPES if one.name == kind)
    true_s = seconds(1.5e10, 32, tflops)
    assert found["step_s"] == pytest.approx(true_s, rel=0.35)
    assert found["step_low_s"] < true_s < found["step_high_s"]
    (known,) = model().predict(asked("c", f"1x{kind}", 32)).to_dict("records")
    assert found["step_high_s"] / found["step_low_s"] > 1.5 > known["step_high_s"] / known["step_low_s"]
    assert np.isnan(found["nearest_doublings"])


def test_what_it_is_off_by_is_shared_by_the_types() -> None:
    guessing = introduced(model(), NEW)
    assert guessing is not None
    rows = pd.concat([asked("new", f"1x{one.name}", 32) for one in TYPES])
    drawn = np.log(guessing.draws(rows, count=400, seed=1))
    assert np.corrcoef(drawn).min() > 0.5


def test_nothing_that_was_known_changes() -> None:
    guessing = introduced(model(), NEW)
    assert guessing is not None
    rows = data().runs.drop(columns="step_s")
    pd.testing.assert_frame_equal(guessing.predict(rows), model().predict(rows))
    assert "new" not in model().workloads, "the model itself was not told"
    with pytest.raises(ValueError, match="new"):
        model().predict(asked("new", f"1x{TYPES[0].name}", 32))


def test_facts_without_flops_and_workloads_that_were_measured_are_not_guessed_at() -> None:
    assert introduced(model(), replace(NEW, flops_per_sample=None)) is None
    assert introduced(model(), replace(NEW, name="a")) is None, "perhaps as another definition, but measured"


def test_the_map_is_stored_with_the_model_exactly_and_an_older_model_guesses_nothing() -> None:
    back = StepTimeModel.from_json(model().to_json())
    guessing, again = introduced(model(), NEW), introduced(back, NEW)
    assert guessing is not None and again is not None
    rows = pd.concat([asked("new", f"2x{one.name}", 16) for one in TYPES])
    pd.testing.assert_frame_equal(guessing.predict(rows), again.predict(rows))
    older = replace(model(), physics=replace(model().physics, compute=replace(model().physics.compute, guess=None)))
    assert introduced(older, NEW) is None


def test_without_a_peak_rate_there_is_no_guess() -> None:
    types = data().instance_types.assign(device_tflops=None)
    untold = fit(replace(data(), instance_types=types), seed=1)
    guessing = introduced(untold, NEW)
    assert guessing is not None and not guessing.physics.compute.can_guess(TYPES[0].name)
    with pytest.raises(ValueError, match="never measured"):
        guessing.predict(asked("new", f"1x{TYPES[0].name}", 32))


def test_memory_is_bounded_by_the_facts() -> None:
    guessing = introduced(model(), NEW)
    assert guessing is not None
    assert 1.4e9 < guessing.peak_bytes("new", TYPES[0].name, 1) < guessing.peak_bytes("new", TYPES[0].name, 64)


def test_several_are_introduced_at_once_each_as_if_alone_and_none_that_was_measured() -> None:
    flops, sizes = {"new": 1.5e10, "other": 4e10, "a": 1.0}, {"new": 2e8, "a": 1.0}
    both = all_introduced(model(), flops, sizes)
    assert both.workloads == tuple(sorted({*model().workloads, "new", "other"}))
    alone = introduced(model(), NEW)
    assert alone is not None
    rows = pd.concat([asked("new", f"2x{one.name}", 16) for one in TYPES])
    pd.testing.assert_frame_equal(both.predict(rows), alone.predict(rows))
    assert both.peak_bytes("new", TYPES[0].name, 8) == alone.peak_bytes("new", TYPES[0].name, 8)
    heavier = [
        float(both.predict(asked(name, f"1x{TYPES[0].name}", 32))["step_s"].iloc[0]) for name in ("new", "other")
    ]
    assert heavier[1] > 1.5 * heavier[0]
    measured = asked("a", f"1x{TYPES[0].name}", 8)
    pd.testing.assert_frame_equal(both.predict(measured), model().predict(measured))
    in_turn = introduced(alone, replace(NEW, name="other", flops_per_sample=4e10))
    assert in_turn is not None and in_turn.workloads == both.workloads
