"""A machine is made ready for a launch's workloads, or each run has a record with the reason."""

import os
import sys
from dataclasses import replace

import pytest

from tasks.node import prepare
from tasks.node.processes import EXIT_ITEM_FAILED, EXIT_NO_DEVICE
from tasks.node.record import CPU, INSTALL, MACHINE, Devices, Item, WorkloadFile
from tasks.node.requirements import InstallationInterrupted
from tasks.providers.archive import archive
from tests.tasks.node.conftest import Left, give, plan, records

pytestmark = pytest.mark.usefixtures("ends")

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


def end_of(mailbox, monkeypatch, workload, device=CPU):
    """The end of preparing node 1, for a run on each of two nodes alone."""
    runs = [
        Item(run_id=f"r{n}", kind="train", nodes=[n], workload="repo", batches=[8]) for n in (0, 1)
    ]
    devices = [Devices(name=device, count=4)] * 3
    give(plan(*runs, workloads=[workload], expected=devices), mailbox, 1, monkeypatch)
    (mailbox / "workloads").mkdir(exist_ok=True)
    files = {"train.py": b"def build(): ...", "requirements.txt": b"nosuch\n--no-index"}
    (mailbox / workload.file).write_bytes(archive(files))

    def execve(*given):
        raise Became(*given, os.getcwd())

    monkeypatch.chdir(mailbox)
    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setattr(sys, "argv", ["prepare", "-m", "torchrun"])
    with pytest.raises((Became, Left)) as ended:
        prepare.main()
    return ended.value.args


def test_a_folder_is_unpacked_and_the_command_runs_in_it_with_the_workloads_variables(
    tmp_path, monkeypatch
):
    program, words, environment, folder = end_of(tmp_path, monkeypatch, FOLDER)
    assert (program, words) == (sys.executable, [sys.executable, "-m", "torchrun"])
    assert environment["WIDTH"] == "3" and environment["PATH"]
    assert folder == str(tmp_path / "node-1/scratch/workloads/c") and os.listdir(folder)


def test_requirements_that_are_installed_already_are_used(tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "complete.json").touch()
    program, *_ = end_of(tmp_path, monkeypatch, replace(NEEDS, environment=str(ready)))
    assert program == str(ready / "bin" / "python")


@pytest.mark.parametrize(("named", "cause"), [("nosuch", ""), ("slow", INSTALL)])
def test_a_workload_that_cannot_be_made_ready_fails_every_run_of_the_machine(
    tmp_path, monkeypatch, capsys, named, cause
):
    def slow(*_):
        raise InstallationInterrupted("slow")

    if cause:
        monkeypatch.setattr(prepare, "install", slow)
    assert end_of(tmp_path, monkeypatch, NEEDS) == (EXIT_ITEM_FAILED,)
    ((run, record),) = records(tmp_path).items()
    assert (run, record["status"], record["cause"]) == ("node-1/r1", "failed", cause)
    assert record["workload_digest"] == "d" and named in record["reason"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"node 1: {last.removeprefix(f'srift[{EXIT_ITEM_FAILED}]: ')}" == record["reason"]


def test_a_machine_without_its_devices_fails_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "wait_for_devices", lambda expected, _: f"no {expected.name}")
    assert end_of(tmp_path, monkeypatch, FOLDER, "A10G") == (EXIT_NO_DEVICE,)
    ((run, record),) = records(tmp_path).items()
    assert (run, record["reason"], record["cause"]) == ("node-1/r1", "node 1: no A10G", MACHINE)
