"""Provide the public step times that ship with Srift (warehouse/seeds).

Srift imports them when they are first needed. After a user forgets this import, Srift does not
import it again.
"""

import csv
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

import warehouse as package
from warehouse.database import Warehouse
from warehouse.reads import public_rows

from ..workspace.settings import WorkloadSettings
from ..workspace.workspace import Workspace

PROVIDER = "ec2"
PUBLIC_IMPORT = "public-steps"  # staging views recognise packaged imports by `public-`
ORIGIN = "public step times that came with Srift (warehouse/seeds/README.md)"

FOLDER = Path(package.__file__).parent / "seeds"
MEASUREMENTS, FACTS = FOLDER / "public_steps.parquet", FOLDER / "workloads.csv"


@cache
def public_workloads() -> dict[str, WorkloadSettings]:
    """Return the settings (samples, batches and goals) of the packaged workloads, by name."""
    body = tomllib.loads((FOLDER / "workloads.toml").read_text())
    return {name: WorkloadSettings.model_validate(one) for name, one in body["workloads"].items()}


@cache
def packaged_names() -> frozenset[str]:
    """Return the names of all workloads with packaged step times."""
    with FACTS.open(newline="") as file:
        return frozenset(row["workload"] for row in csv.DictReader(file))


def public_machines() -> list[dict[Any, Any]]:
    """Return the machines that no provider offers and on which packaged step times were measured.

    The rows have columns of the mart `instance_types`.
    """
    table = pd.read_csv(FOLDER / "machines.csv").astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return [{**dict(row), "provider": PROVIDER, "digest": ""} for row in rows]


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
    """True if all step times of the workload in the warehouse came with the package."""
    return workload in public_rows(warehouse, provider)
