"""The value of a run: nothing where it tells nothing, most where a choice hangs on it; and who contends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from models.campaign.value_of_information import (
    LEAST_REGRET,
    Belief,
    Question,
    aim_and_meeting,
    choice,
    choice_set_of,
    gain,
    run_values,
)
from models.domain.cluster import Cluster
from models.domain.workload import Goal, Setup
from models.job import duration as spot
from models.job.job_conditions import Pool, Stated
from models.planner.choice_rule import drawn_meeting, normal_meeting
from tests.models.planning import offer, workload

NOBODY = 1e-9


def question(count: int, **changes: object) -> Question:
    nothing = np.zeros(count)
    plain = Question(
        name="fastest",
        places=np.arange(count),
        fixed_hours=nothing,
        hours_per_step_s=nothing + 1,
        usd_per_hour=nothing + 1,
        irreducible_sd=nothing,
        aim="hours",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def belief(
    step_s: list[float], sd: list[float], *, alike: float = 0.0, noise: float = NOBODY
) -> Belief:
    """All setups correlated by `alike`."""
    spread = np.array(sd)
    correlation = np.full((len(sd), len(sd)), alike) + (1 - alike) * np.eye(len(sd))
    return Belief(
        mean=np.log(np.array(step_s)),
        covariance=correlation * np.outer(spread, spread),
        noise=np.full(len(sd), noise),
    )


@st.composite
def beliefs(draw: st.DrawFn) -> tuple[Question, Belief]:
    count = draw(st.integers(2, 6))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    root = random.normal(size=(count, count)) * draw(st.floats(0.0, 0.5))
    believed = Belief(
        mean=random.normal(size=count),
        covariance=root @ root.T,
        noise=random.uniform(1e-6, 0.1, size=count),
    )
    asked = question(
        count,
        usd_per_hour=random.uniform(0.1, 10.0, size=count),
        aim=draw(st.sampled_from(["hours", "usd"])),
    )
    limited = draw(st.sampled_from([None, "hours", "usd"]))
    return replace(
        asked, limited=limited, limit=np.inf if limited is None else draw(st.floats(0.1, 5.0))
    ), believed


@settings(max_examples=60, deadline=None)
@given(beliefs())
def test_no_run_has_a_value_below_zero_and_equals_get_equal(asked: tuple[Question, Belief]) -> None:
    runs = list(range(len(asked[1].mean)))
    found, again = gain(*asked, runs), gain(*asked, runs)
    assert np.all(found.regret >= 0) and np.all((found.chance >= 0) & (found.chance <= 1 + 1e-9))
    assert np.array_equal(found.regret, again.regret) and np.array_equal(found.chance, again.chance)


def test_a_run_has_a_value_where_it_tells_of_a_near_rival_and_little_where_it_is_all_noise() -> (
    None
):
    believed = belief([1.0, 1.01, 1.0], [0.1, 0.1, 0.1])
    found = gain(
        question(2), believed, [0, 1, 2]
    )  # the third contends for nothing and shares nothing
    assert found.regret[2] == found.chance[2] == 0.0 and np.all(found.regret[:2] > 0.01)
    assert gain(question(2), belief([1.0, 1.01], [1e-8, 1e-8]), [0, 1]).regret.tolist() == [
        0.0,
        0.0,
    ], "all is known"
    clear, noisy = (
        gain(question(2), belief([1.0, 1.01], [0.1, 0.1], noise=n), [1]).regret[0]
        for n in (NOBODY, 10.0)
    )
    assert noisy < clear / 10
    near, loser = range(2)
    found = gain(question(3), belief([1.0, 1.05, 3.0], [0.1, 0.1, 0.1]), [1, 2])
    assert found.regret[near] > 0.01 and found.regret[loser] < 1e-6
    assert found.chance[near] > 0.2 and found.chance[loser] < 1e-3


def test_the_value_is_that_of_the_textbook() -> None:
    """Two setups to choose from, one known: the knowledge gradient is sd f(-gap / sd), f(z) = z Phi(z) + phi(z)."""
    gap, sd = 0.05, 0.1
    z = -gap / sd
    expected = sd * (z * 0.308538 + 0.352065)  # Phi(-0.5), phi(-0.5)
    found = gain(question(2), belief([1.0, float(np.exp(gap))], [1e-9, sd]), [1])
    assert found.regret[0] == pytest.approx(expected, rel=0.02) and found.chance[
        0
    ] == pytest.approx(0.3085, abs=0.06)


def test_what_all_share_changes_no_choice_among_them() -> None:
    together = belief([1.0, 1.05, 1.1], [0.3, 0.3, 0.3], alike=1.0)
    assert gain(question(3), together, [0, 1, 2]).regret.max() < 1e-9
    limited = question(3, limited="usd", usd_per_hour=np.array([3.0, 2.0, 1.0]), limit=2.3)
    assert gain(limited, together, [0]).regret[0] > 0.01  # but it tells who meets a budget


def test_the_choice_keeps_to_the_constraint_with_the_chance_required() -> None:
    sold = question(2, limited="usd", usd_per_hour=np.array([2.0, 1.0]), limit=2.2, p_required=0.9)
    assert choice(sold, belief([1.0, 1.5], [0.01, 0.01])) == 0
    assert (
        choice(sold, belief([1.0, 1.5], [0.2, 0.01])) == 1
    )  # the faster one would overspend too often
    assert choice(replace(sold, p_required=0.5), belief([1.0, 1.5], [0.2, 0.01])) == 0
    assert (
        choice(replace(sold, limit=0.1), belief([1.0, 1.5], [0.2, 0.2])) == 1
    )  # none meets it: the likeliest
    with pytest.raises(ValueError, match="nobody"):
        choice(replace(sold, places=np.zeros(0, dtype=np.intp)), belief([1.0], [0.1]))


def test_a_measurement_narrows_what_errs_with_it_by_the_conditional_normal() -> None:
    before = belief([1.0, 1.0, 1.0], [0.2, 0.1, 0.1], alike=0.5, noise=0.01)
    after = before.given(0, 0.1)
    assert after.mean == pytest.approx(np.array([0.04, 0.01, 0.01]) / 0.05 * 0.1)
    assert after.variance == pytest.approx(
        [0.04 - 0.04**2 / 0.05, 0.01 - 0.01**2 / 0.05, 0.01 - 0.01**2 / 0.05]
    )
    assert before.given(0).mean.tolist() == before.mean.tolist()
    assert before.given(0).variance == pytest.approx(after.variance)


def test_questions_add_up_and_what_saves_next_to_nothing_counts_nothing() -> None:
    believed = belief([1.0, 1.05, 3.0], [0.1, 0.1, 0.1])
    dollars = question(3, name="cheapest", aim="usd")
    both = run_values([question(3), dollars], believed, [0, 1, 2])
    alone = gain(question(3), believed, [0, 1, 2])
    assert both.regret[1] == pytest.approx(2 * alone.regret[1]) and both.question[1] == "fastest"
    assert both.regret[2] == 0.0 and both.question[2] == ""
    twins = belief([1.0, 1.0], [0.001, 0.001])
    assert (
        gain(question(2), twins, [0]).chance[0] > 0.3
        and gain(question(2), twins, [0]).regret[0] < LEAST_REGRET
    )
    assert run_values([question(2)], twins, [0, 1]).regret.tolist() == [0.0, 0.0]


def test_runs_tell_the_same_by_the_square_of_their_correlation() -> None:
    alike = belief([1.0] * 3, [0.1] * 3, alike=0.6).alike()
    assert alike == pytest.approx(0.36 + 0.64 * np.eye(3), abs=1e-6)


def test_spread_that_no_run_can_lower_counts_against_meeting_a_constraint() -> None:
    asked = question(2, irreducible_sd=np.array([0.0, 0.5]), aim="usd", limited="hours", limit=1.2)
    _, meeting = aim_and_meeting(asked, np.zeros((2, 1, 1)), np.full((2, 1, 1), 0.01**2))
    assert meeting is not None
    assert meeting.chance[0, 0, 0] > 0.99 > 0.75 > meeting.chance[1, 0, 0] > 0.5
    assert meeting.overshoot[0, 0, 0] < 1e-6 and 0.1 < meeting.overshoot[1, 0, 0] < 0.2


def test_without_a_required_probability_overshooting_is_weighed() -> None:
    """0.2 of doubt overshoots by 0.041 in the mean, which costs 0.41 at a price of 10: half as slow again."""
    sold = question(2, limited="usd", usd_per_hour=np.array([2.0, 1.0]), limit=2.2)
    assert choice(sold, belief([1.0, 1.6], [0.2, 0.01])) == 0
    assert choice(sold, belief([1.0, 1.4], [0.2, 0.01])) == 1
    assert choice(replace(sold, overshoot_price=5.0), belief([1.0, 1.3], [0.2, 0.01])) == 0
    values = [
        gain(replace(sold, overshoot_price=price), belief([1.0, 1.3], [0.2, 0.01]), [0]).regret[0]
        for price in (0.0, 10.0)
    ]
    assert values[0] < 0.01 < values[1], "only the price of overshooting gives it any value"


@settings(max_examples=40, deadline=None)
@given(beyond=st.floats(-1, 1), sd=st.floats(0.01, 0.6), limit=st.floats(0.1, 10))
def test_normal_and_drawn_meetings_agree(beyond: float, sd: float, limit: float) -> None:
    middles = ndtri((np.arange(20_000) + 0.5) / 20_000)
    drawn = drawn_meeting(limit * np.exp(beyond + sd * middles)[None], limit)
    known = normal_meeting(np.log(limit) + beyond, sd, limit)
    assert known.chance == pytest.approx(drawn.chance[0], abs=1e-3)
    assert known.overshoot == pytest.approx(drawn.overshoot[0], abs=1e-3)


HOURS = 10.0  # of work at a second a step
JOB = replace(workload("mlp", 64, None, samples=int(64 * 3600 * HOURS)), gradient_bytes=None)


def zones(count: int, first: int, usd_per_hour: float, market: str = "on-demand") -> list[Setup]:
    """One machine in each of so many zones, each a little dearer than the one before."""
    return [
        Setup(
            workload="mlp",
            cluster=Cluster(
                members=(
                    offer(
                        "small",
                        market,
                        zone=f"z{at:03d}",
                        usd_per_hour=usd_per_hour * (1 + at / 1e4),
                    ),
                )
            ),
            layout=(1,),
            batch_per_device=(64,),
        )
        for at in range(first, first + count)
    ]


def predicted(*steps: tuple[int, float, float]) -> pd.DataFrame:
    """(how many, step seconds, factor of the interval to either side) one after the other."""
    rows = [(step, step / off, step * off) for many, step, off in steps for _ in range(many)]
    return pd.DataFrame(rows, columns=["step_s", "step_low_s", "step_high_s"])


def test_those_that_are_safe_contend_beside_the_many_that_are_cheaper_and_may_miss() -> None:
    deadline = Goal(goal="cheapest_within_deadline", hours=HOURS)
    cheap, safe = zones(45, 0, 1.0), zones(25, 45, 3.0)
    steps = predicted((45, 1.0, 1.2), (25, 0.5, 1.01))
    found = choice_set_of(replace(JOB, goals=(deadline,)), [*cheap, *safe], steps)
    asked = next(one for one in found.questions if one.name == deadline.goal)
    prices = [1.0 + at / 1e4 for at in range(30)] + [3.0 * (1 + at / 1e4) for at in range(45, 55)]
    assert asked.usd_per_hour == pytest.approx(prices)


@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_start_up_is_paid_once_and_does_not_grow_with_the_step(market: str) -> None:
    def asked(**seconds: float) -> Question:
        setups, steps = zones(2, 0, 1.0, market), predicted((2, 1.0, 1.1))
        found = choice_set_of(JOB, setups, steps, conditions=Stated(**seconds))
        return next(one for one in found.questions if one.name == "fastest")

    slow, quick = asked(startup_s=7200.0), asked(startup_s=0.0)
    assert slow.fixed_hours == pytest.approx(2.0) and quick.fixed_hours == pytest.approx(0.0)
    assert slow.hours_per_step_s == pytest.approx(quick.hours_per_step_s)
    hazard = 0.3 if market == "spot" else 0.0
    for one, startup_s in ((slow, 7200.0), (quick, 0.0)):
        conditions = Stated(startup_s=startup_s).gangs(
            [Pool("a", market, "z", hazard)], np.ones((1, 1), int), 0.0
        )
        hours = float(spot.expected_hours([HOURS], conditions)[0])
        assert one.fixed_hours + one.hours_per_step_s == pytest.approx(np.full(2, hours))
    if market == "spot":
        assert (asked(replacement_s=3600.0).hours_per_step_s > 1.1 * quick.hours_per_step_s).all()
