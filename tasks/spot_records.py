"""Records made elsewhere of what spot jobs meet: step times, checkpoints, launches, prices and interruption buckets.

CSV files in the columns of their sources, read into the frames that `models` learns from. Refuses what lacks a column.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

_MARKETS = {"on_demand": "on-demand", "preemptible": "spot"}
# The launches were of machines with these devices, the prices are of EC2 families with their peers.
_STANDS_FOR = {"K80": "p2", "P100": "p3"}
# The recorded step times all have one batch, which their file does not tell; any number does, since it cancels.
_BATCH = 128.0


def _columns(path: Path, names: dict[str, str]) -> pd.DataFrame:
    """The named columns of a CSV file under our names. Raises ValueError where one is missing."""
    rows = pd.read_csv(path)
    if missing := [name for name in names if name not in rows]:
        raise ValueError(f"{path}: no column {', '.join(missing)}")
    return rows[list(names)].rename(columns=names)


def read_step_times(path: Path) -> pd.DataFrame:
    """Columns workload, flops_per_sample, batch, device_tflops, seconds."""
    names = {"model": "workload", "model_flops": "flops_per_sample", "gpu_tflops": "device_tflops"}
    return _columns(path, names | {"iter_time_s": "seconds"}).assign(batch=_BATCH)


def read_checkpoints(path: Path) -> pd.DataFrame:
    """Columns group (the network), mb, seconds."""
    return _columns(path, {"model": "group", "checkpoint_mb": "mb", "checkpoint_s": "seconds"})


def read_launches(path: Path, instance_types: list[str]) -> pd.DataFrame:
    """Columns instance_type, market, seconds: each launch once for every one of `instance_types` that it stands for."""
    rows = _columns(path, {"mode": "market", "gpu": "gpu", "total_s": "seconds"})
    rows["market"] = rows["market"].map(_MARKETS)
    rows["family"] = rows["gpu"].map(_STANDS_FOR)
    types = pd.DataFrame({"instance_type": instance_types, "family": [one.partition(".")[0] for one in instance_types]})
    return rows.merge(types, on="family").drop(columns=["family", "gpu"])


def read_spot_prices(path: Path) -> tuple[pd.DataFrame, float]:
    """(instance_type, zone, hours since the record's start, usd_per_hour), and its start's hour of the day (UTC)."""
    names = {"instance_type": "instance_type", "availability_zone": "zone", "spot_usd_per_h": "usd_per_hour"}
    rows = _columns(path, names | {"timestamp_utc": "at"})
    at = pd.to_datetime(rows["at"])
    start = at.min()
    hours = (at - start).dt.total_seconds() / 3600
    return rows.drop(columns="at").assign(hours=hours), start.hour + start.minute / 60


def read_buckets(path: Path, region: str) -> dict[str, int]:
    """Spot Advisor's bucket (0 to 4) of each instance type in `region`."""
    names = {"region": "region", "instance_type": "instance_type", "interruption_bucket": "bucket"}
    rows = _columns(path, names)
    mine = rows[rows["region"] == region]
    return {str(name): int(bucket) for name, bucket in zip(mine["instance_type"], mine["bucket"], strict=True)}
