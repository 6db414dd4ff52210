"""A rented machine's life: nobody's code behind a fence that does not hold, and everything carried
that can be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.node.on_ec2 import courier
from tasks.node.on_ec2.courier import Delivery
from tasks.providers.ec2.prices import PUTS_PER_HOUR

USER = pwd.struct_passwd(("srift", "x", 12345, 12345, "", "/", "/bin/sh"))
GOES = {"kind": "interruption", "action": "terminate", "at": "2026-11-20T12:00:00Z"}


def test_the_agent_sees_where_programs_are_and_nothing_of_the_machines_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "SRIFT_BASE"):
        monkeypatch.setenv(name, "secret")
    started: dict[str, Any] = {}

    def start_as(user: pwd.struct_passwd, command: list[str], **options: Any) -> SimpleNamespace:
        started.update(options, user=user, command=command)
        return SimpleNamespace(pid=2**30)  # none has that number

    monkeypatch.setattr(courier, "start_as", start_as)
    courier.AgentProcess(USER, "/python", tmp_path, "10.0.0.4", 3, 9.0)
    assert started["user"] == USER and started["command"] == [
        *("/python", "-m", "node", "--mailbox", str(tmp_path), "--node", "3"),
        *("--address", "10.0.0.4", "--deadline", "9.0"),
    ]
    assert "secret" not in started["env"].values()
    assert set(started["env"]) <= {
        *("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH"),
        *("HOME", "USER", "LOGNAME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),
    }
    assert started["env"]["HOME"] == str(tmp_path / "node-3") and started["env"]["PATH"]


@pytest.mark.parametrize(
    ("reason", "came"), [("it does not hold", "it does not hold"), ("", "served")]
)
def test_nothing_is_served_behind_a_fence_that_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, came: str
) -> None:
    monkeypatch.setattr(courier, "account", lambda _: USER)
    monkeypatch.setattr(courier, "fence", lambda *_: reason)
    monkeypatch.setattr(courier.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        courier, "Delivery", lambda **_: SimpleNamespace(serve=lambda: "served", leave=None)
    )
    arguments = argparse.Namespace(user="srift", python="/python", directory=tmp_path)
    metadata: Any = SimpleNamespace(
        require=lambda _: "10.0.0.4", base="http://169.254.169.254", notice=None
    )
    none: Any = None
    assert courier.deliver(arguments, metadata, none, none, ends=1e12) == came


class Data:
    """In place of what fetches: a test says how far it is."""

    def __init__(self, mailbox: Path) -> None:
        self.mailbox = mailbox
        self.asked: dict[str, str] = {}
        self.fetched: dict[str, dict[str, Any]] = {}
        self.stopped = False

    def request(self, addresses: dict[str, str]) -> None:
        self.asked |= addresses

    def states(self) -> dict[str, dict[str, Any]]:
        return json.loads(json.dumps(self.fetched))  # type: ignore[no-any-return]

    def stop(self) -> None:
        self.stopped = True


class World:
    """The store, the agent and the notices of one machine, which has its place unless a test takes
    it away.
    """

    def __init__(self, directory: Path, clock: Any) -> None:
        self.clock, self.at = clock, clock.at
        self.directory, self.own = directory, directory / "node-1"
        self.inward: dict[str, bytes] = {}
        self.came: list[tuple[float, str, bytes]] = []
        self.asked: list[float] = []
        self.down = False
        self.code: int | None = None
        self.started = self.ended = -1.0
        self.given: dict[str, str] | None = None
        self.data: Any = Data(directory)
        self.place()

    def serve(self, deadline_s: float = 1000.0) -> str:
        self.delivery = Delivery(
            store=self, start=self.start, notice=self.notice, owner=os.getuid(),
            deadline_s=deadline_s, data=self.data,
        )  # fmt: skip
        return self.delivery.serve()

    def get(self, name: str) -> bytes:
        self.asked.append(self.clock.now)
        if self.down or name not in self.inward:
            raise OSError(f"no {name}")
        return self.inward[name]

    def put(self, name: str, content: bytes) -> None:
        if self.down:
            raise TimeoutError("the store does not answer")
        self.came.append((self.clock.now, name, content))

    def start(self, rank: int, deadline_unix: float) -> World:
        assert rank == 1
        self.started = self.clock.now
        return self

    def poll(self) -> int | None:
        return self.code

    def end(self) -> None:
        self.ended = self.clock.now

    def last_output(self) -> str:
        return "Traceback: no such thing"

    def notice(self) -> dict[str, str] | None:
        if self.given is None and self.clock.now > 3.0:
            raise OSError("the metadata service is away")
        return self.given

    def place(self) -> None:
        self.inward["node.json"] = b'{"node": 1, "nodes": 2}'

    def tell(self, name: str, content: bytes) -> None:
        self.inward[name] = content
        self.inward["manifest.json"] = json.dumps(
            {"files": {name: hashlib.sha256(content).hexdigest()}}
        ).encode()

    def writes(self, moment: float, name: str, content: str = "{}") -> None:
        def act() -> None:
            (self.own / name).parent.mkdir(exist_ok=True)
            (self.own / name).write_text(content)

        self.at(moment, act)

    def sets(self, moment: float, **values: object) -> None:
        self.at(moment, lambda: self.__dict__.update(values))

    def moments(self, name: str) -> list[float]:
        return [moment for moment, one, _ in self.came if one == name]


@pytest.fixture
def world(tmp_path: Path, clock: Any) -> World:
    return World(tmp_path, clock)


def test_a_machine_says_it_is_up_takes_its_place_and_carries_both_ways(world: World) -> None:
    world.inward.clear()
    world.at(3, world.place)
    world.at(5, lambda: world.tell("plan.json", b'{"attempt": 1}'))
    world.writes(8, "records/r.json", "whole")
    world.sets(20, code=0)
    assert world.serve() == ""
    assert world.moments("booted.json") == [0.0]
    assert 3 <= world.started <= 4
    assert (world.directory / "plan.json").read_bytes() == b'{"attempt": 1}'
    assert [one[1:] for one in world.came if "r.json" in one[1]] == [("records/r.json", b"whole")]
    assert world.moments("records/r.json")[0] <= 8.5
    assert world.ended >= 20


@pytest.mark.parametrize(
    ("name", "back_at", "least_s", "most_s"),
    [
        (
            "records/r.json",
            400,
            400,
            411,
        ),  # a record outlives a store that is away, and the agent too
        ("records/r.json", 1e9, 980, 1000),  # until the deadline
        ("log-1.txt", 1e9, 0, 80),  # and what is no record not so long
    ],
)
def test_a_store_that_is_away_is_waited_for(
    world: World, name: str, back_at: float, least_s: float, most_s: float
) -> None:
    world.sets(8, down=True)
    world.writes(10, name)
    world.sets(12, code=0)
    world.sets(back_at, down=False)
    assert world.serve() == ""
    assert least_s <= world.clock.now <= most_s
    assert bool(world.moments(name)) is (back_at < 1000)


def test_a_notice_is_passed_on_at_once_with_everything_else(world: World) -> None:
    world.writes(1, "log-1.txt", "a")
    world.sets(2, given={"kind": "rebalance", "action": "", "at": ""})
    world.writes(30, "log-1.txt", "ab")
    world.writes(31, "log-1.txt", "abc")  # would have to wait for its turn
    world.writes(31, "records/r.json")
    world.sets(31, given=GOES)
    world.sets(40, code=0)
    world.serve()
    notices = [
        (moment, json.loads(content))
        for moment, name, content in world.came
        if name == "notice.json"
    ]
    assert [body["kind"] for _, body in notices] == ["rebalance", "interruption"]
    assert notices[1][1]["at"] == GOES["at"] and "seen_unix" in notices[1][1]
    assert 31 <= notices[1][0] <= 33.5
    assert json.loads((world.own / "notice.json").read_text())["kind"] == "interruption"
    assert (notices[1][0], "log-1.txt", b"abc") in world.came
    assert world.moments("records/r.json")[0] <= notices[1][0]


def test_a_machine_that_must_go_before_it_has_a_place_says_so(world: World) -> None:
    world.inward.clear()
    world.sets(2, given=GOES)
    world.at(9, world.place)
    world.sets(20, code=0)
    world.serve()
    assert world.moments("notice.json")[0] <= 5
    assert (world.own / "notice.json").exists()


def test_an_agent_that_fails_is_reported_with_its_last_words(world: World) -> None:
    world.writes(5, "records/r.json")
    world.sets(5, code=1)
    assert world.serve().endswith("1: Traceback: no such thing")


def test_requested_data_are_fetched_and_their_progress_is_reported(
    world: World,
) -> None:
    """Also where what came after the question could not be put in place, and where the store is
    away meanwhile.
    """
    asked = b'{"data": {"aabb": "s3://mine-1/cats/"}}'
    world.tell("data.json", asked)
    files = {name: hashlib.sha256(asked).hexdigest() for name in ("data.json", "plan.json")}
    world.inward["manifest.json"] = json.dumps(
        {"files": files}
    ).encode()  # of a plan that is not there
    for second in range(5, 60):
        world.at(
            second,
            lambda s=second: world.data.fetched.update(aabb={"state": "fetching", "bytes": s}),
        )
    world.sets(58, down=True)
    world.at(60, lambda: world.data.fetched.update(aabb={"state": "ready", "bytes": 60}))
    world.sets(63, down=False)
    world.sets(80, code=0)
    assert world.serve() == ""
    assert world.data.asked == {"aabb": "s3://mine-1/cats/"} and world.data.stopped
    reports = [
        (moment, json.loads(content)["aabb"])
        for moment, name, content in world.came
        if name == "data.json"
    ]
    assert {state["state"] for _, state in reports[:-1]} == {"fetching"} and 4 <= len(reports) <= 7
    assert 63 <= reports[-1][0] <= 65 and reports[-1][1] == {"state": "ready", "bytes": 60}


@pytest.fixture
def at_work(world: World) -> World:
    """With its plan, and an agent that beats once a second and writes a log, for five minutes."""
    world.tell("plan.json", b'{"attempt": 1}')
    for second in range(1, 300):
        world.writes(second, "heartbeat.json", str(second))
        world.writes(second, "log-1.txt", "x" * second)
    world.sets(300, code=0)
    return world


def test_a_machine_at_work_asks_and_tells_no_more_than_the_bill_counts(at_work: World) -> None:
    at_work.serve(3000.0)
    lists, records = 720, 60  # of an hour: the controller's, and of the runs
    heartbeats = (PUTS_PER_HOUR - lists - records) / 12
    assert 0.9 * heartbeats <= len(at_work.came) <= 1.05 * heartbeats
    assert len(at_work.asked) <= 1.5 * 720 / 12
