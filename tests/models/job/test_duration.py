"""Hours of interrupted jobs: exact means, honest tails."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.job.checkpoints import best_interval
from models.job.duration import (
    Conditions,
    drawn_hours,
    expected_hours,
    interruptions,
)

HOURS = st.floats(0.01, 200.0)
SURE = dict.fromkeys(Conditions._fields, np.zeros(1))
SECONDS = {"startup_s": 12.0, "checkpoint_s": 3.6, "replacement_s": 22.0}


def conditions(hazard, **changes):
    """Of one cluster."""
    stated = SECONDS | {"hazard_per_hour": hazard} | changes
    return Conditions(**SURE | {name: np.array([value]) for name, value in stated.items()})


def expected(work, hazard, **changes):
    return float(expected_hours([work], conditions(hazard, **changes))[0])


def drawn(work, hazard, draws=200, **changes):
    """(draws,) hours of a job of certain work."""
    hours = np.full((1, draws), work)
    return drawn_hours(hours, [work], conditions(hazard, **changes), seed=1)[0]


@given(work=HOURS, hazard=st.floats(0.0, 3.0), factor=st.floats(1.01, 10.0))
def test_expected_hours_grow_with_work_and_hazard(work, hazard, factor):
    base = expected(work, hazard)
    assert base >= work
    assert expected(work * factor, hazard) > base
    assert expected(work, hazard * factor) >= base


def test_the_interval_is_dalys_and_the_mean_is_exact():
    """c = 18 s, one interruption an hour: Young 0.1 h, Daly 0.0967 h; a piece takes e^s - 1 h."""
    interval = float(best_interval(18 / 3600, 1.0))
    assert interval == pytest.approx(0.1 * (1 + 0.05 / 3 + 0.0025 / 9) - 0.005)
    count = np.ceil(10.0 / interval)
    hours = expected(10.0, 1.0, startup_s=0.0, checkpoint_s=18.0, replacement_s=0.0)
    assert hours == pytest.approx(count * np.expm1((10.0 + (count - 1) * 0.005) / count))


@pytest.mark.parametrize("hazard", [0.05, 2.0, 20.0])
def test_drawn_hours_have_the_expected_mean(hazard):
    hours = drawn(3.0, hazard, 20_000, replacement_s=300.0)
    assert hours.mean() == pytest.approx(expected(3.0, hazard, replacement_s=300.0), rel=0.01)
    assert hours.min() >= 3.0


def test_the_number_of_interruptions_is_a_sum_of_geometric_numbers():
    """Two checkpoints divide 9 h into three pieces. A replacement takes far longer than all."""
    hazard, replacement_hours = 0.2, 50.0
    hours = drawn(
        9.0, hazard, 40_000, checkpoint_s=3600 * 1.8, replacement_s=3600 * replacement_hours
    )
    count = np.round(hours / (np.expm1(hazard * replacement_hours) / hazard))
    mean = np.expm1(hazard * (9.0 + 2 * 1.8) / 3)
    assert count.mean() == pytest.approx(3 * mean, rel=0.02)
    assert count.var() == pytest.approx(3 * mean * (1 + mean), rel=0.03)


@pytest.mark.parametrize(("doubt", "bunching"), [(2.0, 0.0), (0.0, 2.0)])
def test_doubt_and_bunching_widen_the_draws_around_the_same_mean(doubt, bunching):
    even, wide = (
        drawn(
            20.0, 0.05, 40_000, replacement_s=900.0, doubt=scale * doubt, bunching=scale * bunching
        )
        for scale in (0, 1)
    )
    assert wide.mean() == pytest.approx(even.mean(), rel=0.01)
    assert wide.std() > 1.3 * even.std()


def test_doubt_of_a_rate_lowers_the_risk_as_in_a_simulation():
    doubt, bunching = 1.5, 1.0
    random = np.random.default_rng(4)
    rate = np.ones(400_000)
    for variance in (doubt, bunching * (1 + 24 / 26)):
        rate = rate * random.gamma(1 / variance, variance, len(rate))
    simulated = float(np.mean(random.poisson(0.8 * 2.0 * rate) > 0))
    known = conditions(0.8, checkpoint_s=0.001, doubt=doubt, bunching=bunching)
    [found] = interruptions([2.0], known, seed=1)[1]
    assert found == pytest.approx(simulated, abs=0.02) and found < -np.expm1(-1.6) - 0.05


@pytest.mark.parametrize(
    ("work", "hazard", "sd", "changes"),
    [
        (1.0, 0.0, "startup_log_sd", {"startup_s": 100.0}),
        (50.0, 0.2, "checkpoint_log_sd", {"checkpoint_s": 60.0}),
    ],
)
def test_uncertain_start_up_and_checkpoints_are_drawn(work, hazard, sd, changes):
    sure, unsure = (drawn(work, hazard, **changes, **{sd: value}) for value in (0.0, 0.5))
    assert unsure.std() > sure.std() and unsure.mean() == pytest.approx(sure.mean(), rel=0.01)
