"""How a worker ends: a mailbox that refuses a file, a lost peer, and a fault of the workload are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from tasks.node import launch, train
from tasks.node.endings import EXIT_MAILBOX
from tasks.node.places import Places


class Left(Exception):
    """Stands for the end of the process."""


def test_a_full_disk_ends_the_launch_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(_path: Path, _body: object) -> None:
        raise OSError(28, "No space left on device")

    def ended(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(launch, "write_json", full)
    monkeypatch.setattr("os._exit", ended)
    mine = launch.Launch(
        mailbox=tmp_path,
        plan=None,  # type: ignore[arg-type]
        places=Places(devices={0: 1, 1: 2}),
        rank=2,
        device=torch.device("cpu"),
        store=None,  # type: ignore[arg-type]
        groups={},
    )
    with pytest.raises(Left, match=str(EXIT_MAILBOX)):
        launch.report(mine, tmp_path / "node-1" / "records" / "r.json", {})
    said = capsys.readouterr().err
    assert said.startswith("srift[5]: node 1 could not write") and "No space left on device" in said


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]"), True),
        (RuntimeError("Timed out waiting 20000ms for recv operation to complete"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x1)"), False),
        (ValueError("the connection between rows is missing"), False),
    ],
)
def test_a_lost_peer_is_not_taken_for_a_fault_of_the_workload(error: Exception, lost: bool) -> None:
    assert train.lost_peer(error) == lost


def test_an_explanation_is_one_line_with_the_kind_of_error() -> None:
    assert launch.explain(ValueError("row 17\nis not a number")) == "ValueError: row 17"
    assert launch.explain(KeyError()) == "KeyError"
