"""Where a machine finds a workload's data, what it says where they are not there, and which keys become files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.node.data import DataMissing, data_path, failure_of, files_of, folder_of
from tasks.node.launch import explain
from tasks.node.record import CPU, DATA, Devices, Item, Plan, WorkloadFile, record_of

READS = """
import pathlib
import torch

def build({parameters}):
    width = len(pathlib.Path(data, "width.txt").read_text())
    model = torch.nn.Linear(width, 1)
    def make_batch(batch):
        return torch.ones(batch, width), torch.ones(batch, 1)
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""
FAR = WorkloadFile(
    name="w",
    digest="d",
    file="w.py",
    function="build",
    data="s3://mine-1/cats/",
    data_digest="aabbccddeeff",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "width.txt").write_text("xxx")
    return tmp_path


def test_a_folder_that_went_away_is_said_and_the_fault_is_not_the_workloads(folder: Path) -> None:
    near = replace(FAR, data=str(folder / "imagess"))
    with pytest.raises(DataMissing, match="imagess") as missing:
        data_path(folder, near)
    item = Item(run_id="r", kind="train", nodes=[0], workload="w", batches=[1])
    plan = Plan(
        lease_id="l", attempt=1, addresses=["a"], expected=[], workloads=[near], items=[item]
    )
    problem = f"node 0: {explain(missing.value, near)}"
    used = [Devices(name=CPU, count=1)]
    assert record_of(plan, item, started_unix=0.0, problem=problem, devices=used).cause == DATA
    assert (
        record_of(
            plan, item, started_unix=0.0, problem="node 0: KeyError: 'data'", devices=used
        ).cause
        == ""
    )


def test_what_a_courier_fetched_is_found_and_why_it_could_not_is_reported(folder: Path) -> None:
    with pytest.raises(DataMissing, match="aabbccddeeff"):
        data_path(folder, FAR)
    failure = failure_of(folder, FAR.data_digest)
    failure.parent.mkdir()
    failure.write_text("its data could not be fetched: there is no bucket called mine-1")
    with pytest.raises(DataMissing, match="mine-1"):
        data_path(folder, FAR)
    failure.unlink()
    folder_of(folder, FAR.data_digest).mkdir()
    assert data_path(folder, FAR) == str(folder / "data" / "aabbccddeeff")


def test_keys_become_files_below_the_folder() -> None:
    keys = ["cats/", "cats/1.jpg", "cats/deep/", "cats/deep/2 3.jpg", "cats/..rc"]
    assert files_of(keys, "cats/") == {
        "1.jpg": "cats/1.jpg",
        "deep/2 3.jpg": "cats/deep/2 3.jpg",
        "..rc": "cats/..rc",
    }


@pytest.mark.parametrize(
    "key",
    ["cats/../../etc/passwd", "cats/..", "cats//etc/passwd", "cats/./x", "cats/a/../../x", "dogs/1.jpg", "cats/a\nb",
     "cats/a\0b", f"cats/{'x' * 256}"],
)  # fmt: skip
def test_keys_that_climb_out_or_could_be_no_file_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"object|below"):
        files_of(["cats/1.jpg", key], "cats/")
