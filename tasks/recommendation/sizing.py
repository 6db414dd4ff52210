"""`srift size`: how far a workload scales and its best batch, from measured runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from models.domain.suggestions import nearest_names
from models.planner.sizing import FORMULAS, size_workload
from models.step_time.dataset import TrainingData
from warehouse.database import WarehouseMissing
from warehouse.reads import training_frames, workload_providers

from ..data_files.imports import asked_of_public
from ..data_files.public import ORIGIN, only_public
from ..workspace.blas_threads import one_thread
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace, open_workspace, refresh_command
from .known_workloads import known_elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuestion:
    """A workload; one instance type or all (None); a global batch or any that is allowed (None)."""

    workload: str
    instance_type: str | None = None
    batch: int | None = None


def size(provider: str, question: SizeQuestion) -> dict[str, Any]:
    """Return the rows of `size_workload` with `formulas` and `notes`.

    Raises:
        SettingsError: the workload or the instance type is unknown.
        WarehouseMissing: the workload has no runs on the provider.
    """
    name = question.workload
    workspace = asked_of_public(open_workspace(provider), name, datetime.now(UTC))
    _refuse_unknown(workspace, name)
    missing = known_elsewhere(workspace.warehouse, name, provider) or (
        f"No run of {name!r} was measured on {provider}."
        f" Run `{refresh_command(provider, '25')}` or `srift import FILE`."
    )
    if not workspace.warehouse.exists():
        raise WarehouseMissing(missing)
    data = TrainingData(**training_frames(workspace.warehouse, provider))
    with one_thread():
        found = size_workload(data, name, batches=_batches(workspace, question))
    types = {row["instance_type"] for rows in found.values() for row in rows}
    if not types:
        raise WarehouseMissing(missing)
    wanted = question.instance_type
    if wanted is not None:
        if wanted not in types:
            raise SettingsError(
                f"{name!r} was not measured on {wanted!r}; {nearest_names(wanted, types)}"
            )
        found = {
            key: [row for row in rows if row["instance_type"] == wanted]
            for key, rows in found.items()
        }
    notes = _notes(found)
    if only_public(workspace.warehouse, provider, name):
        notes = [f"all runs of it are {ORIGIN}", *notes]
    return {
        "workload": name,
        "provider": provider,
        "formulas": FORMULAS,
        "scaling": found["scaling"],
        "checks": found["checks"],
        "best_batch": found["best_batch"],
        "notes": notes,
    }


def _refuse_unknown(workspace: Workspace, name: str) -> None:
    provider, known = workspace.provider.name, workload_providers(workspace.warehouse)
    if name in workspace.settings.workloads or (name, provider) in known:
        return
    names = {*workspace.settings.workloads, *(other for other, _ in known)}
    elsewhere = known_elsewhere(workspace.warehouse, name, provider)
    raise SettingsError(elsewhere or f"unknown workload {name!r}; {nearest_names(name, names)}")


def _batches(workspace: Workspace, question: SizeQuestion) -> tuple[float, float]:
    """Return the smallest and largest global batch to consider."""
    if question.batch is not None:
        return question.batch, question.batch
    if question.workload not in workspace.settings.workloads:
        return 0.0, math.inf
    stated = workspace.settings.workload(question.workload)
    return stated.global_batch_least, stated.global_batch_most


def _notes(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a note for each instance type without a result, and for each unknown link."""
    scaled = {row["instance_type"] for row in found["scaling"]}
    unknown = {
        row["instance_type"]: row["batches"]
        for row in found["unknown"]
        if row["instance_type"] not in scaled
    }
    notes = [
        f"{name}: no global batch is known on one machine and on several;"
        f" measured batches: {', '.join(f'{batch:g}' for batch in batches[:6])}"
        for name, batches in sorted(unknown.items())
    ]
    links = {row["instance_type"] for row in found["scaling"] if row.get("stated_gbps", 0) is None}
    return notes + [f"{name}: its bandwidth is unknown" for name in sorted(links)]
