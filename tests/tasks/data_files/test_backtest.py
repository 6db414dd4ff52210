"""Two files in, a report and a file of predictions out; and what is refused."""

import numpy as np
import pandas as pd
import pytest

from tasks.data_files.backtest import backtest
from tasks.data_files.file_reader import ImportRefused

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
"""
FACTS = "workload,parameters,gradient_bytes\ntiny,1000000,4000000\n"
TYPES = """instance_type,vcpu,gpu_name,gpu_count,network_gbps,on_demand_usd_per_h_us_east_1
g9.big,48.0,t9,4.0,,
g9.odd,,,,,
"""
PREDICTED = ["predicted_step_s", "low_s", "high_s"]


@pytest.fixture
def here(tmp_path):
    for name, text in {"train": TRAIN, "test": TEST, "facts": FACTS, "types": TYPES}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def report(here, test="test.csv", out="out.csv"):
    return backtest(
        here / "train.csv",
        here / test,
        workloads=here / "facts.csv",
        catalogue=here / "types.csv",
        predictions=here / out if out else None,
    )


def test_the_test_rows_get_three_columns_more(here, capsys):
    found = report(here)
    assert found["rows"] == 4 and 1 <= found["predicted"] < 4 and found["provider"] == "ec2"
    assert "colour" in capsys.readouterr().err
    out = pd.read_csv(here / "out.csv", dtype=str, keep_default_na=False)
    assert list(out.columns) == [*TEST.splitlines()[0].split(","), *PREDICTED]
    assert out["batch_per_device"].tolist() == ["08", "16+16", "4", "32"]
    assert out["step_s"][0] == "3.10e-2" and out["colour"][0] == "red, or so"
    assert (out["predicted_step_s"] != "").sum() == found["predicted"]
    assert 0.02 < float(out["predicted_step_s"][0]) < 0.06
    assert len(found["summary"])


def test_measured_seconds_earlier_predictions_and_the_kind_of_file_change_nothing(here):
    report(here)
    first = pd.read_csv(here / "out.csv")
    first.assign(step_s=first["step_s"] * 2).to_parquet(here / "again.parquet")
    report(here, test="again.parquet", out="again.csv")
    again = pd.read_csv(here / "again.csv")
    assert np.allclose(first[PREDICTED], again[PREDICTED], rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "name, text",
    [
        ("train", TRAIN + "tiny,2xg9.big,1+1,8,-1,0\n"),
        ("train", TRAIN.splitlines()[0] + "\n"),
        ("test", TEST.splitlines()[0] + "\n"),
        ("train", "workload,cluster,batch_per_device,step_s,provider\ntiny,1xa,8,1,ec2\ntiny,1xa,8,1,local\n"),
        ("test", "workload,cluster,batch_per_device,step_s,provider\ntiny,1xa,8,1,local\n"),
        ("facts", "workload,parameters\ntiny,1\n"),
        ("types", "instance_type,vcpu\na,4\na,8\n"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_and_earlier_predictions_stay(here, name, text):
    (here / "out.csv").write_text("before")
    (here / f"{name}.csv").write_text(text)
    with pytest.raises(ImportRefused):
        report(here)
    assert (here / "out.csv").read_text() == "before"


@pytest.mark.parametrize("out", ["train.csv", "types.csv", "none/out.csv"])
def test_predictions_do_not_replace_an_input(here, out):
    with pytest.raises(OSError):
        report(here, out=out)
    assert (here / "train.csv").read_text() == TRAIN
