"""What a reader of the table relies on: the winner is the best that meets the constraint, and the reasons are true."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.cluster import Cluster, Offer
from models.domain.workload import Goal, Setup, Workload
from models.job.cost import job_costs
from models.planner import explanations as explain
from models.planner.candidates import Supply
from models.planner.planner import candidates
from models.planner.ranking import COLUMNS, recommend
from tests.models.planning import CORES, LineModel, cores_fit, frame, offer, offers, workload

MODEL = LineModel()
DEADLINE = Goal(goal="cheapest_within_deadline", hours=0.45, p_required=0.9)
BUDGET = Goal(goal="fastest_within_budget", usd=0.08, p_required=0.9)
BESIDE = {"storage_usd_per_hour": 0.013, "other_usd_per_hour": 0.007}


def table(job: Workload, sold: list[Offer] | None = None, **options: Any) -> list[dict[str, Any]]:
    setups = candidates(job, Supply(offers=sold or offers(), max_hosts=4, fits=cores_fit), MODEL)
    rows = frame(setups)
    costs = job_costs(job, setups, MODEL.predict(rows), MODEL.draws(rows, count=200, seed=1))
    return recommend(job, costs, **options)


def of(rows: list[dict[str, Any]], goal: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["goal"] == goal]


def test_every_goal_is_answered_with_every_column_and_ranks_from_one() -> None:
    rows = table(workload("mlp", 64, None, DEADLINE, BUDGET))
    for goal in ("cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"):
        mine = of(rows, goal)
        assert [row["rank"] for row in mine] == list(range(1, len(mine) + 1))
        assert mine[0]["status"] == "recommended" and mine[0]["reason"]
        assert len({(row["cluster"], str(row["cluster_offers"])) for row in mine}) == len(mine)
    assert all(tuple(row) == COLUMNS for row in rows)


def test_the_winner_meets_the_deadline_and_nothing_cheaper_does() -> None:
    rows = of(table(workload("mlp", 64, None, DEADLINE), top=50), "cheapest_within_deadline")
    met = [row for row in rows if row["status"] != "misses_constraint"]
    assert all(row["p_meets_constraint"] >= 0.9 for row in met)
    assert [row["usd"] for row in met] == sorted(row["usd"] for row in met)
    missed = [row for row in rows if row["status"] == "misses_constraint"]
    assert missed and all(
        row["p_meets_constraint"] < 0.9 and row["usd"] < rows[0]["usd"] for row in missed
    )
    assert all("misses the deadline of 0.45 h" in row["reason"] for row in missed)


@settings(max_examples=20, deadline=None)
@given(hours=st.floats(0.05, 20.0), p=st.floats(0.5, 0.99), samples=st.integers(10_000, 5_000_000))
def test_a_looser_deadline_never_costs_more(hours: float, p: float, samples: int) -> None:
    tight = Goal(goal="cheapest_within_deadline", hours=hours, p_required=p)
    loose = Goal(goal="cheapest_within_deadline", hours=hours * 1.5, p_required=p)
    rows = [
        r for r in table(workload("mlp", 64, None, tight, loose, samples=samples)) if r["rank"] == 1
    ]
    first, second = rows[0], rows[1]
    if first["status"] == "infeasible":
        return
    assert second["status"] == "recommended" and second["usd"] <= first["usd"] * (1 + 1e-9)


def test_an_impossible_deadline_or_budget_says_which_one_would_do_and_it_does() -> None:
    job = workload("mlp", 64, None, replace(DEADLINE, hours=0.1), replace(BUDGET, usd=0.0001))
    rows = table(job)
    assert "would meet a budget of $0." in of(rows, BUDGET.goal)[0]["reason"]
    (row,) = of(rows, DEADLINE.goal)
    assert (row["rank"], row["status"], row["cluster"], row["usd"]) == (1, "infeasible", None, None)
    assert tuple(row) == COLUMNS
    nearest = float(row["reason"].split("deadline of ")[1].split(" h")[0])
    again = of(table(workload("mlp", 64, None, replace(DEADLINE, hours=nearest))), DEADLINE.goal)
    assert again[0]["status"] == "recommended"


def test_where_none_is_sure_enough_the_best_bet_is_named_with_its_chance_and_what_it_costs() -> (
    None
):
    """A deadline that its fastest cluster meets in half of the draws: feasible if that much were enough."""
    fastest = of(table(workload("mlp", 64, None)), "fastest")[0]
    limit = fastest["hours"] * 1.02
    (row,) = of(table(workload("mlp", 64, None, replace(DEADLINE, hours=limit))), DEADLINE.goal)
    assert row["status"] == "infeasible"
    bet = re.search(r"best bet, (\S+) \(.*?\), meets .* with (\d+)% probability", row["reason"])
    assert bet is not None, row["reason"]
    chance = int(bet[2]) / 100
    assert 0 < chance < 0.9
    easier = replace(DEADLINE, hours=limit, p_required=max(chance - 0.02, 0.01))
    met = of(table(workload("mlp", 64, None, easier), top=50), DEADLINE.goal)
    assert bet[1] in {one["cluster"] for one in met if one["status"] != "misses_constraint"}
    harder = replace(DEADLINE, hours=limit, p_required=min(chance + 0.02, 0.99))
    assert (
        of(table(workload("mlp", 64, None, harder)), DEADLINE.goal)[0]["status"] == "infeasible"
    ), "a better bet"
    hopeless = of(table(workload("mlp", 64, None, replace(DEADLINE, hours=1e-3))), DEADLINE.goal)[0]
    assert "best bet" not in hopeless["reason"]


def weighed(goal: Goal, **changes: Any) -> Goal:
    return replace(goal, p_required=None, **changes)


@pytest.mark.parametrize("goal", [DEADLINE, BUDGET])
@pytest.mark.parametrize("tight", [1.0, 0.6, 0.1])
def test_without_a_required_probability_the_least_loss_is_named_with_its_chance(
    goal: Goal, tight: float
) -> None:
    limits = {"hours": goal.hours and tight * goal.hours, "usd": goal.usd and tight * goal.usd}
    job = workload("mlp", 64, None, weighed(goal, **limits))
    setups = candidates(job, Supply(offers=offers(), max_hosts=4, fits=cores_fit), MODEL)
    rows = frame(setups)
    costs = job_costs(job, setups, MODEL.predict(rows), MODEL.draws(rows, count=200, seed=1))
    used = costs.drawn(str(goal.constraint)) / (limits[str(goal.constraint)] or np.nan)
    loss = np.log(costs.expected(goal.objective)) + 10.0 * np.maximum(np.log(used), 0.0).mean(
        axis=1
    )
    first, *others = of(recommend(job, costs, top=20), goal.goal)
    best = int(np.argmin(loss))
    cluster = setups[best].cluster
    assert (first["status"], first["cluster"], first["market"]) == (
        "recommended",
        cluster.name,
        cluster.market,
    )
    assert first["p_meets_constraint"] == np.mean(used[best] <= 1) and first["p_required"] is None
    assert (
        "overshooting weighed" in first["reason"]
        and f"{first['p_meets_constraint']:.0%}" in first["reason"]
    )
    for row in others:
        assert row["status"] == (
            "misses_constraint" if row["p_meets_constraint"] < 0.5 else "alternative"
        )
        assert "is allowed" not in row["reason"]


def test_a_dearer_overshoot_is_a_smaller_one_and_nothing_overshoots_a_loose_limit() -> None:
    """The price lies between even odds and certainty; where no limit binds, the answer is that of no constraint."""
    chances = [
        of(
            table(workload("mlp", 64, None, weighed(DEADLINE, overshoot_price=price))),
            DEADLINE.goal,
        )[0]["p_meets_constraint"]
        for price in (0.01, 1.0, 10.0, 1000.0)
    ]
    assert chances == sorted(chances) and chances[0] < 0.5 and chances[-1] > 0.95
    loose = table(workload("mlp", 64, None, weighed(DEADLINE, hours=1e4)))
    assert of(loose, DEADLINE.goal)[0]["cluster"] == of(loose, "cheapest")[0]["cluster"]
    assert of(loose, DEADLINE.goal)[0]["p_best"] == of(loose, "cheapest")[0]["p_best"]


def test_a_limit_of_nothing_is_met_by_nobody() -> None:
    (row,) = of(table(workload("mlp", 64, None, weighed(BUDGET, usd=0.0))), BUDGET.goal)
    assert row["status"] == "infeasible" and "no cluster on offer meets $0" in row["reason"]


def test_the_best_is_the_one_that_the_rule_would_choose_if_times_were_known() -> None:
    """The first is cheaper and late in a tenth of the draws, by so much that the other would be chosen."""
    job = workload("mlp", 64, None, weighed(DEADLINE, hours=3.0), samples=64 * 3600)
    pair = [
        Setup(
            workload="mlp",
            cluster=Cluster(members=(offer(name),)),
            layout=(1,),
            batch_per_device=(64,),
        )
        for name in ("small", "medium")
    ]
    draws = np.array([[2.0] * 90 + [3.05] * 10, [1.2] * 100])  # hours of work; $0.06 and $0.066
    costs = job_costs(job, pair, MODEL.predict(frame(pair)).assign(step_s=[2.0, 1.2]), draws)
    rows = of(recommend(job, costs), DEADLINE.goal)
    assert [(row["cluster"], row["p_best"]) for row in rows] == [
        ("1xsmall", 0.9),
        ("1xmedium", 0.1),
    ]


@pytest.mark.parametrize(
    ("value", "what"), [(3.2e-5, "usd"), (0.0123, "usd"), (4e-4, "hours"), (2e-6, "hours")]
)
def test_small_amounts_keep_digits_that_count(value: float, what: str) -> None:
    shown = explain.amount(value, what)
    number = float(re.sub(r"[^0-9.]", "", shown))
    scale = 3600.0 if shown.endswith(" s") else 60.0 if shown.endswith(" min") else 1.0
    assert number / scale == pytest.approx(value, rel=0.03)
    enough = float(re.sub(r"[^0-9.]", "", explain.enough(value, what)))
    assert value <= enough / scale < 1.2 * value


def test_an_unknown_price_is_none_wins_no_money_goal_and_may_be_the_fastest() -> None:
    job = workload("mlp", 64, None, DEADLINE, BUDGET)
    sold = [offer("small"), offer("medium"), offer("whole", usd_per_hour=None)]
    rows = table(job, sold)
    fastest = of(rows, "fastest")[0]
    assert "whole" in fastest["cluster"]
    assert (
        fastest["usd"] is None
        and fastest["usd_p90"] is None
        and fastest["usd_per_million_samples"] is None
    )
    others = [row for row in rows if row["goal"] != "fastest" and row["status"] != "infeasible"]
    assert others and all("whole" not in row["cluster"] and row["usd"] > 0 for row in others)


def test_without_any_price_money_goals_say_so_and_no_sum_is_made_up() -> None:
    rows = table(workload(), [offer("small", usd_per_hour=None, **BESIDE)])
    assert (
        of(rows, "cheapest")[0]["status"] == "infeasible"
        and "price" in of(rows, "cheapest")[0]["reason"]
    )
    fastest = of(rows, "fastest")[0]
    assert fastest["status"] == "recommended"
    assert (fastest["usd"], fastest["usd_machines"], fastest["usd_p90"]) == (None, None, None)
    assert fastest["usd_storage"] > 0 and fastest["usd_other"] > 0


def billed(*markets: str) -> list[Offer]:
    return [
        offer(name, market, **BESIDE)
        for name in CORES
        for market in markets or ("on-demand", "spot")
    ]


def test_nothing_to_choose_from_is_a_row_and_not_silence() -> None:
    job = workload("mlp", 64, None, DEADLINE)
    rows = recommend(job, job_costs(job, [], MODEL.predict(frame([])), np.zeros((0, 10))))
    assert [row["status"] for row in rows] == ["infeasible"] * 3
    assert all("no cluster on offer" in row["reason"] for row in rows)


def test_figures_hang_together_and_the_parts_of_a_bill_are_its_sum_to_the_last_digit() -> None:
    job = workload("mlp", 64, None, DEADLINE)
    for row in table(job, billed()):
        assert row["step_low_s"] < row["step_s"] < row["step_high_s"]
        assert row["hours"] <= row["hours_p90"] and row["usd"] <= row["usd_p90"]
        assert row["usd"] == row["usd_machines"] + row["usd_storage"] + row["usd_other"]
        machines = sum(one["count"] * one["usd_per_hour"] for one in row["cluster_offers"])
        count = sum(one["count"] for one in row["cluster_offers"])
        parts = [row["usd_machines"], row["usd_storage"], row["usd_other"]]
        assert parts == pytest.approx(
            [row["hours"] * usd for usd in (machines, 0.013 * count, 0.007 * count)]
        )
        assert row["usd_p90"] == pytest.approx(row["hours_p90"] * (machines + count * 0.02))
        assert row["usd_per_million_samples"] == pytest.approx(row["usd"] / 0.6)
        assert row["samples_per_s"] == pytest.approx(row["global_batch"] / row["step_s"])
        assert row["hours"] >= job.samples / row["samples_per_s"] / 3600
        assert 0 <= row["p_best"] <= 1


def test_a_certain_model_is_sure_and_shared_errors_do_not_change_who_is_best() -> None:
    job = workload()
    setups = candidates(job, Supply(offers=offers("on-demand"), max_hosts=2, fits=cores_fit), MODEL)
    rows = frame(setups)
    shared = MODEL.predict(rows)["step_s"].to_numpy()[:, None] * np.exp(np.linspace(-0.5, 0.5, 101))
    for row in recommend(job, job_costs(job, setups, MODEL.predict(rows), shared)):
        assert row["p_best"] == (1.0 if row["rank"] == 1 else 0.0)


def test_losers_say_by_how_much() -> None:
    rows = of(table(workload()), "cheapest")
    extra = 100 * (rows[1]["usd"] / rows[0]["usd"] - 1)
    stated = float(rows[1]["reason"].split(" % dollars")[0])
    assert stated == pytest.approx(extra, abs=0.51)
    assert rows[0]["cluster"] in rows[1]["reason"] and rows[1]["cluster"] in rows[0]["reason"]
    assert f"limited by {rows[0]['bottleneck']}" in rows[0]["reason"]


def test_where_the_next_is_better_in_what_was_asked_for_the_winner_says_that_it_overshoots() -> (
    None
):
    row = {
        "hours": 30.0,
        "usd": 99.0,
        "p_meets_constraint": 0.9,
        "p_best": 0.6,
        "bottleneck": "compute",
    }
    next_one = row | {
        "cluster": "4xfast",
        "cluster_offers": [{"market": "spot"}],
        "precision": "fp32",
    }
    next_one |= {
        "strategy": "ddp",
        "switches": "none",
        "hours": 8.1,
        "usd": 140.0,
        "p_meets_constraint": 0.04,
    }
    goal = Goal(goal="fastest_within_budget", usd=100.0)
    said = explain.winner(row, next_one, goal, clusters=9)
    assert (
        "has -73 % hours (8.10 h against 30.00 h) but meets $100.00 with only 4% probability"
        in said
    ), said
    assert "only" not in explain.winner(row, next_one | {"hours": 31.0}, goal, clusters=9)
    alike = (
        row
        | {"usd": row["usd"] * (1 - 1e-9), "hours": row["hours"] * (1 - 1e-9)}
        | {"cluster": "4xfast"}
    )
    alike |= {
        name: next_one[name] for name in ("cluster_offers", "precision", "strategy", "switches")
    }
    assert "misses" not in explain.winner(row, alike, goal, clusters=9), "nothing is said of a tie"
    likelier = explain.winner(row | {"p_meets_constraint": 0.0}, next_one, goal, clusters=9)
    assert "(8.10 h against 30.00 h) but where it misses $100.00 it does by more; " in likelier, (
        likelier
    )


def test_a_range_of_batches_is_judged_by_the_whole_job() -> None:
    """A larger batch that the workload tolerates spreads each step's fixed cost: it wins, and is named."""
    fastest = of(table(workload("mlp", 64, 256)), "fastest")[0]
    assert fastest["global_batch"] == 256


def test_what_is_not_aligned_or_lacks_its_constraint_is_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        job_costs(workload(), [], MODEL.predict(frame([])), np.zeros((1, 10)))
    with pytest.raises(ValueError, match="needs hours"):
        table(workload("mlp", 64, None, Goal(goal="cheapest_within_deadline")))
    with pytest.raises(ValueError, match="none of"):
        table(workload("mlp", 64, None, Goal(goal="prettiest")))


def test_the_reason_says_how_near_the_nearest_measurement_is() -> None:
    row = {"usd": 1.0, "hours": 1.0, "p_best": 1.0, "bottleneck": "compute"}
    goal = Goal(goal="cheapest")
    ends = [
        explain.winner(row, None, goal, clusters=3, nearest=one).split("; ")[-1]
        for one in (None, 0.0, 1.5)
    ]
    assert ends == [
        "limited by compute",
        "measured itself",
        "nearest measurement 1.5 doublings away",
    ]


def test_a_reason_that_names_input_says_what_would_shorten_the_wait() -> None:
    row = {"usd": 1.0, "hours": 1.0, "p_best": 1.0, "bottleneck": "input"}
    asked = {"goal": Goal(goal="cheapest"), "clusters": 3, "input_by": "loader workers"}
    assert explain.winner(row, None, **asked).endswith(
        "limited by input (more loader workers would help)"
    )  # type: ignore[arg-type]
    assert explain.winner(row | {"bottleneck": "compute"}, None, **asked).endswith(
        "limited by compute"
    )  # type: ignore[arg-type]
    job, setups = workload(), [Setup(workload="conv", cluster=Cluster(members=(offer("small"),)), layout=(1,),
                                     batch_per_device=(48,))]  # fmt: skip
    predicted = MODEL.predict(frame(setups)).assign(bottleneck="input", input_by="processors")
    draws = np.full((1, 4), float(predicted["step_s"].iloc[0]))
    assert (
        "(more processors would help)"
        in of(recommend(job, job_costs(job, setups, predicted, draws)), "cheapest")[0]["reason"]
    )


def test_a_reason_says_what_the_step_is_made_up_of_where_there_is_more_than_computing() -> None:
    """Parts below half a percent of the step are left out, and those of a model that does not say them."""
    row = {"usd": 1.0, "hours": 1.0, "p_best": 1.0, "bottleneck": "compute"}
    row |= {
        "compute_s": 0.5,
        "communication_s": 0.3,
        "exposed_communication_s": 0.2,
        "input_s": 0.3,
    }
    asked = {"goal": Goal(goal="cheapest"), "clusters": 3}

    def ends(**changes: float | str) -> str:
        said = explain.winner(row | changes, None, **asked)  # type: ignore[arg-type]
        return said.partition("; a step is ")[2]

    communicating = "0.2 s of communication (another 0.1 s is hidden behind computing)"
    assert ends() == f"0.5 s of computing, {communicating} and 0.3 s of waiting for input"
    assert (
        ends(input_s=0.003, communication_s=0.2) == "0.5 s of computing and 0.2 s of communication"
    )
    hidden = {"exposed_communication_s": 0.0, "communication_s": 0.25, "input_s": 0.0}
    assert (
        ends(**hidden) == "0.5 s of computing (0.25 s of communication is hidden behind computing)"
    )
    short = {
        "compute_s": 0.005,
        "communication_s": 0.0,
        "exposed_communication_s": 0.0,
        "input_s": 5e-5,
    }
    assert ends(**short) == "5 ms of computing and 0.05 ms of waiting for input", "no power of ten"
    assert ends(compute_s=1234.5, input_s=50.0).startswith("1234.5 s of computing and 50 s of")
    alone = {"exposed_communication_s": 0.0, "communication_s": 0.0, "input_s": 0.0}
    assert ends(**alone) == ""
    assert ends(**alone, bottleneck="stragglers") == "0.5 s of computing on the slowest device"
    assert (
        ends(**alone, bottleneck="input")
        == "0.5 s of making batches, for the most part, and computing"
    )
    setups = [
        Setup(
            workload="conv",
            cluster=Cluster(members=(offer("small"),)),
            layout=(1,),
            batch_per_device=(48,),
        )
    ]
    predicted = MODEL.predict(frame(setups))
    step = predicted["step_s"].to_numpy()
    parts = {
        "compute_s": 0.6 * step,
        "communication_s": 0.0,
        "exposed_communication_s": 0.0,
        "input_s": 0.4 * step,
    }
    draws = np.full((1, 4), float(step[0]))
    found = of(
        recommend(workload(), job_costs(workload(), setups, predicted.assign(**parts), draws)),
        "cheapest",
    )[0]
    assert (found["compute_s"], found["input_s"]) == pytest.approx((0.6 * step[0], 0.4 * step[0]))
    assert "s of waiting for input" in found["reason"]


def test_a_cluster_of_which_one_split_meets_the_constraint_is_not_shown_as_missing_it_too() -> None:
    """Another split of the winner is cheaper on average and misses the deadline too often: it is no tempting rival."""
    job = workload("mlp", 64, None, replace(DEADLINE, hours=3.0), samples=64 * 3600)
    splits = [
        Setup(workload="mlp", cluster=Cluster(members=(offer(name),)), layout=(1,), batch_per_device=(64 // n,),
              accumulation_steps=n)
        for name, n in (("small", 1), ("small", 2), ("medium", 1))
    ]  # fmt: skip
    steps = np.array([1.5, 2.0, 0.9])  # hours; the third would cost 0.0495 dollars, the second 0.06
    draws = np.array([[0.5, 0.5, 0.5, 3.5] * 25, [2.0] * 100, [0.5, 3.5] * 50])
    predicted = MODEL.predict(frame(splits)).assign(step_s=steps)
    rows = of(recommend(job, job_costs(job, splits, predicted, draws)), "cheapest_within_deadline")
    assert [(row["cluster"], row["accumulation_steps"], row["status"]) for row in rows] == [
        ("1xsmall", 2, "recommended"),
        ("1xmedium", 1, "misses_constraint"),
    ]


def test_what_is_beside_the_machines_decides_too() -> None:
    """Two small machines are cheaper than one, until each of them has a volume."""
    job, sold = (
        workload("mlp", 64),
        [offer("small", usd_per_hour=0.03), offer("whole", usd_per_hour=0.2)],
    )
    (bare, *_), (whole, *_) = (
        of(table(job, [replace(one, storage_usd_per_hour=usd) for one in sold]), "cheapest")
        for usd in (0.0, 2.0)
    )
    assert "small" in bare["cluster"] and whole["cluster"] == "1xwhole"


def test_a_budget_is_one_of_the_whole_bill() -> None:
    rows = of(table(workload("mlp", 64, None, BUDGET), billed()), "fastest_within_budget")
    met = [row for row in rows if row["status"] != "misses_constraint"]
    assert all(row["usd_p90"] <= 0.08 * 1.001 for row in met)
    assert [row["hours"] for row in met] == sorted(row["hours"] for row in met)
    dear = [replace(one, storage_usd_per_hour=10.0) for one in offers()]
    (nothing,) = of(table(workload("mlp", 64, None, BUDGET), dear), "fastest_within_budget")
    assert nothing["status"] == "infeasible" and rows[0]["status"] == "recommended"


def test_the_market_is_reported_and_so_is_the_risk_of_spot() -> None:
    for row in table(workload("mlp", 64, None, DEADLINE), top=50):
        markets = {one["market"] for one in row["cluster_offers"]}
        assert row["market"] == (markets.pop() if len(markets) == 1 else "mixed")
        spot = sum(one["count"] for one in row["cluster_offers"] if one["market"] == "spot")
        assert (row["interruption_risk"] > 0) == (row["expected_interruptions"] > 0) == (spot > 0)
        if spot:  # 0.3 an hour each, while at work
            assert row["interruption_risk"] == pytest.approx(
                -math.expm1(-0.3 * spot * row["hours"]), rel=0.2
            )
            assert row["expected_interruptions"] >= row["interruption_risk"]
    assert Cluster.of((1, offer("small")), (2, offer("small", "spot"))).market == "mixed"
    impossible = of(table(workload("mlp", 64, None, replace(DEADLINE, hours=0.01))), DEADLINE.goal)
    assert [(row["market"], row["interruption_risk"]) for row in impossible] == [(None, None)]


def test_no_probability_is_required_unless_it_is_stated() -> None:
    assert Goal(goal="cheapest_within_deadline", hours=1.0).p_required is None
