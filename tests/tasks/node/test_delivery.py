"""A machine's life with a store, a disk and an agent that do as a script says, on a clock that only sleeping moves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.node import delivery as module
from tasks.node.delivery import Delivery


class World:
    """The store, the agent, the notices and the clock of one machine."""

    def __init__(self, directory: Path, deadline_s: float = 1000.0) -> None:
        self.now = 0.0
        self.directory, self.own = directory, directory / "node-1"
        self.inward: dict[str, bytes] = {}
        self.came: list[tuple[float, str, bytes]] = []
        self.down = False
        self.code: int | None = None
        self.started = self.ended = -1.0
        self.given: dict[str, str] | None = None
        self.script: list[tuple[float, Callable[[], object]]] = []
        self.delivery = Delivery(
            directory=directory,
            store=self,
            start=self.start,
            notice=self.notice,
            owner=os.getuid(),
            deadline_s=deadline_s,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def at(self, moment: float, act: Callable[[], object]) -> None:
        self.script.append((moment, act))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [act for moment, act in self.script if moment <= self.now]
        self.script = [one for one in self.script if one[0] > self.now]
        for act in due:
            act()

    def get(self, name: str) -> bytes:
        if self.down or name not in self.inward:
            raise OSError(f"no {name}")
        return self.inward[name]

    def put(self, name: str, content: bytes) -> None:
        if self.down:
            raise TimeoutError("the store does not answer")
        self.came.append((self.now, name, content))

    def start(self, rank: int, deadline_unix: float) -> World:
        assert rank == 1
        self.started = self.now
        return self

    def poll(self) -> int | None:
        return self.code

    def end(self) -> None:
        self.ended = self.now

    def said(self) -> str:
        return "Traceback: no such thing"

    def notice(self) -> dict[str, str] | None:
        if self.given is None and self.now > 3.0:
            raise OSError("the metadata service is away")
        return self.given

    def place(self) -> None:
        self.inward["node.json"] = b'{"node": 1, "nodes": 2}'

    def tell(self, name: str, content: bytes) -> None:
        self.inward[name] = content
        self.inward["manifest.json"] = json.dumps({"files": {name: hashlib.sha256(content).hexdigest()}}).encode()

    def write(self, name: str, content: str = "{}") -> None:
        (self.own / name).parent.mkdir(exist_ok=True)
        (self.own / name).write_text(content)

    def leave(self, code: int = 0) -> None:
        self.code = code

    def moments(self, name: str) -> list[float]:
        return [moment for moment, one, _ in self.came if one == name]

    def set(self, **values: object) -> Callable[[], None]:
        return lambda: [setattr(self, name, value) for name, value in values.items()] and None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_machine_says_it_is_up_takes_its_place_and_carries_both_ways(world: World) -> None:
    world.at(3, world.place)
    world.at(5, lambda: world.tell("plan.json", b'{"attempt": 1}'))
    world.at(8, lambda: world.write("records/r.json", "whole"))
    world.at(20, world.leave)
    assert world.delivery.serve() == ""
    assert world.moments("booted.json") == [0.0]
    assert 3 <= world.started <= 4
    assert (world.directory / "plan.json").read_bytes() == b'{"attempt": 1}'
    assert [one[1:] for one in world.came if "r.json" in one[1]] == [("records/r.json", b"whole")]
    assert world.moments("records/r.json")[0] <= 8.5
    assert world.ended >= 20


def test_a_record_outlives_a_store_that_is_away_and_the_agent_too(world: World) -> None:
    world.place()
    world.at(8, world.set(down=True))
    world.at(10, lambda: world.write("records/r.json"))
    world.at(12, world.leave)
    world.at(400, world.set(down=False))
    assert world.delivery.serve() == ""
    assert 400 <= world.moments("records/r.json")[0] <= 411


def test_what_is_no_record_is_not_waited_for_so_long(world: World) -> None:
    world.place()
    world.at(8, world.set(down=True))
    world.at(10, lambda: world.write("log-1.txt"))
    world.at(12, world.leave)
    assert world.delivery.serve() == ""
    assert world.now < 80


def test_a_store_that_stays_away_ends_the_machine_at_its_deadline(world: World) -> None:
    world.place()
    world.at(8, world.set(down=True))
    world.at(10, lambda: world.write("records/r.json"))
    world.at(12, world.leave)
    world.delivery.serve()
    assert 980 <= world.now <= 1000


def test_a_notice_is_passed_on_at_once_with_everything_else(world: World) -> None:
    world.place()
    world.at(1, lambda: world.write("log-1.txt", "a"))
    world.at(2, world.set(given={"kind": "rebalance", "action": "", "at": ""}))
    world.at(30, lambda: world.write("log-1.txt", "ab"))
    world.at(31, lambda: world.write("log-1.txt", "abc"))  # would have to wait for its turn
    world.at(31, lambda: world.write("records/r.json"))
    world.at(31, world.set(given={"kind": "interruption", "action": "terminate", "at": "2026-11-20T12:00:00Z"}))
    world.at(40, world.leave)
    world.delivery.serve()
    told = [(moment, json.loads(content)) for moment, name, content in world.came if name == "notice.json"]
    assert [body["kind"] for _, body in told] == ["rebalance", "interruption"], "each once"
    assert told[1][1]["at"] == "2026-11-20T12:00:00Z" and told[1][1]["seen_unix"] > 0
    assert 31 <= told[1][0] <= 33.5
    assert json.loads((world.own / "notice.json").read_text())["kind"] == "interruption"
    assert (told[1][0], "log-1.txt", b"abc") in world.came
    assert world.moments("records/r.json")[0] <= told[1][0]


def test_a_notice_to_a_store_that_is_away_is_bounded_and_comes_later(world: World) -> None:
    world.place()
    world.at(2, world.set(given={"kind": "interruption", "action": "terminate", "at": ""}, down=True))
    world.at(50, world.set(down=False))
    world.at(70, world.leave)
    world.delivery.serve()
    assert 50 <= world.moments("notice.json")[0] <= 65


def test_a_machine_that_must_go_before_it_has_a_place_says_so(world: World) -> None:
    world.at(2, world.set(given={"kind": "interruption", "action": "terminate", "at": ""}))
    world.at(9, world.place)
    world.at(20, world.leave)
    world.delivery.serve()
    assert world.moments("notice.json")[0] <= 5
    assert (world.own / "notice.json").exists(), "those on the machine cannot see it"


def test_a_full_disk_does_not_silence_a_notice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "place", full)
    monkeypatch.setattr("tasks.node.inbox.place", full)
    world.place()
    world.tell("plan.json", b"{}")
    world.at(2, world.set(given={"kind": "interruption", "action": "terminate", "at": ""}, down=True))
    world.at(6, world.set(down=False))
    world.at(20, world.leave)
    assert world.delivery.serve() == ""
    assert len(world.moments("notice.json")) == 1 and world.moments("notice.json")[0] <= 10


def test_an_agent_that_hangs_is_ended_in_time_to_carry_what_it_wrote(world: World) -> None:
    world.place()
    world.at(990, lambda: world.write("records/late.json"))
    world.at(960, lambda: world.write("records/r.json"))
    assert world.delivery.serve() == ""
    assert 969 <= world.ended <= 971
    assert world.moments("records/r.json")


def test_a_machine_that_goes_down_carries_what_it_has_and_no_longer(world: World) -> None:
    world.place()
    world.at(10, lambda: world.write("records/r.json"))
    world.at(10, world.delivery.leave)
    assert world.delivery.serve() == ""
    assert world.moments("records/r.json")
    world.now = 0.0
    assert world.ended <= 11


def test_a_machine_that_nobody_places_goes_and_says_why(world: World) -> None:
    assert "no place" in world.delivery.serve()
    assert world.now <= 1000 and world.started < 0


def test_an_agent_that_fails_is_told_with_its_last_words(world: World) -> None:
    world.place()
    world.at(5, lambda: world.leave(1))
    assert world.delivery.serve() == "the agent ended with exit code 1: Traceback: no such thing"


def test_a_manifest_that_is_none_is_said_once_and_lived_with(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.place()
    world.inward["manifest.json"] = b"[]"
    world.at(5, lambda: world.write("records/r.json"))
    world.at(20, world.leave)
    assert world.delivery.serve() == ""
    assert capsys.readouterr().out.count("manifest.json") == 1
    assert world.moments("records/r.json")
