"""A machine's mailbox and the store: what comes in, and what goes out."""

import os
from contextlib import suppress

import pytest

from models.campaign.budget import LATE_S
from tasks.node.on_ec2 import sync
from tasks.node.on_ec2.sync import Inbox, Outbox
from tasks.providers.ec2 import prices as ec2_prices
from tests.tasks.node.on_ec2.store import Store


def write(folder, name, content="{}"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.1")
    beside.write_text(content)
    beside.rename(path)


@pytest.fixture
def store(clock):
    return Store(clock)


@pytest.fixture
def outbox(tmp_path, store, clock):
    return Outbox(tmp_path, owner=os.getuid(), put=store.put)


def test_what_is_new_or_changed_is_fetched_and_only_as_the_manifest_names_it(tmp_path, store):
    inbox = Inbox(tmp_path, store.get)
    with pytest.raises(OSError, match="manifest"):
        inbox.fetch()
    store.inward = {"workloads/d.py": b"w"}
    store.brings(plan__json="1")
    store.inward["workloads/d.py"] = b"other"
    inbox.fetch()
    assert not list(tmp_path.iterdir())
    store.inward["workloads/d.py"] = b"w"
    inbox.fetch()
    assert store.requests[-2:] == ["workloads/d.py", "plan.json"]
    store.brings(plan__json="2")
    store.requests.clear()
    inbox.fetch()
    assert store.requests == ["manifest.json", "plan.json"]
    assert (tmp_path / "plan.json").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "workloads"]


@pytest.mark.parametrize("name", ["../x", "node-0/notice.json"])
def test_a_manifest_that_leads_elsewhere_is_refused(name, tmp_path, store):
    store.inward[name] = b""
    store.brings()
    with pytest.raises(OSError, match="not a mailbox file name"):
        Inbox(tmp_path / "own", store.get).fetch()
    assert not list(tmp_path.iterdir())


def test_records_go_before_anything_else_and_other_folders_stay(tmp_path, store, outbox):
    first = ["records/b.json", "armed-1.json", "heartbeat.json", "ready.json", "log-1.txt"]
    for name in (*reversed(first), "scratch/plan-1.json", "records/deep/c.json"):
        write(tmp_path, name)
    write(tmp_path, "records/a.json", '"whole"')
    (tmp_path / "records" / ".c.json.77").write_text("hal")
    outbox.carry()
    assert store.bodies("records/a.json") == ["whole"]
    assert store.names() == ["records/a.json", *first]
    write(tmp_path, "heartbeat.json", "again")
    outbox.carry(due_only=False)
    assert store.names() == ["heartbeat.json"]


def test_a_store_that_is_down_costs_patience_and_no_record(tmp_path, store, outbox, clock):
    store.down = True
    for name in ("records/a.json", "records/b.json", "ready.json"):
        write(tmp_path, name)
    for half_second in range(310):
        clock.now = half_second / 2
        store.down = half_second < 240
        with suppress(OSError):
            outbox.carry()
        if half_second == 239:
            assert 10 < store.tried < 90 and outbox.records_wait()
    assert sorted(store.names()) == ["ready.json", "records/a.json", "records/b.json"]


def test_a_record_that_the_store_refuses_holds_nothing_back(tmp_path, store, clock):
    def put(name, content):
        if name == "records/a.json":
            raise TimeoutError(name)
        store.put(name, content)

    for name in ("records/a.json", "records/b.json", "heartbeat.json"):
        write(tmp_path, name)
    with pytest.raises(TimeoutError):
        Outbox(tmp_path, owner=os.getuid(), put=put).carry()
    assert store.names() == ["records/b.json", "heartbeat.json"]


def test_of_a_long_log_the_end_goes_and_of_a_monster_a_reason(tmp_path, store, outbox, monkeypatch):
    monkeypatch.setattr(sync, "_LARGEST_BYTES", 4)
    write(tmp_path, "log-1.txt", "0123456789")
    write(tmp_path, "records/a.json", "0123456789")
    outbox.carry()
    assert store.bodies("log-1.txt") == [6789] and len(store.came) == 2 and not outbox.waiting()
    assert "records/a.json" in store.bodies("refused.json")[0]["reason"]


def test_no_link_leads_out_no_pipe_is_waited_for_and_no_other_users_file_is_read(
    tmp_path, store, clock
):
    secret, folder = tmp_path / "secret", tmp_path / "own"
    write(secret, "x.json", "secret")
    folder.mkdir()
    (folder / "records").symlink_to(secret)
    (folder / "y.json").symlink_to(secret / "x.json")
    os.mkfifo(folder / "pipe.json")
    write(folder, "line\nbreak.json")
    outbox = Outbox(folder, owner=os.getuid(), put=store.put)
    outbox.carry()
    (folder / "records").unlink()
    write(folder, "records/x.json", "ours")
    write(folder, "z.json", "ours")
    Outbox(folder, owner=os.getuid() + 1, put=store.put).carry()
    assert outbox.waiting() == ["records/x.json", "z.json"]
    (folder / "records").rename(folder / "scratch")
    (folder / "records").symlink_to(secret)  # between the look and the read
    (folder / "z.json").unlink()
    (folder / "z.json").symlink_to(secret / "x.json")
    outbox._upload("records/x.json")
    outbox._upload("z.json")
    assert store.names() == []


@pytest.mark.parametrize("kind", ["", "records/"])
def test_a_flood_of_files_is_cut(tmp_path, store, outbox, monkeypatch, kind):
    monkeypatch.setattr(sync, "_MOST_FILES", 3)
    for number in range(5):
        write(tmp_path, f"{kind}{number}.json")
    outbox.carry()
    assert len(store.names()) == 3
    write(tmp_path, "log-1.txt" if kind else "records/a.json")
    outbox.carry()
    assert len(store.names()) == 1


def test_files_that_are_rewritten_all_the_time_cost_no_more_than_the_caps_count(
    tmp_path, store, outbox, clock
):
    """Twice as many as may go up, for a quarter of an hour; no heartbeat is left out."""
    for second in range(0, 900, 20):
        clock.now = float(second)
        for number in range(40):
            (tmp_path / f"mine-{number}.txt").write_text(f"{number} {second}")
        write(tmp_path, "heartbeat.json", str(second))
        if second == 800:
            write(tmp_path, "records/a.json")
        outbox.carry()
        assert not outbox.records_wait()
    names = store.names()
    uploads = len(names) - names.count("heartbeat.json")
    assert names.count("heartbeat.json") == 45 and names.count("records/a.json") == 1
    may = sync.UPLOADS_PER_HOUR / 4 + sync.UPLOADS_AT_ONCE
    assert 0.9 * may < uploads <= may
    at_once = 3 * sync.UPLOADS_AT_ONCE  # in the shortest time that the caps count, twenty minutes
    assert LATE_S + 300.0 >= 1200.0
    uploads_per_hour = 3600.0 / sync.CHANGED_EVERY_S + sync.UPLOADS_PER_HOUR + at_once
    assert uploads_per_hour <= ec2_prices.MOST_EACH_PER_HOUR - 3600.0  # the controller's own
    most_bytes = uploads_per_hour * sync._LARGEST_BYTES + 3600 * 20_000  # and manifests
    assert most_bytes <= ec2_prices.MOST_BYTES_PER_HOUR
