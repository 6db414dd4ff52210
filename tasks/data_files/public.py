"""Read the public step times that ship with Srift (warehouse/seeds).

Srift imports the public step times when it first needs them. After `srift forget public-steps`,
Srift does not import them again.
"""

import tomllib
from dataclasses import replace
from pathlib import Path

import warehouse as package

from ..workspace.settings import WorkloadSettings
from ..workspace.workspace import Workspace
from .file_reader import read_facts

PROVIDER = "ec2"
PUBLIC_IMPORT = "public-steps"  # warehouse/staging recognizes public rows by the prefix `public-`
ORIGIN = "public step times that came with Srift (warehouse/seeds/README.md)"

FOLDER = Path(package.__file__).parent / "seeds"
MEASUREMENTS, FACTS = FOLDER / "public_steps.parquet", FOLDER / "workloads.csv"
# Machines with public step times that EC2 does not sell, with columns of the mart instance_types.
MACHINES = f"select *, '{PROVIDER}' as provider, '' as digest from read_csv($file)"


def public_workloads() -> dict[str, WorkloadSettings]:
    """Return the settings (samples, batches, goals) of workloads with public step times."""
    body = tomllib.loads((FOLDER / "workloads.toml").read_text())
    return {
        name: WorkloadSettings.model_validate(fields) for name, fields in body["workloads"].items()
    }


def packaged_names() -> frozenset[str]:
    """Return the names of all workloads with public step times."""
    return frozenset(fact["workload"] for fact in read_facts(FACTS))


def with_public_workloads(workspace: Workspace) -> Workspace:
    """Return a copy of the workspace, with the public workloads added.

    A public workload has step times on EC2 that ship with Srift. It is added to a workspace of EC2
    if these step times are imported and in use. A workload of srift.toml is never replaced.
    """
    if workspace.provider.name != PROVIDER:
        return workspace
    names_in_use = set(workspace.mart("public_rows")["workload"])
    more = {name: workload for name, workload in public_workloads().items() if name in names_in_use}
    update = {"workloads": more | workspace.settings.workloads}
    return replace(workspace, settings=workspace.settings.model_copy(update=update))


def only_public(workspace: Workspace, workload: str) -> bool:
    """Return True if all step times of the workload on the provider's machines are public.

    Returns False if the warehouse has no such step times.
    """
    return (
        workload in packaged_names() and not workspace.mart("public_rows", workload=workload).empty
    )
