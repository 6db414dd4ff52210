"""A machine's mailbox and the store: what comes in, and what goes out."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from models.campaign.budget import late_s
from tasks.node.on_ec2 import sync
from tasks.node.on_ec2.sync import BadManifest, Inbox, Outbox
from tasks.providers.ec2 import prices as ec2_prices


class Files:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    def say(self, **files: str) -> None:
        for name, content in files.items():
            self.files[name.replace("__", "/").replace("_", ".")] = content.encode()
        named = {
            name: hashlib.sha256(self.files[name]).hexdigest()
            for name in self.files
            if name != "manifest.json"
        }
        self.files["manifest.json"] = json.dumps({"files": named}).encode()

    def get(self, name: str) -> bytes:
        self.asked.append(name)
        try:
            return self.files[name]
        except KeyError:
            raise OSError(f"no {name}") from None


def test_what_is_new_or_changed_is_fetched_and_only_as_the_manifest_says(tmp_path: Path) -> None:
    store = Files()
    inbox = Inbox(tmp_path, store.get)
    with pytest.raises(OSError, match="manifest"):
        inbox.fetch()
    store.say(plan_json="1", workloads__d_py="w")
    store.files["workloads/d.py"] = b"other"
    assert not inbox.fetch() and not list(tmp_path.iterdir())
    store.files["workloads/d.py"] = b"w"
    assert inbox.fetch()
    assert store.asked[-2:] == ["workloads/d.py", "plan.json"]
    assert (tmp_path / "workloads" / "d.py").read_text() == "w"
    store.say(plan_json="2")
    store.asked.clear()
    assert inbox.fetch()
    assert store.asked == ["manifest.json", "plan.json"]
    assert (tmp_path / "plan.json").read_text() == "2"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["plan.json", "workloads"]


@pytest.mark.parametrize(
    "named",
    [
        b"[]",
        b'{"files": {"../x": "0"}}',
        b'{"files": {"node-0/notice.json": "0"}}',
    ],
)
def test_a_manifest_that_leads_elsewhere_or_is_none_is_refused(
    named: bytes, tmp_path: Path
) -> None:
    store = Files()
    store.files |= {"manifest.json": named, "node.json": b"3", "x": b""}
    with pytest.raises(BadManifest):
        Inbox(tmp_path / "own", store.get).fetch()
    with pytest.raises(BadManifest):
        Inbox(tmp_path / "own", store.get).rank()
    assert not list(tmp_path.iterdir())


class Store:
    """Takes what comes unless it is `down`, or its name is in `refused`."""

    def __init__(self) -> None:
        self.came: list[tuple[str, bytes]] = []
        self.down = False
        self.refused: set[str] = set()
        self.tried: list[str] = []

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


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def carried(tmp_path: Path, store: Store, clock: Any) -> Outbox:
    return Outbox(tmp_path, owner=os.getuid(), put=store.put)


def test_records_go_before_anything_else_and_scratch_stays(
    tmp_path: Path, store: Store, carried: Outbox
) -> None:
    for name in (
        "log-1.txt",
        "heartbeat.json",
        "ready.json",
        "armed-1.json",
        "scratch/plan-1.json",
        "records/b.json",
    ):
        write(tmp_path, name)
    write(tmp_path, "records/a.json", "whole")
    (tmp_path / "records" / ".c.json.77").write_text("hal")
    carried.carry()
    assert store.came[0] == ("records/a.json", b"whole")
    assert store.names() == [
        *(
            "records/a.json",
            "records/b.json",
            "armed-1.json",
            "ready.json",
            "heartbeat.json",
            "log-1.txt",
        )
    ]


def test_a_store_that_is_down_costs_patience_and_no_record(
    tmp_path: Path, store: Store, carried: Outbox, clock: Any
) -> None:
    store.down = True
    for name in ("records/a.json", "records/b.json", "ready.json"):
        write(tmp_path, name)
    for half_second in range(310):
        clock.now = half_second / 2
        if half_second == 240:
            assert 10 < len(store.tried) < 60
            assert "no room" in carried.problem
            store.down = False
        carried.carry()
    assert sorted(store.names()) == ["ready.json", "records/a.json", "records/b.json"]


def test_of_a_long_log_the_end_goes_and_of_a_monster_nothing(
    tmp_path: Path, store: Store, carried: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_LOG_BYTES", 4)
    monkeypatch.setattr(sync, "_LARGEST_BYTES", 8)
    write(tmp_path, "log-1.txt", "0123456789")
    write(tmp_path, "records/a.json", "0123456789")
    assert carried.flush(1.0) == 0
    assert store.came == [("log-1.txt", b"6789")]


def test_no_link_leads_out_no_pipe_is_waited_for_and_nobody_elses_file_is_theirs(
    tmp_path: Path, store: Store, clock: Any
) -> None:
    secret, own = tmp_path / "secret", tmp_path / "own"
    write(secret, "x.json", "secret")
    own.mkdir()
    (own / "records").symlink_to(secret)
    (own / "y.json").symlink_to(secret / "x.json")
    os.mkfifo(own / "pipe.json")
    write(own, "line\nbreak.json")
    carried = Outbox(own, owner=os.getuid(), put=store.put)
    carried.carry()
    assert store.names() == []
    (own / "records").unlink()
    write(own, "records/x.json", "ours")
    Outbox(own, owner=os.getuid() + 1, put=store.put).flush(1.0)
    assert store.names() == []
    waiting = carried._waiting()
    (own / "records").rename(own / "scratch")
    (own / "records").symlink_to(secret)  # between the look and the read
    assert waiting == ["records/x.json"] and not carried._send("records/x.json")
    assert store.names() == []


def test_one_machine_sends_so_many_bytes_and_no_more_but_for_records_and_what_is_small(
    tmp_path: Path, store: Store, carried: Outbox, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_MOST_BYTES", 100)
    monkeypatch.setattr(sync, "_SMALL_BYTES", 10)
    for number in range(3):
        write(tmp_path, f"dump-{number}.bin", "x" * 49)
    write(tmp_path, "heartbeat.json", "{}")
    assert carried.flush(1.0) == 0
    names = store.names()
    assert len([one for one in names if one.startswith("dump")]) == 2 and "heartbeat.json" in names
    assert "(49 bytes)" in carried.refused
    write(tmp_path, "records/a.json", "x" * 60)
    write(tmp_path, "heartbeat.json", "{    }")
    clock.now = 10.0
    assert carried.flush(11.0) == 0
    assert store.names() == ["records/a.json", "heartbeat.json"]
    write(tmp_path, "dump-0.bin", "x")  # what takes the place of another frees its room
    write(tmp_path, "dump-3.bin", "x" * 40)
    assert carried.flush(12.0) == 0
    assert store.names() == ["dump-0.bin", "dump-3.bin"]
    write(tmp_path, "records/b.json", "x" * 60)
    assert carried.flush(13.0) == 0 and store.names() == [] and "records/b.json" in carried.refused


def test_files_that_are_rewritten_all_the_time_cost_no_more_than_the_caps_count(
    tmp_path: Path, store: Store, carried: Outbox, clock: Any
) -> None:
    """Twice as many as may go up, for a quarter of an hour; a record goes up at once, and no
    heartbeat is left out.
    """
    for second in range(0, 900, 20):
        clock.now = float(second)
        for number in range(40):
            (tmp_path / f"mine-{number}.txt").write_text(f"{number} {second}")
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
    assert (
        3600.0 / sync.STEADY_EVERY_S + sync.UPLOADS_PER_HOUR + at_once
        <= most
        <= ec2_prices.MOST_GETS_PER_HOUR
    )


def test_a_flood_of_records_lets_no_machine_fall_silent(
    tmp_path: Path, store: Store, carried: Outbox
) -> None:
    for number in range(sync.UPLOADS_AT_ONCE + 50):
        write(tmp_path, f"records/{number}.json")
    write(tmp_path, "heartbeat.json")
    carried.carry()
    assert store.names()[-1] == "heartbeat.json"
