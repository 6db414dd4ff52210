"""Drift is named where more recent runs miss their intervals than chance explains."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from models.monitoring.drift import WHOLE, Drift, Group, drift_sentence, judge, recent
from models.step_time.model import TrainingData, fit
from tests.models.synthetic import World

NOON = pd.Timestamp("2026-11-20 12:00")
MINUTE = pd.Timedelta(minutes=1)


def runs(
    clusters: dict[str, int], factor: dict[str, float], *, seed: int = 0, start: int = 0
) -> pd.DataFrame:
    """Runs by cluster, as slow as the slowest type's `factor`; intervals are right for 1."""
    random, rows = np.random.default_rng(seed), []
    spread = 0.04
    for cluster, count in clusters.items():
        slow = max((many for name, many in factor.items() if name in cluster), default=1.0)
        for _ in range(count):
            measured = slow * float(np.exp(spread * random.standard_normal()))
            rows.append({"cluster": cluster, "zone": "z1", "measured_s": measured, "step_s": 1.0})
    frame = pd.DataFrame(rows).sample(frac=1, random_state=seed, ignore_index=True)
    half = np.exp(1.645 * spread)
    times = NOON + MINUTE * (start + np.arange(len(frame)))
    return frame.assign(step_low_s=1 / half, step_high_s=half, measured_at=times)


def named(found: list[Drift]) -> list[str]:
    return [one.instance_type or one.scope for one in found if one.drifting]


def drifting(found: list[Drift]) -> dict[Group, pd.Timestamp | None]:
    return {(one.scope, one.instance_type, one.zone): one.since for one in found if one.drifting}


def test_a_type_that_became_slower_is_named() -> None:
    scored = runs({"1xa": 12, "1xb": 12, "2xc": 12}, {"b": 1.15})
    found = judge(scored, {})
    assert named(found) == ["b"]
    (slow,) = (one for one in found if one.instance_type == "b")
    assert (slow.zone, slow.direction, slow.runs) == ("z1", "slower", 12)
    assert slow.median_ratio == pytest.approx(1.15, abs=0.04)
    out = scored[(scored["cluster"] == "1xb") & (scored["measured_s"] > scored["step_high_s"])]
    assert slow.outside == len(out) > 6 and slow.since == out["measured_at"].min()
    assert named(judge(scored.assign(measured_s=1 / scored["measured_s"]), {})) == ["b"]


def test_a_type_beside_a_slow_one_is_not_named() -> None:
    found = judge(runs({"1xa": 10, "1xa+1xb": 15, "1xb": 10, "1xb+1xc": 8}, {"a": 1.3}), {})
    assert named(found)[:1] == ["a"] and "b" not in named(found) and "c" not in named(found)


def test_right_intervals_are_seldom_called_a_drift() -> None:
    false = sum(
        bool(named(judge(runs({"1xa": 15, "1xb": 15, "1xc": 15}, {}, seed=seed), {})))
        for seed in range(300)
    )
    assert false <= 0.08 * 300


def test_narrow_intervals_are_no_shift_of_everything() -> None:
    factor = dict.fromkeys("abcdef", 1.06)
    found = judge(runs({f"1x{name}": 4 for name in "abcdef"}, factor), {})
    assert named(found) == ["provider"]
    assert found[-1].direction == "slower" and found[-1].median_ratio == pytest.approx(
        1.06, abs=0.02
    )
    wide = runs({f"1x{name}": 4 for name in "abcdef"}, {})
    narrow = wide.assign(step_low_s=0.99, step_high_s=1.01)
    assert named(judge(narrow, {})) == []


def test_a_drift_goes_on_while_half_of_the_runs_lie_outside() -> None:
    first = drifting(judge(runs({"1xa": 12}, {"a": 1.2}), {}))
    still = judge(runs({"1xa": 3}, {"a": 1.3}, start=100), first)
    assert [one.drifting for one in still] == [True, False]
    assert still[0].since == first["type", "a", "z1"]
    assert [one.drifting for one in judge(runs({"1xa": 3}, {"a": 1.3}), {})] == [False, False]
    over = judge(runs({"1xa": 3}, {}, start=200), drifting(still))
    assert [one.drifting for one in over] == [False, False] and over[0].since is None
    assert judge(runs({"1xb": 3}, {}), first)[0].instance_type == "b"


def test_recent_runs_are_newer_than_all_that_the_model_learned() -> None:
    data = World(5).data(70)
    data = replace(
        data,
        runs=data.runs.assign(
            measured_at=[NOON + MINUTE * n for n in range(len(data.runs))], zone="z"
        ),
    )
    later = data.runs.index >= 50
    model = fit(replace(data, runs=data.runs[~later]), seed=0)
    found = recent(model, data)
    assert len(found) == 20 and found["measured_at"].min() == NOON + 50 * MINUTE
    assert found["measured_s"].tolist() == data.runs.loc[later, "step_s"].tolist()
    assert found["cluster"].tolist() == data.runs.loc[later, "cluster"].tolist()
    assert len(recent(fit(data, seed=0), data)) == 0
    late_import = replace(
        data, runs=data.runs.assign(measured_at=data.runs["measured_at"].mask(later, NOON - MINUTE))
    )
    assert len(recent(model, late_import)) == 0
    unknown: TrainingData = replace(data, runs=data.runs.assign(measured_at=pd.NaT))
    assert len(recent(model, unknown)) == 0


def test_the_sentence_names_machines_time_and_extent() -> None:
    *_, slow, whole = judge(runs({"1xa": 12, "1xb": 12, "1xc": 12}, dict.fromkeys("abc", 1.2)), {})
    line = drift_sentence(asdict(slow))
    assert "c in z1" in line and "slower" in line and "2026-11-20 12:0" in line
    assert whole.drifting and whole.group == WHOLE
    assert "everything" in drift_sentence(asdict(whole))


def test_one_unlucky_group_among_many_is_not_named() -> None:
    scored = runs({f"1xt{at:02d}": 10 for at in range(20)}, {}, seed=5)
    own = scored["cluster"] == "1xt07"
    outside = scored["step_high_s"] * 1.02
    unlucky = scored.assign(
        measured_s=np.where(
            own & (own.cumsum() <= 4), outside, np.where(own, 1.0, scored["measured_s"])
        )
    )
    assert (
        named(judge(unlucky, {})) == []
    )  # 4 of 10 outside: 1 in 80 by itself, nothing among twenty
    alone = unlucky[own]
    assert named(judge(alone, {}))  # and enough where it is the only one
