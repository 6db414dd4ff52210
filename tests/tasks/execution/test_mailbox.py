"""What nodes write cannot harm a refresh, and the log knows each machine of a launch."""

import pytest

from models.domain.cluster import Cluster
from tasks.execution.mailbox import MachineLog, Mailbox, machine_rows
from tasks.execution.outcomes import blame
from tasks.node.processes import EXIT_NO_DEVICE
from tests.fakes import FakeProvider, offer
from tests.warehouse.builders import NOON


def test_a_node_speaks_for_itself_alone(tmp_path):
    (tmp_path / "node-0").mkdir()
    text = f'{{"exit_code": 1, "worker_exit_code": {EXIT_NO_DEVICE}, "node": 1}}'
    (tmp_path / "node-0/finished-1.json").write_text(text)
    for torn in ('{"attempt": 1', "[1]", "1" + 400 * "0"):
        (tmp_path / "node-0/progress.json").write_text(torn)
        assert Mailbox(path=tmp_path, nodes=2).under_way(1) == set()
    ended = blame(Mailbox(path=tmp_path, nodes=2).finished(1), "a", {"a"})
    assert ended.nodes == (0,) and ended.reason.startswith("node 0:")


def test_a_replacement_is_another_machine_in_the_same_place(tmp_path):
    mailbox = tmp_path / "mailbox"
    log = MachineLog(Mailbox(path=mailbox, nodes=2), Cluster.of((2, offer())))
    log.lost(1, 20.0, interrupted=True)
    log.ordered(1, offer(), after_s=25.0)
    log.lost(1, 50.0, interrupted=True)
    provider = FakeProvider(tmp_path)
    provider.end("l", mailbox, "released")
    rows = machine_rows(provider.over[0], "local")
    assert [(row["node"], row["number"], row["interrupted"]) for row in rows] == [
        (0, 0, False),
        (1, 0, True),
        (1, 1, True),
    ]
    assert [row["hours"] * 3600 for row in rows] == pytest.approx([60.0, 20.0, 25.0])
    assert [(row["asked_at"] - NOON).total_seconds() for row in rows] == [0.0, 0.0, 25.0]
