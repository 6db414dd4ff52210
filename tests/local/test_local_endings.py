"""However a lease ends, nothing of it is left but its mailbox."""

import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from tasks.providers.base import NoCapacity, ProviderError
from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.processes import hosts
from tests.local.hosts import (
    HERE,
    SHARE,
    acquired,
    cluster,
    left_over,
    needs_network,
    post,
    provider,
    rate_gbps,
    ready,
    wait_for,
)

pytestmark = pytest.mark.local


def test_ctrl_c_in_a_lease_leaves_nothing_but_the_mailbox(local):
    with pytest.raises(KeyboardInterrupt), acquired(local, "narrow") as running:
        assert [lease.lease_id for lease in local.leases()] == ["lease"]
        assert running.usd_so_far() is not None
        raise KeyboardInterrupt
    assert left_over(local) == local.leases() == []
    [ended] = local.ended()
    assert ended.outcome == "released" and (ended.usd or 0) > 0
    assert (ended.mailbox / "node-0/ready.json").exists()
    local.forget("lease")
    assert local.ended() == [] and not ended.mailbox.exists()


@needs_network
def test_a_revoked_host_is_interrupted_and_an_agent_that_ends_is_not(local):
    with acquired(local, "narrow", "wide") as running:
        running.revoke(1)
        first, second = running.nodes()
        assert first.alive
        assert (second.alive, second.interrupted) == (False, True) and "wide" in second.reason
        post(running, 0, kind="leave", status=3)
        wait_for(lambda: not running.nodes()[0].alive)
        running.revoke(0)
        left = running.nodes()[0]
        assert not left.interrupted and "exit status 3" in left.reason
    assert left_over(local) == []


@needs_network
def test_another_host_takes_the_place_of_a_lost_one_where_there_is_one(local):
    with acquired(local, "wide", "narrow", lease_id="none") as running:
        running.revoke(1)
        assert not running.replace(1)
    with acquired(local, "wide", "replaced") as running:
        running.settle()
        for number in (3, 4):
            running.revoke(1)
            assert not running.nodes()[1].alive
            (running.mailbox / "node-1/ready.json").unlink()
            assert running.replace(1) and running.addresses == ["10.77.0.1", f"10.77.0.{number}"]
            ready(running)
            assert all(node.alive for node in running.nodes())
            assert rate_gbps(running, 0, 1) > 0
        running.settle()
    assert left_over(local) == []


def test_two_controllers_share_the_machine_until_it_is_full(tmp_path, monkeypatch):
    busy = sum(mark.cores for mark in hosts())
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: busy + 1.5 * SHARE)
    holder, other = provider(tmp_path / "one"), provider(tmp_path / "other")
    with acquired(holder, "narrow", lease_id="first") as running:
        for rival in (holder, other):
            lease = rival.acquire(
                cluster(holder, "narrow"),
                lease_id="next",
                deadline_s=60,
                seed=1,
                max_usd_per_hour=1e9,
            )
            with pytest.raises(NoCapacity, match="first"), lease:
                pass
        assert running.nodes()[0].alive
        assert other.leases() == [] and [lease.lease_id for lease in holder.leases()] == ["first"]
    with acquired(other, "narrow"):
        pass
    assert left_over(holder) == left_over(other) == []


CONTROLLER = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tasks.providers.local import catalogue
from tests.local import hosts
catalogue.most_cores = lambda: 64.0
names = ("narrow", "narrow") if hosts.ISOLATION.namespaces else ("narrow",)
with hosts.acquired(hosts.provider(Path(sys.argv[1])), *names, lease_id="orphan"):
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_what_a_killed_controller_leaves_is_reaped_and_its_mailbox_kept(local, tmp_path):
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(HERE.parent.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None and controller.stdout.readline() == "ready\n"
        now = datetime.now(UTC)
        assert local.reap(now) == [] and local.leases()[0].controller_alive
        controller.send_signal(signal.SIGKILL)
    assert left_over(local) != [] and not local.leases()[0].controller_alive
    with pytest.raises(ProviderError, match="has not ended"):
        local.forget("orphan")
    [sentence] = local.reap(now)
    assert "orphan" in sentence and "is gone" in sentence
    assert left_over(local) == local.leases() == local.reap(now) == []
    [ended] = local.ended()
    assert ended.outcome == "reaped" and (ended.mailbox / "node-0/ready.json").exists()


def test_a_lease_past_its_deadline_is_ended_under_its_controller(local):
    with acquired(local, "narrow") as running:
        [sentence] = local.reap(datetime.now(UTC) + timedelta(seconds=601))
        assert "deadline" in sentence and not running.nodes()[0].alive
        assert left_over(local) == []
    assert [ended.outcome for ended in local.ended()] == ["reaped"]
