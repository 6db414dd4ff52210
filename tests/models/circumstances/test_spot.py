"""Interruptions cost time, never give it back; on-demand machines are not interrupted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.circumstances.interrupted import best_interval, hours_given
from models.circumstances.spot import checkpoint_seconds, drawn_hours, expected_hours, job_time

HOURS = st.floats(0.01, 200.0)
HAZARD = st.floats(0.0, 3.0)


@given(work=HOURS, hazard=HAZARD, more=st.floats(1.01, 10.0))
def test_expected_hours_grow_with_work_and_with_hazard(work: float, hazard: float, more: float) -> None:
    base = float(expected_hours(work, hazard))
    assert base >= work
    assert float(expected_hours(work * more, hazard)) > base
    assert float(expected_hours(work, hazard * more)) >= base


@given(work=HOURS, hazard=st.floats(0.01, 2.0), seed=st.integers(0, 5))
def test_the_90th_percentile_grows_with_work_and_with_hazard(work: float, hazard: float, seed: int) -> None:
    p90 = job_time([work, work, 1.2 * work], [hazard, 2 * hazard, hazard], [1.0, 1.0, 1.0], seed=seed).hours_p90
    assert p90[1] >= p90[0] * 0.99  # one draw's quantile, not its limit
    assert p90[2] > p90[0]


def test_on_demand_work_takes_its_time_and_the_start() -> None:
    job = job_time([2.0], [0.0], [0.5], startup_s=36.0)
    assert job.hours[0] == job.hours_p90[0] == pytest.approx(2.01)
    assert job.usd[0] == pytest.approx(1.005)


def test_the_interval_is_dalys_and_the_mean_exact() -> None:
    """c = 18 s, one interruption an hour: Young says 0.1 h, Daly 0.0967 h; each piece takes e^s - 1 hours."""
    interval = float(best_interval(18 / 3600, 1.0))
    assert interval == pytest.approx(0.1 * (1 + 0.05 / 3 + 0.0025 / 9) - 0.005)
    hours = float(expected_hours(10.0, 1.0, startup_s=0.0, checkpoint_s=18.0, replacement_s=0.0))
    many = np.ceil(10.0 / interval)
    assert hours == pytest.approx(many * np.expm1((10.0 + (many - 1) * 0.005) / many))


@pytest.mark.parametrize("hazard", [0.05, 0.5, 2.0, 20.0])
def test_drawn_hours_have_the_expected_mean(hazard: float) -> None:
    drawn = drawn_hours(np.full((1, 20_000), 3.0), np.array([[hazard]]), seed=3, replacement_s=300.0)
    assert float(drawn.mean()) == pytest.approx(float(expected_hours(3.0, hazard, replacement_s=300.0)), rel=0.01)
    assert float(drawn.min()) >= 3.0


def test_rare_interruptions_leave_most_jobs_alone() -> None:
    job = job_time([1.0], [0.04], [1.0], draws=1000, replacement_s=3600.0)
    quiet = np.median(job.drawn_hours)
    assert np.mean(job.drawn_hours > quiet + 0.5) == pytest.approx(0.04, abs=0.01)


def test_an_unknown_price_stays_unknown() -> None:
    job = job_time([1.0, 1.0], [0.1, 0.1], [np.nan, 1.0])
    assert np.isnan(job.usd[0]) and np.isnan(job.usd_p90[0]) and job.usd[1] > 0


def test_the_same_seed_gives_the_same_hours() -> None:
    first, second = (job_time([5.0], [1.0], [1.0], seed=4).drawn_hours for _ in range(2))
    assert np.array_equal(first, second)


def test_checkpoints_take_longer_the_more_there_is_to_write() -> None:
    assert checkpoint_seconds(500e6) == pytest.approx(13.6)


def test_doubt_and_bunching_move_the_tail_and_not_the_mean() -> None:
    work, hazard = np.full((1, 40_000), 20.0), np.array([[0.05]])
    even = drawn_hours(work, hazard, seed=1, replacement_s=900.0)
    for doubt, bunching in ((2.0, 0.0), (0.0, 2.0), (2.0, 2.0)):
        wide = drawn_hours(work, hazard, seed=1, replacement_s=900.0, doubt=doubt, bunching=bunching)
        assert float(wide.mean()) == pytest.approx(float(even.mean()), rel=0.01)
        assert float(wide.std()) > 1.3 * float(even.std())


def test_start_up_and_checkpoints_are_drawn_where_they_are_uncertain() -> None:
    safe = job_time([1.0], [0.0], [1.0], startup_s=100.0, startup_log_sd=0.3)
    assert safe.hours[0] == pytest.approx(1 + 100 / 3600)
    assert safe.hours_p90[0] == pytest.approx(1 + 100 * np.exp(0.3 * 1.2816 - 0.045) / 3600, rel=1e-3)
    slow = [job_time([50.0], [0.2], [1.0], checkpoint_s=60.0, checkpoint_log_sd=sd) for sd in (0.0, 0.5)]
    assert slow[0].hours[0] == slow[1].hours[0]
    assert slow[1].drawn_hours.std() > slow[0].drawn_hours.std()


def test_stated_hours_are_those_of_jobs_interrupted_at_random() -> None:
    """The formula against `hours_given` at memoryless moments: mean within 1 %, 90th percentile exceeded by a tenth."""
    rng = np.random.default_rng(8)
    work, hazard, start, write, replace = 12.0, 0.3, 90.0, 30.0, 120.0
    stated = job_time([work], [hazard], [1.0], draws=4000, startup_s=start, checkpoint_s=write, replacement_s=replace)
    actual = np.array(
        [
            hours_given(
                np.cumsum(rng.exponential(1 / hazard, 60)),
                work_hours=work,
                interval_hours=float(best_interval(write / 3600, hazard)),
                startup_hours=start / 3600,
                checkpoint_hours=write / 3600,
                replacement_hours=replace / 3600,
            )
            for _ in range(3000)
        ]
    )
    assert float(actual.mean()) == pytest.approx(float(stated.hours[0]), rel=0.01)
    assert 0.08 <= float((actual > stated.hours_p90[0]).mean()) <= 0.12
