"""Promotion follows held-out groups alone: better by more than noise, with intervals that cover, or not at all."""

from __future__ import annotations

from dataclasses import fields, replace

import pandas as pd
import pytest

from models.monitoring.cross_validation import SPLITS, fitted, predictions_of, summarise
from models.monitoring.promotion import LARGE_ERROR, caution, decide, verdict
from models.step_time.model import StepTimeModel, TrainingData, fit
from tests.models.monitoring.test_cross_validation import both, data, held
from tests.models.synthetic import World

NEW = {"workload": "lm", "instance type": "s.whole"}


def whole() -> StepTimeModel:
    """The challenger whose held-out predictions `held` are."""
    return both()[0]


def once(scored: pd.DataFrame) -> pd.DataFrame:
    """A prediction a run, as a fixed model makes them."""
    return scored.drop_duplicates("row")


def off(factor: float) -> pd.DataFrame:
    """Every run predicted `factor` times too long, with intervals that cover."""
    rows = once(held())
    return rows.assign(step_s=rows["measured_s"] * factor, step_low_s=0.0, step_high_s=99.0)


def without(whole: TrainingData, what: str) -> TrainingData:
    """The data from before the workload NEW was there."""
    name, columns = NEW[what], ("workload", "instance_type", "cluster", "name")
    frames = {}
    for field in fields(whole):
        frame = getattr(whole, field.name)
        for column in columns:
            if column in frame:
                frame = frame[~frame[column].str.contains(name, regex=False)]
        frames[field.name] = frame
    return TrainingData(**frames)


def test_the_first_model_is_promoted_and_an_equal_one_or_one_that_cannot_be_judged_is_not() -> None:
    first = decide(held(), None)
    assert first.promote and "no champion" in first.reason
    again = decide(once(held()), once(held()))
    assert not again.promote and "%" in again.reason
    assert decide(held().iloc[:0], None).promote and not decide(held().iloc[:0], held()).promote


def test_a_clearly_better_challenger_is_promoted_and_a_slightly_better_one_is_not() -> None:
    assert decide(held(), off(1.5)).promote
    refused = decide(off(1.5), off(1.0))
    assert not refused.promote and "not better" in refused.reason
    one_setup_only = off(1.05)
    lucky = one_setup_only["setup"] == one_setup_only["setup"].iloc[0]
    refused = decide(
        off(1.05), one_setup_only.assign(step_s=one_setup_only["step_s"].where(~lucky, 9.0))
    )
    assert not refused.promote and "less than noise" in refused.reason


def test_a_run_counts_once_however_many_splits_hold_it_out() -> None:
    thrice = pd.concat([off(1.05).assign(split=split) for split in SPLITS])
    assert decide(thrice, off(1.2)) == decide(off(1.05).assign(split="setup"), off(1.2))
    two_setups = thrice[thrice["setup"].isin(thrice["setup"].value_counts().index[:2])]
    assert not decide(two_setups, off(1.2)).promote


def test_intervals_that_do_not_cover_are_refused_where_a_champion_is_in_force() -> None:
    narrow = held().assign(
        step_low_s=held()["step_s"] * 1.0001, step_high_s=held()["step_s"] * 1.0002
    )
    refused = decide(narrow, off(1.5))
    assert not refused.promote and "cover only" in refused.reason and "80%" in refused.reason
    first = decide(narrow, None)
    assert first.promote and "cover only" in first.reason


def test_a_champion_of_little_data_loses_to_a_challenger_of_much() -> None:
    much = World(8).data(90)
    little = replace(
        much, runs=much.runs.iloc[:12], profiles=much.profiles[much.profiles["workload"] == "lm"]
    )
    champion = fit(replace(little, probes=pd.DataFrame()), seed=0)
    challenger, scored = fitted(much, seed=0)
    decision = verdict(much, scored, challenger, champion)
    assert decision.promote, decision.reason
    assert summarise(scored).set_index(["split", "group"]).loc[("setup", "all"), "rows"] == 90


def test_a_held_out_group_without_a_new_run_does_not_stop_the_contest() -> None:
    size_one = [text.startswith("1x") and "+" not in text for text in data().runs["cluster"]]
    old = replace(
        data(),
        runs=pd.concat(
            [data().runs[size_one], data().runs[[not one for one in size_one]].iloc[:20]]
        ),
    )
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
    now = replace(
        data(),
        workloads=then.workloads.assign(digest=then.workloads["digest"].mask(changed, "now")),
    )
    champion = fit(then, seed=0)
    assert set(predictions_of(champion, then)["setup"].str.split(" ").str[0]) == {
        "conv",
        "embed",
        "lm",
        "mlp",
    }
    assert set(predictions_of(champion, now)["setup"].str.split(" ").str[0]) == {
        "conv",
        "embed",
        "mlp",
    }
    challenger = fit(now, seed=0)
    decision = verdict(now, held(), challenger, champion)
    assert decision.promote and "workload lm" in decision.reason
    first = verdict(now, held(), challenger, replace(champion, workload_digests={}))
    assert first.promote and "workload conv" in first.reason


@pytest.mark.parametrize(
    ("factor", "high", "says"),
    [
        (1 + LARGE_ERROR - 0.01, 99.0, ""),
        (1.6, 99.0, "mean error 60.0% on setups held out"),
        (1.1, 0.0, "90 % intervals cover only 0% of"),
    ],
)
def test_a_large_error_and_intervals_that_do_not_cover_are_reported_to_whoever_reads_the_answers(
    factor: float, high: float, says: str
) -> None:
    board = summarise(
        held().assign(step_s=held()["measured_s"] * factor, step_low_s=0.0, step_high_s=high)
    )
    assert caution(board).startswith(says) and bool(caution(board)) == bool(says)
    assert ";" not in caution(board)
    assert "nothing could be held out" in caution(board.iloc[:0]) == caution(pd.DataFrame())
