"""The value of a run: nothing where it moves no choice, most where a choice hangs on it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from models.campaign.value_of_information import (
    LEAST_REGRET,
    Belief,
    OpenChoice,
    aim_and_meeting,
    choice,
    gain,
    run_values,
)
from models.domain.workload import GOALS, Goal
from models.planner.choice_rule import drawn_meeting, normal_meeting

FASTEST, CHEAPEST = Goal(goal="fastest"), Goal(goal="cheapest")


def question(count, goal=FASTEST, **changes):
    nothing = np.zeros(count)
    plain = OpenChoice(
        goal=goal,
        places=np.arange(count),
        fixed_hours=nothing,
        hours_per_step_s=nothing + 1,
        usd_per_hour=nothing + 1,
        download_usd=nothing,
        irreducible_sd=nothing,
        irreducible_mean=nothing,
    )
    return plain._replace(**changes)


def budget(limit, **changes):
    """Two setups at two dollars and one dollar an hour."""
    goal = Goal(goal="fastest_within_budget", usd=limit, **changes)
    return question(2, goal, usd_per_hour=np.array([2.0, 1.0]))


def belief(step_s, sd, *, alike=0.0, noise=1e-9):
    """All setups correlated by `alike`."""
    spread = np.array(sd)
    correlation = np.full((len(sd), len(sd)), alike) + (1 - alike) * np.eye(len(sd))
    return Belief(
        mean=np.log(np.array(step_s)),
        covariance=correlation * np.outer(spread, spread),
        noise=np.full(len(sd), noise),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10_000), st.sampled_from(GOALS))
def test_no_run_has_a_value_below_zero(count, seed, name):
    random = np.random.default_rng(seed)
    root = random.normal(size=(count, count)) * random.uniform(0.0, 0.5)
    believed = Belief(
        mean=random.normal(size=count),
        covariance=root @ root.T,
        noise=random.uniform(1e-6, 0.1, size=count),
    )
    limit = random.uniform(0.1, 5.0)
    goal = Goal(goal=name, hours=limit, usd=limit)
    choice = question(count, goal, usd_per_hour=random.uniform(0.1, 10.0, size=count))
    regret, chance = gain(choice, believed, list(range(count)))
    assert np.all(regret >= 0) and np.all((chance >= 0) & (chance <= 1 + 1e-9))


def test_the_value_is_that_of_the_textbook():
    """One of two setups is known: sd f(-gap / sd), with f(z) = z Phi(z) + phi(z)."""
    gap, sd = 0.05, 0.1
    expected = sd * (-gap / sd * 0.308538 + 0.352065)  # Phi(-0.5), phi(-0.5)
    regret, chance = gain(question(2), belief([1.0, float(np.exp(gap))], [1e-9, sd]), [1])
    assert regret[0] == pytest.approx(expected, rel=0.02)
    assert chance[0] == pytest.approx(0.3085, abs=0.06)


@pytest.mark.parametrize(
    "limit, p_required, sd, expected",
    [(2.2, 0.9, 0.01, 0), (2.2, 0.9, 0.2, 1), (2.2, 0.5, 0.2, 0)],
)
def test_the_choice_meets_the_constraint_with_the_required_probability(
    limit, p_required, sd, expected
):
    assert choice(budget(limit, p_required=p_required), belief([1.0, 1.5], [sd, 0.01])) == expected
    likeliest = budget(0.1, p_required=p_required)  # none meets it
    assert choice(likeliest, belief([1.0, 1.5], [0.2, 0.2])) == 1


def test_a_run_conditions_the_joint_normal():
    before = belief([1.0, 1.0, 1.0], [0.2, 0.1, 0.1], alike=0.5, noise=0.01)
    after = before.given(0, 0.1)
    assert after.mean == pytest.approx(np.array([0.04, 0.01, 0.01]) / 0.05 * 0.1)
    left = [0.04 - 0.04**2 / 0.05, 0.01 - 0.01**2 / 0.05, 0.01 - 0.01**2 / 0.05]
    assert after.variance == pytest.approx(left)
    assert before.given(0).mean.tolist() == before.mean.tolist()
    assert before.given(0).variance == pytest.approx(after.variance)


def test_values_of_goals_add_up_and_tiny_ones_count_nothing():
    believed = belief([1.0, 1.05, 3.0], [0.1] * 3)
    both = run_values([question(3), question(3, CHEAPEST)], believed, [1, 2])
    regret, _ = gain(question(3), believed, [1])
    assert both == pytest.approx([0.0, 2 * regret[0], 0.0])
    twins = belief([1.0, 1.0], [0.001, 0.001])
    regret, chance = gain(question(2), twins, [0])
    assert chance[0] > 0.3 and regret[0] < LEAST_REGRET
    assert run_values([question(2)], twins, [0, 1]).tolist() == [0.0, 0.0]


def test_irreducible_spread_counts_against_meeting_a_constraint():
    deadline = Goal(goal="cheapest_within_deadline", hours=1.2)
    choice = question(2, deadline, irreducible_sd=np.array([0.0, 0.5]))
    _, meeting = aim_and_meeting(choice, np.zeros(2), np.full(2, 0.01**2))
    assert meeting.chance[0] > 0.99 > 0.75 > meeting.chance[1] > 0.5


def test_without_a_required_probability_overshooting_is_weighed():
    """A sd of 0.2 overshoots by 0.041 on average, which costs 0.41 at a price of 10."""
    assert choice(budget(2.2), belief([1.0, 1.6], [0.2, 0.01])) == 0
    assert choice(budget(2.2), belief([1.0, 1.4], [0.2, 0.01])) == 1
    assert choice(budget(2.2, overshoot_price=5.0), belief([1.0, 1.3], [0.2, 0.01])) == 0


@pytest.mark.parametrize("beyond, sd", [(-0.3, 0.2), (0.1, 0.05), (0.5, 0.6)])
def test_normal_and_drawn_meetings_agree(beyond, sd):
    drawn = drawn_meeting(np.exp(beyond + sd * ndtri((np.arange(20_000) + 0.5) / 20_000)), 1.0)
    assert np.array(normal_meeting(beyond, sd, 1.0)) == pytest.approx(np.array(drawn), abs=1e-3)
