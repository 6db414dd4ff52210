"""Read the facts of instance types: CPU cores, network link, devices, memory and speed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from ..domain.data_sheets import data_sheets, sheets_of
from ..domain.setup_table import column
from ..domain.workload import Mode
from .single_device import UNKNOWN, Sheet

# Peak fp32 TFLOP/s of a CPU core, as the operating system counts cores. Two units of eight lanes
# with two operations at about 3 GHz are 0.1 TFLOP/s, shared by two such cores (derived for Srift).
_CORE_TFLOPS = 0.05
_FACTS = ["cores", "bandwidth_gbps", "devices", "device_memory_gib", "device_tflops"]
# Defaults if the value is unknown for all types. Only ratios of cores matter. 10 Gbit/s is usual
# Ethernet, within the middle half of EC2's types (3.75 to 50 in mid 2026). 15 TFLOP/s is within a
# factor of five of the accelerators of 2026 (4.4 to 67).
_USUAL = {"cores": 1.0, "bandwidth_gbps": 10.0, "device_tflops": 15.0, "speed": 15.0}
# Usual memory bandwidth in GB/s: per CPU core, and per TFLOP/s of an accelerator without a data
# sheet. The third number is the confidence, from 0 to 1, in the rate of such an accelerator.
_CORE_GBYTES, _USUAL_GBYTES, _HALF = 10.0, 25.0, 0.6
# A stated rate may differ from the data sheet by this factor, because some sources include tensor
# cores and others do not.
_ALIKE = 2.0
# PCIe 3.0 with 16 lanes: Gbit/s between devices without a data sheet.
_INSIDE_GBPS = 128.0
# The eight network cards of a usual machine with NVLink have a third of NVLink's rate [DGX A100].
_NVLINK_INSIDE, _NVLINK_PER_LINK = 2000.0, 3.0
_NO_DEVICE = "cpu"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of one instance type.

    `prior_speed` is the peak fp32 rate in TFLOP/s of one accelerator, or of all cores if the type
    has no accelerator.
    """

    cores: float
    bandwidth_gbps: float
    devices: int
    prior_speed: float
    device_memory_gib: float = 0.0  # 0 if unknown
    speed_known: bool = True  # False: `prior_speed` is the median of other types
    link_known: bool = True  # False: `bandwidth_gbps` is an estimate
    device: str = _NO_DEVICE  # the accelerator's name; empty if unknown
    inside_gbps: float = _INSIDE_GBPS  # Gbit/s between the devices of one machine

    @property
    def has_accelerator(self) -> bool:
        """True if the machine is known to have an accelerator."""
        return self.device != _NO_DEVICE and bool(self.device or self.speed_known)


def read_machines(instance_types: pd.DataFrame, seen: Collection[str]) -> dict[str, Machine]:
    """Return {name: Machine} for the rows of `instance_types` and for the measured types `seen`.

    Unknown values are replaced:

    - An unknown speed is taken from another row with the same device, if there is one.
    - An unknown network rate of a machine with NVLink is a third of NVLink's rate.
    - Other unknown speeds, network rates and numbers of cores are medians of the measured types.
    - An unknown number of devices becomes 1. An unknown device memory becomes 0.
    """
    types = instance_types.reindex(columns=["name", "device", *_FACTS]).set_index("name")
    types = types.reindex(types.index.union(list(seen), sort=False))
    facts = types[_FACTS].apply(pd.to_numeric, errors="coerce")
    facts = facts.where((facts > 0) & (facts < math.inf))
    # EC2 writes "L4", and other sources write "l4".
    device = column(types, "device", "").str.strip().str.lower()
    of_cores = _CORE_TFLOPS * facts["cores"]
    speed = facts["device_tflops"].where(device != _NO_DEVICE, of_cores)
    # Medians of the measured types only: a further row of `instance_types` must not change them.
    usual = facts.assign(speed=speed).loc[[*set(seen)]].median().fillna(_USUAL)
    speeds = speed.groupby(device).first().to_dict()
    speeds |= {_NO_DEVICE: _CORE_TFLOPS * usual["cores"], "": usual["speed"]}
    memory = facts["device_memory_gib"].fillna(0.0)
    links = [_sheet(*each)[2] for each in zip(device, memory, strict=True)]
    inside = pd.Series(links, types.index, dtype=float)
    network = (inside / _NVLINK_PER_LINK).where(inside > _NVLINK_INSIDE, usual["bandwidth_gbps"])
    table = pd.DataFrame(
        {
            "cores": facts["cores"].fillna(usual["cores"]),
            "bandwidth_gbps": facts["bandwidth_gbps"].fillna(network),
            "devices": facts["devices"].fillna(1).astype(int),
            "prior_speed": speed.fillna(device.map(speeds)).fillna(usual["device_tflops"]),
            "device_memory_gib": memory,
            "speed_known": speed.notna(),
            "link_known": facts["bandwidth_gbps"].notna(),
            "device": device,
            "inside_gbps": inside,
        }
    )
    rows: dict[Any, Any] = table.sort_index().to_dict("index")
    return {name: Machine(**row) for name, row in rows.items()}


def device_kind(name: str, machine: Machine) -> str:
    """Return the kind of device: the name of the accelerator, or `name` if there is none.

    `name` is the name of the instance type. If the peak rate of `machine` does not match the data
    sheet, the kind includes the rate. Thus a slice of a GPU and the whole GPU are different kinds.
    """
    if not machine.has_accelerator or not machine.device:
        return name
    kind, tflops, _ = _sheet(machine.device, machine.device_memory_gib)
    rate = machine.prior_speed
    alike = not machine.speed_known or 1 / _ALIKE < rate / tflops < _ALIKE
    return kind if alike else f"{machine.device} of {rate:g} TFLOP/s"


@cache
def _sheet(device: str, memory_gib: float) -> tuple[str, float, float]:
    """Return (name, peak fp32 TFLOP/s, Gbit/s of the link between devices) from a data sheet.

    If `device` has several data sheets, the sheet whose memory size is nearest to `memory_gib` is
    used. If it has none, the result is (`device`, NaN, 128).
    """
    sheets = sheets_of(device)
    if not len(sheets):
        return device, math.nan, _INSIDE_GBPS
    memory = sheets["memory_gb"]
    distance = abs(np.log(memory / (memory_gib or memory.iloc[0])))
    nearest = sheets.iloc[int(np.argmin(distance))]
    return str(nearest.name), float(nearest["fp32_tflops"]), float(nearest["link_gbps"])


def computes(device: str, mode: Mode) -> bool:
    """Return True if a device supports the precision and the switches of a mode.

    GPUs support TF32 and bfloat16 since the Ampere generation. A CPU supports neither TF32 nor
    offload to host memory. A GPU without a data sheet is assumed to support every mode.
    """
    precision = mode.precision
    if device == _NO_DEVICE:
        return precision != "tf32" and not mode.offloaded
    if precision not in ("tf32", "bf16"):
        return True
    sheets = sheets_of(device)
    return not len(sheets) or bool(sheets["tf32_tflops"].notna().any())


@cache
def _data_sheet(kind: str, precision: str) -> Sheet | None:
    """Return the numbers in the data sheet of a kind of device; None if there is no data sheet."""
    table = data_sheets()
    if kind not in table.index:
        return None
    # GPUs compute in bf16 at the rate of fp16. Srift measures fp32 without TF32.
    name = f"{precision.replace('bf16', 'fp16')}_tflops"
    rate = table[name].fillna(table["fp32_tflops"])
    return Sheet(float(table["bandwidth_gbytes_s"][kind]), float(rate[kind]), 1.0)


def sheet_of(kind: str, precision: str, machines: Mapping[str, Machine]) -> Sheet:
    """Return the memory bandwidth and the peak TFLOP/s of a kind of device at a precision.

    The result comes from the first of these sources that exists:

    1. The data sheet. If it has no rate for the precision, the fp32 rate is used.
    2. An instance type in `machines` with this kind of device. The rate is its `prior_speed`. The
       bandwidth is estimated in proportion to the rate.
    3. The Sheet UNKNOWN.
    """
    if (sheet := _data_sheet(kind, precision)) is not None:
        return sheet
    for name, machine in machines.items():
        if device_kind(name, machine) != kind:
            continue
        gbytes, confidence = _CORE_GBYTES / _CORE_TFLOPS, 1.0
        if machine.has_accelerator:
            gbytes, confidence = _USUAL_GBYTES, _HALF
        speed = machine.prior_speed
        return Sheet(gbytes * speed, speed, confidence * machine.speed_known)
    return UNKNOWN


def peak_tflops(machine: Machine, precision: str) -> float:
    """Return the peak TFLOP/s in the data sheet of the machine's device; NaN without a sheet."""
    sheet = _data_sheet(_sheet(machine.device, machine.device_memory_gib)[0], precision)
    return math.nan if sheet is None else sheet.rate
