"""The wire: plans and records as JSON, written whole or not at all; the ranks of a plan."""

import json
import os
from pathlib import Path

import pytest

from tasks.node.record import (
    Devices,
    Item,
    RankLayout,
    WorkloadFile,
    plan_from_json,
    write_file,
    write_json,
)
from tests.tasks.node.conftest import plan


def test_a_plan_survives_the_mailbox(tmp_path):
    file = WorkloadFile(name="w", digest="d", file="d.py", function="build", arguments={"width": 3})
    item = Item(run_id="r", kind="train", nodes=[0, 1], workload="w", batches=[3, 5])
    whole = plan(item, workloads=[file], expected=[Devices(name="A10G", count=4)] * 3)
    write_json(tmp_path / "plan.json", whole)
    assert plan_from_json((tmp_path / "plan.json").read_text()) == whole


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "records" / "r.json"
    write_json(path, {"say": "old"})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"say": "new"})
    assert json.loads(path.read_text()) == {"say": "old"}
    assert [one.name for one in path.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_no_link_that_lies_in_wait_is_written_through(tmp_path, monkeypatch, comes_back):
    victim, notice = tmp_path / "victim", tmp_path / "notice.json"
    victim.write_text("untouched")
    for link in (notice, tmp_path / f".notice.json.{os.getpid()}"):
        link.symlink_to(victim)
    if comes_back:
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(FileExistsError):
            write_file(notice, b"{}")
    else:
        write_file(notice, b"{}")
        assert not notice.is_symlink() and notice.read_text() == "{}"
    assert victim.read_text() == "untouched"


def test_a_node_has_the_ranks_of_its_largest_item_and_smaller_ones_use_the_first():
    sizes = {"small": ([0, 1], [1, 2]), "large": ([1, 2], [4, 1])}
    small, large = (
        Item(run_id=name, kind="train", nodes=nodes, batches=[1, 1], devices=devices)
        for name, (nodes, devices) in sizes.items()
    )
    found = RankLayout.of(plan(small, large))
    assert found.devices == {0: 1, 1: 4, 2: 1}
    assert found.ranks(small) == (0, 1, 2)
    assert found.ranks(large) == (1, 2, 3, 4, 5)
    assert found.label(2) == "node 1 device 1" and found.label(5) == "node 2"
    with pytest.raises(ValueError, match="node 0"):
        RankLayout.of(plan(small, ranks=[1, 2]))
