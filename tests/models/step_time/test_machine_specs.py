"""Instance types whose descriptions have holes, and data sheets."""

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd

from models.step_time.machine_specs import (
    Machine,
    data_sheets,
    device_kind,
    read_machines,
    sheet_of,
)

UNKNOWN = {"speed_known": False, "link_known": False, "device": ""}


def test_an_unknown_figure_is_the_median_of_the_measured_types():
    rows = [("a", "cpu", 2.0, 4.0), ("b", "cpu", 8.0, None), ("c", "cpu", None, 25.0)]
    types = pd.DataFrame(rows, columns=["name", "device", "cores", "bandwidth_gbps"])
    found = read_machines(types, ["a", "b", "c", "d"])
    assert found["a"] == Machine(cores=2.0, bandwidth_gbps=4.0, devices=1, prior_speed=0.1)
    assert (found["b"].bandwidth_gbps, found["b"].link_known) == (14.5, False)
    assert (found["c"].cores, found["c"].speed_known) == (5.0, False)
    assert found["d"] == Machine(
        cores=5.0, bandwidth_gbps=14.5, devices=1, prior_speed=0.25, **UNKNOWN
    )
    assert read_machines(types, ["a", "b"])["b"].bandwidth_gbps == 4.0
    assert read_machines(types, ["b"])["b"].bandwidth_gbps == 10.0


def test_a_device_has_one_name_and_one_speed():
    rows = [("a", "T9", 8.0), ("b", "t9 ", None), ("c", "x", 30.0), ("d", None, 30.0)]
    found = read_machines(pd.DataFrame(rows, columns=["name", "device", "device_tflops"]), ["c"])
    assert found["a"].device == found["b"].device == "t9"
    assert found["a"].prior_speed == found["b"].prior_speed == 8.0 and found["d"].accelerated


def test_every_data_sheet_is_dated_and_sourced():
    table = data_sheets()
    assert table.index.is_unique and table["source"].str.startswith("https://").all()
    assert (pd.to_datetime(table["as_of"]) >= pd.Timestamp("2026-11-01")).all()
    figures = table[["memory_gb", "bandwidth_gbytes_s", "fp32_tflops"]]
    assert (figures > 0).all(axis=None) and np.isfinite(figures).all(axis=None)
    assert (table["tf32_tflops"].fillna(0) <= table["fp16_tflops"]).all()


def test_of_several_sheets_of_a_device_the_nearest_in_memory_is_taken():
    sizes = {"small": 40.0, "large": 80.0, "unknown": None}
    types = pd.DataFrame({"name": list(sizes), "device_memory_gib": list(sizes.values())})
    machines = read_machines(types.assign(device="A100", devices=8, device_tflops=19.5), [])
    kinds = {name: device_kind(name, machine) for name, machine in machines.items()}
    assert kinds == {"small": "a100", "large": "a100 80gb", "unknown": "a100"}
    sheets = [sheet_of(kinds[name], "bf16", machines) for name in ("small", "large")]
    assert [(one.bandwidth, one.rate) for one in sheets] == [(1555.0, 312.0), (2039.0, 312.0)]


def test_every_gpu_on_ec2_has_a_data_sheet():
    held = json.loads(gzip.decompress(Path("tasks/providers/ec2/snapshot.json.gz").read_bytes()))
    rows = [
        dict(zip(held["columns"], one, strict=True), name=name)
        for name, one in held["instance_types"].items()
    ]
    machines = read_machines(pd.DataFrame(rows), []).items()
    whole = {name: one for name, one in machines if one.accelerated and "1/" not in one.device}
    kinds = {device_kind(name, one) for name, one in whole.items()}
    others = ("inferentia", "trainium", "qualcomm", "gaudi")
    gpus = {kind for kind in kinds if not kind.startswith(others)}
    assert len(gpus) > 9 and set(data_sheets().index) >= gpus
