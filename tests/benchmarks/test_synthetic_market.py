"""The planner with a real champion of either physics: bounds that hold, and the answer of brute force."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from models.domain.workload import Goal, Setup, Workload
from models.job.cost import job_costs
from models.planner import planner, ranking, search
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
def test_no_prediction_undercuts_its_bound_and_some_come_near(name: str) -> None:
    model = champion()
    rows = pd.DataFrame([one.row() for one in every_setup(synthetic.workload(name), 7)])
    arrays = model._read(rows)
    ratio = model.predict(rows)["step_s"].to_numpy(float) / model.least_seconds(arrays)
    assert len(ratio) > 300 and ratio.min() >= 1.0
    least, most = np.array([model._held(block) for block in model.regression.blocks]).T
    assert (least <= 0).all() and (most >= 0).all()
    assert ratio.max() <= np.exp((most - least).max()) * (1 + 1e-6)


@pytest.mark.parametrize("name", [BY_ROWS, PROFILED])
def test_it_answers_as_predicting_and_drawing_for_every_setup_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "CLUSTERS_COMPARED", 8)
    monkeypatch.setattr(search, "_TURN", 16)
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
    assert answer.candidates == len(setups) and answer.looked_at < 0.8 * len(setups)
    for ours, theirs in zip(answer.rows, whole, strict=True):
        ours["reason"] = ours["reason"].partition("; made to fit by ")[0]  # which the plan adds
        for column, value in theirs.items():
            assert ours[column] == (
                pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            ), column


def found(job: Workload) -> planner.Plan:
    return planner.plan(job, supply(5), champion())
