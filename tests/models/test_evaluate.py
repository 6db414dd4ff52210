"""Scores come from rows that the fit never saw, and promotion follows its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from models.evaluate import (
    COLUMNS,
    SPLITS,
    calibration,
    contest,
    decide,
    fitted,
    held_out,
    predictions,
    predictions_of,
    summarise,
    verdict,
)
from models.step_time import StepTimeModel, TrainingData, fit
from tests.models.synthetic import World


@cache
def data() -> TrainingData:
    return World(7).data(60)


@cache
def held() -> pd.DataFrame:
    return predictions(data(), seed=0)


@cache
def whole() -> StepTimeModel:
    """The challenger whose held-out predictions `held` are."""
    return fit(data(), seed=0)


def board() -> pd.DataFrame:
    return summarise(held())


def once(scored: pd.DataFrame) -> pd.DataFrame:
    """A prediction a run, as a fixed model makes them."""
    return scored.drop_duplicates("row")


def off(factor: float) -> pd.DataFrame:
    """Every run predicted `factor` times too long, with intervals that cover."""
    rows = once(held())
    return rows.assign(step_s=rows["measured_s"] * factor, step_low_s=0.0, step_high_s=99.0)


NEW = {"workload": "lm", "instance type": "s.whole"}


def without(whole: TrainingData, what: str) -> TrainingData:
    """The data from before the newcomer of NEW was there."""
    name, columns = NEW[what], ("workload", "instance_type", "cluster", "name")
    frames = {}
    for field in fields(whole):
        frame = getattr(whole, field.name)
        for column in columns:
            if column in frame:
                frame = frame[~frame[column].str.contains(name, regex=False)]
        frames[field.name] = frame
    return TrainingData(**frames)


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


def test_a_group_without_which_nothing_is_left_to_learn_from_is_skipped() -> None:
    runs = data().runs
    alone = runs[(runs["workload"] == "lm") & runs["cluster"].str.fullmatch("2x[^+]*")]
    assert alone["cluster"].nunique() > 1
    scored = predictions(replace(data(), runs=alone, profiles=data().profiles.iloc[:0]), seed=0)
    assert set(scored["split"]) == {"setup"} and sorted(scored["row"]) == list(range(len(alone)))


def test_groups_may_be_fitted_without_in_any_order_elsewhere() -> None:
    few = replace(data(), runs=data().runs.iloc[::3])

    def backwards(one: Callable[[Any], Any], groups: Iterable[Any]) -> list[Any]:
        return [one(group) for group in reversed(list(groups))][::-1]

    apart = predictions(few, seed=0)
    pd.testing.assert_frame_equal(predictions(few, seed=0, each=backwards), apart, check_exact=True)
    model, together = fitted(few, seed=0, each=backwards)
    pd.testing.assert_frame_equal(together, apart, check_exact=True)
    assert model.to_json() == fit(few, seed=0).to_json()


def test_where_nothing_can_be_learned_no_model_is_made() -> None:
    nothing = replace(data(), runs=data().runs.iloc[:0], profiles=data().profiles.iloc[:0])
    with pytest.raises(ValueError, match="nothing to learn from"):
        fitted(nothing, seed=0)


def test_no_rows_give_an_empty_scoreboard() -> None:
    empty = predictions(replace(data(), runs=data().runs.iloc[:0]), seed=0)
    assert len(summarise(empty)) == 0 and tuple(summarise(empty).columns) == COLUMNS
    assert decide(empty, None).promote and not decide(empty, held()).promote


def test_the_first_model_is_promoted_and_an_equal_one_is_not() -> None:
    first = decide(held(), None)
    assert first.promote and "no champion" in first.reason
    again = decide(once(held()), once(held()))
    assert not again.promote and "%" in again.reason


def test_a_clearly_better_challenger_is_promoted_and_a_slightly_better_one_is_not() -> None:
    assert decide(held(), off(1.5)).promote
    refused = decide(off(1.5), off(1.0))
    assert not refused.promote and "not better" in refused.reason
    one_setup_only = off(1.05)
    lucky = one_setup_only["setup"] == one_setup_only["setup"].iloc[0]
    refused = decide(off(1.05), one_setup_only.assign(step_s=one_setup_only["step_s"].where(~lucky, 9.0)))
    assert not refused.promote and "less than noise" in refused.reason


def test_calibration_states_how_many_lie_inside_narrower_intervals() -> None:
    spread = 0.1
    quantiles = norm.ppf((np.arange(1000) + 0.5) / 1000)
    rows = pd.DataFrame({"split": "setup", "measured_s": np.exp(spread * quantiles), "step_s": 1.0})
    honest = rows.assign(step_low_s=np.exp(-1.6449 * spread), step_high_s=np.exp(1.6449 * spread))
    assert calibration(honest)["observed"].tolist() == pytest.approx([0.5, 0.8, 0.9], abs=0.002)
    wide = calibration(honest.assign(step_low_s=np.exp(-3.3 * spread), step_high_s=np.exp(3.3 * spread)))
    assert (wide["observed"] > wide["stated"] + 0.05).all() and set(wide["rows"]) == {1000}
    assert len(calibration(rows.iloc[:0])) == 0


def test_a_run_counts_once_however_many_splits_hold_it_out() -> None:
    thrice = pd.concat([off(1.05).assign(split=split) for split in SPLITS])
    assert decide(thrice, off(1.2)) == decide(off(1.05).assign(split="setup"), off(1.2))
    two_setups = thrice[thrice["setup"].isin(thrice["setup"].value_counts().index[:2])]
    assert not decide(two_setups, off(1.2)).promote


def test_intervals_that_do_not_cover_are_refused_where_a_champion_is_in_force() -> None:
    narrow = held().assign(step_low_s=held()["step_s"] * 1.0001, step_high_s=held()["step_s"] * 1.0002)
    refused = decide(narrow, off(1.5))
    assert not refused.promote and "cover only" in refused.reason and "80%" in refused.reason
    first = decide(narrow, None)
    assert first.promote and "cover only" in first.reason


def test_a_champion_of_little_data_loses_to_a_challenger_of_much() -> None:
    much = World(8).data(90)
    little = replace(much, runs=much.runs.iloc[:12], profiles=much.profiles[much.profiles["workload"] == "lm"])
    champion = fit(replace(little, probes=pd.DataFrame()), seed=0)
    scores, decision = contest(much, fit(much, seed=0), champion, seed=0)
    assert decision.promote, decision.reason
    assert scores.set_index(["split", "group"]).loc[("setup", "all"), "rows"] == 90


def test_a_held_out_group_without_a_new_run_does_not_stop_the_contest() -> None:
    size_one = [text.startswith("1x") and "+" not in text for text in data().runs["cluster"]]
    old = replace(data(), runs=pd.concat([data().runs[size_one], data().runs[[not one for one in size_one]].iloc[:20]]))
    decision = verdict(data(), held(), whole(), fit(old, seed=0))
    assert f"{len(data().runs) - len(old.runs)} runs" in decision.reason


@pytest.mark.parametrize("what", ["workload", "instance type"])
def test_a_challenger_that_has_met_more_is_compared_where_both_can_predict(what: str) -> None:
    champion = fit(without(data(), what), seed=0)
    decision = verdict(data(), held(), whole(), champion)
    assert decision.promote and f"{what} {NEW[what]}" in decision.reason
    assert not verdict(data(), held(), champion, whole()).promote


def test_a_much_worse_challenger_is_refused_although_it_has_met_more() -> None:
    refused = decide(off(1.5), off(1.05), news="workload lm")
    assert not refused.promote and "not better" in refused.reason
    close = decide(off(1.05), off(1.05), news="workload lm")
    assert close.promote and "workload lm" in close.reason


def test_a_workload_that_was_defined_anew_is_no_longer_one_the_champion_knows() -> None:
    then = replace(data(), workloads=data().workloads.assign(digest="then"))
    changed = data().workloads["workload"] == "lm"
    now = replace(data(), workloads=then.workloads.assign(digest=then.workloads["digest"].mask(changed, "now")))
    champion = fit(then, seed=0)
    assert set(predictions_of(champion, then)["setup"].str.split(" ").str[0]) == {"conv", "embed", "lm", "mlp"}
    assert set(predictions_of(champion, now)["setup"].str.split(" ").str[0]) == {"conv", "embed", "mlp"}
    challenger = fit(now, seed=0)
    decision = verdict(now, held(), challenger, champion)
    assert decision.promote and "workload lm" in decision.reason
    first = verdict(now, held(), challenger, replace(champion, workload_digests={}))
    assert first.promote and "workload conv" in first.reason


@pytest.mark.parametrize("column", ["step_s", "sync_s"])
def test_a_held_out_rows_own_times_do_not_reach_its_prediction(column: str) -> None:
    for _, _, training, rows in list(held_out(data(), seed=0))[:2]:
        model = fit(training, seed=0)
        plain = model.predict(rows)
        pd.testing.assert_frame_equal(model.predict(rows.assign(**{column: 123.0})), plain)
