"""Leases on disk, and what the reaper may and may not end."""

import math
import os
import subprocess
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest

from tasks.providers.base import Lease, LeaseUnreadable, NotSwept, ProviderError
from tasks.providers.local.cluster import interrupted_after_s
from tasks.providers.local.leases import LeaseStore
from tasks.providers.local.processes import end
from tasks.providers.local.provider import LocalProvider
from tests.fakes import offer
from tests.warehouse.builders import NOON

LEASE = Lease(
    lease_id="one",
    cluster="1xlc.small",
    market="spot",
    usd_per_hour=0.36,
    started_at=NOON,
    deadline_at=NOON + timedelta(hours=1),
    controller=2**30,  # no process has this PID
)


@pytest.fixture
def sleeper(tmp_path):
    """A process of the lease `one`."""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}/leases/one/code"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        yield psutil.Process(process.pid)
        process.kill()


def provider(home, *leases, alive=False):
    """A provider with `leases`, whose controllers have died unless `alive`."""
    made = LocalProvider(home, {}, home, "python3")
    with made.store.locked():
        for lease in leases:
            made.store.create(lease)
            if not alive:
                made.store.release(lease.lease_id)
    return made


@pytest.fixture
def local(tmp_path):
    return provider(tmp_path, LEASE)


def file_of(local):
    return local.store.directory("one") / "lease.json"


def record_of(local, text):
    """A record in the mailbox of a lease whose file is lost."""
    record = local.store.mailbox("one") / "node-0/records/r.json"
    record.parent.mkdir(parents=True)
    record.write_text(text)
    file_of(local).unlink()
    return record


def test_a_lease_comes_back_as_it_was_written(tmp_path):
    written = replace(LEASE, ended_at=NOON, usd=0.1)
    store = provider(tmp_path, written).store
    assert store.read("one") == written and store.read("two") is None
    with pytest.raises(ProviderError, match="exists already"):
        store.create(written)


def test_a_lease_is_on_the_disk_before_it_takes_its_name(local, monkeypatch):
    seen, path = [], file_of(local)
    monkeypatch.setattr(
        "os.fsync",
        lambda handle: seen.append((os.fstat(handle).st_size, "reaped" in path.read_text())),
    )
    local.store.write(replace(LEASE, outcome="reaped"))
    assert seen == [(path.stat().st_size, False)]


def test_records_without_a_lease_are_kept_and_its_processes_ended(tmp_path, sleeper):
    local = provider(tmp_path, LEASE, replace(LEASE, lease_id="two"))
    record = record_of(local, "{}")
    (local.store.directory("two") / "lease.json").unlink()
    assert len(local.reap(NOON)) == 2
    assert local.store.ids() == ["one"] and record.exists() and sleeper.status() == "zombie"


@pytest.mark.parametrize("text", ["{", "[]", '{"lease_id": "one"}', "[" * 100_000, ""])
def test_an_unreadable_lease_is_reported_and_neither_ended_nor_deleted(local, text, monkeypatch):
    file = file_of(local)
    file.write_text(text)
    if not text:  # it cannot be opened
        file.unlink()
        file.mkdir()
    monkeypatch.setattr(local.store, "end", lambda *_: pytest.fail("its hosts were ended"))
    with pytest.raises(NotSwept, match=f"(?s)lease one: {file}.*srift reap --provider"):
        local.reap(NOON + timedelta(days=1))
    assert file.exists()
    [found] = local.leases()
    assert (found.lease_id, found.usd_per_hour) == ("one", None)
    assert "cannot be read" in found.problem
    with pytest.raises(LeaseUnreadable):
        local.forget("one")


@pytest.mark.parametrize("name", ["", "../one", "a/b", "a:b", ".lock"])
def test_a_lease_id_cannot_lead_elsewhere(tmp_path, name):
    with pytest.raises(ProviderError, match="letters"):
        LeaseStore(tmp_path).directory(name)


def test_the_processes_of_a_lease_are_ended_and_its_dollars_counted(tmp_path, sleeper):
    local = provider(tmp_path, LEASE, replace(LEASE, lease_id="two"))
    first, second = local.reap(NOON + timedelta(minutes=10))
    assert "1 processes" in first and "0 processes" in second and sleeper.status() == "zombie"
    assert [lease.usd for lease in local.ended()] == [pytest.approx(0.06)] * 2


def test_nothing_is_paid_beyond_the_deadline_however_late_the_reaper(local):
    morning = NOON + timedelta(hours=9)
    assert [lease.usd_until(morning) for lease in local.leases()] == [pytest.approx(0.36)]
    local.reap(morning)
    assert [lease.usd for lease in local.ended()] == [pytest.approx(0.36)]


def test_a_recycled_process_number_is_left_alone(sleeper):
    stale = psutil.Process(sleeper.pid)
    stale._ident = (stale.pid, stale._ident[1] - 1)
    assert end([stale]) == [] and sleeper.is_running()


def test_a_live_controllers_lease_is_ended_only_at_its_deadline_in_any_container(tmp_path):
    local = provider(tmp_path, LEASE, alive=True)
    assert local.reap(NOON) == []
    assert [lease.controller_alive for lease in local.leases()] == [True]
    assert len(local.reap(LEASE.deadline_at)) == 1 and local.leases() == []


def test_leases_of_another_home_are_left_alone(tmp_path):
    here, there = provider(tmp_path / "here"), provider(tmp_path / "there", LEASE)
    assert here.reap(NOON + timedelta(days=1)) == []
    assert [lease.lease_id for lease in there.leases()] == ["one"]


def test_revocations_follow_the_hazard_and_the_seed():
    spot = replace(offer(), interruptions_per_hour=2.0)
    on_demand = replace(spot, market="on-demand", interruptions_per_hour=0.0)
    drawn = [interrupted_after_s(spot, f"7-{number}") for number in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(1800, rel=0.05)
    assert interrupted_after_s(on_demand, "7-0") == math.inf
    assert drawn[0] == interrupted_after_s(spot, "7-0")
