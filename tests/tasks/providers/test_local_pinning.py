"""Hosts that are measured at once do not take each other's core."""

from __future__ import annotations

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from tasks.providers.local_pinning import place

TWO_CORES = {0: 0.0, 1: 0.0}


def loads(shares: list[float], placed: list[set[int]], before: dict[int, float]) -> dict[int, float]:
    after = dict(before)
    for share, cores in zip(shares, placed, strict=True):
        for core in cores:
            after[core] += share / len(cores)
    return after


def test_no_core_is_promised_twice_by_any_cluster_that_fits_two_cores() -> None:
    for size in range(1, 5):
        for shares in combinations_with_replacement((0.2, 0.4, 0.8, 1.0), size):
            if sum(shares) <= 1.75:
                assert max(loads(list(shares), place(shares, TWO_CORES), TWO_CORES).values()) <= 1.0 + 1e-9


def test_hosts_of_other_leases_are_kept_clear_of() -> None:
    assert place([0.4], {0: 0.8, 1: 0.2}) == [{1}]


def test_shares_that_do_not_pack_are_not_held_on_one_core() -> None:
    assert place([0.55, 0.55, 0.55], TWO_CORES) == [{0, 1}, {1}, {0, 1}]


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=12), st.integers(1, 8))
def test_those_held_on_a_core_never_ask_for_more_than_it_has(shares: list[float], count: int) -> None:
    free = dict.fromkeys(range(count), 0.0)
    held = [(share, cores) for share, cores in zip(shares, place(shares, free), strict=True) if len(cores) < count]
    assert max(loads([share for share, _ in held], [cores for _, cores in held], free).values()) <= 1.0 + 1e-9


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6), st.integers(1, 8))
def test_every_share_gets_enough_cores_where_there_are_enough(shares: list[float], count: int) -> None:
    for share, cores in zip(shares, place(shares, dict.fromkeys(range(count), 0.0)), strict=True):
        assert len(cores) >= min(count, share) - 1e-6 and cores <= set(range(count))
