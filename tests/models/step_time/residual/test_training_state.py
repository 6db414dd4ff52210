"""Where the learned factor is held, interval, draws and joint moments are equally wide."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from models.step_time.model import StepTimeModel
from models.step_time.residual.calibration import Z_90
from tests.models.step_time.test_model import known, setup

ASKED = pd.concat(
    [setup("lm", cluster, batch) for cluster, batch in (("2xs.large", "8"), ("4xs.small", "24"), ("1xs.whole", "4000"))]
    + [setup("mlp", "3xs.medium", "96"), setup("mlp", "3xs.medium", "96")]
)


@cache
def held() -> StepTimeModel:
    """The model of a world, its factor held where it would leave no setup."""
    model = known()[2]
    return replace(model, _made={"learned": replace(model._learned(), least=-0.3, most=-0.3)})


def widths(model: StepTimeModel) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Standard deviation of log step seconds by the printed interval."""
    predicted = model.predict(ASKED)
    return np.log(predicted["step_high_s"] / predicted["step_low_s"]).to_numpy(float) / 2 / Z_90


def test_draws_are_as_wide_as_the_interval_and_lie_about_the_prediction_in_pairs() -> None:
    drawn = np.log(held().draws(ASKED, count=4000, seed=0))
    assert drawn.std(axis=1) == pytest.approx(widths(held()), rel=0.04)
    middle = np.log(held().predict(ASKED)["step_s"].to_numpy(float))
    assert (drawn[:, :2000] + drawn[:, 2000:]) / 2 == pytest.approx(np.tile(middle[:, None], 2000), abs=1e-12)
    assert (widths(held()) > 1.2 * widths(known()[2])).all()


def test_draws_of_a_held_setup_are_the_same_in_any_company() -> None:
    drawn = held().draws(ASKED, count=6, seed=3)
    assert held().draws(ASKED.iloc[[2, 0]], count=6, seed=3) == pytest.approx(drawn[[2, 0]], rel=1e-9)


def test_joint_moments_are_as_wide_as_the_interval_and_correlations_stay() -> None:
    mean, covariance, noise = held().joint(ASKED)
    assert mean == pytest.approx(np.log(held().predict(ASKED)["step_s"].to_numpy(float)))
    assert np.sqrt(np.diag(covariance) + noise) == pytest.approx(widths(held()), rel=1e-6)
    _, plain, plain_noise = known()[2].joint(ASKED)
    assert noise == pytest.approx(plain_noise)
    for one in (covariance, plain):
        one /= np.sqrt(np.outer(np.diag(one), np.diag(one)))
    assert covariance == pytest.approx(plain, abs=1e-9) and covariance[3, 4] > 0.99
