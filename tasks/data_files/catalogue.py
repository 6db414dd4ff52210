"""Instance types from a catalogue file, CSV or Parquet, in the columns of EC2's. Empty is unknown, never zero.

Such a file does not tell how fast a device is: the peak rates of known devices stand in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..providers.ec2.catalogue import device_tflops
from .measurements import Text, read_descriptions

COLUMNS = (
    "name",
    "devices",
    "device",
    "cores",
    "bandwidth_gbps",
    "memory_gib",
    "device_memory_gib",
    "device_tflops",
)


def _number(value: object) -> object:
    """Counts may be written 4.0."""
    return float(value) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Figure = Annotated[float, Field(gt=0)]


class CatalogueRow(BaseModel):
    """What the step time needs of one instance type. None is unknown."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    instance_type: Text
    vcpu: Figure | None = None
    memory_gib: Figure | None = None
    gpu_name: Text | None = None
    gpu_count: Count | None = None
    gpu_memory_gib_each: float | None = Field(default=None, ge=0)
    accelerator_name: Text | None = None
    accelerator_count: Count | None = None
    network_gbps: Figure | None = None
    on_demand_usd_per_h_us_east_1: float | None = Field(default=None, ge=0)

    @property
    def device(self) -> str:
        """The accelerator's name, else cpu. A share of a GPU is another device, of which a file tells no more."""
        name = self.gpu_name or self.accelerator_name or "cpu"
        return f"part of {name}" if self.gpu_name and self.gpu_count == 0 else name

    @property
    def devices(self) -> int | None:
        """How many devices. None where a device is named and not counted; a count of 0 is a share of one device."""
        counted = self.gpu_count if self.gpu_count is not None else self.accelerator_count
        return max(counted, 1) if counted is not None else 1 if self.device == "cpu" else None


def read_catalogue(path: Path) -> pd.DataFrame:
    """The file's types in COLUMNS, as the mart `instance_types` names them; NaN is unknown. Raises ImportRefused."""
    rows = [
        (row.instance_type, row.devices, row.device, row.vcpu, row.network_gbps, row.memory_gib,
         row.gpu_memory_gib_each or None, device_tflops(row.device))
        for row in read_descriptions(path, CatalogueRow, key="instance_type")
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read_prices(path: Path) -> dict[str, float]:
    """On-demand dollars an hour by instance type; a price of 0 is unknown, like none. Raises ImportRefused."""
    rows = read_descriptions(path, CatalogueRow, key="instance_type")
    return {
        row.instance_type: row.on_demand_usd_per_h_us_east_1
        for row in rows
        if row.on_demand_usd_per_h_us_east_1
    }
