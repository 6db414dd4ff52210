"""Instance types whose descriptions have holes, and data sheets."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from models.domain.data_sheets import data_sheets
from models.step_time.machine_specs import (
    Machine,
    device_kind,
    read_machines,
    sheet_of,
)


def test_an_unknown_figure_is_the_median_of_the_measured_types():
    rows = [("a", "cpu", 2.0, 4.0), ("b", "cpu", 8.0, None), ("c", "cpu", None, 25.0)]
    types = pd.DataFrame(rows, columns=["name", "device", "cores", "bandwidth_gbps"])
    found = read_machines(types, ["a", "b", "c", "d"])
    assert found["a"] == Machine(cores=2.0, bandwidth_gbps=4.0, devices=1, prior_speed=0.1)
    assert (found["b"].bandwidth_gbps, found["b"].link_known) == (14.5, False)
    assert (found["c"].cores, found["c"].speed_known) == (5.0, False)
    assert (found["d"].prior_speed, found["d"].device) == (0.25, "")
    assert [read_machines(types, names)["b"].bandwidth_gbps for names in ("ab", "b")] == [4, 10]


@pytest.mark.parametrize(
    ("gib", "kind", "gbytes_s"),
    [(40.0, "a100", 1555.0), (80.0, "a100 80gb", 2039.0), (None, "a100", 1555.0)],
)
def test_of_several_sheets_of_a_device_the_nearest_in_memory_is_taken(gib, kind, gbytes_s):
    types = pd.DataFrame({"name": ["t"], "device": "A100", "device_memory_gib": gib})
    machines = read_machines(types.assign(device_tflops=19.5), [])
    assert device_kind("t", machines["t"]) == kind
    sheet = sheet_of(kind, "bf16", machines)
    assert (sheet.bandwidth, sheet.rate) == (gbytes_s, 312.0)


def test_every_gpu_on_ec2_has_a_data_sheet():
    held = json.loads(gzip.decompress(Path("tasks/providers/ec2/snapshot.json.gz").read_bytes()))
    types = pd.DataFrame(held["instance_types"].values(), columns=held["columns"])
    machines = read_machines(types.assign(name=list(held["instance_types"])), []).items()
    whole = {
        name: spec for name, spec in machines if spec.has_accelerator and "1/" not in spec.device
    }
    kinds = {device_kind(name, spec) for name, spec in whole.items()}
    others = ("inferentia", "trainium", "qualcomm", "gaudi")
    gpus = {kind for kind in kinds if not kind.startswith(others)}
    assert len(gpus) > 9 and set(data_sheets().index) >= gpus
