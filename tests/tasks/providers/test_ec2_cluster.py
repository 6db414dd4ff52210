"""A running cluster of EC2 as the controller sees it: the mailbox mirrored, notices, interruptions, replacements."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.mailbox import Mailbox, silent_nodes
from tasks.node.record import write_json
from tests.ec2_home import Home
from tests.fake_ec2 import SILENT, Fault
from tests.fake_s3 import ROLE


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def names(home: Home) -> list[str]:
    return [one.instance_id for one in home.world.alive()]


def test_what_nodes_upload_is_in_the_mailbox_and_what_is_written_there_reaches_every_node(home: Home) -> None:
    with home.acquire(home.two()) as running:
        first, second = names(home)
        home.world.s3.upload(home.world.now, "r-1", first, "ready.json", {"address": "10.0.0.1"})
        home.world.s3.upload(home.world.now, "r-1", second, "records/r-1-000.json", {"run_id": "r-1-000"})
        write_json(running.mailbox / "plan.json", {"attempt": 1})
        (running.mailbox / "workloads").mkdir()
        (running.mailbox / "workloads" / "abc.py").write_text("x = 1\n")
        write_json(running.mailbox / "controller" / "envelopes.json", {"r-1-000": {}})
        assert running.mirror.sync()
        box = Mailbox(path=running.mailbox, nodes=2)
        assert (box.ready(), box.recorded()) == (1, {"r-1-000"})
        for name in (first, second):
            manifest = home.world.s3.read("r-1", name, "manifest.json")["files"]
            assert set(manifest) == {"plan.json", "workloads/abc.py", "node.json"}, "the controller's own stays here"
        puts = home.world.count("s3:PutObject")
        assert running.mirror.sync() and home.world.count("s3:PutObject") == puts, "nothing new, nothing sent"


def test_the_manifest_comes_after_what_it_names(home: Home) -> None:
    with home.acquire(home.two()) as running:
        one = names(home)[0]
        write_json(running.mailbox / "plan.json", {"attempt": 1})
        home.world.faults = [Fault(action="s3:PutObject", code="SlowDown", when=lambda words: "plan" in words["Key"])]
        assert not running.mirror.sync() and "fewer requests" in running.mirror.problem
        assert set(home.world.s3.read("r-1", one, "manifest.json")["files"]) == {"node.json"}
        assert running.mirror.sync()
        assert "plan.json" in home.world.s3.read("r-1", one, "manifest.json")["files"]


def test_half_an_answer_never_appears(home: Home) -> None:
    with home.acquire(home.two()) as running:
        home.world.s3.upload(home.world.now, "r-1", names(home)[0], "records/a.json", {"run_id": "a" * 100})
        home.world.s3.cut = 1
        assert not running.mirror.sync() and home.records() == set()
        assert running.mirror.sync() and home.records() == {"a"}
        [file] = running.mailbox.glob("node-0/records/*")
        assert json.loads(file.read_text()) == {"run_id": "a" * 100}


@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject"])
def test_a_store_that_fails_makes_nobody_silent(home: Home, action: str) -> None:
    with home.acquire(home.two()) as running:
        box = Mailbox(path=running.mailbox, nodes=2)
        home.world.s3.skew_s = 3600.0
        for name in names(home):
            home.world.s3.upload(home.world.now, "r-1", name, "heartbeat.json", {"phase": "measuring"})
        running.mirror.sync()
        assert silent_nodes(box, running.now_unix()) == [], "by the store's clock, however wrong it is"
        home.world.faults = [Fault(action=action, code=SILENT, times=999)]
        for _ in range(60):
            home.world.pass_s(1.0)
            for name in names(home):
                home.world.s3.upload(home.world.now, "r-1", name, "heartbeat.json", {"phase": "measuring"})
            running.mirror.sync()
        assert silent_nodes(box, running.now_unix()) == []
        home.world.faults = []
        home.world.pass_s(60.0)
        running.mirror.sync()
        assert silent_nodes(box, running.now_unix()) == [0, 1], "heard again, and nothing new in a minute"


@pytest.mark.parametrize(
    "name", ["../../../evil.json", "records/../../x.json", ".hidden", "a/b/c/d/e.json", "a\nb.json"]
)
def test_a_name_that_leads_elsewhere_is_left_where_it_is(home: Home, name: str) -> None:
    with home.acquire(home.two()) as running:
        home.world.s3.upload(home.world.now, "r-1", names(home)[0], name, {"evil": True})
        before = sorted(home.path.rglob("*"))
        assert running.mirror.sync()
        assert sorted(home.path.rglob("*")) == before


def test_a_stranger_in_the_bucket_is_not_heard(home: Home) -> None:
    with home.acquire(home.two()) as running:
        home.world.s3.upload(home.world.now, "r-1", "i-0ffffffffffffffff", "records/x.json", {"run_id": "x"})
        running.mirror.sync()
        assert home.records() == set()


def test_a_file_in_the_place_of_a_folder_does_not_stop_the_others(home: Home) -> None:
    with home.acquire(home.two()) as running:
        first, second = names(home)
        home.world.s3.upload(home.world.now, "r-1", first, "records", {})
        home.world.s3.upload(home.world.now, "r-1", first, "records/a.json", {})
        home.world.s3.upload(home.world.now, "r-1", second, "records/b.json", {})
        assert running.mirror.sync() and home.records() == {"b"}
    assert len(home.provider.ended()) == 1


def test_an_interruption_is_told_from_a_failure(home: Home) -> None:
    with home.acquire(home.two()) as running:
        first, second = names(home)
        home.world.interrupt(first)
        home.world.instances[second].end(home.world.now, "Client.InstanceInitiatedShutdown")
        home.world.pass_s(6.0)
        lost = running.nodes()
        assert [one.alive for one in lost] == [False, False]
        assert [one.interrupted for one in lost] == [True, False]
        assert "spot market" in lost[0].reason and "shut itself down" in lost[1].reason
        assert "secret" not in lost[0].reason


def test_a_machine_that_ec2_knows_no_more_is_gone(home: Home) -> None:
    with home.acquire(home.two()) as running:
        assert [one.alive for one in running.nodes()] == [True, True]
        del home.world.instances[names(home)[1]]
        home.world.pass_s(6.0)
        assert [one.alive for one in running.nodes()] == [True, False]


def test_a_controller_whose_clock_is_ahead_of_the_stores_takes_nobody_for_silent(home: Home) -> None:
    home.world.s3.skew_s = -300.0
    with home.acquire(home.two()) as running:
        home.world.s3.upload(home.world.now, "r-1", names(home)[0], "heartbeat.json", {"phase": "waiting"})
        running.mirror.sync()
        assert silent_nodes(Mailbox(path=running.mailbox, nodes=2), running.now_unix()) == []


def test_a_replacement_that_measures_a_run_again_overwrites_no_record(home: Home) -> None:
    with home.acquire(home.two()) as running:
        second = names(home)[1]
        home.world.s3.upload(home.world.now, "r-1", second, "records/a.json", {"run_id": "a", "by": 2})
        home.world.interrupt(second)
        assert running.replace(1)
        third = next(one.instance_id for one in home.world.alive() if one.instance_id > second)
        home.world.s3.upload(home.world.now, "r-1", third, "records/a.json", b'{"run_id": "a", "b')
        assert running.mirror.sync() and running.mirror.sync()
    records = [file.read_text() for file in home.leases.mailbox("r-1").glob("node-*/records/a.json")]
    assert sorted(records) == ['{"run_id": "a", "b', '{"run_id": "a", "by": 2}']


def test_what_aws_says_is_asked_for_every_few_seconds_and_silence_is_no_loss(home: Home) -> None:
    with home.acquire(home.two()) as running:
        running.nodes()
        asked = home.world.count("ec2:DescribeInstances")
        for _ in range(10):
            running.nodes()
        assert home.world.count("ec2:DescribeInstances") == asked
        home.world.faults = [Fault(action="ec2:DescribeInstances", code=SILENT, times=2)]
        home.world.pass_s(6.0)
        assert [one.alive for one in running.nodes()] == [True, True]


def test_a_notice_counts_down_by_the_stores_clock(home: Home) -> None:
    with home.acquire(home.two()) as running:
        first, second = names(home)
        at = home.world.now.timestamp() + 110
        notice = {"kind": "interruption", "action": "terminate", "at": "", "seen_unix": at}
        home.world.s3.upload(home.world.now, "r-1", first, "notice.json", notice)
        home.world.s3.upload(home.world.now, "r-1", second, "notice.json", notice | {"kind": "rebalance"})
        home.world.pass_s(20.0)
        running.mirror.sync()
        leaving, warned = running.nodes()
        assert (leaving.alive, leaving.notice, leaving.leaving_s) == (True, "interruption", 100.0)
        assert (warned.alive, warned.notice, warned.leaving_s) == (True, "rebalance", None)
        home.world.instances[first].end(home.world.now, "Client.InstanceInitiatedShutdown")
        home.world.pass_s(6.0)
        assert running.nodes()[0].interrupted, "it went down by itself, for it had been told to"


def test_a_replacement_takes_the_rank_and_the_lost_ones_records_stay(home: Home) -> None:
    with home.acquire(home.two()) as running:
        first, second = names(home)
        for name in ("ready.json", "heartbeat.json", "records/a.json"):
            home.world.s3.upload(home.world.now, "r-1", second, name, {"run_id": "a"})
        home.world.interrupt(second)
        write_json(running.mailbox / "plan.json", {"attempt": 1})
        running.mirror.sync()
        assert running.replace(1)
        third = next(name for name in names(home) if name not in (first, second))
        assert running.addresses == ["10.0.0.1", home.world.instances[third].address]
        assert [one.alive for one in running.nodes()] == [True, True]
        assert Mailbox(path=running.mailbox, nodes=2).ready() == 0, "the new one has not reported itself"
        home.world.s3.upload(home.world.now, "r-1", second, "records/b.json", {"run_id": "b"})
        running.mirror.sync()
        assert home.records() == {"a", "b"}
        assert home.world.s3.read("r-1", third, "node.json") == {"node": 1, "nodes": 2}
        assert "plan.json" in home.world.s3.read("r-1", third, "manifest.json")["files"]
    assert home.world.alive() == [] and home.world.bought() == 3


def test_a_silent_machine_that_does_not_end_is_not_replaced(home: Home) -> None:
    with home.acquire(home.two()) as running:
        home.world.immortal = True
        assert not running.replace(1) and home.world.bought() == 2, "a third would be more than any cap counts"
        home.world.immortal = False
        home.world.faults = [Fault(action="ec2:TerminateInstances", code="RequestLimitExceeded", times=3)]
        assert running.replace(1) and len(home.world.alive()) == 2, "asked again"


def test_no_replacement_where_there_is_none(home: Home) -> None:
    with home.acquire(home.two()) as running:
        home.world.interrupt(names(home)[1])
        home.world.capacity[("us-east-1a", "spot")] = 0
        assert not running.replace(1)
        assert [one.alive for one in running.nodes()] == [True, False]
        assert [one.code for one in running.refusals] == ["InsufficientInstanceCapacity"]
        home.world.capacity[("us-east-1a", "spot")] = 1
        assert running.replace(1), "asked for anew, under a token of its own"


def test_records_uploaded_at_the_last_moment_are_brought_home(home: Home) -> None:
    with home.acquire(home.two()) as running:
        write_json(running.mailbox / "done.json", {})
        home.world.s3.upload(home.world.now, "r-1", names(home)[0], "records/last.json", {"run_id": "last"})
        home.world.faults = [Fault(action="s3:ListBucket", code=SILENT, times=3)]
    assert home.records() == {"last"} and len(home.provider.ended()) == 1


def test_what_is_uploaded_while_machines_are_ended_is_brought_home(home: Home) -> None:
    def sleep(seconds: float) -> None:
        home.world.pass_s(seconds)
        for one in home.world.instances.values():
            if one.ended_at is not None:
                home.world.s3.upload(home.world.now, "r-1", one.instance_id, "records/last.json", {"run_id": "last"})

    home.provider._clock = replace(home.world.clock, sleep=sleep)
    with home.acquire(home.two()):
        ended = home.world.now
    assert home.records() == {"last"} and (home.world.now - ended).total_seconds() < 60


def test_a_lease_whose_records_cannot_be_fetched_is_not_given_out_until_they_are(home: Home) -> None:
    with home.acquire(home.two()):
        home.world.s3.upload(home.world.now, "r-1", names(home)[0], "records/last.json", {"run_id": "last"})
        home.world.faults = [Fault(action="s3:GetObject", code="InternalError", times=40)]
    assert home.world.alive() == [] and home.provider.ended() == []
    assert len(home.provider.leases()) == 1, "its dollars count all the same"
    home.world.faults = []
    home.provider = home.controller()
    assert [one.lease_id for one in home.provider.ended()] == ["r-1"] and home.records() == {"last"}


def test_a_node_speaks_under_its_role_and_instance(home: Home) -> None:
    with home.acquire(home.two()):
        keys = {key.split("/")[3] for key in home.world.s3.objects if key.startswith("srift/leases/r-1/")}
        assert keys == {f"{ROLE}:{name}" for name in names(home)}
        [code] = [key for key in home.world.s3.objects if key.startswith("srift/code/")]
        assert code.removesuffix(".tar.gz").rpartition("/")[2] in home.world.alive()[0].user_data


def test_mirrors_that_turn_by_themselves_stop_with_their_lease(home: Home) -> None:
    home.threaded = True
    home.provider = home.controller()
    with home.acquire(home.two()):
        assert any(one.name.startswith("mirror-") for one in threading.enumerate())
        home.world.s3.upload(home.world.now, "r-1", names(home)[0], "records/a.json", {"run_id": "a"})
    assert not any(one.name.startswith("mirror-") for one in threading.enumerate()) and home.records() == {"a"}
