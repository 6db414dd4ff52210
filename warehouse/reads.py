"""What others read from the warehouse, as frames whose columns the marts document. Never computes features."""

from __future__ import annotations

import hashlib
from typing import Any

import pandas as pd

from .database import Warehouse, has_relation, select

TRAINING_FRAMES = ("runs", "profiles", "buckets", "probes", "workloads", "instance_types")


def training_frames(warehouse: Warehouse, provider: str) -> dict[str, pd.DataFrame]:
    """The frames that a model is fitted on, of one provider and one moment, by name."""
    with warehouse.read() as connection:
        return {name: select(connection, name, {"provider": provider}) for name in TRAINING_FRAMES}


def training_digest(frames: dict[str, pd.DataFrame]) -> str:
    """Sixteen hex digits that change whenever a value or a column of the frames does; row order does not count."""
    whole = hashlib.sha256()
    for name in sorted(frames):
        frame = frames[name].reindex(sorted(frames[name].columns), axis=1)
        whole.update(f"{name}:{','.join(frame.columns)}\n".encode())
        for line in sorted(frame.to_csv(index=False, header=False).splitlines()):
            whole.update(line.encode() + b"\n")
    return whole.hexdigest()[:16]


def offers(warehouse: Warehouse, provider: str) -> pd.DataFrame:
    """The provider's newest snapshot of prices; unknown dollars are NaN."""
    return warehouse.select("offers", {"provider": provider})


def drifting(warehouse: Warehouse, provider: str) -> pd.DataFrame:
    """Rows of the mart `drift` that are drifting now; none before the first refresh, or the first of this version."""
    if not warehouse.path.exists():
        return pd.DataFrame()
    with warehouse.read() as connection:
        if not has_relation(connection, "drift"):
            return pd.DataFrame()
        return select(connection, "drift", {"provider": provider, "drifting": True})


def launched(warehouse: Warehouse, provider: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The marts `machines` and `refusals`; empty before the first refresh, or the first of this version."""
    if not warehouse.path.exists():
        return pd.DataFrame(), pd.DataFrame()
    with warehouse.read() as connection:
        if not has_relation(connection, "machines"):
            return pd.DataFrame(), pd.DataFrame()
        machines = select(connection, "machines", {"provider": provider})
        return machines, select(connection, "refusals", {"provider": provider})


def mart(warehouse: Warehouse, name: str, **equal: Any) -> pd.DataFrame:
    """Any mart by name (outdated_runs, failed_runs, spend, model_versions, scores, timings), filtered by columns."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not the name of a mart")
    return warehouse.select(name, equal)
