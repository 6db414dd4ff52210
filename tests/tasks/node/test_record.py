"""The wire: what is written is read back, and a file in the mailbox is whole or absent."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tasks.node.record import Item, Plan, WorkloadFile, plan_from_json, write_json

PLAN = Plan(
    lease_id="lease",
    attempt=2,
    addresses=["10.0.0.1", "10.0.0.2"],
    workloads=[WorkloadFile(name="w", digest="d", file="workloads/d.py", function="build", arguments={"width": 3})],
    items=[Item(run_id="r", kind="train", nodes=[0, 1], workload="w", batches=[3, 5])],
)


def test_a_plan_survives_the_mailbox(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", PLAN)
    assert plan_from_json((tmp_path / "plan.json").read_text()) == PLAN


def test_a_plan_of_another_version_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        plan_from_json(json.dumps({**asdict(PLAN), "colour": "red"}))


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records" / "r.json"
    write_json(path, {"say": "old"})

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"say": "new"})
    assert json.loads(path.read_text()) == {"say": "old"}
    assert [one.name for one in path.parent.iterdir()] == ["r.json"]
