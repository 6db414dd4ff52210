"""The planner with a champion of either physics finds the answer of brute force."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest

from models.domain.workload import Goal, Setup, Workload
from models.job.cost import job_costs
from models.planner import planner, ranking
from models.planner.candidates import Supply
from models.step_time.model import StepTimeModel
from tests.benchmarks import synthetic_market as synthetic
from tests.benchmarks.synthetic_market import BY_ROWS, PROFILED

SOLD = [synthetic.types()[at] for at in (0, 4, 9)]


@cache
def champion() -> StepTimeModel:
    return synthetic.champion(SOLD, runs=80)


def supply(max_hosts: int) -> Supply:
    return Supply(offers=synthetic.offers(SOLD), max_hosts=max_hosts, fits=lambda _: "")


def every_setup(job: Workload, max_hosts: int) -> list[Setup]:
    return planner.candidates(job, supply(max_hosts), champion())


@pytest.mark.parametrize("name", [BY_ROWS, PROFILED])
def test_it_answers_as_predicting_and_drawing_for_every_setup_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "CLUSTERS_COMPARED", 8)
    model = champion()
    plain = {row["goal"]: row for row in found(synthetic.workload(name)).rows[::-1]}
    job = synthetic.workload(
        name,
        Goal(goal="cheapest_within_deadline", hours=2.5 * plain["fastest"]["hours"]),
        Goal(goal="fastest_within_budget", usd=1.4 * plain["cheapest"]["usd"], p_required=0.75),
    )
    setups = every_setup(job, 5)
    rows = pd.DataFrame([one.row() for one in setups])
    drawn = model.draws(rows, count=planner.DRAWS, seed=0)
    whole = ranking.recommend(job, job_costs(job, setups, model.predict(rows), drawn))
    answer = found(job)
    assert answer.candidates == len(setups)
    for goal in job.goals:
        ours, theirs = (
            next(row for row in rows if row["goal"] == goal.goal) for rows in (answer.rows, whole)
        )
        assert (ours["cluster"], ours["market"]) == (theirs["cluster"], theirs["market"])
        assert [ours["hours"], ours["usd"]] == pytest.approx([theirs["hours"], theirs["usd"]])


def found(job: Workload) -> planner.Recommendation:
    return planner.plan(job, supply(5), champion())
