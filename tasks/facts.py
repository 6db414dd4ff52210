"""What measurements told about the workloads of srift.toml: size of the gradient, parameters, operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from models.identity import rows_of
from models.workload import Workload
from warehouse.database import WarehouseMissing
from warehouse.reads import mart

from .installation import Installation

_FACTS: dict[str, type[int] | type[float]] = {"parameters": int, "gradient_bytes": int, "flops_per_sample": float}


def with_facts(workloads: Sequence[Workload], known: pd.DataFrame) -> list[Workload]:
    """The workloads with what the mart `workloads` knows of them; facts of another digest are another workload's."""
    facts = {(row["workload"], row["digest"]): row for row in rows_of(known) if "digest" in row}
    return [_told(one, facts.get((one.name, one.digest), {})) for one in workloads]


def _told(workload: Workload, row: dict[str, Any]) -> Workload:
    values: dict[str, Any] = {name: of(row[name]) for name, of in _FACTS.items() if pd.notna(row.get(name))}
    return replace(workload, **values)


def told(here: Installation, workload: Workload) -> Workload:
    """`workload` with what the warehouse knows of it; as it is before the first refresh."""
    try:
        known = mart(here.warehouse, "workloads", provider=here.provider.name, workload=workload.name)
    except WarehouseMissing:
        return workload
    return with_facts([workload], known)[0]
