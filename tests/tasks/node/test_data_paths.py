"""Where a machine finds a workload's data, what it says where they are not there, and which keys become files."""

from dataclasses import replace

import pytest

from tasks.node.data_paths import DataMissing, data_path, files_of, folder_of
from tasks.node.launch import explain
from tasks.node.record import DATA, Item, WorkloadFile, record_of
from tests.tasks.node.conftest import plan

FAR = WorkloadFile(
    name="w",
    digest="d",
    file="w.py",
    function="build",
    data="s3://mine-1/cats/",
    data_digest="aabbccddeeff",
)


def test_a_folder_that_went_away_is_named_and_the_fault_is_not_the_workloads(tmp_path):
    near = replace(FAR, data=str(tmp_path / "images"))
    with pytest.raises(DataMissing, match="images") as missing:
        data_path(tmp_path, near)
    item = Item(run_id="r", kind="train", nodes=[0], workload="w", batches=[1])
    problem = f"node 0: {explain(missing.value, near)}"
    assert record_of(plan(item), item, started_unix=0.0, problem=problem)["cause"] == DATA
    (tmp_path / "images").mkdir()
    assert data_path(tmp_path, near) == near.data


def test_fetched_data_are_found_and_a_failure_to_fetch_is_explained(tmp_path):
    with pytest.raises(DataMissing, match="aabbccddeeff"):
        data_path(tmp_path, FAR)
    fetched = folder_of(tmp_path, FAR.data_digest)
    fetched.mkdir(parents=True)
    assert data_path(tmp_path, FAR) == str(fetched)
    fetched.with_suffix(".failed").write_text(
        "its data could not be fetched: there is no bucket called mine-1"
    )
    with pytest.raises(DataMissing, match="mine-1"):
        data_path(tmp_path, FAR)


@pytest.mark.parametrize(
    "key",
    ["cats/../../etc/passwd", "cats/..", "cats//etc/passwd", "cats/./x", "cats/a/../../x", "cats/a\nb", "cats/a\0b"],
)  # fmt: skip
def test_keys_that_climb_out_or_could_be_no_file_are_refused(key):
    with pytest.raises(ValueError, match=r"object|below"):
        files_of([{"Key": "cats/1.jpg"}, {"Key": key}], "cats/")


def test_objects_that_cost_extra_to_read_are_refused():
    free = [{"Key": "1", "StorageClass": name} for name in ("", "INTELLIGENT_TIERING")]
    dear = [{"Key": name, "StorageClass": "GLACIER_IR"} for name in ("folder/", "2")]
    assert [*files_of([*free, dear[0]], "")] == ["1"]
    with pytest.raises(ValueError, match="GLACIER_IR"):
        files_of(dear, "")
