"""`srift size`: how far a workload scales, what would hide its communication, its best batch; from measured runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from models.domain.suggestions import nearest_names
from models.planner.sizing import FORMULAS, Scaling, Series, Sizing, size_workload
from models.step_time.dataset import TrainingData
from models.step_time.setup_arrays import workload_and_mode
from warehouse.database import WarehouseMissing
from warehouse.reads import training_frames, workload_providers

from ..data_files.imports import asked_of_public
from ..data_files.public import ORIGIN, only_public
from ..workspace.blas_threads import one_thread
from ..workspace.settings import IMPORTED, SettingsError
from ..workspace.workspace import Workspace, open_workspace, refresh_command
from .known_workloads import known_elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuestion:
    """A workload, one instance type or all (None), and a global batch, or (None) any that srift.toml allows."""

    workload: str
    instance_type: str | None = None
    batch: int | None = None


def size(provider: str, question: SizeQuestion) -> dict[str, Any]:
    """Plain values: `scaling` by series, `best_batch` by type, the `formulas` of both, and `notes` on what is missing.

    Raises SettingsError on an unknown workload or instance type, naming the nearest, and WarehouseMissing where no run
    tells anything, with what to type.
    """
    name = question.workload
    workspace = asked_of_public(open_workspace(provider), name, datetime.now(UTC))
    _refuse_unknown(workspace, name)
    elsewhere = known_elsewhere(workspace.warehouse, name, provider)
    nothing = (
        elsewhere
        or f"no run of {name!r} was measured on {provider} machines yet: {remedy(workspace, name)}"
    )
    if not workspace.warehouse.exists():
        raise WarehouseMissing(nothing)
    with one_thread():
        found = size_workload(
            TrainingData(**training_frames(workspace.warehouse, provider)),
            name,
            batches=_batches(workspace, question),
        )
    if not found.types:
        raise WarehouseMissing(nothing)
    if question.instance_type is not None and question.instance_type not in found.types:
        near = nearest_names(question.instance_type, found.types)
        raise SettingsError(f"{name!r} was not measured on {question.instance_type!r}; {near}")
    found = found.of(question.instance_type)
    notes = _notes(workspace, question, found)
    if only_public(workspace.warehouse, provider, name):
        notes = [f"all runs of it are {ORIGIN}", *notes]
    if not found.scalings and not found.best_batches:
        raise WarehouseMissing("; ".join(notes))
    return {
        "workload": name,
        "provider": provider,
        "formulas": FORMULAS,
        "scaling": [_scaling(one) for one in found.scalings],
        "best_batch": [_named(asdict(one)) for one in found.best_batches],
        "notes": notes,
    }


def _refuse_unknown(workspace: Workspace, name: str) -> None:
    if name in workspace.settings.workloads:
        return
    provider, known = workspace.provider.name, workload_providers(workspace.warehouse)
    if (name, provider) in known:
        return
    elsewhere = known_elsewhere(workspace.warehouse, name, provider)
    names = {*workspace.settings.workloads, *(one for one, _ in known)}
    raise SettingsError(elsewhere or f"unknown workload {name!r}; {nearest_names(name, names)}")


def _batches(workspace: Workspace, question: SizeQuestion) -> tuple[float, float]:
    """Least and most global batch: what is asked for, else what srift.toml states, else any."""
    if question.batch is not None:
        return question.batch, question.batch
    if question.workload not in workspace.settings.workloads:
        return 0.0, math.inf
    stated = workspace.settings.workload(question.workload)
    return stated.global_batch_least, stated.global_batch_most


def remedy(workspace: Workspace, name: str) -> str:
    """What to type to have runs of a workload: a refresh where it can run, else an import."""
    settings, provider = workspace.settings, workspace.provider.name
    runs_here = name in settings.workloads and settings.workload_digest(name) != IMPORTED
    imported = "`srift import FILE` with rows of one global batch on one machine and on several"
    return (
        f"`{refresh_command(provider, '25')}` measures some, or {imported}"
        if runs_here
        else f"Type {imported}"
    )


def _notes(workspace: Workspace, question: SizeQuestion, found: Sizing) -> list[str]:
    """Of each type and mode without a series that scales, what is missing and the rows that would be enough."""
    told = {(one.workload, one.instance_type) for one in found.scalings}
    notes: dict[tuple[str, str], str] = {}
    for series in found.too_few:
        key = (series.workload, series.instance_type)
        if key not in told:
            notes.setdefault(key, _missing(workspace, question, series))
    unknown = {
        one.instance_type for one in found.scalings if one.hiding and one.hiding.stated_gbps is None
    }
    noted = refresh_command(workspace.provider.name, "0")
    links = [
        f"Gbit/s of {name} are not known: `{noted}` notes those of known types"
        for name in sorted(unknown)
    ]
    return [*notes.values(), *links]


def _missing(workspace: Workspace, question: SizeQuestion, series: Series) -> str:
    name, mode = workload_and_mode(series.workload)
    least, most = _batches(workspace, question)
    wanted = (
        f"{least:g}" if least == most else "any" if math.isinf(most) else f"{least:g} to {most:g}"
    )
    batch = int(max(series.batches, default=2) if math.isinf(most) else most)
    near = sorted(sorted(series.batches, key=lambda one: abs(one - batch))[:_NEAR])
    several = next((one for one in range(2, batch + 1) if batch % one == 0), 2)
    rows = [
        f"{name},{size}x{series.instance_type},{batch // size},SECONDS" for size in (1, several)
    ]
    return (
        f"{series.instance_type} in {mode}: too few runs to say how it scales: no global batch ({wanted} is asked for;"
        f" measured were {', '.join(f'{one:g}' for one in near)}) is known on one machine and on several."
        f" {remedy(workspace, name)}: workload,cluster,batch_per_device,step_s; {'; '.join(rows)}"
    )


_NEAR = 6  # measured batches that a note names


def _scaling(one: Scaling) -> dict[str, Any]:
    """With R, which JSON cannot hold where it is infinite."""
    values = _named(asdict(one))
    ratio = one.rule.ratio
    values["rule"] |= {"ratio": ratio if math.isfinite(ratio) else None}
    return values


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """The mode apart from the workload's name."""
    name, mode = workload_and_mode(values["workload"])
    return values | {"workload": name, "mode": str(mode)}
