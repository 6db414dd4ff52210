"""A machine made ready for a launch's workloads: folder, Python and variables; or a record for each run, and why."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.node import prepare
from tasks.node.processes import EXIT_ITEM_FAILED
from tasks.node.record import CPU, Devices, Item, Plan, WorkloadFile, write_json
from tasks.node.requirements import NotInstalled
from tasks.workspace.sources import archive

FOLDER = WorkloadFile(
    name="repo",
    digest="d",
    file="workloads/c.tar.gz",
    function="build",
    module="train",
    env={"WIDTH": "3"},
)
NEEDS = replace(FOLDER, requirements="requirements.txt", requirements_digest="r")


class Became(Exception):
    """Stands for the command; holds the program, its words, environment and folder."""


def became(
    mailbox: Path,
    monkeypatch: pytest.MonkeyPatch,
    workload: WorkloadFile,
    nodes: tuple[int, ...] = (0, 1),
) -> Any:
    """What preparing node 1 of two came to, for a run on each of `nodes` alone."""
    plan = Plan(
        lease_id="l",
        attempt=1,
        addresses=["a", "b"],
        expected=[Devices(name=CPU, count=1)] * 2,
        workloads=[workload],
        items=[
            Item(run_id=f"r{n}", kind="train", nodes=[n], workload="repo", batches=[8])
            for n in nodes
        ],
    )
    write_json(mailbox / "plan-1.json", plan)
    (mailbox / "workloads").mkdir()
    files = {"train.py": b"def build(): ...", "requirements.txt": b"nosuch\n--no-index"}
    (mailbox / workload.file).write_bytes(archive(files))

    def execve(program: str, words: list[str], environment: dict[str, str]) -> None:
        raise Became(program, words, environment, os.getcwd())

    monkeypatch.chdir(mailbox)
    monkeypatch.setattr(prepare.os, "execve", execve)
    served = ("--mailbox", str(mailbox), "--plan", str(mailbox / "plan-1.json"), "--node", "1")
    monkeypatch.setattr(
        sys, "argv", ["prepare", *served, "--", sys.executable, "-m", "torchrun", "--", "more"]
    )
    with pytest.raises((Became, SystemExit)) as ended:
        prepare.main()
    return ended.value


def records(mailbox: Path) -> dict[str, dict[str, Any]]:
    return {
        file.stem: json.loads(file.read_text()) for file in mailbox.glob("node-*/records/*.json")
    }


def test_a_folder_is_unpacked_and_the_command_runs_in_it_with_the_workloads_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = became(tmp_path, monkeypatch, FOLDER)
    program, words, environment, folder = ended.args
    assert (program, words) == (sys.executable, [sys.executable, "-m", "torchrun", "--", "more"])
    assert environment["WIDTH"] == "3" and environment["PATH"]
    assert folder == str(tmp_path / "node-1/scratch/workloads/c") and os.listdir(folder) != []


def test_requirements_that_are_installed_already_give_the_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "environment"
    made.mkdir()
    (made / "complete.json").write_text("{}")
    ended = became(tmp_path, monkeypatch, replace(NEEDS, environment=str(made)))
    assert ended.args[0] == ended.args[1][0] == f"{made}/bin/python"


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (NEEDS, "nosuch"),
        (replace(NEEDS, environment="/gone"), "/gone"),
    ],
)
def test_where_that_cannot_be_every_run_of_the_machine_fails_by_fault_of_the_workload(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workload: WorkloadFile,
    said: str,
) -> None:
    ended = became(tmp_path, monkeypatch, workload)
    assert ended.code == EXIT_ITEM_FAILED
    [(run_id, record)] = records(tmp_path).items()
    assert (run_id, record["status"], record["cause"], record["workload_digest"]) == (
        "r1",
        "failed",
        "",
        "d",
    )
    assert said in record["reason"]
    assert (
        capsys.readouterr().err.splitlines()[-1] == f"srift[{EXIT_ITEM_FAILED}]: {record['reason']}"
    )


def test_where_no_index_answered_or_the_time_was_up_the_fault_is_not_the_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_index(*_: object) -> str:
        raise NotInstalled(
            "requirements of workload repo could not be installed: no index", passing=True
        )

    monkeypatch.setattr(prepare, "install", no_index)
    assert became(tmp_path, monkeypatch, NEEDS).code == EXIT_ITEM_FAILED
    assert [one["cause"] for one in records(tmp_path).values()] == ["install"]
