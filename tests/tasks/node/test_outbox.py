"""What leaves a machine: records first and once, nothing lost by a fault, and only files of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.node import outbox as module
from tasks.node.outbox import Outbox


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


def test_a_heartbeat_goes_every_two_seconds_and_a_record_once(tmp_path: Path) -> None:
    store = Store()
    carried = outbox(tmp_path, store)
    write(tmp_path, "records/a.json", "first")
    for half_second in range(21):
        store.now = half_second / 2
        write(tmp_path, "heartbeat.json", str(half_second))
        write(tmp_path, "log-1.txt", "x" * half_second)
        carried.carry()
    names = store.names()
    assert [names.count(one) for one in ("heartbeat.json", "log-1.txt", "records/a.json")] == [6, 2, 1]
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
    store.now = 2.5
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
    monkeypatch.setattr(module, "_LOG_BYTES", 4)
    monkeypatch.setattr(module, "_LARGEST_BYTES", 8)
    write(tmp_path, "log-1.txt", "0123456789")
    write(tmp_path, "records/a.json", "0123456789")
    store = Store()
    assert outbox(tmp_path, store).flush(1.0) == 0
    assert store.came == [("log-1.txt", b"6789")]


def test_files_without_end_are_not_carried_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    store = Store()
    carried = outbox(tmp_path, store)
    for number in range(9):
        write(tmp_path, f"records/{number}.json")
        carried.carry()
    assert len(store.names()) == 3


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
