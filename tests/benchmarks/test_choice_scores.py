"""What a choice costs against the best that was measured; who misses a constraint has no regret but a failure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.choice_scores import (
    A_TENTH,
    CAP,
    CHOOSERS,
    DEADLINE,
    RECOMMENDED,
    SLACKS,
    STRICT,
    Contest,
    causes,
    contests,
    headline,
    judge,
    promised,
    reliability,
    said_and_held,
    summary,
)
from tests.benchmarks.setups import measured_setups
from tests.benchmarks.trial import at_one_batch, key
from tests.models.planning import cores_fit, offers, workload
from tests.models.synthetic import TYPES, World


def contest(
    measured: list[float], usd: list[float], predicted: list[float] | None = None, sd: float = 0.0
) -> Contest:
    """Setups of 1, 2, 3 ... machines at `usd` an hour in all; draws lie around what is predicted."""
    count = len(measured)
    batch = math.lcm(*range(1, count + 1))
    rows = [
        {
            "workload": "w",
            "cluster": f"{n}xm{n}",
            "layout": "1",
            "batch_per_device": str(batch // n),
            "step_s": step_s,
        }
        for n, step_s in enumerate(measured, start=1)
    ]
    rows = [row | {"layout": "+".join(["1"] * n)} for n, row in enumerate(rows, start=1)]
    found = measured_setups(
        pd.DataFrame(rows), {}, {f"m{n}": price / n for n, price in enumerate(usd, start=1)}
    )
    step_s = np.array(measured if predicted is None else predicted)
    noise = np.random.default_rng(0).standard_normal((1, 200))
    predictions = pd.DataFrame(
        {"step_s": step_s, "step_low_s": step_s, "step_high_s": step_s, "bottleneck": "compute"}
    )
    return Contest(
        setups=found.setups,
        measured_s=found.step_s,
        predictions=predictions.assign(compute_s=1 / np.arange(1, count + 1)),
        draws=step_s[:, None] * np.exp(sd * noise),
    )


def outcome_of(one: Contest, kind: str, slack: float, chooser: str) -> tuple[bool, float]:
    """Whether the chooser met its constraint, and its regret."""
    row = judge(one, seed=0).set_index(["kind", "slack", "chooser"]).loc[(kind, slack, chooser)]
    return bool(row["met"]), float(row["regret"])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=8),
    st.integers(0, 3),
)
def test_who_knows_the_truth_never_misses_and_regrets_nothing(
    rows: list[tuple[float, float]], seed: int
) -> None:
    judged = judge(contest([s for s, _ in rows], [p for _, p in rows]), seed=seed)
    strict = judged[judged["chooser"] == STRICT]
    assert strict["met"].all() and strict["regret"].abs().max() < 1e-6
    assert (judged["regret"].dropna() > -1e-9).all() and (
        judged["lost"].dropna() > -1e-9
    ).all()  # nobody beats the best
    weighed = judged[judged["chooser"] == RECOMMENDED]
    assert (
        weighed["lost"].max() < 1e-6 and weighed["answered"].all()
    )  # it may miss, by less than it saves


def test_every_kind_slack_and_chooser_is_asked_and_failures_are_counted_apart() -> None:
    judged = judge(contest([4, 2, 1], [1, 3, 9]), seed=0)
    assert set(judged["chooser"]) == {*CHOOSERS, A_TENTH}
    assert len(judged[judged["chooser"] == RECOMMENDED]) == 2 * len(SLACKS)
    table = summary(judged).set_index(["chooser", "kind"])
    assert table.loc[(RECOMMENDED, DEADLINE), "missed"] == 0
    assert table.loc[(RECOMMENDED, DEADLINE), "mean"] == pytest.approx(0, abs=1e-9)
    assert table.loc[("cheapest per hour", DEADLINE), "missed"] > 0


def test_the_headline_is_what_others_pay_where_both_keep_to_the_constraint() -> None:
    judged = pd.concat([judge(contest([4, 2, 1], [1, 3, 9]), seed=0)] * 2)
    figures = headline(judged).set_index(["chooser", "kind"])
    assert (figures.loc[RECOMMENDED, ["ratio", "it_alone_missed"]] == [1.0, 0.0]).all(axis=None)
    own = judged[judged["kind"] == DEADLINE].set_index("chooser")["regret"]
    dearer = np.log1p(own["most machines"].to_numpy()) - np.log1p(own[RECOMMENDED].to_numpy())
    assert (
        figures.ratio["most machines", DEADLINE] == pytest.approx(np.exp(np.nanmean(dearer)))
        and np.nanmean(dearer) > 0
    )
    assert figures.it_alone_missed["cheapest per hour", DEADLINE] > 0


def test_habits_miss_deadlines_and_caps() -> None:
    three = contest([4, 2, 1], [1, 3, 9])
    assert (
        not outcome_of(three, DEADLINE, 1.05, "cheapest per hour")[0]
        and outcome_of(three, DEADLINE, 5.0, "cheapest per hour")[0]
    )
    assert not outcome_of(three, CAP, 1.05, "most machines")[0]
    assert outcome_of(three, DEADLINE, 5.0, "most machines")[1] == pytest.approx(
        9 / 4 - 1, rel=1e-3
    )


def test_a_wrong_prediction_is_a_failure_and_an_unsure_one_keeps_away_from_the_limit() -> None:
    too_rosy = contest([2.0, 1.0], [1, 3], predicted=[1.0, 1.0])
    assert not outcome_of(too_rosy, DEADLINE, 1.2, RECOMMENDED)[0]
    unsure = contest(
        [1.0, 0.6], [1, 3], sd=0.3
    )  # the cheap one would meet 1.2 s in about 70 % of draws
    assert outcome_of(unsure, DEADLINE, 2.0, STRICT) == (True, pytest.approx(0.8, rel=1e-3))
    assert outcome_of(unsure, DEADLINE, 2.0, "recommended at even odds") == (
        True,
        pytest.approx(0, abs=1e-9),
    )


def test_where_nothing_is_sure_enough_the_table_stays_silent() -> None:
    tight = contest([3.0, 1.0, 0.9], [1.0, 3.03, 9.0], sd=0.3)
    answered = judge(tight, seed=0).set_index(["kind", "slack", "chooser"])["answered"]
    assert (
        not answered[(CAP, 1.05, STRICT)]
        and answered[(CAP, 5.0, STRICT)]
        and answered[(CAP, 1.05, RECOMMENDED)]
    )
    table = summary(judge(tight, seed=0)).set_index(["chooser", "kind"])
    unsure = [
        slack for slack in SLACKS if slack < 1.5
    ]  # 0.3 of a spread leave less than 90 % below them
    assert table.loc[(STRICT, CAP), "unanswered"] == pytest.approx(100 * len(unsure) / len(SLACKS))
    assert table.loc[(STRICT, CAP), "missed"] == 0


def test_what_is_lost_to_caution_is_what_who_knows_the_times_loses_by_stated_widths() -> None:
    """Right times held for unsure: all that is lost is caution. Wrong ones held for sure: all of it is error."""
    measured, usd = [2.0, 1.0, 0.9], [1.0, 3.0, 9.0]
    unsure = causes(judge(contest(measured, usd, sd=0.3), seed=0)).set_index(["chooser", "kind"])
    assert unsure["error"].abs().max() < 1e-9 and unsure.loc[(STRICT, DEADLINE), "caution"] > 1
    wrong = causes(judge(contest(measured, usd, predicted=[1.0, 1.0, 1.0]), seed=0)).set_index(
        ["chooser", "kind"]
    )
    assert wrong.loc[(RECOMMENDED, DEADLINE), "caution"] == pytest.approx(0, abs=1e-9)
    assert wrong.loc[(RECOMMENDED, DEADLINE), "error"] > 1


def test_reliability_counts_what_was_said_by_tenths_and_how_often_it_held() -> None:
    said = pd.DataFrame(
        {
            "what": "p ok",
            "said": [0.95, 0.9, 1.0, 0.3, 0.32],
            "held": [True, True, False, False, True],
        }
    )
    table = reliability(said).set_index("tenth")
    assert table.loc["90 to 100", ["cases", "said", "held"]].tolist() == pytest.approx(
        [3, 95, 200 / 3]
    )
    assert table.loc["30 to 40", ["cases", "said", "held"]].tolist() == pytest.approx([2, 31, 50])
    sure = said_and_held(contest([4, 2, 1], [1, 3, 9]))
    assert ((sure["said"] > 0.5) == sure["held"]).all() and set(sure["what"]) == {"p ok", "p best"}
    first = promised(sure)
    assert (
        len(first) == 4
        and (first["held"] == first["said"]).all()
        and (first["cases"] == len(SLACKS)).all()
    )


def test_ignoring_communication_believes_in_more_machines() -> None:
    name = "recommended, communication ignored"
    assert not outcome_of(contest([1.0, 2.0, 3.0], [1, 1, 1]), DEADLINE, 1.05, name)[0]


def test_contests_hold_the_workload_out_but_for_one_device_and_the_pilots() -> None:
    world = World(7)
    data = world.data(10)
    clusters = [["s.small"] * n for n in (1, 2, 3, 4)] + [["s.large"] * n for n in (1, 2, 3, 4)]
    clusters += [["s.small", "s.large"], ["s.medium", "s.large"]]
    rows = [world.row(100 + at, "lm", c, [24 // len(c)] * len(c)) for at, c in enumerate(clusters)]
    data = replace(
        data, runs=pd.concat([data.runs[data.runs["workload"] != "lm"], pd.DataFrame(rows)])
    )
    prices = dict.fromkeys(TYPES, 1.0)
    found = [one for one in contests(data, {}, prices, pilots=0, seed=0) if one[:2] == ("lm", 24.0)]
    assert len(found) == 1
    own = found[0][2]
    assert len(own.measured_s) == len(clusters) and sorted(
        len(one.layout) for one in own.setups
    ) == sorted(map(len, clusters))
    lied = data.runs.assign(
        step_s=np.where(data.runs["run_id"].isin([r["run_id"] for r in rows[1:4]]), 9.0, 1.0)
    )
    lied["step_s"] = np.where(lied["step_s"] == 9.0, 50 * data.runs["step_s"], data.runs["step_s"])
    blind = next(
        c
        for w, b, c in contests(replace(data, runs=lied), {}, prices, pilots=0, seed=0)
        if (w, b) == ("lm", 24.0)
    )
    np.testing.assert_allclose(
        sorted(blind.predictions["step_s"]), sorted(own.predictions["step_s"])
    )  # what it was not given changes nothing
    piloted = next(
        c for w, b, c in contests(data, {}, prices, pilots=3, seed=0) if (w, b) == ("lm", 24.0)
    )
    assert not np.allclose(sorted(piloted.predictions["step_s"]), sorted(own.predictions["step_s"]))
    more = data.runs[data.runs["run_id"].isin([row["run_id"] for row in rows[1:]])]
    twice = replace(data, runs=pd.concat([data.runs, more]))
    again = next(
        c
        for w, b, c in contests(twice, {}, prices, pilots=0, seed=0, runs=2)
        if (w, b) == ("lm", 24.0)
    )
    assert (
        len(again.measured_s) == len(clusters) - 1
    )  # the one that was measured once does not count
    assert not list(
        contests(data, {}, {}, pilots=0, seed=0)
    )  # without prices there is nothing to choose by


def test_clusters_at_one_batch_are_not_measured_twice() -> None:
    job = workload("mlp", 64)
    drawn = at_one_batch(
        [job], offers("on-demand"), max_hosts=3, fits=cores_fit, measured=(), clusters=9, seed=1
    )
    several = [one for one in drawn if len(one[0].members) > 1]
    assert len(several) == 9 and all(
        sum(item.batches) == 64 for _, items in drawn for item in items
    )
    assert len(drawn) - len(several) == len(offers("on-demand"))  # every host alone too
    known = {
        key("mlp", [one.instance_type.name for one in cluster.members], items[0].batches)
        for cluster, items in several[:4]
    }
    again = at_one_batch(
        [job], offers("on-demand"), max_hosts=3, fits=cores_fit, measured=known, clusters=9, seed=1
    )
    assert len(again) == len(drawn) - 4
