"""What the model needs of each instance type: cores, link, devices, and an a-priori speed. Never a price."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

# Where nobody knows a type, the middle of those known stands in; with none known, these.
_CORES, _GBPS = 1.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type as the step time sees it. `prior_speed` is relative and only compared within one provider."""

    cores: float
    bandwidth_gbps: float
    devices: int
    prior_speed: float


def _positive(value: object) -> float | None:
    number = float(str(value)) if value is not None and str(value) not in ("", "None", "<NA>", "nan") else math.nan
    return number if math.isfinite(number) and number > 0 else None


def read_machines(instance_types: pd.DataFrame, seen: Iterable[str]) -> dict[str, Machine]:
    """Machines by name: those described, and those only `seen` in measurements, which get the median of the others."""
    described: dict[str, Machine] = {}
    for row in instance_types.to_dict("records"):
        cores, gbps = _positive(row.get("cores")), _positive(row.get("bandwidth_gbps"))
        tflops = _positive(row.get("device_tflops"))
        is_cpu = str(row.get("device", "cpu")) == "cpu"
        described[str(row["name"])] = Machine(
            cores=cores or _CORES,
            bandwidth_gbps=gbps or _GBPS,
            devices=int(_positive(row.get("devices")) or 1),
            prior_speed=(cores or _CORES) if is_cpu or tflops is None else tflops,
        )
    values = list(described.values())
    middle = Machine(
        cores=float(np.median([one.cores for one in values])) if values else _CORES,
        bandwidth_gbps=float(np.median([one.bandwidth_gbps for one in values])) if values else _GBPS,
        devices=1,
        prior_speed=float(np.median([one.prior_speed for one in values])) if values else 1.0,
    )
    return {**dict.fromkeys(sorted(set(seen) - set(described)), middle), **described}
