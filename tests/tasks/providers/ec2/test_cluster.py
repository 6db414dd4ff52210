"""A running cluster of EC2: mirrored mailbox, notices, interruptions, replacements."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tasks.execution.mailbox import Mailbox
from tasks.node.record import write_json
from tasks.providers.ec2 import mailbox_s3 as ec2_mirror
from tasks.providers.ec2.cluster import Ec2Cluster
from tests.ec2_home import Home
from tests.fake_ec2 import SILENT, FakeAws, Fault
from tests.fake_s3 import ROLE, FakeS3


@pytest.fixture
def running(home: Home) -> Iterator[Ec2Cluster]:
    with home.acquire(home.two()) as cluster:
        yield cluster


def names(home: Home) -> list[str]:
    return [machine.instance_id for machine in home.world.alive()]


def test_what_nodes_upload_is_in_the_mailbox_and_what_is_written_there_reaches_every_node(
    home: Home, running: Ec2Cluster
) -> None:
    first, second = names(home)
    home.upload(first, "ready.json", {"address": "10.0.0.1"})
    home.upload(second, "records/r-1-000.json", {"run_id": "r-1-000"})
    write_json(running.mailbox / "plan.json", {"attempt": 1})
    (running.mailbox / "workloads").mkdir()
    (running.mailbox / "workloads" / "abc.py").write_text("x = 1\n")
    write_json(running.mailbox / "controller" / "envelopes.json", {"r-1-000": {}})
    assert running.mirror.sync()
    box = Mailbox(path=running.mailbox, nodes=2)
    assert (box.ready_of(0) > 0, box.recorded()) == (True, {"r-1-000"})
    for name in (first, second):
        manifest = home.reads(name, "manifest.json")["files"]
        assert set(manifest) == {"plan.json", "workloads/abc.py", "node.json"}
    puts = home.world.count("s3:PutObject")
    assert running.mirror.sync() and home.world.count("s3:PutObject") == puts


def test_the_manifest_comes_after_what_it_names(home: Home, running: Ec2Cluster) -> None:
    one = names(home)[0]
    write_json(running.mailbox / "plan.json", {"attempt": 1})
    home.world.faults = [
        Fault(action="s3:PutObject", code="AccessDenied", when=lambda words: "plan" in words["Key"])
    ]
    assert not running.mirror.sync()
    assert set(home.reads(one, "manifest.json")["files"]) == {"node.json"}
    assert running.mirror.sync()
    assert "plan.json" in home.reads(one, "manifest.json")["files"]


def test_half_an_answer_never_appears(home: Home, running: Ec2Cluster) -> None:
    home.upload(names(home)[0], "records/a.json", {"run_id": "a" * 100})
    home.world.s3.cut = 1
    assert not running.mirror.sync() and home.records() == set()
    assert running.mirror.sync() and home.records() == {"a"}
    [file] = running.mailbox.glob("node-0/records/*")
    assert json.loads(file.read_text()) == {"run_id": "a" * 100}


@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject"])
def test_a_store_that_fails_makes_nobody_silent(
    home: Home, running: Ec2Cluster, action: str
) -> None:
    box = Mailbox(path=running.mailbox, nodes=2)
    home.world.s3.skew_s = 3600.0
    for name in names(home):
        home.upload(name, "heartbeat.json", {"phase": "measuring"})
    running.mirror.sync()
    assert box.silent(running.now_unix()) == set()
    home.world.faults = [Fault(action=action, code=SILENT, times=999)]
    for _ in range(60):
        home.world.pass_s(1.0)
        for name in names(home):
            home.upload(name, "heartbeat.json", {"phase": "measuring"})
        running.mirror.sync()
    assert box.silent(running.now_unix()) == set()
    home.world.faults = []
    home.world.pass_s(60.0)
    running.mirror.sync()
    assert box.silent(running.now_unix()) == {0, 1}


def test_a_name_that_leads_elsewhere_is_left_where_it_is_and_a_stranger_is_not_heard(
    home: Home, running: Ec2Cluster
) -> None:
    before = sorted(home.path.rglob("*"))
    names_that_lead_elsewhere = (
        "../../../evil.json",
        "records/../../x.json",
        ".hidden",
        "a/b/c/d/e.json",
        "a\nb.json",
        "a:b.json",
        f"{ROLE}:i-0ffffffffffffffff/out/x.json",
    )
    for name in names_that_lead_elsewhere:
        home.upload(names(home)[0], name, {"evil": True})
    home.upload("i-0ffffffffffffffff", "records/x.json", {"run_id": "x"})
    assert running.mirror.sync()
    assert sorted(home.path.rglob("*")) == before


def test_an_upload_that_is_too_large_is_left_where_it_is(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_mirror, "MOST_BYTES", 100)
    with home.acquire(home.two()) as running:
        for name, size in (("fits", 100), ("large", 101)):
            home.upload(names(home)[0], f"records/{name}.json", b"x" * size)
        assert running.mirror.sync() and home.records() == {"fits"}
        assert home.world.count("s3:GetObject") == 1


def test_a_record_is_on_the_disk_before_it_takes_its_name(
    home: Home, running: Ec2Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.upload(names(home)[0], "records/a.json", b"x" * 77)
    seen: list[tuple[int, bool]] = []
    file = running.mailbox / "node-0" / "records" / "a.json"
    monkeypatch.setattr(
        "os.fsync", lambda handle: seen.append((os.fstat(handle).st_size, file.exists()))
    )
    assert running.mirror.sync() and file.exists() and seen == [(77, False)]


def test_a_store_that_does_not_answer_keeps_no_machine_alive(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_mirror, "POLL_S", 0.0)
    home.threaded, ended, asked = True, threading.Event(), threading.Event()
    home.provider = home.controller()
    heard: list[bool] = []
    terminate, listed = home.world._terminate_instances, home.world.s3.list_objects_v2

    def terminated(**words: Any) -> Any:
        answer = terminate(**words)
        ended.set()
        return answer

    def slow(**words: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            heard.append(ended.wait(10.0))
        return listed(**words)

    with home.acquire(home.two()) as running:
        home.upload(names(home)[0], "records/a.json", {"run_id": "a"})
        write_json(running.mailbox / "done.json", {})
        monkeypatch.setattr(
            FakeAws, "_terminate_instances", lambda self, **words: terminated(**words)
        )
        monkeypatch.setattr(FakeS3, "list_objects_v2", lambda self, **words: slow(**words))
        assert asked.wait(10.0)
    assert heard[0]
    assert home.records() == {"a"} and len(home.provider.ended()) == 1


def test_an_interruption_is_distinguished_from_a_failure_and_what_ec2_knows_no_more_is_gone(
    home: Home, running: Ec2Cluster
) -> None:
    first, second = names(home)
    home.world.interrupt(first)
    home.world.pass_s(6.0)
    assert [node.alive for node in running.nodes()] == [False, True]
    home.world.instances[second].end(home.world.now, "Client.InstanceInitiatedShutdown")
    home.world.pass_s(6.0)
    lost = running.nodes()
    assert [machine.alive for machine in lost] == [False, False]
    assert [machine.interrupted for machine in lost] == [True, False]
    assert all(machine.reason and "secret" not in machine.reason for machine in lost)
    del home.world.instances[second]
    home.world.pass_s(6.0)
    assert not running.nodes()[1].alive and running.nodes()[1].reason


def test_a_replacement_that_measures_a_run_again_overwrites_no_record(home: Home) -> None:
    with home.acquire(home.two()) as running:
        second = names(home)[1]
        home.upload(second, "records/a.json", {"run_id": "a", "by": 2})
        home.world.interrupt(second)
        assert running.replace(1)
        third = next(
            machine.instance_id for machine in home.world.alive() if machine.instance_id > second
        )
        home.upload(third, "records/a.json", b'{"run_id": "a", "b')
        assert running.mirror.sync() and running.mirror.sync()
    records = [
        file.read_text() for file in home.leases.mailbox("r-1").glob("node-*/records/a.json")
    ]
    assert sorted(records) == ['{"run_id": "a", "b', '{"run_id": "a", "by": 2}']


def test_what_aws_says_is_asked_for_every_few_seconds_and_silence_is_no_loss(
    home: Home, running: Ec2Cluster
) -> None:
    running.nodes()
    asked = home.world.count("ec2:DescribeInstances")
    for _ in range(10):
        running.nodes()
    assert home.world.count("ec2:DescribeInstances") == asked
    home.world.faults = [Fault(action="ec2:DescribeInstances", code=SILENT, times=2)]
    home.world.pass_s(6.0)
    assert [node.alive for node in running.nodes()] == [True, True]


def test_a_notice_counts_down_by_the_stores_clock(home: Home, running: Ec2Cluster) -> None:
    first, second = names(home)
    at = home.world.now.timestamp() + 110
    notice = {"kind": "interruption", "action": "terminate", "at": "", "seen_unix": at}
    home.upload(first, "notice.json", notice)
    home.upload(second, "notice.json", notice | {"kind": "rebalance"})
    home.world.pass_s(20.0)
    running.mirror.sync()
    leaving, warned = running.nodes()
    assert (leaving.alive, leaving.notice, leaving.leaving_s) == (True, "interruption", 100.0)
    assert (warned.alive, warned.notice, warned.leaving_s) == (True, "rebalance", None)
    home.world.instances[first].end(home.world.now, "Client.InstanceInitiatedShutdown")
    home.world.pass_s(6.0)
    assert running.nodes()[0].interrupted


def test_a_replacement_takes_the_rank_and_the_lost_ones_records_stay(home: Home) -> None:
    with home.acquire(home.two()) as running:
        first, second = names(home)
        for name in ("ready.json", "heartbeat.json", "records/a.json"):
            home.upload(second, name, {"run_id": "a"})
        home.world.interrupt(second)
        write_json(running.mailbox / "plan.json", {"attempt": 1})
        running.mirror.sync()
        assert running.replace(1)
        third = next(name for name in names(home) if name not in (first, second))
        assert running.addresses == ["10.0.0.1", home.world.instances[third].address]
        assert [node.alive for node in running.nodes()] == [True, True]
        assert not Mailbox(path=running.mailbox, nodes=2).reported(0, "10.0.0.1")
        home.upload(second, "records/b.json", {"run_id": "b"})
        running.mirror.sync()
        assert home.records() == {"a", "b"}
        assert home.reads(third, "node.json") == {"node": 1, "nodes": 2}
        assert "plan.json" in home.reads(third, "manifest.json")["files"]
    assert home.world.alive() == [] and home.world.bought() == 3


def test_a_silent_machine_that_does_not_end_is_not_replaced(
    home: Home, running: Ec2Cluster
) -> None:
    home.world.immortal = True
    assert not running.replace(1) and home.world.bought() == 2
    home.world.immortal = False
    home.world.faults = [
        Fault(action="ec2:TerminateInstances", code="RequestLimitExceeded", times=3)
    ]
    assert running.replace(1) and len(home.world.alive()) == 2


def test_a_lease_whose_records_cannot_be_fetched_is_not_given_out_until_they_are(
    home: Home,
) -> None:
    with home.acquire(home.two()):
        home.upload(names(home)[0], "records/last.json", {"run_id": "last"})
        home.world.faults = [Fault(action="s3:GetObject", code="InternalError", times=400)]
    assert home.world.alive() == [] and home.provider.ended() == []
    assert len(home.provider.leases()) == 1
    home.world.faults = []
    home.provider = home.controller()
    assert [one.lease_id for one in home.provider.ended()] == ["r-1"] and home.records() == {"last"}


def test_a_quiet_store_is_listed_every_five_seconds_and_a_new_file_goes_up_at_once(
    home: Home,
) -> None:
    with home.acquire(home.two(), deadline_s=7200.0) as running:
        for second in range(120):
            if second == 60:
                before = home.world.count("s3:ListBucket")
            assert running.mirror.poll()
            home.world.pass_s(1.0)
        assert home.world.count("s3:ListBucket") - before == 12
        write_json(running.mailbox / "plan.json", {"attempt": 2})
        running.mirror.poll()
        assert home.reads(names(home)[0], "plan.json") == {"attempt": 2}


def test_a_refused_replacement_leaves_the_rank_lost_and_may_be_asked_for_again(
    home: Home, running: Ec2Cluster
) -> None:
    home.world.interrupt(names(home)[1])
    home.world.capacity[("us-east-1c", "spot")] = 0
    assert not running.replace(1)
    assert [node.alive for node in running.nodes()] == [True, False]
    home.world.capacity[("us-east-1c", "spot")] = 1
    assert running.replace(1) and len(home.world.alive()) == 2
