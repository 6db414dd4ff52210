"""Replays on hand-made tables: dollars as on a bill, regret as a reader has it, and ours stops by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from models.campaign.candidates import EC2_COSTS, Costs
from models.domain.workload import Setup
from tests.benchmarks.policies import AnyOrder, BestSeen, Campaign, cheapest_first
from tests.benchmarks.replay import (
    Bill,
    Ground,
    at_dollars,
    ground_of,
    questions_at,
    regret,
    replay,
    usd_until,
)
from tests.benchmarks.setups import frame_of, measured_setups

COSTS = Costs(launch_s=30.0, build_s=0.0, steps=10, train_most_s=1e3, minimum_s=60.0)
STEP_S = np.array([4.0, 2.0, 1.5, 1.4])
PRICE = np.array([1.0, 2.0, 4.0, 4.0])


def setups(
    prices: Sequence[float] = PRICE, names: Sequence[str] = ("a", "b", "c", "c")
) -> tuple[Setup, ...]:
    rows = pd.DataFrame(
        {
            "workload": "w",
            "cluster": [f"1x{name}" for name in names],
            "batch_per_device": "8",
            "step_s": 1.0,
        }
    ).assign(layout=[str(1 + at) for at in range(len(names))])
    return measured_setups(rows, {}, dict(zip(names, prices, strict=True))).setups


def ground(step_s: np.ndarray = STEP_S) -> Ground:
    made = setups()
    return Ground(
        workload="w",
        setups=made,
        rows=frame_of(made),
        step_s=step_s,
        usd_per_hour=PRICE,
        questions=tuple(questions_at(np.arange(4), step_s, PRICE, "8")),
    )


def test_a_launch_is_billed_for_its_minimum_and_runs_on_the_same_machines_need_no_start() -> None:
    a, b = (one.cluster for one in setups((3.6, 7.2), ("a", "b")))
    bill = Bill(costs=COSTS)
    bill.add(a, 10.0)  # 30 + 10 s: the minute
    assert bill.usd == pytest.approx(0.06)
    bill.add(a, 20.0)  # 30 + 10 + 20 s: still the minute
    assert bill.usd == pytest.approx(0.06)
    bill.add(a, 10.0)
    assert bill.usd == pytest.approx(0.07)
    bill.add(b, 50.0)  # 80 s
    assert bill.usd == pytest.approx(0.07 + 0.16)
    bill.add(a, 10.0)  # it was given back: it starts anew
    assert bill.usd == pytest.approx(0.07 + 0.16 + 0.06)
    bill.add(a, 10.0, anew=True)
    assert bill.usd == pytest.approx(0.07 + 0.16 + 0.06 + 0.06)


def test_regret_is_against_the_best_that_meets_the_constraint_and_a_miss_counts_one() -> None:
    asked = {one.name: one for one in ground().questions}
    fastest, cheapest = asked["fastest at 8"], asked["cheapest at 8"]
    assert [regret(fastest, STEP_S, at) for at in range(4)] == pytest.approx(
        [4 / 1.4 - 1, 2 / 1.4 - 1, 1.5 / 1.4 - 1, 0]
    )
    assert [regret(cheapest, STEP_S, at) for at in (0, 1, 2)] == pytest.approx([0.0, 0.0, 0.5])
    tight = asked["fastest within 1.05 x the cheapest at 8"]  # 4.2 dollars: the first two meet it
    assert [regret(tight, STEP_S, at) for at in range(4)] == pytest.approx([1.0, 0.0, 1.0, 1.0])
    assert regret(fastest, STEP_S, None) == 1.0
    late = asked["cheapest within 1.6 x the fastest at 8"]  # 2.24 s
    assert [regret(late, STEP_S, at) for at in range(4)] == pytest.approx([1.0, 0.0, 0.5, 0.4])


def test_a_sweep_pays_for_everything_and_ends_without_regret() -> None:
    place = ground()
    assert cheapest_first(place) == [0, 1, 2, 3]
    curve = replay(place, BestSeen(place, cheapest_first(place)), COSTS)
    assert (
        curve["regret"].iloc[0] == 1.0
        and curve["regret"].iloc[-1] == 0.0
        and curve["runs"].tolist() == [0, 1, 2, 3, 4]
    )
    seconds = np.array(
        [70.0, 60.0, 60.0]
    )  # 30 + 40; the minimum; 30 + 15 + 14 is below the minimum too
    assert curve["usd"].iloc[-1] == pytest.approx(
        float((seconds / 3600 * np.array([1.0, 2.0, 4.0])).sum())
    )
    assert replay(place, BestSeen(place, [3, 2, 1, 0]), COSTS, before_usd=1.0)["usd"].iloc[0] == 1.0


def test_dollars_until_regret_stays_low() -> None:
    curve = pd.DataFrame({"usd": [0.0, 1.0, 2.0, 3.0], "regret": [0.2, 0.01, 0.3, 0.05]})
    assert (
        usd_until(curve, 0.05) == 3.0
        and usd_until(curve, 0.3) == 0.0
        and usd_until(curve, 0.01) == np.inf
    )
    assert at_dollars(curve, [0.0, 0.5, 1.0, 9.0]) == [0.2, 0.2, 0.01, 0.05]


def believed(place: Ground, sd: float) -> tuple[Ground, np.ndarray, np.ndarray, np.ndarray]:
    """A model that is right on the average; every setup errs by itself."""
    return place, np.log(place.step_s), sd**2 * np.eye(4), np.full(4, 1e-6)


def test_ours_stops_where_no_run_is_expected_to_change_a_choice() -> None:
    assert Campaign(*believed(ground(), 1e-3), COSTS).next().places == ()
    assert Campaign(*believed(ground(), 0.3), COSTS).next().places != ()


def test_ours_believes_what_it_is_given_and_never_buys_it_again() -> None:
    place = ground(np.array([4.0, 2.0, 1.5, 1.2]))
    _, mean, covariance, noise = believed(ground(np.array([4.0, 2.0, 1.2, 1.5])), 0.3)
    policy = Campaign(place, mean, covariance, noise, COSTS)
    curve = replay(place, policy, COSTS)
    assert curve["regret"].iloc[0] > 0.05 and curve["regret"].iloc[-1] < 0.05
    assert len(policy.known) == curve["runs"].iloc[-1] <= 4
    assert np.exp(policy.belief.mean[list(policy.known)]) == pytest.approx(
        place.step_s[list(policy.known)]
    )
    again = replay(place, Campaign(place, mean, covariance, noise, COSTS), COSTS)
    assert again.equals(curve)


def test_random_order_is_by_its_seed_and_buys_all() -> None:
    place = ground()
    first, again, other = (
        replay(place, AnyOrder(*believed(place, 0.3), seed=s), COSTS) for s in (1, 1, 2)
    )
    assert first.equals(again) and not first.equals(other) and first["runs"].iloc[-1] == 4
    four = AnyOrder(*believed(place, 0.3), seed=1, at_once=4)
    assert {len({place.cluster(one) for one in four.next().places})} == {1}


def test_a_ground_pools_what_differs_in_the_order_of_machines_only() -> None:
    rows = pd.DataFrame(
        [
            {
                "workload": name,
                "cluster": "2xm",
                "layout": layout,
                "batch_per_device": batch,
                "step_s": step_s,
            }
            for name, layout, batch, step_s in (
                *(
                    ("w", "2+1", "4", 1.0),
                    ("w", "1+2", "4", 2.0),
                    ("w", "2+2", "3", 3.0),
                    ("v", "1+1", "6", 9.0),
                ),
                *(("w", "1+1", "6", 5.0), ("w", "1+1", "7", 6.0)),
            )
        ]
    )
    place = ground_of(rows, "w", usd={"m": 3.0}, devices={"m": 2}, batches=1, least=2)
    assert place.step_s.tolist() == [1.5, 3.0, 5.0] and place.usd_per_hour.tolist() == [6.0] * 3
    assert "step_s" not in place.rows and len(place.questions) == 14
    assert not ground_of(rows, "w", usd={"m": 3.0}, devices={"m": 2}, batches=1, least=4).questions


def test_ec2_bills_a_minute_at_least() -> None:
    assert EC2_COSTS.billed_s(0.0) >= EC2_COSTS.minimum_s == 60.0
