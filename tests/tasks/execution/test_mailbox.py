"""What nodes write is theirs, and no number of theirs ends a refresh; what became of each machine comes home once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve
from tasks.execution.collect import collect
from tasks.execution.mailbox import MachineLog, Mailbox, benchmark_seconds, machine_rows
from tasks.execution.outcomes import blame
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.providers.base import NodeState
from tasks.workspace.workspace import Workspace
from tests.fakes import (
    FakeCluster,
    FakeProvider,
    Step,
    armed,
    fast,
    finished,
    offer,
    ready,
    reported,
)
from tests.tasks.execution.test_collect import installation
from tests.tasks.execution.test_session import (
    TAKEN,
    at,
    becomes,
    job,
    new,
    only,
    sells,
    served,
    waits,
)
from tests.warehouse.builders import NOON
from warehouse.reads import mart

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
    assert benchmark_seconds(tmp_path) == 2.0, "a run counts once, however many nodes tell of it"


def test_a_node_speaks_for_itself_alone(tmp_path: Path) -> None:
    wrote(
        tmp_path,
        "node-0/finished-1.json",
        f'{{"exit_code": 1, "worker_exit_code": {EXIT_NO_DEVICE}, "node": 1}}',
    )
    ended = blame(Mailbox(path=tmp_path, nodes=2).finished(1), "a", {"a"})
    assert ended.nodes == (0,) and ended.reason.startswith("node 0:")


def launched(home: Path, *script: Step) -> tuple[Workspace, pd.DataFrame]:
    here = installation(home, script)
    serve(here.provider, job(), stop_at=100.0, watch=lambda *_: None, clock=fast())
    collect(here, "r", NOON)
    return here, mart(here.warehouse, "machines")


def both_ready_one_earlier(cluster: FakeCluster) -> None:
    ready(cluster)
    moment = (cluster.mailbox / "node-1" / "ready.json").stat().st_mtime
    os.utime(cluster.mailbox / "node-0" / "ready.json", (moment - 2.0, moment - 2.0))


def test_each_machine_tells_once_when_it_was_at_work_and_how_long_it_was_held(
    tmp_path: Path,
) -> None:
    script = (
        *waits(40),
        both_ready_one_earlier,
        *waits(20),
        armed(1),
        reported("a", "b", "c"),
        finished(1),
    )
    here, found = launched(tmp_path, *script)
    collect(here, "r", NOON)
    assert len(mart(here.warehouse, "machines")) == len(found) == 2
    assert found["instance_type"].tolist() == ["small", "small"] and set(found["market"]) == {
        "spot"
    }
    early, late = found["startup_s"]
    assert late == pytest.approx(6.1, abs=0.3) and late - early == pytest.approx(2.0, abs=0.01)
    assert found["hours"].tolist() == [pytest.approx(1 / 60)] * 2, "as long as the lease, a minute"
    assert not found["interrupted"].any() and found["machines"].tolist() == [2, 2]


def test_the_machine_that_the_market_took_is_distinguished_from_the_one_that_stayed(
    tmp_path: Path,
) -> None:
    _, found = launched(tmp_path, ready, armed(1), *waits(100), becomes(1, TAKEN))
    assert found["interrupted"].tolist() == [False, True]
    assert (
        found["hours"][1] == pytest.approx(10.3 / 3600, rel=0.1)
        and found["hours"][1] < found["hours"][0]
    )
    assert found["interrupted_at"].notna().tolist() == [False, True]


def test_one_that_never_came_to_work_was_held_all_the_same(tmp_path: Path) -> None:
    _, found = launched(tmp_path, ready, *waits(3), becomes(1, TAKEN))
    assert found["startup_s"].isna().all() and (found["hours"] > 0).all()


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
    log.replaced(1, startup_s=90.0)
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


def replaced(home: Path, *script: Step) -> list[dict[str, Any]]:
    """What became of the machines of a launch that serves one run on two hosts."""
    seen, _ = served(home, job("b"), *script)
    return ended(home, seen.mailbox)


def test_a_replacement_that_is_taken_before_it_came_to_work_is_reported_by_itself(
    tmp_path: Path,
) -> None:
    script = (
        sells(2),
        ready,
        armed(1),
        at("b"),
        *waits(50),
        becomes(1, TAKEN),
        *waits(100),
        becomes(1, TAKEN),
    )
    rows = replaced(
        tmp_path, *script, *waits(80), new(1), armed(3), reported("b-again-2"), finished(3)
    )
    assert [(row["node"], row["number"], row["interrupted"]) for row in rows] == [
        (0, 0, False), (1, 0, True), (1, 1, True), (1, 2, False),
    ]  # fmt: skip
    assert [row["startup_s"] is not None for row in rows] == [True, True, False, True]
    assert rows[3]["startup_s"] == pytest.approx(8.2, abs=0.5)
    assert rows[2]["hours"] * 3600 == pytest.approx(10.1, abs=0.5), (
        "from when it was asked for until it was taken"
    )


def test_machines_that_go_together_are_interrupted_each_for_itself(tmp_path: Path) -> None:
    broken = NodeState(alive=False, reason="the hardware below it failed")

    def both(cluster: FakeCluster) -> None:
        cluster.states = [broken, TAKEN]

    rows = replaced(tmp_path, ready, armed(1), at("b"), *waits(100), both)
    assert [row["interrupted"] for row in rows] == [False, True]
    assert [row["hours"] * 3600 < 15.0 for row in rows] == [True, True], (
        "held no longer than it lived"
    )


def test_a_replacement_that_waited_for_its_peers_to_finish_did_not_start_so_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = 1e9

    def came_early(cluster: FakeCluster) -> None:
        new(1)(cluster)
        os.utime(cluster.mailbox / "node-1" / "ready.json", (moment - 30.0, moment - 30.0))

    monkeypatch.setattr(FakeCluster, "now_unix", lambda _: moment)
    script = (sells(1), ready, armed(1), at("b"), becomes(1, TAKEN), *waits(100))
    meanwhile = (
        only(0, "armed-2.json"),
        came_early,
        *waits(300),
        reported("t"),
        finished(2, node=0),
        lambda _: None,
    )
    seen, _ = served(
        tmp_path, job("bt"), *script, *meanwhile, armed(4), reported("b-again-2"), finished(4)
    )
    assert seen.recorded == {"t", "b-again-2"}
    assert ended(tmp_path, seen.mailbox)[2]["startup_s"] == pytest.approx(10.0, abs=1.0)


def test_what_cannot_be_read_is_left_out_and_stops_nothing(tmp_path: Path) -> None:
    provider = FakeProvider(tmp_path)
    for name, text in (("torn", '{"machines": [{"node":'), ("odd", '{"machines": [{"node": 0}]}')):
        (tmp_path / name / "controller").mkdir(parents=True)
        (tmp_path / name / "controller" / "machines.json").write_text(text)
        provider.end("l", tmp_path / name, "reaped")
    provider.end("l", tmp_path / "none", "reaped")
    assert [machine_rows(lease, "local") for lease in provider.over] == [[], [], []]
