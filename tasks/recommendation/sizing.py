"""Answer `srift size`: the largest efficient cluster and the best batch of a workload.

Parallel efficiency is the speed-up divided by the number of machines or devices. The answer has
the largest cluster with an efficiency of at least 90 %, and the largest cluster with at least 80 %.
"""

import math
from typing import Any

from models.planner.sizing import FORMULAS, size_workload
from models.step_time.dataset import TrainingData
from warehouse.database import WarehouseMissing
from warehouse.reads import training_frames, workload_providers

from ..data_files.imports import load_public_if_needed
from ..data_files.public import ORIGIN, only_public, with_public_workloads
from ..workspace.blas_threads import single_thread
from ..workspace.workspace import open_workspace, refresh_command
from .known_workloads import unknown


def size(
    provider: str, name: str, *, instance_type: str | None = None, batch: int | None = None
) -> dict[str, Any]:
    """Return the largest efficient cluster and the best batch of workload `name`.

    The keys of the result are:

        scaling: a row for each instance type, mode and unit. The row has the largest efficient
            cluster. A unit is a device, or a machine with a given number of devices.
        checks: a row for each row of `scaling` and each cluster size. The row has the measured
            and the predicted efficiency.
        best_batch: a row for each instance type and mode. The row has the batch at which a single
            device computes the most samples per second.
        formulas: {name of a computed value: its formula}.
        notes: sentences for the user, for example on instance types whose scaling is unknown.
        workload, provider: the arguments `name` and `provider`.

    instance_type: the instance type to include; None means all types.
    batch: the global batch to consider. None means all global batches that srift.toml allows. If
        the workload is not in srift.toml, None means all measured batches.

    Raises:
        SettingsError: if the workload is unknown.
        WarehouseMissing: if the workload has no runs on the provider or the instance type.
    """
    workspace = open_workspace(provider)
    load_public_if_needed(workspace, name)
    workspace = with_public_workloads(workspace)
    batches: tuple[float, float] = 0.0, math.inf
    if name in workspace.settings.workloads:
        batches = workspace.settings.workloads[name].global_batch
    elif (name, provider) not in workload_providers(workspace.warehouse):
        raise unknown(workspace, name)
    if batch is not None:
        batches = batch, batch
    with single_thread():
        data = TrainingData(**training_frames(workspace.warehouse, provider))
        tables = size_workload(data, name, batches=batches)
    tables = {
        key: [row for row in rows if instance_type in (None, row["instance_type"])]
        for key, rows in tables.items()
    }
    if not any(tables.values()):
        raise WarehouseMissing(
            f"No run of {name!r} was measured on {instance_type or provider}."
            f" Run `{refresh_command(provider, '25')}` or `srift import FILE`."
        )
    scaled_types = {row["instance_type"] for row in tables["scaling"]}
    notes = [
        f"{row['instance_type']}: no global batch was measured both on one machine and on several;"
        f" measured batches: {', '.join(f'{batch:g}' for batch in row['batches'])}"
        for row in tables.pop("unknown")
        if row["instance_type"] not in scaled_types
    ]
    if only_public(workspace, name):
        notes.insert(0, f"all runs of this workload are {ORIGIN}")
    return {"workload": name, "provider": provider, "formulas": FORMULAS, **tables, "notes": notes}
