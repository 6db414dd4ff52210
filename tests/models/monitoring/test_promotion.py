"""Scores come from rows that the fit never saw, and promotion from more than noise in them."""

from dataclasses import fields, replace
from functools import cache

import pandas as pd
import pytest

from models.monitoring.cross_validation import COLUMNS, SPLITS, fit_and_score, held_out, summarise
from models.monitoring.promotion import LARGE_ERROR, caution, decide, verdict
from models.step_time.model import TrainingData, fit
from tests.models.synthetic import World

NEW = {"workload": "lm", "instance type": "s.whole"}


@cache
def data():
    return World(7).data(60)


@cache
def both():
    return fit_and_score(data(), seed=0)


def held():
    return both()[1]


def off(factor):
    """Every run predicted `factor` times too long, with intervals that cover."""
    rows = held().drop_duplicates("row")
    return rows.assign(step_s=rows["measured_s"] * factor, step_low_s=0.0, step_high_s=99.0)


def without(name):
    """The data from before the workload or instance type `name` was there."""
    frames = {field.name: getattr(data(), field.name) for field in fields(TrainingData)}
    for field, frame in frames.items():
        for column in {"workload", "instance_type", "cluster", "name"} & set(frame):
            frame = frame[~frame[column].str.contains(name, regex=False)]
        frames[field] = frame
    return TrainingData(**frames)


def test_a_model_is_promoted_if_it_is_the_first_equal_or_better():
    narrow = held().assign(step_low_s=held()["step_s"], step_high_s=held()["step_s"])
    assert decide(narrow, None).promote and decide(held().iloc[:0], None).promote
    assert decide(held(), held()).promote and decide(held().iloc[:0], held()).promote
    assert decide(held(), off(1.5)).promote


def test_a_challenger_is_refused_if_it_is_worse_by_more_than_noise():
    assert not decide(off(1.5), off(1.05)).promote
    rival = off(1.05)
    unlucky = rival["setup"] == rival["setup"].iloc[0]
    bad_setup = rival.assign(step_s=rival["step_s"].where(~unlucky, 9.0))
    assert decide(bad_setup, rival).promote


def test_step_times_that_are_not_finite_are_refused():
    for value in (float("nan"), float("inf")):
        assert not decide(off(1.0).assign(step_s=value), off(1.05)).promote


def test_a_run_counts_once_however_many_splits_hold_it_out():
    thrice = pd.concat([off(1.2).assign(split=split) for split in SPLITS])
    assert decide(thrice, off(1.05)) == decide(off(1.2).assign(split="setup"), off(1.05))
    assert not decide(thrice, off(1.05)).promote
    two_setups = thrice[thrice["setup"].isin(thrice["setup"].value_counts().index[:2])]
    assert decide(two_setups, off(1.05)).promote


def test_intervals_that_cover_less_than_the_champions_are_refused():
    narrow = off(1.05).assign(step_low_s=98.0)
    assert not decide(narrow, off(1.5)).promote and decide(narrow, narrow).promote


def test_a_champion_is_judged_on_the_runs_it_has_not_learned_from():
    champion = fit(replace(data(), runs=data().runs.iloc[:40]), seed=0)
    assert "20 runs" in verdict(data(), held(), both()[0], champion).reason


@pytest.mark.parametrize("what", ["workload", "instance type"])
def test_a_challenger_that_knows_more_is_compared_where_both_can_predict(what):
    champion = fit(without(NEW[what]), seed=0)
    decision = verdict(data(), held(), both()[0], champion)
    assert decision.promote and NEW[what] in decision.reason


def test_a_new_workload_gets_in_whatever_the_other_runs_say():
    decision = decide(off(1.5), off(1.05), news="workload lm")
    assert decision.promote and "higher by more than noise" in decision.reason


def test_a_champion_of_other_definitions_counts_as_absent():
    now = replace(data(), workloads=data().workloads.assign(digest="now"))
    challenger = replace(both()[0], workload_digests=dict.fromkeys(NEW.values(), "now"))
    assert verdict(now, off(1.5), challenger, both()[0]).promote


@pytest.mark.parametrize(
    "factor, high, is_warned",
    [(1 + LARGE_ERROR - 0.01, 99.0, False), (1.6, 99.0, True), (1.1, 0.0, True)],
)
def test_large_errors_and_narrow_intervals_are_warned_about(factor, high, is_warned):
    board = summarise(off(factor).assign(step_high_s=high))
    assert bool(caution(board)) == is_warned and caution(board.iloc[:0])


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
                set(zip(table["workload"], table["cluster"], strict=True))
                for table in (known, rows)
            ]
            assert not setups[0] & setups[1]


def test_no_rows_give_an_empty_scoreboard_and_nothing_to_learn_from_no_model():
    no_runs = replace(data(), runs=data().runs.iloc[:0])
    with pytest.raises(ValueError):
        fit_and_score(replace(no_runs, profiles=data().profiles.iloc[:0]), seed=0)
    board = summarise(fit_and_score(no_runs, seed=0)[1])
    assert board.empty and tuple(board.columns) == COLUMNS
