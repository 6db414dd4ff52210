"""A machine's mailbox and the store, in both directions: what comes in, what goes out, and a machine's whole life."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from models.campaign.budget import late_s
from tasks.node.on_ec2 import sync
from tasks.node.on_ec2.sync import BadManifest, Delivery, Inbox, Outbox, files_of, write_file
from tasks.providers.ec2 import prices as ec2_prices
from tasks.providers.ec2.prices import PUTS_PER_HOUR


class Files:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    def say(self, **files: str) -> None:
        for name, content in files.items():
            self.files[name.replace("__", "/").replace("_", ".")] = content.encode()
        named = {name: hashlib.sha256(self.files[name]).hexdigest() for name in self.files if name != "manifest.json"}
        self.files["manifest.json"] = json.dumps({"files": named}).encode()

    def get(self, name: str) -> bytes:
        self.asked.append(name)
        try:
            return self.files[name]
        except KeyError:
            raise OSError(f"no {name}") from None


def test_what_is_new_or_changed_is_fetched_and_nothing_else(tmp_path: Path) -> None:
    store = Files()
    inbox = Inbox(tmp_path, store.get)
    with pytest.raises(OSError, match=r"no manifest\.json"):
        inbox.fetch()
    store.say(plan_json="1", workloads__d_py="w")
    assert inbox.fetch() == ["workloads/d.py", "plan.json"]
    assert (tmp_path / "workloads" / "d.py").read_text() == "w"
    store.say(plan_json="2")
    store.asked.clear()
    assert inbox.fetch() == ["plan.json"]
    assert store.asked == ["manifest.json", "plan.json"]
    assert (tmp_path / "plan.json").read_text() == "2"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["plan.json", "workloads"]


def test_a_plan_comes_after_its_workloads_and_the_end_last() -> None:
    names = ("done.json", "go-1.json", "plan.json", "workloads/d.py", "node.json")
    manifest = json.dumps({"files": dict.fromkeys(names, "0" * 64)}).encode()
    assert list(files_of(manifest)) == ["node.json", "workloads/d.py", "plan.json", "go-1.json", "done.json"]


def test_content_that_is_not_what_the_manifest_says_is_not_put_in_place(tmp_path: Path) -> None:
    store = Files()
    store.say(plan_json="1", workloads__d_py="w")
    store.files["workloads/d.py"] = b"other"
    inbox = Inbox(tmp_path, store.get)
    assert inbox.fetch() == []
    assert not (tmp_path / "plan.json").exists(), "a plan without its workload"
    store.say()
    assert inbox.fetch() == ["workloads/d.py", "plan.json"]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "a//b", "", ".x", "a/.x", "node-0/notice.json", "a\\b", "a/b/c/d", "a\n"]
)
def test_a_name_that_leads_elsewhere_refuses_the_manifest(name: str) -> None:
    with pytest.raises(BadManifest, match=r"manifest\.json names"):
        files_of(json.dumps({"files": {"plan.json": "0" * 64, name: "0" * 64}}).encode())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": []}', '{"files": {"plan.json": 3}}', '{"files": {"a": "0"}}']
)
def test_a_manifest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadManifest):
        files_of(text.encode())


@pytest.mark.parametrize(
    "text", ["", "3", "{}", '{"node": "0", "nodes": 1}', '{"node": 2, "nodes": 2}', '{"node": -1, "nodes": 2}']
)
def test_a_place_outside_the_cluster_is_refused(text: str, tmp_path: Path) -> None:
    store = Files()
    store.files["node.json"] = text.encode()
    with pytest.raises(BadManifest):
        Inbox(tmp_path, store.get).rank()
    store.files["node.json"] = b'{"node": 1, "nodes": 2}'
    assert Inbox(tmp_path, store.get).rank() == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_no_link_that_lies_in_wait_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    victim, notice = tmp_path / "victim", tmp_path / "notice.json"
    victim.write_text("untouched")
    for link in (notice, tmp_path / ".notice.json.courier"):
        link.symlink_to(victim)
    if comes_back:
        monkeypatch.setattr(Path, "unlink", lambda _: None)
        with pytest.raises(FileExistsError):
            write_file(notice, b"{}")
    else:
        write_file(notice, b"{}")
        assert not notice.is_symlink() and notice.read_text() == "{}"
    assert victim.read_text() == "untouched"


class Store:
    """Takes what comes unless it is `down`, or its name is in `refused`."""

    def __init__(self) -> None:
        self.came: list[tuple[str, bytes]] = []
        self.down = False
        self.refused: set[str] = set()
        self.tried: list[str] = []
        self.now = 0.0

    def put(self, name: str, content: bytes) -> None:
        self.tried.append(name)
        if self.down or name in self.refused:
            raise OSError(f"no room for {name}")
        self.came.append((name, content))

    def names(self) -> list[str]:
        names = [name for name, _ in self.came]
        self.came.clear()
        return names


def write(folder: Path, name: str, content: str = "{}") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.1")
    beside.write_text(content)
    beside.rename(path)


def outbox(folder: Path, store: Store, owner: int | None = None) -> Outbox:
    return Outbox(folder, owner=os.getuid() if owner is None else owner, put=store.put, clock=lambda: store.now)


def test_records_go_before_anything_else_and_scratch_stays(tmp_path: Path) -> None:
    for name in ("log-1.txt", "heartbeat.json", "ready.json", "armed-1.json", "scratch/plan-1.json", "records/b.json"):
        write(tmp_path, name)
    write(tmp_path, "records/a.json", "whole")
    (tmp_path / "records" / ".c.json.77").write_text("hal")
    store = Store()
    outbox(tmp_path, store).carry()
    assert store.came[0] == ("records/a.json", b"whole")
    assert store.names() == [
        *("records/a.json", "records/b.json", "armed-1.json", "ready.json", "heartbeat.json", "log-1.txt")
    ]


def test_a_heartbeat_goes_every_five_seconds_and_a_record_once(tmp_path: Path) -> None:
    store = Store()
    carried = outbox(tmp_path, store)
    write(tmp_path, "records/a.json", "first")
    for half_second in range(21):
        store.now = half_second / 2
        write(tmp_path, "heartbeat.json", str(half_second))
        write(tmp_path, "log-1.txt", "x" * half_second)
        carried.carry()
    names = store.names()
    assert [names.count(one) for one in ("heartbeat.json", "log-1.txt", "records/a.json")] == [3, 2, 1]
    write(tmp_path, "records/a.json", "forged")
    store.now += 100
    carried.carry()
    carried.flush(store.now + 1)
    assert "records/a.json" not in store.names()
    store.now += 100
    carried.carry()
    assert store.names() == [], "nothing has changed"


def test_a_store_that_is_down_costs_patience_and_no_record(tmp_path: Path) -> None:
    store = Store()
    store.down = True
    carried = outbox(tmp_path, store)
    for name in ("records/a.json", "records/b.json", "ready.json"):
        write(tmp_path, name)
    for half_second in range(240):
        store.now = half_second / 2
        carried.carry()
    assert len(store.tried) < 60, "it was hammered"
    assert "no room" in carried.problem
    store.down = False
    for half_second in range(240, 310):
        store.now = half_second / 2
        carried.carry()
    assert sorted(store.names()) == ["ready.json", "records/a.json", "records/b.json"]


def test_one_file_that_is_always_refused_does_not_hold_up_the_others(tmp_path: Path) -> None:
    store = Store()
    store.refused = {"records/a.json"}
    carried = outbox(tmp_path, store)
    for name in ("records/a.json", "records/b.json", "heartbeat.json"):
        write(tmp_path, name)
    assert carried.flush(1.0) == 1
    assert store.names() == ["records/b.json", "heartbeat.json"]
    assert carried.records_waiting() == 1
    write(tmp_path, "heartbeat.json", "later")
    store.now = 5.5
    carried.carry()
    carried.carry()
    assert store.names() == ["heartbeat.json"]


def test_a_flush_waits_for_nothing_but_its_end(tmp_path: Path) -> None:
    store = Store()
    carried = outbox(tmp_path, store)
    write(tmp_path, "log-1.txt", "early")
    carried.carry()
    write(tmp_path, "log-1.txt", "early and late")
    assert carried.flush(store.now) == 1, "there is no time"
    assert carried.flush(store.now + 1) == 0
    assert store.came[-1] == ("log-1.txt", b"early and late")


def test_of_a_long_log_the_end_goes_and_of_a_monster_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_LOG_BYTES", 4)
    monkeypatch.setattr(sync, "_LARGEST_BYTES", 8)
    write(tmp_path, "log-1.txt", "0123456789")
    write(tmp_path, "records/a.json", "0123456789")
    store = Store()
    assert outbox(tmp_path, store).flush(1.0) == 0
    assert store.came == [("log-1.txt", b"6789")]


def test_no_link_leads_out_of_the_folder_and_no_pipe_is_waited_for(tmp_path: Path) -> None:
    secret, own = tmp_path / "secret", tmp_path / "own"
    write(secret, "x.json", "secret")
    own.mkdir()
    (own / "records").symlink_to(secret)
    (own / "y.json").symlink_to(secret / "x.json")
    os.mkfifo(own / "pipe.json")
    write(own, "line\nbreak.json")
    store = Store()
    carried = outbox(own, store)
    carried.carry()
    assert store.names() == []
    (own / "records").unlink()
    write(own, "records/x.json", "ours")
    waiting = carried._waiting()
    (own / "records").rename(own / "scratch")
    (own / "records").symlink_to(secret)  # between the look and the read
    assert waiting == ["records/x.json"] and not carried._send("records/x.json")
    assert store.names() == []


def test_a_file_of_another_user_is_none_of_theirs(tmp_path: Path) -> None:
    write(tmp_path, "records/a.json")
    store = Store()
    outbox(tmp_path, store, owner=os.getuid() + 1).flush(1.0)
    assert store.names() == []


def test_a_flood_of_files_keeps_no_record_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_MOST_FILES", 3)
    for number in range(9):
        write(tmp_path, f"{number}.json")
    store = Store()
    carried = outbox(tmp_path, store)
    carried.carry()
    assert len(store.names()) == 3
    write(tmp_path, "records/late.json")
    carried.carry()
    assert store.names() == ["records/late.json"]
    for number in range(9):
        write(tmp_path, f"records/{number}.json")
        carried.carry()
    assert len(store.names()) == 2, "nor are records without end carried without end"


def test_one_machine_sends_so_many_bytes_and_no_more_but_for_records_and_what_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_MOST_BYTES", 100)
    monkeypatch.setattr(sync, "_SMALL_BYTES", 10)
    store = Store()
    carried = outbox(tmp_path, store)
    for number in range(3):
        write(tmp_path, f"dump-{number}.bin", "x" * 49)
    write(tmp_path, "heartbeat.json", "{}")
    assert carried.flush(1.0) == 0, "what is refused is not waited for"
    names = store.names()
    assert len([one for one in names if one.startswith("dump")]) == 2 and "heartbeat.json" in names
    assert "(49 bytes)" in carried.refused
    write(tmp_path, "records/a.json", "x" * 60)
    write(tmp_path, "heartbeat.json", "{    }")
    store.now = 10.0
    assert carried.flush(11.0) == 0
    assert store.names() == ["records/a.json", "heartbeat.json"]
    write(tmp_path, "dump-0.bin", "x")  # what takes the place of another frees its room
    write(tmp_path, "dump-3.bin", "x" * 40)
    assert carried.flush(12.0) == 0
    assert store.names() == ["dump-0.bin", "dump-3.bin"]
    write(tmp_path, "records/b.json", "x" * 60)
    assert carried.flush(13.0) == 0 and store.names() == [] and "records/b.json" in carried.refused


def test_files_that_are_rewritten_all_the_time_cost_no_more_than_the_caps_count(tmp_path: Path) -> None:
    """Twice as many as may go up, for a quarter of an hour; a record goes up at once, and no heartbeat is left out."""
    store = Store()
    carried = outbox(tmp_path, store)
    for second in range(0, 900, 20):
        store.now = float(second)
        for number in range(40):
            write(tmp_path, f"mine-{number}.txt", f"{second}")
        write(tmp_path, "heartbeat.json", str(second))
        if second == 800:
            write(tmp_path, "records/a.json")
        carried.carry()
        assert carried.records_waiting() == 0
    names = store.names()
    uploads = len(names) - names.count("heartbeat.json")
    assert names.count("heartbeat.json") == 45 and names.count("records/a.json") == 1
    may = sync.UPLOADS_PER_HOUR / 4 + sync.UPLOADS_AT_ONCE
    assert 0.9 * may < uploads <= may
    at_once = 3 * sync.UPLOADS_AT_ONCE  # in the shortest time that the caps count, twenty minutes
    assert late_s(2 * 6) + 300.0 >= 1200.0
    most = ec2_prices.MOST_PUTS_PER_HOUR - 3600.0  # the controller's own
    assert 3600.0 / sync.STEADY_EVERY_S + sync.UPLOADS_PER_HOUR + at_once <= most <= ec2_prices.MOST_GETS_PER_HOUR


def test_a_flood_of_files_holds_no_record_back_at_the_end_and_is_carried_in_time(tmp_path: Path) -> None:
    store = Store()
    carried = outbox(tmp_path, store)
    for number in range(2 * sync.UPLOADS_AT_ONCE):
        write(tmp_path, f"mine-{number}.txt")
    write(tmp_path, "records/a.json")
    left = carried.flush(1e9)
    assert store.tried[0] == "records/a.json" and left == sync.UPLOADS_AT_ONCE + 1
    assert "the rest waits" in carried.problem
    store.now += 3 * left
    assert carried.flush(1e9) <= 1 and carried.records_waiting() == 0


def test_a_flood_of_records_lets_no_machine_fall_silent(tmp_path: Path) -> None:
    store = Store()
    for number in range(sync.UPLOADS_AT_ONCE + 50):
        write(tmp_path, f"records/{number}.json")
    write(tmp_path, "heartbeat.json")
    outbox(tmp_path, store).carry()
    assert store.names()[-1] == "heartbeat.json"


class World:
    """The store, the agent, the notices and the clock of one machine."""

    def __init__(self, directory: Path, deadline_s: float = 1000.0) -> None:
        self.now = 0.0
        self.directory, self.own = directory, directory / "node-1"
        self.inward: dict[str, bytes] = {}
        self.came: list[tuple[float, str, bytes]] = []
        self.asked: list[float] = []
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
        self.asked.append(self.now)
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


def test_that_files_are_left_behind_is_told_once_and_records_still_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_MOST_BYTES", 100)
    monkeypatch.setattr(sync, "_SMALL_BYTES", 10)
    world.place()
    for number in range(4):
        world.at(8, lambda number=number: world.write(f"dump-{number}.bin", "x" * 60))
    world.at(20, lambda: world.write("records/r.json", "x" * 80))
    world.at(40, world.leave)
    assert world.delivery.serve() == ""
    [told] = [json.loads(content) for _, name, content in world.came if name == "refused.json"]
    assert "dump-" in told["reason"] and len(world.moments("records/r.json")) == 1
    assert sum(name.startswith("dump-") for _, name, _ in world.came) == 1


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


@pytest.mark.parametrize(("name", "least_s", "most_s"), [("log-1.txt", 0, 80), ("records/r.json", 980, 1000)])
def test_a_store_that_stays_away_is_waited_for_until_the_deadline_with_a_record_and_else_not_so_long(
    world: World, name: str, least_s: float, most_s: float
) -> None:
    world.place()
    world.at(8, world.set(down=True))
    world.at(10, lambda: world.write(name))
    world.at(12, world.leave)
    world.delivery.serve()
    assert least_s <= world.now <= most_s


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

    monkeypatch.setattr(sync, "write_file", full)
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


def at_work(tmp_path: Path, seconds: float) -> World:
    """A machine with its plan, whose agent beats once a second and writes a log."""
    world = World(tmp_path, deadline_s=10 * seconds)
    world.place()
    world.tell("plan.json", b'{"attempt": 1}')
    for second in range(1, int(seconds)):
        beat = str(second)
        world.at(second, lambda beat=beat: world.write("heartbeat.json", beat))  # type: ignore[misc]
        world.at(second, lambda beat=beat: world.write("log-1.txt", "x" * int(beat)))  # type: ignore[misc]
    return world


def test_a_machine_at_work_asks_and_tells_no_more_than_the_bill_counts(tmp_path: Path) -> None:
    world = at_work(tmp_path, 300.0)
    world.at(300, world.leave)
    world.delivery.serve()
    lists, records = 720, 60  # of an hour: the controller's, and of the runs
    told = (PUTS_PER_HOUR - lists - records) / 12
    assert 0.9 * told <= len(world.came) <= 1.05 * told, "with fewer heartbeats, silence would be taken for death"
    assert len(world.asked) <= 1.5 * 720 / 12, "the manifest, every five seconds but for the beginning"


def test_news_is_asked_for_less_often_while_there_is_none_and_at_once_where_some_is_near(tmp_path: Path) -> None:
    world = at_work(tmp_path, 400.0)
    plan = world.directory / "plan.json"
    heard: list[float] = []
    world.at(100.2, lambda: world.tell("plan.json", b'{"attempt": 2}'))
    for half in range(200, 220):
        world.at(half / 2, lambda: plan.read_bytes() == b'{"attempt": 2}' and heard.append(world.now))
    world.at(200, lambda: world.write("finished-2.json"))
    world.at(300, world.leave)
    world.delivery.serve()
    assert 100.2 < heard[0] <= 105.5, "four seconds later than if it asked every second"
    rates = [sum(start <= moment < start + 15 for moment in world.asked) for start in (60, 102, 150, 201, 250)]
    assert rates[0] <= 4 and rates[2] <= 4 and rates[4] <= 4, "every five seconds while nothing changes"
    assert rates[1] >= 9 and rates[3] >= 12, "every second after news from either side"
