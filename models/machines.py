"""What the model needs of each instance type: cores, link, devices, memory, and an a-priori speed. Never a price."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

# Where nobody knows any type's figure. Cores and speeds are only compared with each other, so that any one number
# does. A link's rate is compared with measured seconds: 10 Gbit/s is usual Ethernet between servers, and lies within
# the middle half of EC2's types (3.75 to 50 in mid 2026); 1 Gbit/s would be right for hardly any of them.
_CORES, _GBPS, _SPEED = 1.0, 10.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type as the step time sees it. `prior_speed` is relative and only compared within one provider."""

    cores: float
    bandwidth_gbps: float
    devices: int
    prior_speed: float
    device_memory_gib: float | None = None
    device_tflops: float | None = None
    speed_told: bool = True  # or it is that of the others


def _positive(value: object) -> float | None:
    number = float(str(value)) if value is not None and str(value) not in ("", "None", "<NA>", "nan") else math.nan
    return number if math.isfinite(number) and number > 0 else None


def _middle(known: Iterable[float | None], nobody_knows: float) -> float:
    values = [one for one in known if one is not None]
    return float(np.median(values)) if values else nobody_knows


def _speed(row: dict[str, object]) -> float | None:
    """A device's TFLOP/s, or the cores of a machine without one; None where it is unknown.

    An accelerator's host cores say nothing of it: the same device in a larger machine is no faster.
    """
    return _positive(row.get("device_tflops" if _accelerated(row) else "cores"))


def _accelerated(row: dict[str, object]) -> bool:
    return str(row.get("device", "cpu")) != "cpu"


def read_machines(instance_types: pd.DataFrame, seen: Iterable[str]) -> dict[str, Machine]:
    """Machines by name: those described, and those only `seen` in measurements.

    A figure that nobody knows of a type, seen or described, is the median of those known of the others.
    """
    rows = [{str(key): value for key, value in row.items()} for row in instance_types.to_dict("records")]
    accelerated = [row for row in rows if _accelerated(row)]
    middle = Machine(
        cores=_middle((_positive(row.get("cores")) for row in rows), _CORES),
        bandwidth_gbps=_middle((_positive(row.get("bandwidth_gbps")) for row in rows), _GBPS),
        devices=1,
        prior_speed=_middle((_speed(row) for row in accelerated or rows), _SPEED),
        speed_told=False,
    )
    described = {
        str(row["name"]): Machine(
            cores=_positive(row.get("cores")) or middle.cores,
            bandwidth_gbps=_positive(row.get("bandwidth_gbps")) or middle.bandwidth_gbps,
            devices=int(_positive(row.get("devices")) or middle.devices),
            prior_speed=_speed(row) or middle.prior_speed,
            device_memory_gib=_positive(row.get("device_memory_gib")),
            device_tflops=_positive(row.get("device_tflops")) if _accelerated(row) else None,
            speed_told=_speed(row) is not None,
        )
        for row in rows
    }
    return {**dict.fromkeys(sorted(set(seen) - set(described)), middle), **described}
