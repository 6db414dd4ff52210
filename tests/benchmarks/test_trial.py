"""What judges Srift: baselines on the same rows, errors that add up, regret against the best that meets."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from models.domain.cluster import Cluster
from models.domain.workload import Goal, Setup
from models.job.job_conditions import Stated
from tasks.campaign.budget import Tally
from tests.benchmarks import advice as advice
from tests.benchmarks import trial
from tests.benchmarks.trial import Unseen, compare, keys_of, launch_of, summary
from tests.installed import measured, model
from tests.models.planning import offer, workload


def test_the_champion_is_compared_with_both_baselines_on_the_same_rows() -> None:
    rows = measured().runs.head(12)
    compared = compare(model(), measured(), rows)
    assert len(compared) == 12
    for column in ("predicted_step_s", "compute_only_s", "trees_s"):
        assert np.isfinite(compared[column]).all() and (compared[column] > 0).all()
    assert list(compared["step_s"]) == list(compared["nominal_step_s"]) == list(rows["step_s"])


def test_errors_and_coverage_are_those_of_the_rows() -> None:
    compared = pd.DataFrame(
        {
            "cluster": ["2xa", "1xa+1xb"],
            "taken_share": [0.3, 0.0],
            "step_s": [1.0, 1.0],
            "predicted_step_s": [1.1, 0.7],
            "low_s": [0.9, 0.6],
            "high_s": [1.3, 0.8],
            "compute_only_s": [0.5, 0.5],
            "trees_s": [1.0, 2.0],
        }
    )
    table = summary(compared).set_index("model")
    assert table.loc["champion", "mean"] == pytest.approx(0.2) and table.loc[
        "champion", "worst"
    ] == pytest.approx(0.3)
    assert table.loc["champion", "coverage_90"] == 0.5
    assert table.loc["compute only", "median"] == pytest.approx(0.5)
    assert table.loc["boosted trees", "mean"] == pytest.approx(0.5)
    assert table.loc["  of one type", "mean"] == pytest.approx(0.1)
    assert (
        table.loc["  mixed types", "mean"]
        == table.loc["  undisturbed", "mean"]
        == pytest.approx(0.3)
    )
    nominal = summary(compared.assign(nominal_step_s=[1.1, 0.7])).set_index("model")
    assert nominal.loc["  at nominal speed", ["mean", "coverage_90"]].tolist() == [
        pytest.approx(0.0),
        1.0,
    ]
    alike = summary(compared.assign(cluster="2xa", taken_share=0.0))
    assert list(alike["model"]) == ["champion", "compute only", "boosted trees"], (
        "printed once where all are of a kind"
    )


def asked(hours: float) -> tuple[advice.Question, pd.DataFrame]:
    """A deadline, a cheap slow answer and a dear fast rival, and what they measured."""
    job = replace(workload("mlp"), goals=(Goal(goal="cheapest_within_deadline", hours=hours),))
    setups = [
        Setup(
            workload="mlp",
            cluster=Cluster(members=(offer(name),)),
            layout=(1,),
            batch_per_device=(64,),
        )
        for name in ("small", "whole")
    ]
    roles = zip(("advised", "runner-up"), setups, (1.0, 0.25), strict=True)
    found = pd.DataFrame(
        [
            {**setup.row(), "step_s": step_s}
            for setup, step_s in zip(setups, (1.1, 0.22), strict=True)
        ]
    )
    return advice.Question(workload=job, goal=job.goals[0], answers=tuple(roles)), found


def test_regret_is_reckoned_against_the_best_that_meets_the_constraint() -> None:
    question, found = asked(hours=4.0)
    judged = advice.judge([question], found, Stated()).set_index("role")
    assert judged["meets"].all() and judged.loc["advised", "regret"] == 0.0
    assert judged.loc["runner-up", "regret"] > 0.0
    assert judged.loc["advised", "step_error"] == pytest.approx(1.0 / 1.1 - 1.0)


def test_a_choice_that_misses_is_a_failure_and_no_bargain() -> None:
    question, found = asked(hours=1.0)
    judged = advice.judge([question], found, Stated())
    by_role = advice.by_role(judged).set_index("role")
    assert by_role.loc["advised", "met"] == 0 and by_role.loc["runner-up", "met"] == 1
    assert (
        np.isnan(by_role.loc["advised", "worst_regret"])
        and by_role.loc["runner-up", "worst_regret"] == 0.0
    )


def test_a_launch_measures_exactly_what_it_is_given() -> None:
    question, found = asked(hours=1.0)
    assert len(keys_of(found)) == 2
    setup = question.answers[0][1]
    [launch] = [launch_of(setup.cluster, [], "nothing")]
    assert launch.items == () and launch.est_usd > 0
    beside = Cluster(
        members=tuple(replace(one, storage_usd_per_hour=1.0) for one in setup.cluster.members)
    )
    more_usd = launch_of(beside, [], "nothing").est_usd - launch.est_usd
    assert more_usd == pytest.approx(len(beside.members) * trial.START_S / 3600)


def test_a_choice_is_judged_with_volumes_and_addresses() -> None:
    setup = asked(hours=1.0)[0].answers[0][1]
    beside = replace(
        setup,
        cluster=Cluster(
            members=tuple(replace(one, other_usd_per_hour=1.0) for one in setup.cluster.members)
        ),
    )
    conditions = Stated()
    hours, usd = advice._true_cost(workload("mlp"), setup, 0.1, conditions)
    assert advice._true_cost(workload("mlp"), beside, 0.1, conditions)[1] - usd == pytest.approx(
        hours * len(beside.cluster.members)
    )


def test_a_trial_has_twice_the_time_that_it_should_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        """A launch was asked for."""

    def asked(_here: object, _launch: object, _lease: str, tally: Tally) -> None:
        assert tally.left_s == pytest.approx(2 * 2 * launch.est_s, abs=5.0), (
            "what a host disturbs is measured again"
        )
        raise Asked

    unseen = Unseen(workload="mlp", nodes=(0,), batches=(8,), accumulation_steps=1)
    launch = launch_of(Cluster(members=(offer("small"),)), [unseen] * 9, "why")
    monkeypatch.setattr(trial, "serve_launch", SimpleNamespace(fn=asked))
    with pytest.raises(Asked):
        trial.measure_all(None, [launch, launch], "t")  # type: ignore[arg-type]
