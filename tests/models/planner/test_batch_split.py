"""The split sums exactly, finishes together, and no sample is better placed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.planner.batch_split import finish_together, global_batches


def finish_s(lines: Sequence[tuple[float, float]], batches: Sequence[int]) -> float:
    """Seconds until the slowest machine is done with its share."""
    return max(a + k * batch for (a, k), batch in zip(lines, batches, strict=True))


LINE = st.tuples(st.floats(0.0, 0.2), st.floats(1e-4, 0.5))
LINES = st.lists(LINE, min_size=1, max_size=6)


@given(lines=LINES, total=st.integers(1, 2000))
def test_shares_sum_exactly_and_no_single_sample_is_better_elsewhere(
    lines: list[tuple[float, float]], total: int
) -> None:
    shares = finish_together(lines, total)
    if shares is None:
        return
    assert sum(shares) == total and min(shares) >= 1
    finish = finish_s(lines, shares)
    for giver, taker in permutations(range(len(lines)), 2):
        moved = list(shares)
        moved[giver] -= 1
        moved[taker] += 1
        if moved[giver] >= 1:
            assert finish_s(lines, moved) >= finish * (1 - 1e-6)


@given(lines=st.lists(LINE, min_size=2, max_size=3), total=st.integers(2, 14))
def test_no_whole_split_at_all_finishes_earlier(lines: list[tuple[float, float]], total: int) -> None:
    shares = finish_together(lines, total)
    if shares is None:
        return
    all_splits = (s for s in product(range(1, total + 1), repeat=len(lines)) if sum(s) == total)
    assert finish_s(lines, shares) <= min(finish_s(lines, split) for split in all_splits) * (1 + 1e-6)


@given(lines=LINES, total=st.integers(1, 500))
def test_a_cluster_is_dropped_only_if_it_is_dominated(lines: list[tuple[float, float]], total: int) -> None:
    """Where a machine idles, the others alone finish no later than they would with it at one sample."""
    if finish_together(lines, total) is not None or total < len(lines):
        return
    tau = (total + sum(a / k for a, k in lines)) / sum(1 / k for _, k in lines)
    idle = min(range(len(lines)), key=lambda i: (tau - lines[i][0]) / lines[i][1])
    assert lines[idle][0] + lines[idle][1] * 1 >= tau * (1 - 1e-6)


def test_equal_machines_get_equal_shares_and_the_first_get_the_odd_samples() -> None:
    assert finish_together([(0.1, 0.01)] * 4, 64) == (16, 16, 16, 16)
    assert finish_together([(0.1, 0.01)] * 3, 64) == (22, 21, 21)


def test_a_machine_twice_as_fast_gets_twice_the_samples() -> None:
    assert finish_together([(0.0, 0.01), (0.0, 0.02)], 48) == (32, 16)


def test_a_slow_start_is_paid_for_with_fewer_samples() -> None:
    assert finish_together([(0.0, 0.01), (0.1, 0.01)], 50) == (30, 20)


def test_a_machine_without_work_is_no_candidate() -> None:
    assert finish_together([(0.0, 0.001), (5.0, 0.001)], 64) is None
    assert finish_together([(0.0, 0.01)] * 3, 2) is None


def test_devices_of_one_machine_share_its_line() -> None:
    assert finish_together([(0.0, 0.01), (0.0, 0.01)], 60, devices=(4, 1)) == (12, 12)
    assert finish_together([(0.0, 0.01)], 30, devices=(4,)) is None
    assert finish_together([(0.0, 0.01)], 30, devices=(0,)) is None
    assert finish_together([(0.0, 0.01), (0.0, 0.01)], 30, devices=(0, 1)) is None


@given(lines=st.lists(LINE, min_size=2, max_size=4), total=st.integers(8, 400), data=st.data())
def test_shares_of_several_devices_sum_exactly(
    lines: list[tuple[float, float]], total: int, data: st.DataObject
) -> None:
    devices = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=len(lines), max_size=len(lines)))
    shares = finish_together(lines, total, devices)
    assert shares is None or sum(d * b for d, b in zip(devices, shares, strict=True)) == total


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one of each a machine"):
        finish_together([(0.0, 1.0)], 4, devices=(1, 1))


def test_a_range_of_batches_is_walked_by_doubling() -> None:
    assert global_batches(96, 384) == (96, 192, 384)
    assert global_batches(100, 250) == (100, 200, 250)
    assert global_batches(64, 64) == (64,)
    with pytest.raises(ValueError, match="no range"):
        global_batches(10, 5)
