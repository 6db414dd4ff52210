"""Quotas as the kernel reads them, in both versions of control groups, on a copy of their files."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.providers.local.cpu_shares import (
    Affinity,
    CgroupsV1,
    CgroupsV2,
    detect,
    place,
    quota_cores,
)


def tree(tmp_path: Path, kind: str, options: str) -> Path:
    """A mount table that names one hierarchy below tmp_path, and the cgroup file of a process in /mine."""
    top = tmp_path / "cgroup"
    (top / "mine").mkdir(parents=True)
    (top / "cgroup.controllers").write_text("cpu memory\n")
    for folder in (top, top / "mine"):
        (folder / "cgroup.subtree_control").write_text("memory\n")
    (tmp_path / "mounts").write_text(
        f"tmpfs / tmpfs rw 0 0\ncgroup {top} {kind} rw,{options} 0 0\n"
    )
    (tmp_path / "own").write_text(f"{'1:cpu,cpuacct' if kind == 'cgroup' else '0:'}:/mine\n")
    return top


@pytest.mark.parametrize(
    ("cores", "quota", "period"), [(0.2, "2000", "10000"), (1.0, "10000", "10000")]
)
def test_version_1_gives_the_share_and_takes_it_back(
    tmp_path: Path, cores: float, quota: str, period: str
) -> None:
    top = tree(tmp_path, "cgroup", "cpu,cpuacct")
    shares = detect(tmp_path / "mounts", tmp_path / "own")
    assert isinstance(shares, CgroupsV1) and shares.base == top / "mine" and not shares.why_not
    group = shares.group("srift-a")
    shares.add("srift-a", [1234], cores)
    assert (group / "cgroup.procs").read_text() == "1234"
    shares.settle("srift-a", cores)
    assert (group / "cpu.cfs_quota_us").read_text() == quota
    assert (group / "cpu.cfs_period_us").read_text() == period
    assert int((group / "cpu.shares").read_text()) > 100 * 1024
    shares.settle("srift-a", None)
    assert (group / "cpu.cfs_quota_us").read_text() == "-1"
    assert (group / "cpu.shares").read_text() == "1024"


def test_version_2_hands_the_controller_down_and_gives_the_share(tmp_path: Path) -> None:
    top = tree(tmp_path, "cgroup2", "nsdelegate")
    shares = detect(tmp_path / "mounts", tmp_path / "own")
    assert isinstance(shares, CgroupsV2)
    assert (top / "mine" / "cgroup.subtree_control").read_text() == "+cpu"
    shares.add("srift-a", [1234], 0.4)
    shares.settle("srift-a", 0.4)
    assert (shares.group("srift-a") / "cpu.max").read_text() == "4000 10000"
    assert (shares.group("srift-a") / "cpu.weight").read_text() == "10000"
    shares.settle("srift-a", None)
    assert (shares.group("srift-a") / "cpu.max").read_text() == "max 10000"


@pytest.mark.parametrize("kind", ["cgroup", "cgroup2"])
def test_the_quotas_on_our_own_group_and_those_above_it_are_read(tmp_path: Path, kind: str) -> None:
    top = tree(tmp_path, kind, "cpu")

    def cores(own: str) -> float:
        quota_cores.cache_clear()
        (tmp_path / "own").write_text(f"{'1:cpu' if kind == 'cgroup' else '0:'}:{own}\n")
        return quota_cores(tmp_path / "mounts", tmp_path / "own")

    def limit(group: Path, quota_us: int) -> None:
        if kind == "cgroup":
            (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (group / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} 100000\n")

    assert cores("/mine") == math.inf
    limit(top / "mine", -1)
    assert cores("/mine") == math.inf
    limit(top, 200_000)
    assert cores("/mine") == 2.0
    limit(top / "mine", 150_000)
    assert cores("/mine") == 1.5
    assert cores("/as/the/host/calls/it") == 2.0


def test_a_share_too_small_for_a_short_period_gets_a_longer_one(tmp_path: Path) -> None:
    shares = CgroupsV2(tmp_path)
    shares.add("srift-a", [1], 0.05)
    shares.settle("srift-a", 0.05)
    quota, period = map(int, (shares.group("srift-a") / "cpu.max").read_text().split())
    assert quota >= 1000 and quota / period == pytest.approx(0.05)


def test_where_no_group_can_be_made_whole_cores_remain_and_the_reason_is_given(
    tmp_path: Path,
) -> None:
    tree(tmp_path, "cgroup", "cpu")
    (tmp_path / "mounts").write_text(
        "cgroup /proc cgroup rw,cpu 0 0\n"
    )  # a place where nothing can be made
    shares = detect(tmp_path / "mounts", tmp_path / "own")
    assert isinstance(shares, Affinity)
    assert shares.why_not.startswith("/proc: ")
    assert (
        shares.enforces(1.0)
        and shares.enforces(2)
        and not shares.enforces(0.4)
        and not shares.enforces(1.5)
    )
    (tmp_path / "mounts").write_text("tmpfs / tmpfs rw 0 0\n")
    assert "no cgroup hierarchy" in detect(tmp_path / "mounts", tmp_path / "own").why_not


TWO_CORES = {0: 0.0, 1: 0.0}


def loads(
    shares: list[float], placed: list[set[int]], before: dict[int, float]
) -> dict[int, float]:
    after = dict(before)
    for share, cores in zip(shares, placed, strict=True):
        for core in cores:
            after[core] += share / len(cores)
    return after


def test_no_core_is_promised_twice_by_any_cluster_that_fits_two_cores() -> None:
    for size in range(1, 5):
        for shares in combinations_with_replacement((0.2, 0.4, 0.8, 1.0), size):
            if sum(shares) <= 1.75:
                assert (
                    max(loads(list(shares), place(shares, TWO_CORES), TWO_CORES).values())
                    <= 1.0 + 1e-9
                )


def test_hosts_of_other_leases_are_kept_clear_of() -> None:
    assert place([0.4], {0: 0.8, 1: 0.2}) == [{1}]


def test_shares_that_do_not_pack_are_not_held_on_one_core() -> None:
    assert place([0.55, 0.55, 0.55], TWO_CORES) == [{0, 1}, {1}, {0, 1}]


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=12), st.integers(1, 8))
def test_those_held_on_a_core_never_ask_for_more_than_it_has(
    shares: list[float], count: int
) -> None:
    free = dict.fromkeys(range(count), 0.0)
    held = [
        (share, cores)
        for share, cores in zip(shares, place(shares, free), strict=True)
        if len(cores) < count
    ]
    assert (
        max(loads([share for share, _ in held], [cores for _, cores in held], free).values())
        <= 1.0 + 1e-9
    )


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6), st.integers(1, 8))
def test_every_share_gets_enough_cores_where_there_are_enough(
    shares: list[float], count: int
) -> None:
    for share, cores in zip(shares, place(shares, dict.fromkeys(range(count), 0.0)), strict=True):
        assert len(cores) >= min(count, share) - 1e-6 and cores <= set(range(count))
