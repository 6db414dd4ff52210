"""Provide the public step times that ship with Srift (warehouse/seeds).

Srift imports them when they are first needed. After a user forgets this import, Srift does not
import it again.
"""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import warehouse as package
from warehouse.database import Warehouse
from warehouse.reads import public_rows

from ..workspace.settings import WorkloadSettings
from ..workspace.workspace import Workspace

PROVIDER = "ec2"
PUBLIC_IMPORT = "public-t4"  # staging views recognise packaged imports by `public-`
ORIGIN = "public step times that came with Srift (AdaptDL's OSDI'21 artifact, machines of 4 T4)"

FOLDER = Path(package.__file__).parent / "seeds"
MEASUREMENTS, FACTS = FOLDER / "training_runs_t4.parquet", FOLDER / "workloads.csv"


@cache
def public_workloads() -> dict[str, WorkloadSettings]:
    """Return the settings (samples, batches and goals) of the packaged workloads, by name."""
    body = tomllib.loads((FOLDER / "workloads.toml").read_text())
    return {name: WorkloadSettings.model_validate(one) for name, one in body["workloads"].items()}


def with_public_workloads(workspace: Workspace) -> Workspace:
    """Return the workspace after adding the workloads whose public step times are in use.

    If the user's settings have a workload of the same name, the user's workload is kept.
    """
    if workspace.provider.name != PROVIDER:
        return workspace
    counting = public_rows(workspace.warehouse, PROVIDER)
    settings = workspace.settings
    more = {name: one for name, one in public_workloads().items() if name in counting}
    return replace(
        workspace, settings=settings.model_copy(update={"workloads": more | settings.workloads})
    )


def only_public(warehouse: Warehouse, provider: str, workload: str) -> bool:
    """Return True if all stored step times of the workload come from the packaged data set."""
    return workload in public_workloads() and workload in public_rows(warehouse, provider)
