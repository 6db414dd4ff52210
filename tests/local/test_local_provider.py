"""Real hosts on this machine: they reach each other at their rate, keep to their share, and leave nothing behind."""

from __future__ import annotations

import os

import pytest

from tasks.providers.base import NoCapacity
from tasks.providers.local import cpu_shares as local_cpu
from tasks.providers.local.network import Isolation
from tasks.providers.local.provider import LocalProvider
from tests.local.hosts import (
    ISOLATION,
    best,
    cluster,
    instance_type,
    left_over,
    links,
    needs_network,
    needs_quota,
    rate_gbps,
    ready,
    share,
)

pytestmark = pytest.mark.local


@needs_network
@pytest.mark.parametrize("kind", ["root", "user"])
def test_hosts_reach_each_other_at_the_slower_ones_rate_in_both_directions(
    local: LocalProvider, kind: str
) -> None:
    if kind == "root" and ISOLATION.kind != "root":
        pytest.skip("not root")
    local.isolation = Isolation(kind=kind)
    before = links()
    with local.acquire(
        cluster(local, "narrow", "wide"), lease_id="pair", deadline_s=60, seed=1
    ) as running:
        assert [one["links"] for one in ready(running)] == [["lo", "eth0"], ["lo", "eth0"]]
        assert links() == before, "something of ours stands in the machine's own network"
        there = best(lambda: rate_gbps(running, 0, 1), enough=0.17)
        back = best(lambda: rate_gbps(running, 1, 0), enough=0.17)
        assert 0.17 <= there < 0.21
        assert 0.17 <= back < 0.21
        assert all(node.alive for node in running.nodes())
    assert left_over(local) == []
    assert links() == before


@needs_quota
def test_a_share_is_in_force_between_settle_and_unsettle_only(local: LocalProvider) -> None:
    with local.acquire(cluster(local, "tenth"), lease_id="share", deadline_s=60, seed=1) as running:
        ready(running)
        free = best(lambda: share(running), enough=0.2)
        running.settle()
        settled = best(lambda: share(running), enough=0.085)
        running.unsettle()
        again = best(lambda: share(running), enough=0.2)
    assert settled == pytest.approx(0.1, rel=0.15)
    assert min(free, again) >= 0.2


@needs_quota
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: pinning changes nothing")
def test_hosts_that_are_measured_at_once_are_kept_on_cores_of_their_own(
    local: LocalProvider,
) -> None:
    def cores() -> list[set[int]]:
        groups = [local.shares.group(running._name(index)) for index in range(2)]
        return [
            set().union(*(os.sched_getaffinity(one.pid) for one in local_cpu.members(group)))
            for group in groups
            if group is not None
        ]

    both = cluster(local, "narrow", "narrow")
    with local.acquire(both, lease_id="pinned", deadline_s=60, seed=1) as running:
        ready(running)
        running.settle()
        settled = cores()
        running.unsettle()
        assert [len(one) for one in settled] == [1, 1] and settled[0] != settled[1]
        assert cores() == [os.sched_getaffinity(0)] * 2


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: pinning changes nothing")
def test_an_ordinary_users_whole_core_is_a_core_of_its_own(local: LocalProvider) -> None:
    local.shares = local_cpu.Affinity("as an ordinary user")
    local._specs |= {
        "whole": instance_type(cores=1.0),
        "all": instance_type(cores=float(os.cpu_count() or 1)),
    }
    with local.acquire(cluster(local, "whole"), lease_id="whole", deadline_s=60, seed=1) as running:
        assert ready(running)[0]["cores"] == 1
        with (
            pytest.raises(NoCapacity, match="whole cores"),
            local.acquire(cluster(local, "all"), lease_id="second", deadline_s=60, seed=1),
        ):
            pass


def test_nothing_of_the_controllers_settings_and_credentials_reaches_a_host(
    local: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not for you")
    monkeypatch.setenv("SRIFT_HOME", "nor this")
    with local.acquire(cluster(local, "narrow"), lease_id="bare", deadline_s=60, seed=1) as running:
        assert not [
            name for name in ready(running)[0]["environment"] if name.startswith(("AWS_", "SRIFT_"))
        ]
