"""Two files in, a report and a file of predictions out; and everything that is refused before anything is fitted."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks.data_files import backtest as module
from tasks.data_files.backtest import Report, backtest
from tasks.data_files.measurements import ImportRefused

SHARED = Path(__file__).parents[4] / "shared" / "data"

TRAIN = """workload,cluster,layout,batch_per_device,step_s,sync_s
tiny,1xg9.big,1,8,0.026,0
tiny,1xg9.big,1,16,0.042,0
tiny,1xg9.big,1,32,0.074,0
tiny,2xg9.big,1+1,8,0.031,0.005
tiny,2xg9.big,1+1,16,0.047,0.005
tiny,2xg9.big,4+4,16,0.055,0.012
tiny,1xmine,,8,0.05,
"""
TEST = """step_s,workload,colour,cluster,batch_per_device,sync_s,layout,precision
3.10e-2,tiny,"red, or so",3xg9.big,08,0.006,1+1+1,
0.050,tiny,,1xnew+1xg9.big,16+16,,,

0.090,gpt,blue,1xg9.big,4,,1,
0.095,tiny,blue,1xg9.big,32,,1,bf16
0.060,tiny
"""
FACTS = "workload,parameters,gradient_bytes\ntiny,1000000,4000000\n"
TYPES = """instance_type,vcpu,gpu_name,gpu_count,network_gbps,on_demand_usd_per_h_us_east_1
g9.big,48.0,t9,4.0,,
g9.odd,,,,,
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, text in (
        ("train", TRAIN),
        ("test", TEST.replace("0.060,tiny\n", "")),
        ("facts", FACTS),
        ("types", TYPES),
    ):
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def ran(
    here: Path, *, train: str = "train.csv", test: str = "test.csv", out: str | None = "out.csv"
) -> Report:
    return backtest(
        here / train,
        here / test,
        workloads=here / "facts.csv",
        catalogue=here / "types.csv",
        predictions=here / out if out else None,
    )


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def refused_before_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*_: object, **__: object) -> None:
        raise AssertionError("something was fitted")

    monkeypatch.setattr(module.pure, "backtest", fit)


def test_the_test_rows_get_three_columns_more_and_the_report_says_what_was_left_out_and_assumed(
    here: Path,
) -> None:
    (here / "out.csv").write_text("older\n")
    report = ran(here)
    header, *rows = table(here / "out.csv")
    given = [row for row in table(here / "test.csv") if row]
    assert header == [*given[0], "predicted_step_s", "low_s", "high_s"]
    assert [row[:-3] for row in rows] == given[1:]
    for row in rows[:2]:
        step, low, high = (float(cell) for cell in row[-3:])
        assert 0 < low < step < high
    assert [row[-3:] for row in rows[2:]] == [["", "", ""]] * 2
    assert (report.rows, report.predicted, report.provider) == (4, 2, "ec2")
    assert {one.name for one in here.iterdir()} == {
        f"{one}.csv" for one in ("train", "test", "facts", "types", "out")
    }
    said = "\n".join(report.sentences)
    assert "test.csv: column colour is not one of the contract's" in said
    assert "2 of 4 rows are without prediction" in said
    assert (
        "workload tiny in bf16 (TRAIN has no row of it in that mode)" in said
        and "workload gpt" in said
    )
    assert "typical machine, since nobody knows them: new" in said
    assert (
        "one device is assumed where layout is empty, since nobody says how many: mine, new" in said
    )
    assert report.summary[["by", "group", "rows"]].values.tolist() == [
        ["workload", "tiny", 2], ["instances", "2", 1], ["instances", "3", 1], ["all", "all", 2],
    ]  # fmt: skip
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["summary"][-1]["rows"] == 2


def test_a_row_that_ends_early_is_filled_up_and_a_byte_order_mark_stays_out(here: Path) -> None:
    (here / "test.csv").write_text(
        "\ufeffworkload,cluster,batch_per_device,step_s,layout,zone\ntiny,1xg9.big,8,0.02\n"
    )
    ran(here)
    header, row = table(here / "out.csv")
    assert header[0] == "workload" and row[:6] == ["tiny", "1xg9.big", "8", "0.02", "", ""]
    assert len(row) == len(header) == 9 and all(row[6:])


def test_neither_answers_nor_earlier_predictions_nor_the_kind_of_file_change_the_predictions(
    here: Path,
) -> None:
    ran(here)
    first = table(here / "out.csv")
    header, *rows = [row for row in table(here / "test.csv") if row]
    for name in ("step_s", "sync_s"):
        at = header.index(name)
        for row, value in zip(rows, [row[at] for row in rows][::-1], strict=True):
            row[at] = value
    with (here / "permuted.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    ran(here, test="permuted.csv", out="again.csv")
    again = table(here / "again.csv")
    assert [row[0] for row in first] != [row[0] for row in again]
    assert [row[-3:] for row in first] == [row[-3:] for row in again]
    report = ran(here, test="out.csv", out="again.csv")
    assert table(here / "again.csv") == first
    assert "out.csv: its earlier predictions were not looked at" in report.sentences
    text = pd.read_csv(here / "test.csv", dtype=str, skip_blank_lines=True)
    text.assign(step_s=text["step_s"].astype(float)).to_parquet(here / "test.parquet")
    pd.read_csv(here / "train.csv").to_parquet(here / "train.parquet")
    ran(here, train="train.parquet", test="test.parquet", out="again.csv")
    again = table(here / "again.csv")
    assert [row[1:] for row in again] == [row[1:] for row in first], "empty cells stay empty"
    assert again[1][0] == "0.031"


def test_the_catalogue_matters_and_its_holes_do_not(here: Path) -> None:
    (here / "train.csv").write_text(TRAIN.replace("1xmine,,8", "1xmine,2,8"))
    assert not any("nobody says" in one and "g9.big" in one for one in ran(here).sentences)
    whole = table(here / "out.csv")
    (here / "types.csv").write_text(TYPES.replace("t9,4.0,", "t9,,"))
    assert any("nobody says" in one and "g9.big" in one for one in ran(here).sentences)
    assert table(here / "out.csv")[1] == whole[1], (
        "a row that gives its layout hung on the number of devices"
    )


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("train", "", "train.csv was refused.*\n.*there is no column 'workload'"),
        ("test", TEST.splitlines()[0] + "\n", "test.csv was refused.*\n.*it has no row"),
        ("test", TEST, "test.csv was refused.*\n.*line 7, column cluster: is empty"),
        (
            "test",
            "workload,cluster,batch_per_device,step_s\ntiny,1xa,8,-1\n",
            "line 2, column step_s",
        ),
        (
            "train",
            "workload,cluster,batch_per_device,step_s,precision\ntiny,1xa,8,1,fp8\n",
            "line 2, column precision",
        ),
        (
            "train",
            "workload,cluster,batch_per_device,step_s,provider\ntiny,1xa,8,1,ec2\ntiny,1xa,8,1,local\n",
            "train.csv was refused.*\n.*rows of several providers are never pooled: ec2, local",
        ),
        (
            "test",
            "workload,cluster,batch_per_device,step_s,provider\ntiny,1xa,8,1,local\n",
            "test.csv was refused.*\n.*rows of several providers are never pooled: ec2, local",
        ),
        ("facts", "workload,parameters,gradient_bytes\ntiny,none,4\n", "line 2, column parameters"),
        (
            "types",
            "instance_type,network_gbps\na,fast\n",
            "types.csv was refused.*\n.*line 2, column network_gbps",
        ),
        ("types", "instance_type,network_gbps\na,0\n", "line 2, column network_gbps"),
        (
            "types",
            "instance_type,vcpu\na,4\na,8\n",
            "column instance_type: 'a' stands more than once",
        ),
        ("types", "vcpu\n4\n", "there is no column 'instance_type'"),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_and_older_predictions_stay(
    here: Path, name: str, text: str, says: str
) -> None:
    (here / f"{name}.csv").write_text(text)
    (here / "out.csv").write_text("older\n")
    with pytest.raises(ImportRefused, match=says):
        ran(here)
    assert (here / "out.csv").read_text() == "older\n"
    assert not list(here.glob(".*"))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("none/out.csv", "No such file or directory"),
        ("train.csv/out.csv", "Not a directory"),
        (".", "not a file that can be replaced"),
        ("test.csv", "one of the files to read"),
        ("link.csv", "one of the files to read"),
        ("out.parquet", "written as CSV"),
        ("null", "not a file that can be replaced"),
    ],
)
def test_predictions_that_cannot_be_written_are_refused_before_anything_is_fitted(
    here: Path, monkeypatch: pytest.MonkeyPatch, out: str, says: str
) -> None:
    refused_before_fitting(monkeypatch)
    (here / "link.csv").symlink_to("facts.csv")
    (here / "null").symlink_to("/dev/null")
    before = {one: one.read_bytes() for one in here.iterdir() if one.is_file()}
    with pytest.raises(OSError, match=f"cannot be written to .*{says}.*Nothing was fitted"):
        ran(here, out=out)
    assert {one: one.read_bytes() for one in here.iterdir() if one.is_file()} == before


@pytest.mark.skipif(not SHARED.exists(), reason="the measured data lie outside the repository")
def test_the_measured_data_are_predicted_from_a_part_of_them(tmp_path: Path) -> None:
    header, *rows = table(SHARED / "training_runs.csv")
    random.Random(3).shuffle(rows)
    for name, part in (("train", rows[:200]), ("test", rows[200:500])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *part])
    report = backtest(
        tmp_path / "train.csv",
        tmp_path / "test.csv",
        workloads=SHARED / "workloads.csv",
        catalogue=SHARED / "ec2_catalogue.csv",
        predictions=tmp_path / "out.csv",
    )
    whole = report.summary.set_index("by").loc["all"]
    assert report.predicted == whole["rows"] == 300 and report.sentences == ()
    assert whole["median_error"] < 0.1 and whole["coverage_90"] > 0.75
    assert whole["coverage_50"] < whole["coverage_80"] < whole["coverage_90"]
    found = pd.read_csv(tmp_path / "out.csv")
    assert np.median(np.abs(found["predicted_step_s"] / found["step_s"] - 1)) == pytest.approx(
        whole["median_error"]
    )
