"""Read instance types from a catalogue file: CSV or Parquet, with the columns of CatalogueRow."""

from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from ..providers.ec2.catalogue import device_tflops
from .file_reader import read_descriptions

_COLUMNS = ["name", "devices", "device", "cores", "bandwidth_gbps", "memory_gib"]
_COLUMNS += ["device_memory_gib", "device_tflops"]
_Positive = Annotated[float | None, Field(gt=0)]
_Count = Annotated[float | None, Field(ge=0)]


class CatalogueRow(BaseModel):
    """One instance type of a catalogue file. None means that the file's value is empty."""

    model_config = ConfigDict(allow_inf_nan=False)

    instance_type: str
    vcpu: _Positive = None
    memory_gib: _Positive = None
    gpu_name: str | None = None
    gpu_count: _Count = None
    gpu_memory_gib_each: _Count = None
    accelerator_name: str | None = None
    accelerator_count: _Count = None
    network_gbps: _Positive = None

    @property
    def device(self) -> str:
        """Return the name of the accelerator, such as "T4"; "cpu" if the type has none.

        A `gpu_name` with a `gpu_count` of 0 means a fraction of a GPU. The result is then, for
        example, "part of T4".
        """
        name = self.gpu_name or self.accelerator_name or "cpu"
        return f"part of {name}" if self.gpu_name and self.gpu_count == 0 else name

    @property
    def devices(self) -> int | None:
        """Return the number of devices; None if unknown.

        A CPU and a part of a GPU count as one device.
        """
        count = self.gpu_count if self.gpu_count is not None else self.accelerator_count
        if count is None:
            return 1 if self.device == "cpu" else None
        return max(int(count), 1)


def read_catalogue(path: Path | None) -> pd.DataFrame:
    """Return the instance types of the file, in the columns of the mart `instance_types`.

    The peak TFLOP/s of a device are looked up by its name. They are not read from the file.

    Raises ImportRefused if a value is bad, a type is repeated or the file cannot be read.
    """
    rows = [
        (
            *(row.instance_type, row.devices, row.device, row.vcpu, row.network_gbps),
            *(row.memory_gib, row.gpu_memory_gib_each or None, device_tflops(row.device)),
        )
        for row in (read_descriptions(path, CatalogueRow) if path else ())
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)
