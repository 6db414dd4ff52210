"""What nodes write is theirs, and no number of theirs ends a refresh; what became of each machine
comes home once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks.execution.mailbox import MachineLog, Mailbox, benchmark_seconds, machine_rows
from tasks.execution.outcomes import blame
from tasks.node.processes import EXIT_NO_DEVICE
from tests.fakes import (
    FakeProvider,
    offer,
)
from tests.warehouse.builders import NOON

HUGE = "1" + 400 * "0"


def wrote(mailbox: Path, name: str, text: str) -> None:
    file = mailbox / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("number", [HUGE, "Infinity", "NaN", "1e999"])
def test_a_number_that_is_none_counts_as_zero(tmp_path: Path, number: str) -> None:
    wrote(tmp_path, "node-0/progress.json", f'{{"attempt": 1, "index": {number}, "run_id": "a"}}')
    wrote(tmp_path, "node-1/progress.json", '{"attempt": 1, "index": 1, "run_id": "b"}')
    wrote(
        tmp_path,
        "node-0/records/a.json",
        f'{{"kind": "train", "values": {{"warmup_s": {number}, "steps_s": 2}}}}',
    )
    wrote(
        tmp_path,
        "node-0/records/b.json",
        f'{{"kind": "probe", "started_unix": 0, "ended_unix": {number}}}',
    )
    assert Mailbox(path=tmp_path, nodes=2).under_way(1) == "b"
    assert benchmark_seconds(tmp_path) == 2.0
    wrote(tmp_path, "node-0/records/c.json", '{"kind": "train", "values": [1]}')
    wrote(tmp_path, "node-0/records/d.json", '{"kind": "train", "values": {"steps_s": "long"}}')
    wrote(tmp_path, "node-0/records/torn.json", '{"kind": "tra')
    assert benchmark_seconds(tmp_path) == 2.0
    wrote(tmp_path, "node-1/records/a.json", '{"kind": "train", "values": {"steps_s": 2}}')
    assert benchmark_seconds(tmp_path) == 2.0


def test_a_node_speaks_for_itself_alone(tmp_path: Path) -> None:
    wrote(
        tmp_path,
        "node-0/finished-1.json",
        f'{{"exit_code": 1, "worker_exit_code": {EXIT_NO_DEVICE}, "node": 1}}',
    )
    ended = blame(Mailbox(path=tmp_path, nodes=2).finished(1), "a", {"a"})
    assert ended.nodes == (0,) and ended.reason.startswith("node 0:")


def ended(home: Path, mailbox: Path | None) -> list[dict[str, Any]]:
    """The machines of a lease with that mailbox that ends after a minute."""
    assert mailbox is not None
    provider = FakeProvider(home)
    provider.end("l", mailbox, "released")
    return machine_rows(provider.over[0], "local")


def test_a_replacement_is_another_machine_in_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    log = MachineLog(Mailbox(path=tmp_path / "m", nodes=2), Cluster.of((2, offer())))
    log.lost(1, 20.0, interrupted=True)
    log.ordered(1, offer(), after_s=25.0)
    log.replaced(1, at_s=115.0)
    log.lost(1, 50.0, interrupted=True)
    log.lost(1, 55.0, interrupted=True)
    rows = ended(tmp_path, tmp_path / "m")
    assert [(row["node"], row["number"], row["interrupted"], row["startup_s"]) for row in rows] == [
        (0, 0, False, None),
        (1, 0, True, None),
        (1, 1, True, 90.0),
    ]
    assert [row["hours"] * 3600 for row in rows] == pytest.approx([60.0, 20.0, 25.0])
    assert [(row["asked_at"] - NOON).total_seconds() for row in rows] == [0.0, 0.0, 25.0]
