"""A guess from FLOPs: right when networks behave, wide where nothing is known, undisturbed by an oddity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.step_time.physics import flops_prior
from models.step_time.physics.flops_prior import fit_first_guess
from tests.benchmarks.spot_replay import guess_interval, guess_scores, read_step_times

FILE = Path(__file__).parents[5] / "shared" / "data" / "single_gpu_step_times.csv"
COLUMNS = ["workload", "flops_per_sample", "batch", "device_tflops", "seconds"]
NONE = pd.DataFrame({name: [] for name in COLUMNS})


def measured(networks: int, *, odd: int | None = None, spread: float = 0.05) -> pd.DataFrame:
    """Seconds with an efficiency that grows with the step's work; network `odd` takes three times as long."""
    rng = np.random.default_rng(2)
    rows = []
    for number in range(networks):
        flops = 10 ** float(rng.uniform(8.5, 10.5))
        own = np.exp(rng.normal(0, spread)) * (3.0 if number == odd else 1.0)
        for tflops in (4.0, 10.0):
            rows.append((f"n{number}", flops, 32.0, tflops, own * true_s(flops, 32.0, tflops)))
    return pd.DataFrame(rows, columns=COLUMNS)


def true_s(flops: float, batch: float, tflops: float) -> float:
    return float(8.0 * (flops * batch) ** 0.85 * 1e12**0.15 / (tflops * 1e12))


def test_a_network_like_the_others_is_guessed_within_its_spread() -> None:
    model = fit_first_guess(measured(10))
    middle, _ = model.seconds(3e9, 32.0, 7.0)
    assert float(middle) == pytest.approx(true_s(3e9, 32.0, 7.0), rel=0.1)


def test_one_odd_network_does_not_bend_the_line() -> None:
    middle, _ = fit_first_guess(measured(10, odd=4)).seconds(3e9, 32.0, 7.0)
    assert float(middle) == pytest.approx(true_s(3e9, 32.0, 7.0), rel=0.12)


def test_the_interval_says_how_little_is_known() -> None:
    def width(rows: pd.DataFrame, tflops: float = 7.0) -> float:
        low, high = guess_interval(fit_first_guess(rows), 3e9, 32.0, tflops)
        return float(high / low)

    assert width(NONE) > 100 > width(measured(2)) > width(measured(12))
    assert width(measured(12), tflops=300.0) > 1.5 * width(measured(12))


def test_with_nothing_measured_forward_and_backward_run_at_two_fifths_of_the_peak() -> None:
    middle, _ = fit_first_guess(NONE).seconds(1e12 / 32, 32.0, 10.0)
    assert float(middle) == pytest.approx(0.1 / 0.4)


def dense(design: flops_prior.Floats, target: flops_prior.Floats, codes: np.ndarray, prior: np.ndarray) -> list[object]:
    """Line, covariance and scale of the form of all columns, the covariance of all rows written out."""
    line, scale, weight = prior, 0.2, np.ones(codes.max() + 1)
    same, precision = codes[:, None] == codes, np.diag(flops_prior._PRIOR_SD**-2.0)
    for _ in range(200):
        before, spread = line, scale**2 / weight
        inverse = np.linalg.inv(np.where(same, spread[codes], 0.0) + 0.05**2 * np.eye(len(target)))
        covariance = np.linalg.inv(precision + design.T @ inverse @ design)
        line = covariance @ (precision @ prior + design.T @ inverse @ target)
        effect = spread * np.bincount(codes, inverse @ (target - design @ line))
        weight = 3 / (2 + (effect / scale) ** 2)
        scale = np.sqrt((4 * 0.2**2 + np.sum(weight * effect**2)) / (4 + len(weight)))
        if np.max(np.abs(line - before)) < 1e-8:
            break
    return [line, covariance, scale]


def test_the_line_is_that_of_the_covariance_of_all_rows_written_out() -> None:
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(12), rng.integers(1, 9, 12))
    design = flops_prior._design(rng.normal(0, 2, len(codes)), rng.normal(0, 1, len(codes)))
    target = design @ rng.normal(0, 0.3, 5) + 0.3 * rng.standard_t(2, 12)[codes] + rng.normal(0, 0.05, len(codes))
    order = rng.permutation(len(codes))
    found = flops_prior._fit((0, 1, 2, 3, 4), design[order], target[order], codes[order], 12, flops_prior._PRIOR)
    for ours, expected in zip(
        (found.line, found.covariance, found.scale), dense(design, target, codes, flops_prior._PRIOR), strict=True
    ):
        assert ours == pytest.approx(expected, abs=1e-9)


def test_no_matrix_grows_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, invert = [], np.linalg.inv

    def watched(matrix: np.ndarray) -> np.ndarray:
        sizes.append(len(matrix))
        return invert(matrix)

    monkeypatch.setattr(np.linalg, "inv", watched)
    fit_first_guess(measured(40))
    assert max(sizes) == 5


@given(flops=st.floats(1e6, 1e13), batch=st.floats(1, 4096), tflops=st.floats(0.1, 1000), more=st.floats(1.01, 100))
def test_more_work_takes_longer_and_a_faster_device_beyond_those_seen_is_faster(
    flops: float, batch: float, tflops: float, more: float
) -> None:
    model = fit_first_guess(measured(8))
    middle = float(model.seconds(flops, batch, tflops)[0])
    assert middle > 0
    assert float(model.seconds(flops * more, batch, tflops)[0]) > middle
    assert float(model.seconds(flops, batch, max(tflops, 10.0) * more)[0]) < float(
        model.seconds(flops, batch, max(tflops, 10.0))[0]
    )


def test_the_curve_is_what_was_guessed_by_batch() -> None:
    model = fit_first_guess(measured(10))
    curve, doubt = model.curve(3e9, 7.0, (8.0, 16.0, 32.0))
    forward, backward = curve.at(np.array([16.0]))
    assert float(forward[0] + backward[0]) == pytest.approx(float(model.seconds(3e9, 16.0, 7.0)[0]))
    assert curve.origin == "flops" and doubt > 0.1
    intercept, slope = curve.line()
    assert intercept >= 0 and slope > 0


def test_a_figure_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_first_guess(measured(2).assign(flops_per_sample=0.0))
    with pytest.raises(ValueError, match="above 0"):
        fit_first_guess(NONE).seconds(1e9, 32.0, 0.0)


@pytest.mark.skipif(not FILE.exists(), reason="no shared data")
def test_a_network_held_out_is_guessed_from_its_flops() -> None:
    scored = guess_scores(read_step_times(FILE))
    assert scored["workload"].nunique() >= 10
    assert scored["error"].median() <= 0.08
    assert scored["error"].mean() <= 0.13
    assert 0.85 <= scored["inside"].mean() <= 0.96
