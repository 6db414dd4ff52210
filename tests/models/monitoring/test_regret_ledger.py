"""Promise against outcome, regret against measured rivals, failures apart."""

import pandas as pd
import pytest

from models.domain.workload import OVERSHOOT_PRICE
from models.job import duration as spot
from models.job.job_conditions import STATED
from models.monitoring.regret_ledger import judge

NIGHT = pd.Timestamp("2026-11-20 03:00")
DAY = pd.Timedelta(days=1)
WORKLOADS = pd.DataFrame({"workload": ["mlp"], "gradient_bytes": [1e6]})
STEPS = 36_000  # so that a second of a step is ten hours of work
CLUSTERS = {1: "2xa", 2: "1xb", 3: "3xa"}
UNKNOWN = ("constraint_hours", "constraint_usd", "p_required", "p_meets_constraint")


def hours(step_s):
    return spot.STARTUP_S / 3600 + STEPS * step_s / 3600


def setup(cluster):
    mode = {"strategy": "ddp", "precision": "fp32", "switches": "none"}
    batch = {"batch_per_device": str(48 // int(cluster[0])), "accumulation_steps": 1}
    return {"workload": "mlp", "cluster": cluster, "layout": "1", **batch, **mode}


def promise(rank, night=0, often=0.0, **changes):
    """A row of the mart `promises` of 0.1 s a step, on demand at a dollar an hour."""
    cluster = str(changes.get("cluster", CLUSTERS[rank]))
    row = {
        **dict.fromkeys(UNKNOWN, float("nan")),
        **setup(cluster),
        "publication_id": f"night-{night}",
        "published_at": NIGHT + night * DAY,
        "promised_again_at": pd.NaT,
        "provider": "local",
        "samples": STEPS * 48,
        "global_batch": 48,
        "goal": "cheapest",
        "model_version": "7",
        "rank": rank,
        "market": "on-demand",
        "step_s": 0.1,
        "step_low_s": 0.09,
        "step_high_s": 0.11,
        "hours": hours(0.1),
        "usd": hours(0.1),
        "usd_per_hour": 1.0,
        **changes,
    }
    pool = {"instance_type": cluster[2:], "market": row["market"], "zone": "z"}
    count = int(cluster[0])
    return row | {"pools": [pool | {"count": count, "interruptions_per_hour": often / count}]}


DEADLINE = {"goal": "cheapest_within_deadline", "constraint_hours": hours(0.105)}


def run(run_id, rank, step_s, night=0.5):
    measured = {"run_id": run_id, "step_s": step_s, "measured_at": NIGHT + night * DAY}
    return setup(CLUSTERS[rank]) | measured


def two(step_s, rivals_s):
    """A run of the first choice, and one of the second."""
    return [run("a", 1, step_s), run("b", 2, rivals_s)]


def judged(promises, runs):
    frames = pd.DataFrame(promises), pd.DataFrame(runs), WORKLOADS
    return judge(*frames, {"a": 1, "b": 1}, STATED, OVERSHOOT_PRICE)


def test_a_measured_choice_has_its_promise_outcome_and_regret():
    runs = [run("a", 1, 0.11), run("b", 1, 0.13), run("c", 2, 0.10), run("d", 3, 0.5)]
    [row] = judged([promise(1), promise(2), promise(3)], runs)
    assert (row["cluster"], row["runs"], row["within_interval"]) == ("2xa", 2, False)
    assert row["measured_step_s"] == pytest.approx(0.12)
    assert row["measured_hours"] == row["measured_usd"] == pytest.approx(hours(0.12))
    assert (row["rivals_named"], row["rivals_measured"], row["best_rival_rank"]) == (2, 2, 2)
    assert row["verdict"] == "compared" and row["met_constraint"] is None
    assert row["regret"] == pytest.approx(hours(0.12) / hours(0.10) - 1)


def test_runs_before_the_promise_or_at_an_unknown_time_judge_nothing():
    both = [promise(1), promise(2)]
    assert judged(both, [run("a", 1, 0.1, night=-1), run("b", 2, 0.1)]) == []
    assert judged(both, [run("a", 1, 0.1) | {"measured_at": pd.NaT}]) == []
    [row] = judged(both, [run("a", 1, 0.1), run("b", 2, 0.05, night=-1)])
    assert row["verdict"] == "no_rival_measured" and row["regret"] is None
    other_market = promise(2, cluster="2xa", market="spot", usd_per_hour=0.4)
    [row] = judged([promise(1), other_market], [run("a", 1, 0.1)])
    assert row["verdict"] == "no_rival_measured" and row["rivals_named"] == 0


def test_a_choice_that_misses_its_constraint_is_a_failure_without_regret():
    promises = [promise(rank, p_required=0.9, **DEADLINE) for rank in (1, 2)]
    [missed] = judged(promises, two(0.11, 0.2))
    assert missed["verdict"] == "missed_constraint" and missed["regret"] is None
    assert missed["met_constraint"] is False and missed["measured_p_meets"] == 0.0
    assert missed["best_rival_cluster"] is None
    [kept] = judged(promises, two(0.1, 0.2))
    assert kept["verdict"] == "compared" and kept["regret"] == 0.0
    assert kept["best_rival_cluster"] is None  # it misses the deadline


def test_without_a_required_probability_a_rival_must_meet_the_limit_too():
    cheap = promise(2, usd_per_hour=0.5, **DEADLINE)  # half the price
    both = [promise(1, **DEADLINE), cheap]
    [row] = judged(both, two(0.1, 0.104))
    assert row["best_rival_cluster"] == "1xb"
    assert row["regret"] == pytest.approx(hours(0.1) / (0.5 * hours(0.104)) - 1, rel=1e-2)
    [late] = judged(both, two(0.1, 0.107))
    assert late["best_rival_cluster"] is None and late["regret"] == 0.0


def test_a_spot_choice_meets_its_deadline_with_a_probability():
    goal = DEADLINE | {"p_required": 0.9, "market": "spot"}
    [row] = judged([promise(1, often=1.0, **goal)], [run("a", 1, 0.1)])
    assert 0.0 < row["measured_p_meets"] < 0.9 and row["verdict"] == "missed_constraint"


def test_no_run_counts_for_two_equal_promises():
    nights = [
        promise(rank, night=n, promised_again_at=NIGHT + (n + 1) * DAY)
        for n in range(9)
        for rank in (1, 2)
    ]
    runs = [run("a", 1, 0.1, night=2.5), run("b", 2, 0.1, night=4.5), run("c", 1, 0.2, night=6.5)]
    rows = judged(nights, runs)
    assert rows == judged(nights[::-1], runs[::-1])
    assert [row["publication_id"] for row in rows] == ["night-2", "night-6"]
    assert [row["measured_step_s"] for row in rows] == [0.1, 0.2]
    assert [row["verdict"] for row in rows] == ["compared", "no_rival_measured"]
    assert rows[0]["first_measured_at"] == NIGHT + 2.5 * DAY
    assert rows[0]["newest_measured_at"] == NIGHT + 4.5 * DAY
