"""A running cluster of EC2: mirrored mailbox, notices, interruptions, replacements."""

import os
import threading

import pytest

from tasks.execution.mailbox import Mailbox
from tasks.node.record import write_json
from tasks.providers.ec2 import mailbox_s3
from tests.fake_ec2 import SILENT
from tests.fake_s3 import ROLE, FakeS3

FIRST, SECOND, THIRD = (f"i-{number:017x}" for number in (1, 2, 3))


def alive(running):
    return [node.alive for node in running.nodes()]


def test_uploads_reach_the_mailbox_and_the_controllers_files_every_node(home, running, aws):
    home.upload(FIRST, "ready.json", {"address": "10.0.0.1"})
    home.upload(SECOND, "records/r-1-000.json", {"run_id": "r-1-000"})
    write_json(running.mailbox / "plan.json", {"attempt": 1})
    (running.mailbox / "workloads").mkdir()
    for name in ("abc.py", ".abc.py.77"):  # the second is being written
        (running.mailbox / f"workloads/{name}").write_text("x = 1\n")
    write_json(running.mailbox / "controller/envelopes.json", {"r-1-000": {}})
    running.mirror.sync()
    box = Mailbox(path=running.mailbox, nodes=2)
    assert (box.ready_of(0) > 0, box.recorded()) == (True, {"r-1-000"})
    for name in (FIRST, SECOND):
        manifest = home.reads(name, "manifest.json")["files"]
        assert set(manifest) == {"plan.json", "workloads/abc.py", "node.json"}
    assert home.reads(SECOND, "node.json") == {"node": 1, "nodes": 2}
    puts = aws.count("s3:PutObject")
    running.mirror.sync()
    assert aws.count("s3:PutObject") == puts


def test_the_manifest_comes_after_what_it_names(home, running, aws):
    write_json(running.mailbox / "plan.json", {"attempt": 1})
    aws.fails("s3:PutObject", "AccessDenied", when=lambda words: "plan" in words["Key"])
    for names in ({"node.json"}, {"node.json", "plan.json"}):
        running.mirror.sync()
        assert set(home.reads(FIRST, "manifest.json")["files"]) == names


def test_half_an_answer_never_appears_and_a_record_is_on_the_disk_before_its_name(
    home, running, aws, monkeypatch
):
    home.upload(FIRST, "records/a.json", b"x" * 77)
    aws.s3.cut = 1
    assert not running.mirror.pull() and home.records() == set()
    seen = []
    file = running.mailbox / "node-0/records/a.json"
    monkeypatch.setattr(
        "os.fsync", lambda handle: seen.append((os.fstat(handle).st_size, file.exists()))
    )
    monkeypatch.setattr("os.utime", lambda *_: seen.append(file.exists()))
    assert running.mirror.pull() and file.read_bytes() == b"x" * 77
    assert seen == [(77, False), False]


@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject"])
def test_a_store_that_fails_makes_nobody_silent(home, running, aws, action):
    box = Mailbox(path=running.mailbox, nodes=2)
    aws.s3.skew_s = 3600.0

    def round_after(seconds):
        aws.pass_s(seconds)
        if seconds < 60.0:
            for name in (FIRST, SECOND):
                home.upload(name, "heartbeat.json", {"phase": "measuring"})
        running.mirror.sync()
        return box.silent(running.now_unix() - 30.0)

    assert round_after(0.0) == set()
    aws.fails(action, SILENT, times=999)
    assert [round_after(1.0) for _ in range(60)][-1] == set()
    aws.faults = []
    assert round_after(60.0) == {0, 1}


def test_odd_names_strangers_and_large_uploads_are_left_where_they_are(
    home, running, aws, monkeypatch
):
    monkeypatch.setattr(mailbox_s3, "MOST_BYTES", 100)
    before = sorted(home.path.rglob("*"))
    for name in (
        "../../../evil.json",
        "records/../../x.json",
        ".hidden",
        "a/b/c/d/e.json",
        "a\nb.json",
        "a:b.json",
        f"{ROLE}:i-0ffffffffffffffff/out/x.json",
    ):
        home.upload(FIRST, name, {})
    home.upload("i-0ffffffffffffffff", "records/x.json", {})
    home.upload(FIRST, "records/large.json", b"x" * 101)
    assert running.mirror.pull() and sorted(home.path.rglob("*")) == before
    assert aws.count("s3:GetObject") == 0
    home.upload(FIRST, "records/fits.json", b"x" * 100)
    monkeypatch.setattr(mailbox_s3, "MOST_FILES", 2)  # a machine that floods names
    for number in range(9):
        home.upload(FIRST, f"a-{number}.json", {})
    assert running.mirror.pull() and home.records() == {"fits"}
    assert len([*running.mailbox.rglob("a-*.json")]) < 2


def test_a_store_that_does_not_answer_keeps_no_machine_alive(home, aws, monkeypatch):
    monkeypatch.setattr(mailbox_s3, "POLL_S", 0.0)
    home.threaded, request = True, threading.Event()
    home.provider = home.controller()
    ended_first = []
    listed = FakeS3.list_objects_v2

    def slow(self, **words):
        if threading.current_thread() is not threading.main_thread():
            request.set()
            ended = threading.Event()
            for _ in range(100):
                if not aws.alive() or ended.wait(0.1):
                    break
            ended_first.append(not aws.alive())
        return listed(self, **words)

    with home.acquire() as running:
        home.upload(FIRST, "records/a.json", {"run_id": "a"})
        write_json(running.mailbox / "done.json", {})
        monkeypatch.setattr(FakeS3, "list_objects_v2", slow)
        assert request.wait(10.0)
    assert ended_first[0]
    assert home.records() == {"a"} and len(home.provider.ended()) == 1


def test_an_interruption_is_no_failure_and_what_ec2_knows_no_more_is_gone(running, aws):
    aws.interrupt(FIRST)
    aws.pass_s(6.0)
    assert alive(running) == [False, True]
    aws.instances[SECOND].end(aws.now, "Client.InstanceInitiatedShutdown")
    aws.pass_s(6.0)
    lost = running.nodes()
    assert [(node.alive, node.interrupted) for node in lost] == [(False, True), (False, False)]
    assert all(node.reason and "secret" not in node.reason for node in lost)
    del aws.instances[SECOND]
    aws.pass_s(6.0)
    assert not running.nodes()[1].alive


def test_silence_of_ec2_is_no_loss(running, aws):
    running.nodes()
    aws.fails("ec2:DescribeInstances", SILENT, times=2)
    aws.pass_s(6.0)
    assert alive(running) == [True, True]


def test_a_notice_counts_down_by_the_stores_clock(home, running, aws):
    for name, kind in ((FIRST, "interruption"), (SECOND, "rebalance")):
        home.upload(name, "notice.json", {"kind": kind, "action": "terminate", "at": ""})
    aws.pass_s(20.0)
    running.mirror.sync()
    found = [(node.alive, node.leaving_s) for node in running.nodes()]
    assert found == [(True, 100.0), (True, None)]
    aws.instances[FIRST].end(aws.now, "Client.InstanceInitiatedShutdown")
    aws.pass_s(6.0)
    assert running.nodes()[0].interrupted


def test_a_replacement_takes_the_rank_and_all_records_stay(home, aws):
    with home.acquire() as running:
        for name in ("ready.json", "heartbeat.json", "records/a.json"):
            home.upload(SECOND, name, {"by": 2})
        aws.interrupt(SECOND)
        write_json(running.mailbox / "plan.json", {"attempt": 1})
        running.mirror.sync()
        usd = running.usd_so_far()
        running.note_download(7.0)
        assert running.usd_so_far() == pytest.approx(usd + 2 * 7.0)
        assert running.replace(1)
        [lease] = home.provider.leases()
        assert lease.usd_until(lease.started_at) > 3 * 7.0
        assert running.addresses == ["10.0.0.1", "10.0.0.3"]
        assert alive(running) == [True, True]
        assert not Mailbox(path=running.mailbox, nodes=2).has_started(0, "10.0.0.1")
        home.upload(SECOND, "records/b.json", {})
        home.upload(THIRD, "records/a.json", {"by": 3})  # the same run again
        running.mirror.sync()
        assert home.reads(THIRD, "node.json") == {"node": 1, "nodes": 2}
        assert "plan.json" in home.reads(THIRD, "manifest.json")["files"]
    texts = [file.read_text() for file in home.leases.mailbox("r-1").rglob("records/*.json")]
    assert sorted(texts) == ['{"by": 2}', '{"by": 3}', "{}"]
    assert aws.alive() == [] and aws.bought() == 3


def test_a_refused_replacement_or_a_machine_that_does_not_end_leaves_the_rank_lost(running, aws):
    aws.immortal = True
    assert not running.replace(1) and aws.bought() == 2
    aws.immortal = False
    aws.capacity["us-east-1c", "spot"] = 0
    assert not running.replace(1)
    assert alive(running) == [True, False]
    aws.capacity["us-east-1c", "spot"] = 1
    assert running.replace(1) and len(aws.alive()) == 2


def test_a_lease_whose_records_cannot_be_fetched_is_not_given_out_until_they_are(home, aws):
    with home.acquire():
        home.upload(FIRST, "records/last.json", {"run_id": "last"})
        aws.fails("s3:GetObject", "InternalError", times=400)
    assert aws.alive() == home.provider.ended() == [] and home.provider.leases()
    aws.faults = []
    home.provider = home.controller()
    assert len(home.provider.ended()) == 1 and home.records() == {"last"}
