"""Scores come from rows that the fit never saw, whoever fits and in whatever order."""

from dataclasses import replace
from functools import cache

import pytest

from models.monitoring.cross_validation import COLUMNS, SPLITS, fitted, held_out, summarise
from tests.models.synthetic import World


@cache
def data():
    return World(7).data(60)


@cache
def both():
    return fitted(data(), seed=0)


def held():
    return both()[1]


def test_every_split_is_scored_by_group_and_pooled():
    board = summarise(held())
    assert tuple(board.columns) == COLUMNS and set(board["split"]) == set(SPLITS)
    pooled = board[board["group"] == "all"].set_index("split")
    assert pooled.loc["setup", "rows"] == pooled.loc["cluster_size", "rows"] == 60
    assert (pooled["mean_error"] < 0.1).all() and (pooled["coverage_90"] > 0.75).all()
    groups = set(board[board["split"] == "workload"]["group"])
    assert groups == {"conv", "embed", "lm", "mlp", "all"}


def test_the_rows_that_are_scored_are_not_in_the_data_that_is_fitted():
    for split, group, training, rows in held_out(data(), seed=0):
        known = training.runs
        assert not set(known["run_id"]) & set(rows["run_id"])
        if split == "workload":
            left = known["cluster"][known["workload"] == group]
            assert left.str.fullmatch(r"1x[^+]*").all()
        if split == "setup":
            setups = [
                set(zip(part["workload"], part["cluster"], strict=True)) for part in (known, rows)
            ]
            assert not setups[0] & setups[1]


def test_no_rows_give_an_empty_scoreboard_and_nothing_to_learn_from_no_model():
    no_runs = replace(data(), runs=data().runs.iloc[:0])
    with pytest.raises(ValueError):
        fitted(replace(no_runs, profiles=data().profiles.iloc[:0]), seed=0)
    board = summarise(fitted(no_runs, seed=0)[1])
    assert board.empty and tuple(board.columns) == COLUMNS
