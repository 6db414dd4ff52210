"""However a lease ends - orderly, by a crash, by the market - nothing of it is left but its
mailbox.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.providers.base import NoCapacity, ProviderError
from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.processes import hosts
from tasks.providers.local.provider import LocalProvider
from tests.local.hosts import (
    HERE,
    SHARE,
    cluster,
    left_over,
    needs_network,
    provider,
    rate_gbps,
    ready,
    wait_for,
)

pytestmark = pytest.mark.local


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_lease_nothing_is_left_but_the_mailbox(
    local: LocalProvider, failure: type[BaseException]
) -> None:
    with (
        pytest.raises(failure),
        local.acquire(
            cluster(local, "narrow"), lease_id="broken", deadline_s=60, seed=1
        ) as running,
    ):
        ready(running)
        assert [lease.lease_id for lease in local.leases()] == ["broken"]
        assert running.usd_so_far() == pytest.approx(0.0, abs=0.001)
        raise failure
    assert left_over(local) == []
    assert local.leases() == []
    [ended] = local.ended()
    assert ended.outcome == "released" and 0 < (ended.usd or 0) < 0.001
    assert (ended.mailbox / "node-0" / "ready.json").exists()
    local.forget("broken")
    assert local.ended() == [] and not ended.mailbox.exists()


@needs_network
def test_a_revoked_host_is_interrupted_and_an_agent_that_ends_is_not(local: LocalProvider) -> None:
    with local.acquire(
        cluster(local, "narrow", "wide"), lease_id="fate", deadline_s=60, seed=1
    ) as running:
        ready(running)
        running.revoke(1)
        first, second = running.nodes()
        assert first.alive
        assert (second.alive, second.interrupted) == (False, True) and "wide" in second.reason
        job = running.mailbox / "node-0" / "job-0.json"
        job.with_suffix(".beside").write_text(json.dumps({"kind": "leave", "status": 3}))
        job.with_suffix(".beside").rename(job)  # or the agent may read half of it
        wait_for(lambda: not running.nodes()[0].alive)
        left = running.nodes()[0]
        assert (
            not left.interrupted
            and "exit status 3" in left.reason
            and "leaving as asked" in left.reason
        )
        running.revoke(0)
        assert not running.nodes()[0].interrupted
    assert left_over(local) == []


@needs_network
def test_another_host_takes_the_place_of_a_lost_one_where_there_is_one(
    local: LocalProvider,
) -> None:
    pair = cluster(local, "wide", "narrow")
    with local.acquire(pair, lease_id="none", deadline_s=60, seed=1) as running:
        ready(running)
        running.revoke(1)
        assert not running.replace(1)
    pair = cluster(local, "wide", "replaced")
    with local.acquire(pair, lease_id="another", deadline_s=60, seed=1) as running:
        ready(running)
        running.settle()
        for number in (3, 4):
            running.revoke(1)
            assert not running.nodes()[1].alive
            (running.mailbox / "node-1" / "ready.json").unlink()
            assert running.replace(1) and running.addresses == ["10.77.0.1", f"10.77.0.{number}"]
            ready(running)
            assert all(node.alive for node in running.nodes())
            for job in (running.mailbox / "node-1").glob("*-*.json"):
                job.unlink()
            assert rate_gbps(running, 0, 1) > 0.05
        running.settle()
    assert left_over(local) == []


def test_two_controllers_share_the_machine_until_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = sum(mark.cores for mark in hosts())
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: busy + 1.5 * SHARE)
    one, other = provider(tmp_path / "one"), provider(tmp_path / "other")
    lone = cluster(one, "narrow")
    with one.acquire(lone, lease_id="first", deadline_s=60, seed=1) as running:
        ready(running)
        for rival in (one, other):
            with (
                pytest.raises(NoCapacity, match="first"),
                rival.acquire(lone, lease_id="second", deadline_s=60, seed=1),
            ):
                pass
        assert running.nodes()[0].alive
        assert other.leases() == [] and [lease.lease_id for lease in one.leases()] == ["first"]
    with other.acquire(lone, lease_id="second", deadline_s=60, seed=1) as running:
        ready(running)
    assert left_over(one) == left_over(other) == []


CONTROLLER = """
import sys, threading
from datetime import UTC, datetime
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from models.domain.cluster import Cluster
from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.cluster import draw_revocations
from tests.local import hosts as here
local = here.provider(Path(sys.argv[1]))
local_catalogue.most_cores = lambda: 64.0
members = [one for one in local.offers(datetime.now(UTC)) if one.instance_type.name == "narrow"][:1]
members *= 2 if here.ISOLATION.namespaces else 1
cluster = Cluster(members=tuple(members))
with local.acquire(cluster, lease_id="orphan", deadline_s=60, seed=1) as running:
    here.ready(running)
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_what_a_killed_controller_leaves_is_reaped_and_its_mailbox_kept(
    local: LocalProvider, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(HERE.parent.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "ready\n"
        now = datetime.now(UTC)
        assert local.reap(now) == []
        assert local.leases()[0].controller_alive
        controller.send_signal(signal.SIGKILL)
    assert left_over(local) != []
    assert not local.leases()[0].controller_alive
    with pytest.raises(ProviderError, match="still held"):
        local.forget("orphan")
    [sentence] = local.reap(now)
    assert "orphan" in sentence and "is gone" in sentence
    assert left_over(local) == [] and local.leases() == []
    assert local.reap(now) == []
    [ended] = local.ended()
    assert ended.outcome == "reaped" and (ended.mailbox / "node-0" / "ready.json").exists()


def test_a_lease_past_its_deadline_is_ended_under_its_controller(local: LocalProvider) -> None:
    with local.acquire(cluster(local, "narrow"), lease_id="late", deadline_s=60, seed=1) as running:
        ready(running)
        [sentence] = local.reap(datetime.now(UTC) + timedelta(seconds=61))
        assert "late" in sentence and "deadline" in sentence
        assert not running.nodes()[0].alive and left_over(local) == []
    [ended] = local.ended()
    assert ended.outcome == "reaped"


def test_processes_that_no_lease_tells_of_are_ended(local: LocalProvider) -> None:
    with local.acquire(cluster(local, "narrow"), lease_id="lost", deadline_s=60, seed=1) as running:
        ready(running)
        (local.store.directory("lost") / "lease.json").unlink()
        [sentence] = local.reap(datetime.now(UTC))
        assert "lost" in sentence and left_over(local) == []
