"""The wire: plans and records as JSON, written whole or not at all; the ranks of a plan."""

import json
import os
from pathlib import Path

import pytest

from tasks.node.record import (
    Item,
    write_file,
    write_json,
)
from tests.tasks.node.conftest import plan


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "records" / "r.json"
    write_json(path, {"say": "old"})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"say": "new"})
    assert json.loads(path.read_text()) == {"say": "old"}
    assert [path.name for path in path.parent.iterdir()] == ["r.json"]


def test_no_link_that_lies_in_wait_is_written_through(tmp_path, monkeypatch):
    victim, notice = tmp_path / "victim", tmp_path / "notice.json"
    victim.write_text("untouched")
    for link in (notice, tmp_path / f".notice.json.{os.getpid()}"):
        link.symlink_to(victim)
    with monkeypatch.context() as patch, pytest.raises(FileExistsError):
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # the link comes back
        write_file(notice, b"{}")
    write_file(notice, b"{}")
    assert not notice.is_symlink() and victim.read_text() == "untouched"


def test_a_node_has_the_ranks_of_its_largest_item_and_smaller_ones_use_the_first():
    sizes = {"small": ([0, 1], [1, 2]), "large": ([1, 2], [4, 1])}
    small, large = (
        Item(run_id=name, kind="train", nodes=nodes, batches=[1, 1], devices=devices)
        for name, (nodes, devices) in sizes.items()
    )
    found = plan(small, large)
    assert found.rank_counts == {0: 1, 1: 4, 2: 1}
    assert found.ranks_of(small) == (0, 1, 2)
    assert found.ranks_of(large) == (1, 2, 3, 4, 5)
    assert found.label(2) == "node 1 device 1" and found.label(5) == "node 2"
