"""Interruptions cost time, never give it back; on-demand machines are not interrupted; checkpoints by their bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.job.duration import (
    Conditions,
    best_interval,
    drawn_hours,
    expected_hours,
    expected_interruptions,
    interruption_risk,
)

FILE = Path(__file__).parents[4] / "shared" / "data" / "checkpoint_times.csv"
HOURS = st.floats(0.01, 200.0)
HAZARD = st.floats(0.0, 3.0)


def conditions(
    hazard: float,
    *,
    startup_s: float = 12.0,
    checkpoint_s: float = 3.6,
    replacement_s: float = 22.0,
    bunching: float = 0.0,
    **changes: float,
) -> Conditions:
    """Of one cluster; `bunching` is such that lasts."""
    known = Conditions.certain(
        np.array([hazard]),
        startup_s=startup_s,
        checkpoint_s=checkpoint_s,
        replacement_s=replacement_s,
    )
    return replace(
        known, **{name: np.array([one]) for name, one in (changes | {"lasting": bunching}).items()}
    )


def expected(work: float, hazard: float, **changes: float) -> float:
    return float(expected_hours([work], conditions(hazard, **changes))[0])


def drawn(
    work: float, hazard: float, *, draws: int = 200, seed: int = 0, **changes: float
) -> np.ndarray:
    """(draws,) hours of a job of certain work."""
    return drawn_hours(np.full((1, draws), work), [work], conditions(hazard, **changes), seed=seed)[
        0
    ]


def p90(work: float, hazard: float, **options: Any) -> float:
    return float(np.quantile(drawn(work, hazard, **options), 0.9))


@given(work=HOURS, hazard=HAZARD, more=st.floats(1.01, 10.0))
def test_expected_hours_grow_with_work_and_with_hazard(
    work: float, hazard: float, more: float
) -> None:
    base = expected(work, hazard)
    assert base >= work
    assert expected(work * more, hazard) > base
    assert expected(work, hazard * more) >= base


@given(work=HOURS, hazard=st.floats(0.01, 2.0), seed=st.integers(0, 5))
def test_the_90th_percentile_grows_with_work_and_with_hazard(
    work: float, hazard: float, seed: int
) -> None:
    one = p90(work, hazard, seed=seed)
    assert p90(work, 2 * hazard, seed=seed) >= one * 0.99  # one draw's quantile, not its limit
    assert p90(1.2 * work, hazard, seed=seed) > one


def test_on_demand_work_takes_its_time_and_the_start() -> None:
    assert (
        expected(2.0, 0.0, startup_s=36.0) == p90(2.0, 0.0, startup_s=36.0) == pytest.approx(2.01)
    )


def test_the_interval_is_dalys_and_the_mean_exact() -> None:
    """c = 18 s, one interruption an hour: Young says 0.1 h, Daly 0.0967 h; each piece takes e^s - 1 hours."""
    interval = float(best_interval(18 / 3600, 1.0))
    assert interval == pytest.approx(0.1 * (1 + 0.05 / 3 + 0.0025 / 9) - 0.005)
    many = np.ceil(10.0 / interval)
    hours = expected(10.0, 1.0, startup_s=0.0, checkpoint_s=18.0, replacement_s=0.0)
    assert hours == pytest.approx(many * np.expm1((10.0 + (many - 1) * 0.005) / many))


@pytest.mark.parametrize("hazard", [0.05, 0.5, 2.0, 20.0])
def test_drawn_hours_have_the_expected_mean(hazard: float) -> None:
    hours = drawn(3.0, hazard, draws=20_000, seed=3, replacement_s=300.0)
    assert float(hours.mean()) == pytest.approx(
        expected(3.0, hazard, replacement_s=300.0), rel=0.01
    )
    assert float(hours.min()) >= 3.0
    assert np.array_equal(hours, drawn(3.0, hazard, draws=20_000, seed=3, replacement_s=300.0))


def test_rare_interruptions_leave_most_jobs_alone() -> None:
    hours = drawn(1.0, 0.04, draws=1000, replacement_s=3600.0)
    assert np.mean(hours > np.median(hours) + 0.5) == pytest.approx(0.04, abs=0.01)


@pytest.mark.parametrize(("doubt", "bunching"), [(2.0, 0.0), (0.0, 2.0), (2.0, 2.0)])
def test_doubt_and_bunching_move_the_tail_and_not_the_mean(doubt: float, bunching: float) -> None:
    asked: dict[str, Any] = {"draws": 40_000, "seed": 1, "replacement_s": 900.0}
    even, wide = (
        drawn(20.0, 0.05, **asked),
        drawn(20.0, 0.05, doubt=doubt, bunching=bunching, **asked),
    )
    assert float(wide.mean()) == pytest.approx(float(even.mean()), rel=0.01)
    assert float(wide.std()) > 1.3 * float(even.std())


def test_start_up_and_checkpoints_are_drawn_where_they_are_uncertain() -> None:
    quantile = 1 + 100 * np.exp(0.3 * 1.2816 - 0.045) / 3600
    assert p90(1.0, 0.0, startup_s=100.0, startup_log_sd=0.3) == pytest.approx(quantile, rel=1e-3)
    certain, uncertain = (
        drawn(50.0, 0.2, checkpoint_s=60.0, checkpoint_log_sd=sd) for sd in (0.0, 0.5)
    )
    assert uncertain.std() > certain.std()


def risk(work: float, hazard: float, seed: int = 1, **changes: float) -> float:
    return float(
        interruption_risk([work], conditions(hazard, checkpoint_s=0.001, **changes), seed=seed)[0]
    )


@pytest.mark.parametrize("work", [0.1, 1.0, 10.0])
def test_the_risk_of_a_known_rate_is_that_of_a_poisson_process(work: float) -> None:
    assert risk(work, 0.5) == pytest.approx(-np.expm1(-0.5 * work), rel=1e-3)
    assert risk(work, 0.0, doubt=2.0) == 0.0


@pytest.mark.parametrize(("doubt", "bunching"), [(1.0, 0.0), (0.0, 2.0), (1.5, 1.0)])
def test_a_rate_in_doubt_spares_more_jobs_than_its_mean(doubt: float, bunching: float) -> None:
    random = np.random.default_rng(4)
    rate = np.ones(400_000)
    for variance in (doubt, bunching):
        rate = rate * (random.gamma(1 / variance, variance, len(rate)) if variance else 1.0)
    simulated = float(np.mean(random.poisson(0.8 * 2.0 * rate) > 0))
    found = risk(2.0, 0.8, seed=2, doubt=doubt, bunching=bunching)
    assert found == pytest.approx(simulated, abs=0.02) and found < -np.expm1(-1.6) - 0.05


@given(work=st.floats(0.01, 50.0), hazard=st.floats(0.001, 2.0))
def test_a_job_expects_more_interruptions_than_it_risks_one(work: float, hazard: float) -> None:
    count = float(expected_interruptions([work], conditions(hazard, checkpoint_s=0.001))[0])
    assert 0 < risk(work, hazard) <= 1 and count >= risk(work, hazard) * (1 - 1e-9)
    hours = drawn(work, hazard, draws=400, seed=3, replacement_s=0.0, checkpoint_s=1e-6)
    assert count >= hazard * work * (1 - 1e-9) and np.isfinite(hours).all()


@given(cost=st.floats(1e-4, 0.5), hazard=st.floats(1e-4, 5.0), more=st.floats(1.01, 5.0))
def test_the_interval_is_near_the_one_of_least_hours(
    cost: float, hazard: float, more: float
) -> None:
    """Hours for one of work: (e^(h (I + c)) - 1) / (h I), exact for memoryless interruptions; Daly's is within 3 %."""

    def hours(interval: np.ndarray) -> np.ndarray:
        return np.expm1(hazard * (interval + cost)) / (hazard * interval)

    interval = float(best_interval(cost, hazard))
    least = float(np.nanmin(hours(np.geomspace(1e-3, 20.0, 4000) / hazard)))
    if cost * hazard <= 1:
        assert float(hours(np.array([interval]))[0]) <= 1.03 * least
        assert float(best_interval(cost, more * hazard)) <= interval * (1 + 1e-9)
