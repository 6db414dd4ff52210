"""Real hosts on this machine: they reach each other at their rate, keep to their share, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from models.cloud import Cluster
from tasks.providers import local_catalogue, local_cpu
from tasks.providers.base import NoCapacity, NotSupported, ProviderError
from tasks.providers.local import LocalProvider
from tasks.providers.local_cluster import LocalCluster
from tasks.providers.local_hosts import Isolation, detect
from tasks.providers.local_processes import hosts, of_environment

pytestmark = pytest.mark.local

HERE = Path(__file__).parent
ISOLATION = detect()
SHARES = local_cpu.detect()
SHARE = 1.0 if SHARES.why_not else 0.3  # whole cores are all that an ordinary user can enforce
needs_network = pytest.mark.skipif(not ISOLATION.namespaces, reason=f"no namespaces: {ISOLATION.why_not}")
needs_quota = pytest.mark.skipif(bool(SHARES.why_not), reason=f"no CPU quotas: {SHARES.why_not}")


@dataclass(frozen=True, kw_only=True)
class Spec:
    cores: float = SHARE
    memory_gib: float = 1.0
    bandwidth_gbps: float = 0.2
    usd_per_hour: float = 0.036
    spot_usd_per_hour: float = 0.018
    spot_interruptions_per_hour: float = 0.0


TYPES = {
    "narrow": Spec(),
    "tenth": Spec(cores=0.1),
    "wide": Spec(bandwidth_gbps=1.0),
    "hunted": Spec(spot_interruptions_per_hour=36_000.0),  # lives a tenth of a second
}


def provider(home: Path, kind: str = "") -> LocalProvider:
    made = LocalProvider(home, TYPES, HERE / "standin" / "node", sys.executable)
    if kind:
        made._catalogue.isolation = Isolation(kind=kind)
    return made


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalProvider]:
    """A provider on a machine that says it is large: other hosts of this machine are none of the test's business."""
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: 64.0)
    made = provider(tmp_path)
    yield made
    made.reap(datetime.now(UTC), all_of_them=True)


def cluster(local: LocalProvider, *names: str, market: str = "on-demand") -> Cluster:
    offers = {(one.instance_type.name, one.market): one for one in local.offers(datetime.now(UTC))}
    return Cluster(members=tuple(offers[name, market] for name in names))


def wait_for(answer: Callable[[], Any], within_s: float = 20.0) -> Any:
    until = time.monotonic() + within_s
    while not (value := answer()):
        assert time.monotonic() < until, f"not within {within_s} s: {answer}"
        threading.Event().wait(0.01)
    return value


def ready(running: LocalCluster) -> list[dict[str, Any]]:
    files = [running.mailbox / f"node-{index}" / "ready.json" for index in range(len(running.addresses))]
    wait_for(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def ask(running: LocalCluster, node: int, **job: Any) -> dict[str, Any]:
    """Give a node its next job and wait for the answer."""
    folder = running.mailbox / f"node-{node}"
    number = len(list(folder.glob("job-*.json")))
    (folder / ".job").write_text(json.dumps(job))
    (folder / ".job").rename(folder / f"job-{number}.json")
    answer = folder / f"answer-{number}.json"
    wait_for(answer.exists)
    return dict(json.loads(answer.read_text()))


def best(measure: Callable[[], float], enough: float) -> float:
    """The highest of up to five tries: others on the machine can take from a rate or a share, never add to it."""
    highest = 0.0
    for _ in range(5):
        highest = max(highest, measure())
        if highest >= enough:
            break
    return highest


def rate_gbps(running: LocalCluster, sender: int, receiver: int) -> float:
    size = 10_000_000
    answer = ask(running, sender, kind="send", address=running.addresses[receiver], count=size)
    return float(size * 8 / answer["seconds"] / 1e9)


def share(running: LocalCluster, seconds: float = 0.6) -> float:
    return float(ask(running, 0, kind="burn", seconds=seconds)["share"])


def left_over(local: LocalProvider) -> list[str]:
    """What should not be there after an end: processes, marked hosts, CPU groups, links."""
    store = local._store
    found = [f"process {process.pid}" for process, _ in of_environment("PYTHONPATH", store.root)]
    found += [str(mark) for mark in hosts() if mark.home == store.token]
    return found + [str(group) for group in SHARES.groups(store.prefix)]


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


@needs_network
@pytest.mark.parametrize("kind", ["root", "user"])
def test_hosts_reach_each_other_at_the_slower_ones_rate_in_both_directions(local: LocalProvider, kind: str) -> None:
    if kind == "root" and ISOLATION.kind != "root":
        pytest.skip("not root")
    local._catalogue.isolation = Isolation(kind=kind)
    before = links()
    with local.acquire(cluster(local, "narrow", "wide"), lease_id="pair", deadline_s=60, seed=1) as running:
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
def test_hosts_that_are_measured_at_once_are_kept_on_cores_of_their_own(local: LocalProvider) -> None:
    def cores() -> list[set[int]]:
        groups = [local._catalogue.shares.group(running._name(index)) for index in range(2)]
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
    local._catalogue.shares = local_cpu.Affinity("as an ordinary user")
    local._catalogue._specs |= {"whole": Spec(cores=1.0), "all": Spec(cores=float(os.cpu_count() or 1))}
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
        assert not [name for name in ready(running)[0]["environment"] if name.startswith(("AWS_", "SRIFT_"))]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_lease_nothing_is_left_but_the_mailbox(
    local: LocalProvider, failure: type[BaseException]
) -> None:
    with (
        pytest.raises(failure),
        local.acquire(cluster(local, "narrow"), lease_id="broken", deadline_s=60, seed=1) as running,
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


def test_hosts_that_cannot_start_leave_nothing(local: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(type(local._catalogue.shares), "add", refuse)
    with (
        pytest.raises(ProviderError, match="not permitted"),
        local.acquire(cluster(local, "narrow"), lease_id="stillborn", deadline_s=60, seed=1),
    ):
        pass
    assert left_over(local) == [] and local.leases() == [] and local.ended() == []


def test_a_full_disk_is_told_before_anything_starts(local: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(local._store), "write", full)
    with (
        pytest.raises(ProviderError, match=r"nothing was started.*No space"),
        local.acquire(cluster(local, "narrow"), lease_id="full", deadline_s=60, seed=1),
    ):
        pass
    assert left_over(local) == [] and local._store.ids() == []


@needs_network
def test_a_revoked_host_is_interrupted_and_an_agent_that_ends_is_not(local: LocalProvider) -> None:
    with local.acquire(cluster(local, "narrow", "wide"), lease_id="fate", deadline_s=60, seed=1) as running:
        ready(running)
        running.revoke(1)
        first, second = running.nodes()
        assert first.alive
        assert (second.alive, second.interrupted) == (False, True) and "wide" in second.reason
        (running.mailbox / "node-0" / "job-0.json").write_text(json.dumps({"kind": "leave", "status": 3}))
        wait_for(lambda: not running.nodes()[0].alive)
        left = running.nodes()[0]
        assert not left.interrupted and "exit status 3" in left.reason and "leaving as told" in left.reason
        running.revoke(0)
        assert not running.nodes()[0].interrupted, "what had ended by itself was not revoked"
    assert left_over(local) == []


def test_the_spot_market_takes_hosts_away(local: LocalProvider) -> None:
    spot = cluster(local, "hunted", market="spot")
    with local.acquire(spot, lease_id="spot", deadline_s=60, seed=1) as running:
        wait_for(lambda: running.nodes()[0].interrupted)
        assert "spot market" in running.nodes()[0].reason
    with local.acquire(cluster(local, "hunted"), lease_id="kept", deadline_s=60, seed=1) as running:
        ready(running)
        assert running.nodes()[0].alive and not running._revocations


def test_two_controllers_share_the_machine_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@needs_network
def test_two_leases_at_once_do_not_meet(local: LocalProvider) -> None:
    both = cluster(local, "narrow")
    with (
        local.acquire(both, lease_id="left", deadline_s=60, seed=1) as left,
        local.acquire(both, lease_id="right", deadline_s=60, seed=1) as right,
    ):
        ready(left), ready(right)
        assert left.addresses == right.addresses
        assert {lease.lease_id for lease in local.leases()} == {"left", "right"}
        right.release()
        assert left.nodes()[0].alive


CONTROLLER = """
import sys, threading
from datetime import UTC, datetime
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from models.cloud import Cluster
from tests.local import test_local_provider as here
local = here.provider(Path(sys.argv[1]))
here.local_catalogue.most_cores = lambda: 64.0
members = [one for one in local.offers(datetime.now(UTC)) if one.instance_type.name == "narrow"][:1]
members *= 2 if here.ISOLATION.namespaces else 1
with local.acquire(Cluster(members=tuple(members)), lease_id="orphan", deadline_s=60, seed=1) as running:
    here.ready(running)
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_what_a_killed_controller_leaves_is_reaped_and_its_mailbox_kept(local: LocalProvider, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(HERE.parent.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "ready\n"
        now = datetime.now(UTC)
        assert local.reap(now) == [], "a live controller's lease was touched"
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
        (local._store.directory("lost") / "lease.json").write_text('{"lease_id": "lo')  # torn
        [sentence] = local.reap(datetime.now(UTC))
        assert "lost" in sentence and left_over(local) == []


def test_a_loopback_host_runs_alone_and_its_orphans_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: 64.0)
    local = provider(tmp_path, "none")
    with (
        pytest.raises(NotSupported, match="network of their own"),
        local.acquire(cluster(local, "narrow", "narrow"), lease_id="pair", deadline_s=60, seed=1),
    ):
        pass
    with local.acquire(cluster(local, "narrow"), lease_id="alone", deadline_s=60, seed=1) as running:
        assert ready(running)[0]["address"] == "127.0.0.1"
        with (
            pytest.raises(NoCapacity, match="one at a time"),
            local.acquire(cluster(local, "narrow"), lease_id="second", deadline_s=60, seed=1),
        ):
            pass
    assert left_over(local) == []
