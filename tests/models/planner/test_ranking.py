"""The first row is the best that meets the constraint, and figures hang together."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.cluster import Cluster
from models.domain.workload import Goal, Setup
from models.job.cost import job_costs
from models.planner.candidates import Supply
from models.planner.planner import candidates
from models.planner.ranking import recommend
from tests.models.planning import CORES, LineModel, cores_fit, frame, offer, offers, workload

MODEL = LineModel()
DEADLINE = Goal(goal="cheapest_within_deadline", hours=0.45, p_required=0.9)
BUDGET = Goal(goal="fastest_within_budget", usd=0.08, p_required=0.9)
CHEAPEST, FASTEST = Goal(goal="cheapest"), Goal(goal="fastest")
BESIDE = {"storage_usd_per_hour": 0.013, "other_usd_per_hour": 0.007, "start_usd": 0.01}


def costs_of(job, sold=None):
    setups = candidates(job, Supply(offers=sold or offers(), max_hosts=4, fits=cores_fit), MODEL)
    rows = frame(setups)
    return job_costs(job, setups, MODEL.predict(rows), MODEL.draws(rows, count=200, seed=1))


def table(job, sold=None, **options):
    return recommend(job, costs_of(job, sold), **options)


def rows_for(*goals, **options):
    return table(workload("mlp", 64, None, *goals), **options)


def test_the_winner_meets_the_deadline_and_nothing_cheaper_does():
    rows = rows_for(DEADLINE, top=50)
    met = [row for row in rows if row["status"] != "misses_constraint"]
    assert all(row["p_meets_constraint"] >= 0.9 for row in met)
    assert [row["usd"] for row in met] == sorted(row["usd"] for row in met)
    missed = [row for row in rows if row["status"] == "misses_constraint"]
    assert missed and all(row["p_meets_constraint"] < 0.9 for row in missed)
    assert all(row["usd"] < rows[0]["usd"] for row in missed)


@settings(max_examples=8, deadline=None)
@given(hours=st.floats(0.05, 20.0), p=st.floats(0.5, 0.99), samples=st.integers(10_000, 5_000_000))
def test_a_looser_deadline_never_costs_more(hours, p, samples):
    goals = [replace(DEADLINE, hours=limit, p_required=p) for limit in (hours, 1.5 * hours)]
    tight, loose = (table(workload("mlp", 64, None, goal, samples=samples))[0] for goal in goals)
    if tight["status"] != "infeasible":
        assert loose["usd"] <= tight["usd"] * (1 + 1e-9)


def test_an_impossible_deadline_says_which_would_do_and_it_does():
    [row] = rows_for(replace(DEADLINE, hours=0.1))
    assert (row["rank"], row["status"], row["cluster"], row["usd"]) == (1, "infeasible", None, None)
    nearest = float(row["reason"].split("deadline of ")[1].split(" h")[0])
    assert rows_for(replace(DEADLINE, hours=nearest))[0]["status"] == "recommended"
    assert "best bet" in rows_for(replace(DEADLINE, hours=0.99 * nearest))[0]["reason"]
    assert rows_for(replace(BUDGET, usd=0.0001))[0]["status"] == "infeasible"
    assert rows_for(replace(BUDGET, usd=0.0, p_required=None))[0]["status"] == "infeasible"


@pytest.mark.parametrize("goal", [DEADLINE, BUDGET])
@pytest.mark.parametrize("tight", [1.0, 0.6, 0.1])
def test_without_a_required_probability_the_least_loss_of_even_odds_wins(goal, tight):
    limits = {"hours": goal.hours and tight * goal.hours, "usd": goal.usd and tight * goal.usd}
    what = str(goal.constraint)
    job = workload("mlp", 64, None, Goal(goal=goal.goal, **limits))
    costs = costs_of(job)
    used = costs.drawn[what] / (limits[what] or np.nan)
    overshoot = np.maximum(np.log(used), 0.0).mean(axis=1)
    loss = np.log(costs.expected[goal.objective]) + 10.0 * overshoot
    even = np.mean(used <= 1, axis=1) >= 0.5
    first, *others = recommend(job, costs, top=20)
    if not even.any():
        assert first["status"] == "infeasible" and not others
        return
    best = int(np.argmin(np.where(even, loss, np.inf)))
    cluster = costs.setups[best].cluster
    assert (first["cluster"], first["market"]) == (cluster.name, cluster.market)
    assert first["p_meets_constraint"] == np.mean(used[best] <= 1) and first["p_required"] is None
    for row in others:
        assert (row["status"] == "misses_constraint") == (row["p_meets_constraint"] < 0.5)


@pytest.mark.parametrize(
    ("late", "required", "expected"),
    [
        (10, None, {"1xsmall": 0.9, "1xmedium": 0.1}),
        (60, None, {"1xmedium": 0.6, "1xsmall": 0.4}),
        (60, 0.6, {"1xmedium": 1.0, "1xsmall": 0.0}),
    ],
)
def test_the_best_is_what_the_rule_would_choose_if_times_were_known(late, required, expected):
    goal = Goal(goal="cheapest_within_deadline", hours=3.0, p_required=required)
    job = workload("mlp", 64, None, goal, samples=64 * 3600)
    plain = Setup(
        workload="mlp",
        cluster=Cluster(members=(offer("small"),)),
        layout=(1,),
        batch_per_device=(64,),
    )
    pair = [plain, replace(plain, cluster=Cluster(members=(offer("medium"),)))]
    # hours of work; $0.06 and $0.066
    draws = np.array([[2.0] * (100 - late) + [3.05] * late, [1.2] * 100])
    costs = job_costs(job, pair, MODEL.predict(frame(pair)).assign(step_s=[2.0, 1.2]), draws)
    found = {row["cluster"]: row["p_best"] for row in recommend(job, costs)}
    assert found == expected and list(found) == list(expected)


def test_an_unknown_price_is_none_and_wins_no_money_goal():
    sold = [offer("small"), offer("medium"), offer("whole", usd_per_hour=None)]
    job = workload("mlp", 64, None, CHEAPEST, FASTEST)
    rows = table(job, sold)
    fastest = next(row for row in rows if row["goal"] == "fastest")
    assert "whole" in fastest["cluster"]
    assert [fastest[name] for name in ("usd", "usd_p90", "usd_per_million_samples")] == [None] * 3
    assert all("whole" not in row["cluster"] for row in rows if row["goal"] == "cheapest")
    bare = table(job, [offer("small", usd_per_hour=None, **BESIDE)])
    cheapest, fastest = bare[0], bare[1]
    assert (cheapest["status"], fastest["status"]) == ("no_price", "recommended")
    assert (fastest["usd"], fastest["usd_machines"]) == (None, None)
    assert fastest["usd_storage"] > 0 and fastest["usd_other"] > 0


def test_figures_hang_together_and_a_bill_is_the_sum_of_its_items():
    job = workload("mlp", 64, None, DEADLINE)
    sold = [offer(name, market, **BESIDE) for name in CORES for market in ("on-demand", "spot")]
    for row in table(job, sold):
        assert row["step_low_s"] < row["step_s"] < row["step_high_s"]
        assert row["hours"] <= row["hours_p90"] and row["usd"] <= row["usd_p90"]
        assert row["usd"] == row["usd_machines"] + row["usd_storage"] + row["usd_other"]
        machines = sum(offer["count"] * offer["usd_per_hour"] for offer in row["cluster_offers"])
        count = sum(offer["count"] for offer in row["cluster_offers"])
        rates = (machines, 0.013 * count, 0.007 * count)
        downloads = 0.01 * (count + row["expected_interruptions"])
        bill = [row["usd_machines"], row["usd_storage"], row["usd_other"] - downloads]
        assert bill == pytest.approx([row["hours"] * usd for usd in rates])
        hourly = row["hours_p90"] * (machines + count * 0.02)
        assert row["usd_p90"] == pytest.approx(hourly + downloads)
        assert row["usd_per_million_samples"] == pytest.approx(row["usd"] / 0.6)
        assert row["samples_per_s"] == pytest.approx(row["global_batch"] / row["step_s"])
        assert 0 <= row["p_best"] <= 1
