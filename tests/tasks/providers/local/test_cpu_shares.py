"""Quotas as the kernel reads them, in both versions of control groups, on a copy of their files."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.providers.local import cpu_shares
from tasks.providers.local.cpu_shares import CpuShares, detect, place, quota_cores


class Kernel:
    """A mount table that names one hierarchy, and the cgroup file of a process in /mine."""

    def __init__(self, folder, version):
        self.version, self.top = version, folder / "cgroup"
        self.mounts, self.group_file = folder / "mounts", folder / "own"
        (self.top / "mine").mkdir(parents=True)
        kind = "cgroup" if version == 1 else "cgroup2"
        self.mounts.write_text(f"tmpfs / tmpfs rw 0 0\ncgroup {self.top} {kind} rw,cpu,cpuacct 0 0")
        self.enter("/mine")

    def enter(self, group):
        self.group_file.write_text(f"{'1:cpu,cpuacct' if self.version == 1 else '0:'}:{group}\n")

    def limit(self, group, quota_us):
        if self.version == 1:
            (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (group / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} 100000\n")


@pytest.fixture(params=[1, 2])
def kernel(tmp_path, request, monkeypatch):
    made = Kernel(tmp_path, request.param)
    monkeypatch.setattr(cpu_shares, "_MOUNTS", made.mounts)
    monkeypatch.setattr(cpu_shares, "_OUR_GROUP", made.group_file)
    return made


def test_a_share_is_given_and_taken_back(kernel):
    shares = detect()
    assert shares == CpuShares(kernel.version, kernel.top / "mine")
    group = kernel.top / "mine/srift-a"

    def limits():
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares")
        files = files if kernel.version == 1 else ("cpu.max", "cpu.weight")
        return tuple(word for file in files for word in (group / file).read_text().split())

    shares.add("srift-a", [2**30])
    assert (group / "cgroup.procs").read_text() == str(2**30)
    shares.settle("srift-a", [], 0.2, {0})
    assert limits() == ("2000", "10000", "262144" if kernel.version == 1 else "10000")
    shares.settle("srift-a", [], None, {0})
    free = ("-1", "10000", "1024") if kernel.version == 1 else ("max", "10000", "100")
    assert limits() == free


def test_the_quotas_on_our_own_group_and_those_above_it_are_read(kernel):
    def cores(group="/mine"):
        quota_cores.cache_clear()
        kernel.enter(group)
        return quota_cores()

    assert cores() == math.inf
    kernel.limit(kernel.top / "mine", -1)
    assert cores() == math.inf
    kernel.limit(kernel.top, 200_000)
    assert cores() == 2.0
    kernel.limit(kernel.top / "mine", 150_000)
    assert cores() == 1.5
    assert cores("/as/the/host/calls/it") == 2.0


def test_a_share_too_small_for_a_short_period_gets_a_longer_period(tmp_path):
    shares = CpuShares(2, tmp_path)
    shares.add("srift-a", [])
    shares.settle("srift-a", [], 0.05, {0})
    quota, period = map(int, (tmp_path / "srift-a/cpu.max").read_text().split())
    assert quota >= 1000 and quota / period == pytest.approx(0.05)


@pytest.mark.parametrize(
    "mount, reason",
    [
        ("cgroup /proc cgroup rw,cpu 0 0", "/proc: "),
        ("tmpfs / tmpfs rw 0 0", "no cgroup hierarchy"),
    ],
)
def test_where_no_group_can_be_made_whole_cores_remain_and_the_reason_is_given(
    kernel, mount, reason
):
    kernel.mounts.write_text(mount)
    shares = detect()
    assert shares.why_not.startswith(reason)


def highest_load(shares, free):
    """The highest load of a core by shares that are held on some of the cores."""
    loads = dict.fromkeys(free, 0.0)
    for share, cores in zip(shares, place(shares, free), strict=True):
        for core in cores if len(cores) < len(free) else ():
            loads[core] += share / len(cores)
    return max(loads.values())


def test_shares_keep_clear_of_other_leases():
    assert place([0.4], {0: 0.8, 1: 0.2}) == [{1}]


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=12), st.integers(1, 8))
def test_every_share_gets_enough_cores_and_no_core_is_overloaded(shares, count):
    free = dict.fromkeys(range(count), 0.0)
    assert highest_load(shares, free) <= 1.0 + 1e-9
    for share, cores in zip(shares, place(shares, free), strict=True):
        assert len(cores) >= min(count, share) - 1e-6 and cores <= free.keys()
