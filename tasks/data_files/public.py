"""Public step times that ship with the package (warehouse/seeds), for who has measured nothing on EC2 yet.

They are an import like any other, made at the first need, under a name of its own. Once forgotten they stay forgotten.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd

import warehouse as package
from warehouse.database import Warehouse
from warehouse.reads import knows_import, public_rows

from ..workspace.settings import Settings, WorkloadSettings
from ..workspace.workspace import Workspace

PROVIDER = "ec2"
PUBLIC_IMPORT = (
    "public-t4"  # the import's id; the staging views know imports of public rows by `public-`
)
ORIGIN = "public step times that came with Srift (AdaptDL's OSDI'21 artifact, machines of 4 T4)"

FOLDER = Path(package.__file__).parent / "seeds"
MEASUREMENTS, FACTS = FOLDER / "training_runs_t4.parquet", FOLDER / "workloads.csv"


@cache
def public_workloads() -> dict[str, WorkloadSettings]:
    """Samples, batches and goals of the workloads that they are of, by name."""
    body = tomllib.loads((FOLDER / "workloads.toml").read_text())
    return {name: WorkloadSettings.model_validate(one) for name, one in body["workloads"].items()}


def are_waiting(warehouse: Warehouse, settings: Settings) -> bool:
    """Whether the public rows would be loaded at the first need: no more once they were, forgotten since or not."""
    return not settings.ec2.emulated and not knows_import(warehouse, PUBLIC_IMPORT)


def waiting(warehouse: Warehouse, settings: Settings) -> pd.DataFrame:
    """The public rows by workload, with its clusters and facts, if they `are_waiting`."""
    if not are_waiting(warehouse, settings):
        return pd.DataFrame(columns=["workload"])
    rows = pd.read_parquet(MEASUREMENTS, columns=["workload", "cluster", "measured_at"])
    counted = rows.groupby("workload", as_index=False).agg(
        rows=("workload", "size"),
        clusters=("cluster", "unique"),
        newest_measured_at=("measured_at", "max"),
    )
    return counted.merge(pd.read_csv(FACTS), on="workload", how="left")


def with_public_workloads(workspace: Workspace) -> Workspace:
    """The same, as if srift.toml also named the workloads of which public step times count and that it leaves out."""
    if workspace.provider.name != PROVIDER:
        return workspace
    counting = public_rows(workspace.warehouse, PROVIDER)
    settings = workspace.settings
    more = {name: one for name, one in public_workloads().items() if name in counting}
    return replace(
        workspace, settings=settings.model_copy(update={"workloads": more | settings.workloads})
    )


def only_public(warehouse: Warehouse, provider: str, workload: str) -> bool:
    """Whether all that tells of the workload's step times came with the package."""
    return workload in public_workloads() and workload in public_rows(warehouse, provider)
