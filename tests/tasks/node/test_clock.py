"""When a measurement stops: as early as its median is known, never without, and never later than its bounds."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasks.node import clock

SECONDS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40)
BOUNDS = {"least": 8, "most": 30, "most_s": 8.0}


@given(SECONDS)
def test_spread_and_error_do_not_depend_on_the_order_or_the_unit(seconds: list[float]) -> None:
    milliseconds = [1000 * one for one in reversed(seconds)]
    assert clock.spread(milliseconds) == pytest.approx(clock.spread(seconds))
    assert clock.median_error(milliseconds) == pytest.approx(clock.median_error(seconds))


@given(SECONDS, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_lie_within_the_values_and_rise(seconds: list[float], one: float, other: float) -> None:
    low, high = (clock.quantile(seconds, share) for share in sorted((one, other)))
    assert min(seconds) <= low <= high * (1 + 1e-12) <= max(seconds) * (1 + 1e-9)
    assert clock.quantile(seconds, 0.5) == pytest.approx(median(seconds))


@given(SECONDS, st.floats(0, 7.9))
def test_never_enough_before_the_least_steps_while_there_is_time(seconds: list[float], elapsed_s: float) -> None:
    assume(len(seconds) < BOUNDS["least"])
    assert not clock.enough(seconds, elapsed_s=elapsed_s, **BOUNDS)


@given(SECONDS)
def test_the_bounds_end_even_the_noisiest_run(seconds: list[float]) -> None:
    assert clock.enough(seconds, elapsed_s=8.0, **BOUNDS)
    assert clock.enough(seconds, least=1, most=len(seconds), elapsed_s=0.0, most_s=8.0)


def test_nothing_measured_is_never_enough() -> None:
    assert not clock.enough([], elapsed_s=100.0, **BOUNDS)


def test_a_quiet_run_ends_at_the_least_steps_and_a_noisy_one_goes_on() -> None:
    quiet = [0.200, 0.201, 0.199, 0.200, 0.202, 0.200, 0.198, 0.200]
    noisy = [0.200, 0.260, 0.180, 0.240, 0.210, 0.300, 0.190, 0.250]
    assert clock.enough(quiet, elapsed_s=1.6, **BOUNDS)
    assert not clock.enough(noisy, elapsed_s=1.8, **BOUNDS)


def test_one_hiccup_does_not_prolong_a_quiet_run() -> None:
    assert clock.enough([0.2] * 7 + [3.0], elapsed_s=4.4, **BOUNDS)


def test_a_run_that_still_warms_up_is_not_steady() -> None:
    warming = [0.30, 0.30, 0.30, 0.30, 0.20, 0.20, 0.20, 0.20, 0.20, 0.20, 0.20, 0.20]
    assert clock.drift(warming[:8]) > clock.DRIFT
    settling = [0.212, 0.212, 0.212, 0.212, 0.211, 0.203, 0.202, 0.202, 0.202, 0.202]
    assert not clock.enough(settling, elapsed_s=2.0, **BOUNDS)


@given(SECONDS)
def test_the_middle_half_leaves_out_as_much_above_as_below(seconds: list[float]) -> None:
    kept = clock.central(seconds)
    assert len(seconds) / 2 <= len(kept) <= len(seconds) / 2 + 2
    left_out = [one for i, one in enumerate(seconds) if i not in kept]
    middle = [seconds[i] for i in kept]
    below = sum(one <= min(middle) for one in left_out)
    above = sum(one >= max(middle) for one in left_out)
    assert below + above >= len(left_out) and len(left_out) % 2 == 0
    assert len(left_out) < 4 or (below and above)


def test_a_hiccup_is_not_in_the_middle() -> None:
    assert 2 not in clock.central([0.2, 0.21, 9.0, 0.2])


@given(SECONDS)
def test_blocks_never_go_beyond_the_most_steps(seconds: list[float]) -> None:
    assume(len(seconds) < 30)
    block = clock.next_block(seconds, least=8, most=30)
    assert 1 <= block <= 4 and len(seconds) + block <= 30


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert clock.slowest([[1.0, 2.0, 3.0], [2.0, 1.0, 4.0]]) == [2.0, 2.0, 4.0]
