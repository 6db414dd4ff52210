"""Measurements made elsewhere: defaults, identities, and refusals that name line, column and reason."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from tasks.imports import Imported, import_measurements
from tasks.measurements import ImportRefused, read_measurements
from tests.warehouse.builders import NOON, fresh
from warehouse.database import Warehouse
from warehouse.reads import mart, training_frames

SHARED = Path(__file__).parents[3] / "shared" / "data"

LEAST = """workload,cluster,batch_per_device,step_s
tiny,2xg9.small,8,0.5
tiny,2xg9.small,8,0.5
tiny,1xg9.big+2xg9.small,32+8+8,0.25
"""
FULL = """workload,cluster,layout,batch_per_device,accumulation_steps,strategy,precision,step_s,sync_s,provider,\
gradient_bytes,parameters,flops_per_sample,market,zone,run_id,source,measured_at
tiny,2xg9.small,4+2,8+4,2,ddp,bf16,0.5,0.1,local,4.4e7,11000000,1e9,spot,a,run-1,mine,2026-01-02T03:00:00+02:00
"""


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return fresh(tmp_path)


def written(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(warehouse: Warehouse, path: Path, workloads: Path | None = None) -> Imported:
    return import_measurements(warehouse, path, workloads=workloads, now=NOON)


def runs(warehouse: Warehouse, provider: str = "ec2") -> pd.DataFrame:
    return training_frames(warehouse, provider)["runs"]


def test_absent_columns_take_their_defaults(warehouse: Warehouse, tmp_path: Path) -> None:
    assert load(warehouse, written(tmp_path, LEAST)) == Imported(rows=3, new=3, sentences=())
    frame = runs(warehouse).sort_values("step_s")
    assert (
        frame[["accumulation_steps", "strategy", "precision", "source"]].values.tolist()
        == [[1, "ddp", "fp32", "import"]] * 3
    )
    assert frame[["layout", "sync_s", "market", "parameters", "measured_at"]].isna().all(axis=None)
    assert frame.batch_per_device.tolist() == ["32+8+8", "8", "8"]


def test_every_column_arrives(warehouse: Warehouse, tmp_path: Path) -> None:
    load(warehouse, written(tmp_path, FULL))
    row = runs(warehouse, "local").iloc[0].to_dict()
    assert row.pop("measured_at") == pd.Timestamp("2026-01-02 01:00")  # kept in UTC
    assert pd.isna(row.pop("step_spread"))
    assert row == {
        "run_id": "run-1",
        "provider": "local",
        "workload": "tiny",
        "cluster": "2xg9.small",
        "layout": "4+2",
        "batch_per_device": "8+4",
        "accumulation_steps": 2,
        "strategy": "ddp",
        "precision": "bf16",
        "step_s": 0.5,
        "sync_s": 0.1,
        "parameters": 11_000_000,
        "gradient_bytes": 44_000_000,
        "flops_per_sample": 1e9,
        "market": "spot",
        "zone": "a",
        "source": "mine",
    }


def test_loading_twice_changes_nothing_and_repeats_count_as_repeats(warehouse: Warehouse, tmp_path: Path) -> None:
    load(warehouse, written(tmp_path, LEAST))
    assert load(warehouse, written(tmp_path, LEAST, "copy.csv")).new == 0
    third = LEAST + "tiny,2xg9.small,8,0.5\n"
    assert load(warehouse, written(tmp_path, third)).new == 1  # a third occurrence of the same content
    assert len(runs(warehouse)) == 4


def test_parquet_and_csv_of_the_same_rows_are_the_same_rows(warehouse: Warehouse, tmp_path: Path) -> None:
    path = written(tmp_path, LEAST + FULL.splitlines()[1].replace("run-1", "") + "\n")
    path.write_text(LEAST)
    frame = pd.read_csv(path)
    frame["layout"] = None
    frame.to_parquet(tmp_path / "rows.parquet")
    assert load(warehouse, path).new == 3
    assert load(warehouse, tmp_path / "rows.parquet").new == 0


def test_columns_that_nobody_knows_are_ignored_aloud_and_misspelt_ones_refused(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    loaded = load(warehouse, written(tmp_path, LEAST.replace("step_s\n", "step_s,low_s\n").replace("0.5\n", "0.5,1\n")))
    assert loaded.new == 3
    assert "low_s" in loaded.sentences[0]
    with pytest.raises(ImportRefused, match="'acumulation_steps' is not known: did you mean 'accumulation_steps'"):
        load(warehouse, written(tmp_path, "workload,cluster,batch_per_device,step_s,acumulation_steps\n"))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("tiny,2xa,8,-1", "line 3, column step_s: Input should be greater than 0"),
        ("tiny,2xa,8,nan", "line 3, column step_s: Input should be a finite number"),
        ("tiny,2xa,8,", "line 3, column step_s: is empty"),
        ("tiny,2xa,8,fast", "line 3, column step_s: Input should be a valid number"),
        ("tiny,two of a,8,1", "line 3, column cluster: cluster 'two of a': 'two of a' is not of the form 4xNAME"),
        ("tiny,0xa,8,1", "line 3, column cluster: "),
        ("tiny,2xa,8+8+8,1", "line 3, column batch_per_device: batch_per_device '8+8+8': 3 numbers for 2 instances"),
        ("tiny,2xa,0,1", "line 3, column batch_per_device: "),
        ("tiny,2xa,1.5,1", "line 3, column batch_per_device: "),
        (",2xa,8,1", "line 3, column workload: is empty"),
        ("tiny,2xa,8,1,extra", "line 3: more values than the header has columns"),
    ],
)
def test_one_bad_row_refuses_the_file_by_line_column_and_reason(
    warehouse: Warehouse, tmp_path: Path, row: str, says: str
) -> None:
    good = LEAST.splitlines()
    with pytest.raises(ImportRefused) as refusal:
        load(warehouse, written(tmp_path, "\n".join([*good[:2], row, *good[2:]]) + "\n"))
    assert len(refusal.value.problems) == 1
    assert refusal.value.problems[0].startswith(says)
    assert runs(warehouse).empty


def test_a_missing_column_file_or_text_is_refused(warehouse: Warehouse, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="there is no column 'cluster'"):
        load(warehouse, written(tmp_path, "workload,batch_per_device,step_s\n"))
    with pytest.raises(ImportRefused, match=r"it cannot be read: .*No such file"):
        load(warehouse, tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"workload,cluster,batch_per_device,step_s\n\xff\xfe,1xa,8,1\n")
    with pytest.raises(ImportRefused, match="it cannot be read"):
        load(warehouse, tmp_path / "binary.csv")
    (tmp_path / "not.parquet").write_bytes(b"hello")
    with pytest.raises(ImportRefused, match="it cannot be read"):
        load(warehouse, tmp_path / "not.parquet")


def test_a_provider_that_there_is_not_is_refused_with_the_nearest(warehouse: Warehouse, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="column provider: unknown provider 'locl'; did you mean 'local'"):
        load(warehouse, written(tmp_path, FULL.replace(",local,", ",locl,")))


def test_a_pipe_is_refused_and_not_taken_for_an_empty_file(warehouse: Warehouse) -> None:
    reader, writer = os.pipe()
    os.write(writer, LEAST.encode())
    os.close(writer)
    try:
        with pytest.raises(ImportRefused, match="it is not a regular file"):
            load(warehouse, Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)


def test_one_run_id_with_two_contents_is_refused(tmp_path: Path) -> None:
    second = FULL.splitlines()[1].replace("0.5", "0.6")
    with pytest.raises(ImportRefused, match="line 3, column run_id: 'run-1' stands on line 2 with other values"):
        read_measurements(written(tmp_path, FULL + second + "\n"))


def test_facts_of_workloads_come_before_those_of_rows(warehouse: Warehouse, tmp_path: Path) -> None:
    facts = written(tmp_path, "workload,parameters,gradient_bytes,samples\ntiny,10,40,1000\n", "facts.csv")
    rows = written(tmp_path, LEAST.replace("step_s\n", "step_s,parameters\n").replace("0.5\n", "0.5,99\n"))
    load(warehouse, rows, facts)
    load(warehouse, rows, facts)
    assert runs(warehouse).parameters.tolist() == [10, 10, 10]
    workloads = mart(warehouse, "workloads", provider="ec2")
    assert workloads[["workload", "parameters", "gradient_bytes", "samples"]].values.tolist() == [
        ["tiny", 10, 40, 1000]
    ]
    with pytest.raises(ImportRefused, match="line 2, column parameters"):
        load(warehouse, rows, written(tmp_path, "workload,parameters,gradient_bytes\ntiny,none,40\n", "facts.csv"))


def test_the_frame_of_a_file_is_that_of_the_warehouse(warehouse: Warehouse, tmp_path: Path) -> None:
    path = written(tmp_path, LEAST)
    load(warehouse, path)
    frame, stored = read_measurements(path).frame(), runs(warehouse)
    assert set(frame.columns) == set(stored.columns)
    assert sorted(frame.run_id) == sorted(stored.run_id)


@pytest.mark.skipif(not SHARED.exists(), reason="the measured data lie outside the repository")
def test_the_measured_data_load_whole_and_once(warehouse: Warehouse) -> None:
    path, facts = SHARED / "training_runs.csv", SHARED / "workloads.csv"
    assert load(warehouse, path, facts).new == 4853
    assert load(warehouse, path, facts).new == 0
    frames = training_frames(warehouse, "ec2")
    assert len(frames["runs"]) == 4853
    assert len(frames["workloads"]) == 4
    assert frames["runs"].gradient_bytes.notna().all()
