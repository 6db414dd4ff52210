"""Instance types as the step time sees them, where their descriptions have holes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from models.step_time.machine_specs import (
    Machine,
    data_sheets,
    device_kind,
    read_machines,
    sheets_of,
)

UNKNOWN: dict[str, Any] = {"speed_known": False, "link_known": False, "device": ""}


def test_a_figure_that_nobody_knows_is_the_middle_of_those_known() -> None:
    types = pd.DataFrame(
        [
            {"name": "a", "device": "cpu", "cores": 2.0, "bandwidth_gbps": 4.0},
            {"name": "b", "device": "cpu", "cores": 8.0, "bandwidth_gbps": None},
            {"name": "c", "device": "cpu", "cores": None, "bandwidth_gbps": 25.0},
        ]
    )
    assert read_machines(types, ["a", "b", "c", "d"]) == {
        "a": Machine(cores=2.0, bandwidth_gbps=4.0, devices=1, prior_speed=0.1),
        "b": Machine(cores=8.0, bandwidth_gbps=14.5, devices=1, prior_speed=0.4, link_known=False),
        "c": Machine(
            cores=5.0, bandwidth_gbps=25.0, devices=1, prior_speed=0.25, speed_known=False
        ),
        "d": Machine(cores=5.0, bandwidth_gbps=14.5, devices=1, prior_speed=0.25, **UNKNOWN),
    }


def test_what_nobody_measured_on_fills_no_hole_of_another() -> None:
    names = {"a": 4.0, "b": None, "asked": 400.0}
    types = pd.DataFrame(
        [{"name": name, "cores": 2.0, "bandwidth_gbps": gbps} for name, gbps in names.items()]
    )
    assert read_machines(types, ["a", "b"])["b"].bandwidth_gbps == 4.0
    assert read_machines(types, ["b"])["b"].bandwidth_gbps == 10.0


def test_of_a_machine_that_nobody_describes_not_even_the_kind_is_known() -> None:
    types = pd.DataFrame(
        [
            {"name": "cpu", "device": "cpu", "cores": 16.0},
            {"name": "gpu", "device": "t9", "cores": 4.0, "device_tflops": 8.0},
        ]
    )
    cpu, stranger = (read_machines(types, ["cpu", "x"])[name] for name in ("cpu", "x"))
    assert (
        stranger.prior_speed == cpu.prior_speed
        and not stranger.accelerated
        and not stranger.speed_known
    )
    assert read_machines(types, ["gpu", "x"])["x"].prior_speed == 8.0


def test_where_nobody_knows_anything_types_are_equal_on_usual_ethernet() -> None:
    plain = Machine(cores=1.0, bandwidth_gbps=10.0, devices=1, prior_speed=15.0, **UNKNOWN)
    described = pd.DataFrame([{"name": "a", "cores": None, "device": None}])
    assert read_machines(described, ["b"]) == {"a": plain, "b": plain}
    assert read_machines(pd.DataFrame(), ["b"]) == {"b": plain}


def test_a_device_is_as_fast_as_its_tflops_where_somebody_knows_them() -> None:
    types = pd.DataFrame(
        [{"name": "a", "device": "t9", "device_tflops": 8.0, "cores": 4.0, "devices": 4.0}]
    )
    (found,) = read_machines(types, []).values()
    assert (found.prior_speed, found.devices) == (8.0, 4)


def test_one_device_has_one_name_and_one_speed_however_it_is_written() -> None:
    types = pd.DataFrame(
        [
            {"name": "a", "device": "T9", "device_tflops": 8.0},
            {"name": "b", "device": "t9 "},
            {"name": "c", "device": "x", "device_tflops": 30.0},
            {"name": "d", "device": None, "device_tflops": 30.0},
        ]
    )
    found = read_machines(types, ["c"])
    assert found["a"].device == found["b"].device == "t9" and found["b"].prior_speed == 8.0
    assert found["d"].accelerated and not read_machines(types, ["e"])["e"].accelerated


def test_every_data_sheet_is_dated_has_a_source_and_no_absurd_figure() -> None:
    table = data_sheets()
    assert table.index.is_unique and table["source"].str.startswith("https://").all()
    assert (pd.to_datetime(table["as_of"]) >= pd.Timestamp("2026-11-01")).all()
    figures = table[["memory_gb", "bandwidth_gbytes_s", "fp32_tflops"]]
    assert (figures > 0).all(axis=None) and np.isfinite(figures).all(axis=None)
    assert (table["tf32_tflops"].fillna(0) <= table["fp16_tflops"]).all()
    assert (
        table["checked"].notna() | table["note"].fillna("").str.endswith("not checked")
    ).all(), "said where it is not"


def test_of_two_sheets_of_a_device_the_one_of_its_memory_is_taken() -> None:
    types = pd.DataFrame(
        [
            {
                "name": name,
                "device": "A100",
                "devices": 8,
                "device_tflops": 19.5,
                "device_memory_gib": gib,
            }
            for name, gib in (("small", 40.0), ("large", 80.0), ("unknown", None))
        ]
    )
    machines = read_machines(types, [])
    kinds = {name: device_kind(name, machine) for name, machine in machines.items()}
    assert kinds == {"small": "a100", "large": "a100 80gb", "unknown": "a100"}
    sheets = sheets_of(machines, data_sheets())
    assert (sheets["a100"][0], sheets["a100 80gb"][0]) == (1555.0, 2039.0)


def test_every_gpu_that_ec2_offers_has_a_data_sheet() -> None:
    """In the package's own list; parts of a GPU go by their rate, and what is no GPU of CUDA's has none."""
    held = json.loads(gzip.decompress(Path("tasks/providers/ec2/snapshot.json.gz").read_bytes()))
    rows = [
        dict(zip(held["columns"], one, strict=True), name=name)
        for name, one in held["instance_types"].items()
    ]
    machines = read_machines(pd.DataFrame(rows), [])
    kinds = {
        device_kind(name, one)
        for name, one in machines.items()
        if one.accelerated and "1/" not in one.device
    }
    others = {
        one for one in kinds if one.startswith(("inferentia", "trainium", "qualcomm", "gaudi"))
    }
    assert len(kinds - others) > 9 and set(data_sheets().index) >= kinds - others
