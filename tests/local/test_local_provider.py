"""Real hosts on this machine: they reach each other at their rate, keep to their share, and leave
nothing behind.
"""

import pytest

from tasks.providers.local.network import Isolation
from tests.local.hosts import (
    ISOLATION,
    acquired,
    best,
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
    local, kind, monkeypatch
):
    if kind == "root" and ISOLATION.kind != "root":
        pytest.skip("not root")
    local.isolation = Isolation(kind=kind)
    monkeypatch.setenv("SRIFT_HOME", "secret")
    before = links()
    with acquired(local, "narrow", "wide") as running:
        assert [report["links"] for report in ready(running)] == [["lo", "eth0"], ["lo", "eth0"]]
        for found in ready(running):
            assert found["held"] and "SRIFT_HOME" not in found["environment"]
            assert found["bytes"] == [2**30] * 2
        assert links() == before
        there = best(lambda: rate_gbps(running, 0, 1), enough=0.17)
        back = best(lambda: rate_gbps(running, 1, 0), enough=0.17)
        assert 0.17 <= there < 0.21
        assert 0.17 <= back < 0.21
        assert all(node.alive for node in running.nodes())
    assert left_over(local) == []
    assert links() == before


@needs_quota
def test_a_share_is_in_force_between_settle_and_unsettle_only(local):
    with acquired(local, "tenth") as running:
        free = best(lambda: share(running), enough=0.2)
        running.settle()
        settled = best(lambda: share(running), enough=0.085)
        running.unsettle()
        again = best(lambda: share(running), enough=0.2)
    assert settled == pytest.approx(0.1, rel=0.15)
    assert min(free, again) >= 0.2
