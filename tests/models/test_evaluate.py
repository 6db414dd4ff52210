"""Scores come from rows that the fit never saw, and promotion follows its rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from models.evaluate import COLUMNS, SPLITS, contest, decide, held_out, scoreboard, scoreboard_of
from models.step_time import TrainingData, fit
from tests.models.synthetic import World


@cache
def data() -> TrainingData:
    return World(7).data(60)


@cache
def board() -> pd.DataFrame:
    return scoreboard(data(), seed=0)


def test_every_split_is_scored_by_group_and_pooled() -> None:
    assert tuple(board().columns) == COLUMNS
    assert set(board()["split"]) == set(SPLITS)
    pooled = board()[board()["group"] == "all"].set_index("split")
    assert pooled.loc["setup", "rows"] == pooled.loc["cluster_size", "rows"] == 60
    assert (pooled["mean_error"] < 0.1).all() and (pooled["coverage_90"] > 0.75).all()
    assert set(board()[board()["split"] == "workload"]["group"]) == {"conv", "embed", "lm", "mlp", "all"}


def test_the_rows_that_are_scored_are_not_in_the_data_that_is_fitted() -> None:
    for split, group, training, rows in held_out(data(), seed=0):
        assert not set(training.runs["run_id"]) & set(rows["run_id"])
        if split == "workload":
            left = training.runs[training.runs["workload"] == group]
            assert (left["cluster"].str.startswith("1x") & ~left["cluster"].str.contains(r"\+")).all()
        if split == "setup":
            pairs = [set(zip(part["workload"], part["cluster"], strict=True)) for part in (training.runs, rows)]
            assert not pairs[0] & pairs[1]


def test_no_rows_give_an_empty_scoreboard() -> None:
    empty = scoreboard(replace(data(), runs=data().runs.iloc[:0]), seed=0)
    assert len(empty) == 0 and tuple(empty.columns) == COLUMNS
    assert decide(empty, None).promote and not decide(empty, board()).promote


def test_the_first_model_is_promoted_and_an_equal_one_is_not() -> None:
    first = decide(board(), None)
    assert first.promote and "no champion" in first.reason
    again = decide(board(), board())
    assert not again.promote and "not better" in again.reason and "%" in again.reason


def test_a_clearly_better_challenger_is_promoted_and_a_slightly_better_one_is_not() -> None:
    worse = board().assign(mean_error=board()["mean_error"] * 1.5)
    assert decide(board(), worse).promote
    assert not decide(worse, board()).promote
    noisy = board().assign(rows=10, mean_error=0.05)
    noisy["mean_error"] += [0.03 if at % 2 else -0.02 for at in range(len(noisy))]
    refused = decide(board().assign(rows=10, mean_error=0.05), noisy)
    assert not refused.promote and "less than noise" in refused.reason


def test_intervals_that_do_not_cover_are_refused_where_a_champion_is_in_force() -> None:
    narrow = board().assign(coverage_90=0.6)
    refused = decide(narrow, board().assign(mean_error=0.5))
    assert not refused.promote and "60%" in refused.reason and "80%" in refused.reason


def test_the_first_model_is_put_in_force_with_what_is_amiss_in_the_reason() -> None:
    first = decide(board().assign(coverage_90=0.6), None)
    assert first.promote and "60%" in first.reason


def test_a_champion_of_little_data_loses_to_a_challenger_of_much() -> None:
    world = World(8)
    much = world.data(90)
    little = replace(
        much, runs=much.runs.iloc[:6], profiles=much.profiles[much.profiles["workload"] == "lm"], probes=pd.DataFrame()
    )
    champion = fit(replace(little, runs=much.runs.iloc[:12]), seed=0)
    boards = contest(much, champion, seed=0)
    assert set(boards[0]["rows"]) <= set(range(1, 79))
    assert (boards[0].set_index(["split", "group"])["rows"] == boards[1].set_index(["split", "group"])["rows"]).all()
    decision = decide(*boards)
    assert decision.promote, decision.reason


def test_a_champion_is_scored_on_the_same_groups() -> None:
    fixed = scoreboard_of(fit(data(), seed=0), data(), seed=0)
    keys = ["split", "group", "rows"]
    pd.testing.assert_frame_equal(fixed[keys], board()[keys])


@pytest.mark.parametrize("column", ["step_s", "sync_s"])
def test_a_held_out_rows_own_times_do_not_reach_its_prediction(column: str) -> None:
    for _, _, training, rows in list(held_out(data(), seed=0))[:2]:
        model = fit(training, seed=0)
        plain = model.predict(rows)
        pd.testing.assert_frame_equal(model.predict(rows.assign(**{column: 123.0})), plain)
