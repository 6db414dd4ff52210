"""The largest entries without sorting: how many, and which."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.node.strategies.mstopk import largest


def energy(values):
    return float((values.double() ** 2).sum())


def gaussian(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [1000, 100_003])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("power", [1, 9])  # the ninth power has tails that hide all others
def test_the_count_is_exact_and_nearly_all_energy_is_picked(size, density, power):
    values, count = gaussian(size) ** power, max(1, int(density * size))
    picked = largest(values, count)
    assert len(picked.unique()) == len(picked) == count
    assert energy(values[picked]) >= 0.9 * energy(values.abs().topk(count).values)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60), st.integers(1, 80))
def test_what_is_left_is_not_much_larger(values, count):
    entries = torch.tensor(values)
    picked = largest(entries, count)
    assert len(picked.unique()) == len(picked) == min(count, len(values))
    left = entries.abs().clone()
    left[picked] = 0.0
    # thresholds lie within a millionth of the largest from each other
    assert left.max() <= entries[picked].abs().min() + 4e-6 * entries.abs().max()


def test_what_is_small_beside_one_large_entry_is_distinguished():
    values = gaussian(1_000_000) * 1e-6
    values[17] = 1.0
    rest = [place for place in largest(values, 10_000).tolist() if place != 17]
    assert len(rest) == 9999
    assert energy(values[rest]) >= 0.999 * energy(values.abs().topk(10_000).values[1:])
    table = torch.zeros(100_000)
    table[-900:] = 1e-6 * gaussian(900)
    assert set(range(99_100, 100_000)) <= set(largest(table, 1000).tolist())
    assert largest(torch.ones(5), 3).tolist() == [0, 1, 3]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_comes_first(wrong):
    values = gaussian(1000)
    values[[17, 800]] = wrong
    picked = largest(values, 5)
    assert len(picked) == 5 and {17, 800} <= set(picked.tolist())
    assert len(largest(torch.full((50,), wrong), 5)) == 5
