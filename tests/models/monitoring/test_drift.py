"""Drift is named where more recent runs miss their intervals than chance explains."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.monitoring.drift import drift_sentence, judge, recent
from models.step_time.model import fit
from tests.models.synthetic import World

NOON = pd.Timestamp("2026-11-20 12:00")
MINUTE = pd.Timedelta(minutes=1)


def runs(clusters, factor, *, seed=0, start=0):
    """Runs by cluster, as slow as the slowest type's `factor`; intervals are right for 1."""
    ordered = np.repeat(list(clusters), list(clusters.values()))
    names = np.random.default_rng(seed + 1).permutation(ordered)
    slow = [max((f for name, f in factor.items() if name in text), default=1.0) for text in names]
    noise = np.exp(0.04 * np.random.default_rng(seed).standard_normal(len(names)))
    half = np.exp(1.645 * 0.04)
    seconds = {"step_s": 1.0, "step_low_s": 1 / half, "step_high_s": half}
    return pd.DataFrame({"cluster": names, "zone": "z1", "measured_s": slow * noise}).assign(
        measured_at=NOON + MINUTE * (start + np.arange(len(names))), **seconds
    )


def named(found):
    return [row["instance_type"] for row in found if row["drifting"]]


def test_a_type_that_became_slower_is_named():
    scored = runs({"1xa": 12, "1xb": 12, "2xc": 12}, {"b": 1.15})
    found = judge(scored, {})
    assert named(found) == ["b"]
    slow = found[1]
    assert (slow["zone"], slow["direction"], slow["runs"]) == ("z1", "slower", 12)
    assert slow["median_ratio"] == pytest.approx(1.15, abs=0.04)
    out = scored[(scored["cluster"] == "1xb") & (scored["measured_s"] > scored["step_high_s"])]
    assert slow["outside"] == len(out) > 6 and slow["since"] == out["measured_at"].min()
    assert "b in z1" in drift_sentence(slow)
    assert named(judge(scored.assign(measured_s=1 / scored["measured_s"]), {})) == ["b"]


def test_a_type_beside_a_slow_one_is_not_named():
    found = judge(runs({"1xa": 10, "1xa+1xb": 15, "1xb": 10, "1xb+1xc": 8}, {"a": 1.3}), {})
    assert named(found)[:1] == ["a"] and not {"b", "c"} & set(named(found))


def test_right_intervals_are_seldom_called_a_drift():
    clusters = {"1xa": 15, "1xb": 15, "1xc": 15}
    false = sum(bool(named(judge(runs(clusters, {}, seed=seed), {}))) for seed in range(200))
    assert false <= 0.08 * 200


def test_one_unlucky_group_among_many_is_not_named():
    """4 of 10 outside: a chance of 1 in 80 for one group, nothing unlikely among twenty."""
    scored = runs({f"1xt{at:02d}": 10 for at in range(20)}, {}, seed=5)
    in_group = scored["cluster"] == "1xt07"
    seconds = np.where(in_group.cumsum() <= 4, scored["step_high_s"] * 1.02, 1.0)
    unlucky = scored.assign(measured_s=np.where(in_group, seconds, scored["measured_s"]))
    assert named(judge(unlucky, {})) == [] and named(judge(unlucky[in_group], {}))


def test_a_drift_goes_on_while_half_of_the_runs_lie_outside():
    found = judge(runs({"1xa": 12}, {"a": 1.2}), {})
    first = {(row["instance_type"], row["zone"]): row["since"] for row in found if row["drifting"]}
    still = judge(runs({"1xa": 3}, {"a": 1.3}, start=100), first)
    assert named(still)[0] == "a" and still[0]["since"] == first["a", "z1"]
    assert named(judge(runs({"1xa": 3}, {"a": 1.3}), {})) == []  # too few to begin one
    over = judge(runs({"1xa": 3}, {}, start=200), first)
    assert named(over) == [] and over[0]["since"] is None


def test_recent_runs_are_newer_than_all_that_the_model_learned():
    data = World(5).data(70)
    at = NOON + MINUTE * np.arange(70)
    data = replace(data, runs=data.runs.assign(measured_at=at, zone="z"))
    later = data.runs.index >= 50
    model = fit(replace(data, runs=data.runs[~later]), seed=0)
    found = recent(model, data)
    assert found["measured_at"].tolist() == at[50:].tolist()
    for column, source in (("measured_s", "step_s"), ("cluster", "cluster")):
        assert found[column].tolist() == data.runs.loc[later, source].tolist()
    late_import = data.runs["measured_at"].mask(later, NOON - MINUTE)
    for moments in (late_import, pd.NaT):
        assert recent(model, replace(data, runs=data.runs.assign(measured_at=moments))).empty
