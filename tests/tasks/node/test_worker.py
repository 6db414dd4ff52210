"""How a worker ends: a mailbox that refuses a file, a lost peer, and a fault of the workload are distinguished."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from tasks.execution.record_loader import WireRecord
from tasks.node import launch, worker
from tasks.node.measuring import Patience
from tasks.node.processes import EXIT_ITEM_FAILED, EXIT_MAILBOX, EXIT_NO_DEVICE
from tasks.node.record import CPU, MACHINE, Devices, Item, Plan, RankLayout, write_json


class Left(Exception):
    """Stands for the end of the process."""


def ended(code: int) -> NoReturn:
    raise Left(code)


class Store:
    """The launch's: a dictionary, or gone."""

    def __init__(self, gone: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.gone = gone

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise dist.DistNetworkError("failed to send")
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


ITEM = Item(
    run_id="late",
    kind="train",
    nodes=[0, 1],
    devices=[2, 1],
    workload="w",
    batches=[2, 2],
    least_steps=1,
)


def rank(number: int, mailbox: Path, store: Store) -> launch.Launch:
    plan = Plan(
        lease_id="l",
        attempt=1,
        addresses=["a", "b"],
        expected=[],
        workloads=[],
        items=[ITEM],
        timeout_s=1.0,
    )
    return launch.Launch(
        mailbox=mailbox,
        plan=plan,
        layout=RankLayout(devices={0: 2, 1: 1}),
        rank=number,
        device=torch.device("cpu"),
        store=store,  # type: ignore[arg-type]
        groups={},
        patience=Patience(),
        devices=(("NVIDIA L4", 1), ("NVIDIA L4", 1), (CPU, 8)),
    )


def aborted(mine: launch.Launch, error: Exception) -> int:
    with pytest.raises(Left) as left:
        worker.abort(mine, 0, ITEM, error, 0.0)
    return int(left.value.args[0])


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", ended)


def problems(mailbox: Path) -> dict[str, str]:
    files = mailbox.glob("node-*/records/late.json")
    return {file.parents[1].name: json.loads(file.read_text())["reason"] for file in files}


def test_a_device_that_is_lost_after_the_check_fails_every_run_that_needs_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        Item(run_id="own", kind="train", nodes=[1], batches=[8]),
        Item(run_id="other", kind="probe", nodes=[0]),
    ]
    expected = [Devices(name="A10G", count=1)] * 2
    whole = Plan(
        lease_id="l",
        attempt=1,
        addresses=["a", "b"],
        expected=expected,
        workloads=[],
        items=[ITEM, *others],
    )
    write_json(tmp_path / "plan.json", whole)
    words = ["node.worker", "--mailbox", str(tmp_path), "--plan", str(tmp_path / "plan.json")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RANK", "2")  # node 0 has two
    with pytest.raises(Left) as left:
        worker.main()
    assert left.value.args == (EXIT_NO_DEVICE,)
    records = sorted((tmp_path / "node-1" / "records").iterdir())
    assert [file.stem for file in records] == ["late", "own"]
    bodies = [json.loads(file.read_text()) for file in records]
    assert all(
        one["cause"] == MACHINE and WireRecord.model_validate(one).status == "failed"
        for one in bodies
    )


@pytest.mark.parametrize(
    ("number", "node", "label"), [(1, "node-0", "node 0 device 1"), (2, "node-1", "node 1")]
)
def test_a_rank_that_fails_writes_the_record_for_the_first_one_may_be_ended_before(
    tmp_path: Path, number: int, node: str, label: str
) -> None:
    store = Store()
    assert aborted(rank(number, tmp_path, store), ValueError("row 17")) == EXIT_ITEM_FAILED
    assert problems(tmp_path) == {node: f"{label}: ValueError: row 17"} and list(store.values) == [
        f"item-0-rank-{number}-error"
    ]
    assert (
        aborted(rank(0, tmp_path, store), RuntimeError("Connection closed by peer"))
        == EXIT_ITEM_FAILED
    )
    assert problems(tmp_path) == dict.fromkeys({"node-0", node}, f"{label}: ValueError: row 17")


def test_a_full_disk_ends_the_launch_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(_path: Path, _body: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch, "write_json", full)
    with pytest.raises(Left, match=str(EXIT_MAILBOX)):
        launch.report(rank(2, tmp_path, Store()), "records/r.json", {})
    said = capsys.readouterr().err
    assert said.startswith("srift[5]: node 1") and "No space" in said


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            RuntimeError(
                "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]"
            ),
            True,
        ),
        (RuntimeError("Timed out waiting 20000ms for recv operation to complete"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x1)"), False),
        (ValueError("the connection between rows is missing"), False),
    ],
)
def test_a_lost_peer_is_not_taken_for_a_fault_of_the_workload(error: Exception, lost: bool) -> None:
    assert worker.lost_peer(error) == lost
