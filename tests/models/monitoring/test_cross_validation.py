"""Scores come from rows that the fit never saw, whoever fits and in whatever order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from models.monitoring.cross_validation import (
    COLUMNS,
    SPLITS,
    calibration,
    fitted,
    held_out,
    summarise,
)
from models.step_time.model import StepTimeModel, TrainingData, fit
from tests.models.synthetic import World


@cache
def data() -> TrainingData:
    return World(7).data(60)


@cache
def both() -> tuple[StepTimeModel, pd.DataFrame]:
    return fitted(data(), seed=0)


def held() -> pd.DataFrame:
    return both()[1]


def test_every_split_is_scored_by_group_and_pooled() -> None:
    board = summarise(held())
    assert tuple(board.columns) == COLUMNS
    assert set(board["split"]) == set(SPLITS)
    pooled = board[board["group"] == "all"].set_index("split")
    assert pooled.loc["setup", "rows"] == pooled.loc["cluster_size", "rows"] == 60
    assert (pooled["mean_error"] < 0.1).all() and (pooled["coverage_90"] > 0.75).all()
    assert set(board[board["split"] == "workload"]["group"]) == {
        "conv",
        "embed",
        "lm",
        "mlp",
        "all",
    }


def test_the_rows_that_are_scored_are_not_in_the_data_that_is_fitted() -> None:
    for split, group, training, rows in held_out(data(), seed=0):
        assert not set(training.runs["run_id"]) & set(rows["run_id"])
        if split == "workload":
            left = training.runs[training.runs["workload"] == group]
            assert (
                left["cluster"].str.startswith("1x") & ~left["cluster"].str.contains(r"\+")
            ).all()
        if split == "setup":
            pairs = [
                set(zip(part["workload"], part["cluster"], strict=True))
                for part in (training.runs, rows)
            ]
            assert not pairs[0] & pairs[1]
    _, _, training, rows = next(held_out(data(), seed=0))
    model = fit(training, seed=0)
    for column in ("step_s", "sync_s"):
        pd.testing.assert_frame_equal(
            model.predict(rows.assign(**{column: 123.0})), model.predict(rows)
        )


def test_no_rows_give_an_empty_scoreboard_and_nothing_to_learn_from_no_model() -> None:
    with pytest.raises(ValueError):
        fitted(
            replace(data(), runs=data().runs.iloc[:0], profiles=data().profiles.iloc[:0]), seed=0
        )
    _, empty = fitted(replace(data(), runs=data().runs.iloc[:0]), seed=0)
    assert len(summarise(empty)) == 0 and tuple(summarise(empty).columns) == COLUMNS


def test_calibration_states_how_many_lie_inside_narrower_intervals() -> None:
    spread = 0.1
    quantiles = norm.ppf((np.arange(1000) + 0.5) / 1000)
    rows = pd.DataFrame({"split": "setup", "measured_s": np.exp(spread * quantiles), "step_s": 1.0})
    honest = rows.assign(step_low_s=np.exp(-1.6449 * spread), step_high_s=np.exp(1.6449 * spread))
    assert calibration(honest)["observed"].tolist() == pytest.approx([0.5, 0.8, 0.9], abs=0.002)
    wide = calibration(
        honest.assign(step_low_s=np.exp(-3.3 * spread), step_high_s=np.exp(3.3 * spread))
    )
    assert (wide["observed"] > wide["stated"] + 0.05).all() and set(wide["rows"]) == {1000}
    assert len(calibration(rows.iloc[:0])) == 0
