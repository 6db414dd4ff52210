"""Run the commands `srift import` and `srift forget`.

`srift import` loads files with measurements, and files with facts of workloads. Facts are numbers
such as parameters and FLOPs. `srift forget` undoes an import: the model no longer learns from its
rows. Importing the same files again restores the rows.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from models.domain.suggestions import nearest_names
from models.domain.workload import PRECISIONS, Mode
from models.step_time.machine_specs import computes
from warehouse.append import note_import, note_instance_types, note_workloads
from warehouse.database import Connection, Warehouse, empty_warehouse, rows_of_query
from warehouse.import_columns import (
    append_imports,
    changes,
    counted_before,
    implausible,
    remember,
    staged_counts,
)
from warehouse.reads import measured_workloads

from ..providers.ec2.catalogue import most_tflops
from ..reporting.progress import reporter
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace, known_devices, refresh_command
from .file_reader import (
    ImportRefused,
    digest_of_file,
    read_facts,
    sentences,
    stage_measurements,
)
from .public import (
    FACTS,
    FOLDER,
    MACHINES,
    MEASUREMENTS,
    ORIGIN,
    PROVIDER,
    PUBLIC_IMPORT,
    packaged_names,
)

_IMPORTS = "from imports"


@dataclass(kw_only=True)
class Imported:
    """The result of an import.

    rows: number of rows in the file of measurements.
    new: number of rows that were not stored yet, or that `srift forget` had removed from use.
    counts: the summary as {title: {name: count}}. For example, {"workload": {"vit": 12}} means 12
        rows of workload vit.
    sentences: warnings.
    """

    import_id: str = ""
    dry_run: bool = False
    rows: int = 0
    new: int = 0
    providers: tuple[str, ...] = ()
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        lines = [f"{self.rows} rows, {self.new} of them new"]
        for title, counts in self.counts.items():
            lines.append(f"{title}: {', '.join(f'{name} ({n})' for name, n in counts.items())}")
        end = f"import {self.import_id}: `srift forget {self.import_id}` undoes it, and"
        end += f" {_refreshes(self.providers)} learns from it"
        return "\n".join(
            [*lines, *self.sentences, "dry run: nothing was loaded" if self.dry_run else end]
        )


def import_measurements(
    warehouse: Warehouse,
    now: datetime,
    *,
    measurements: Path | None = None,
    workloads: Path | None = None,
    local_types: Iterable[str] = (),
    force: bool = False,
    dry_run: bool = False,
) -> Imported:
    """Load measurements, facts of workloads (parameters, FLOPs, ...) or both in one transaction.

    Loading the same files again changes nothing, unless `srift forget` has undone their import.
    The import's id is a digest of the providers' names and of the files' content. If `measurements`
    is the file that ships with Srift, the id is PUBLIC_IMPORT.

    measurements, workloads: the file of measurements, and the file of facts.
    local_types: names of the local instance types.
    force: if True, implausible rows are loaded too.
    dry_run: if True, the files are checked but nothing is loaded.

    Raises:
        ImportRefused: if a file is refused. Nothing is loaded.
        WarehouseError: if the warehouse cannot be written. Nothing is loaded.
    """
    result, files = Imported(dry_run=dry_run), (measurements, workloads)
    facts = read_facts(workloads) if workloads else []
    fact_workloads = [fact["workload"] for fact in facts]
    uses_file = warehouse.exists() or not dry_run  # a dry run creates no file
    with warehouse.transact() if uses_file else empty_warehouse().cursor() as connection:
        if not uses_file:
            connection.begin()
        if measurements:
            stage_measurements(connection, measurements, now)
            result.counts = staged_counts(connection)
            result.rows = sum(result.counts["workload"].values())
            result.new, other = counted_before(connection)
            if other:
                result.sentences.append(
                    f"{other} rows repeat a known run_id with another step_s: the stored step_s"
                    " counts"
                )
        result.providers = tuple(sorted(result.counts.get("provider", {PROVIDER})))
        digests = [digest_of_file(path) if path else "" for path in files]
        result.import_id = PUBLIC_IMPORT
        if digests[0] != digest_of_file(MEASUREMENTS):
            text = " ".join([*digests, *result.providers])
            result.import_id = hashlib.sha256(text.encode()).hexdigest()[:16]
        remember(connection)
        names = [path.name if path else None for path in files]
        note_import(connection, result.import_id, event="imported", noted_at=now, files=names)
        stamp = {"import_id": result.import_id, "noted_at": now}
        for provider in result.providers:
            note_workloads(connection, facts, provider=provider, digest="", **stamp)
        if facts:
            change_counts = changes(connection, fact_workloads)
            result.counts["facts of workloads"] = {
                kind: change_counts[f"facts_{kind}"] for kind in ("new", "changed", "same")
            }
        if measurements:
            if not force:
                _refuse_implausible(
                    connection, measurements, known_devices(local_types), fact_workloads
                )
            append_imports(
                connection, file_digest=digests[0], loaded_at=now, import_id=result.import_id
            )
        if dry_run:
            connection.rollback()
            connection.begin()
    return result


def _refuse_implausible(
    connection: Connection,
    path: Path,
    types: Mapping[str, Mapping[str, tuple[int, str]]],
    workloads: Sequence[str],
) -> None:
    """Raise ImportRefused if rows of the file are implausible.

    All rows of `workloads` are checked. For other workloads, only rows that are not stored yet are
    checked.

    types: {provider: {instance type: (device count, device name)}}.
    workloads: the workloads whose facts are part of the same import.
    """
    peaks = [
        {
            "provider": provider,
            "name": name,
            "devices": devices,
            "precision": precision,
            "peak_tflops": most_tflops(device, precision),
        }
        for provider, device_types in types.items()
        for name, (devices, device) in device_types.items()
        for precision in PRECISIONS
        if computes(device, Mode(precision=precision))
    ]
    problems = sentences(implausible(connection, peaks, workloads))
    if problems:
        raise ImportRefused(
            path, ["these rows look wrong. If they are right, load them with --force", *problems]
        )


def load_public(workspace: Workspace) -> int:
    """Import the public step times that ship with Srift, and return the number of rows.

    Imports nothing and returns 0 in these cases:

    - The step times were imported before.
    - EC2 is emulated. Emulated machines differ from the measured machines.

    Raises WarehouseError if the warehouse cannot be written.
    """
    warehouse, now = workspace.warehouse, datetime.now(UTC)
    if workspace.settings.ec2.emulated or _was_loaded(warehouse):
        return 0
    warehouse.create()
    with warehouse.transact() as connection:
        machines = rows_of_query(connection, MACHINES, {"file": f"{FOLDER}/machines.csv"})
        note_instance_types(connection, machines, noted_at=now)
    result = import_measurements(
        warehouse, now, measurements=MEASUREMENTS, workloads=FACTS, force=True
    )
    reporter().say(
        f"loaded {result.rows} rows: {ORIGIN}. They count for a workload until you measure it."
        f" To remove all of them, type `srift forget {PUBLIC_IMPORT}`"
    )
    return result.rows


def _was_loaded(warehouse: Warehouse) -> bool:
    """Return True if the public step times were imported, even if `srift forget` undid this."""
    return len(warehouse.select("stg_import_files", {"import_id": PUBLIC_IMPORT})) > 0


def load_public_if_needed(workspace: Workspace, workload: str, *, shape: bool = False) -> None:
    """Import the public step times that ship with Srift, if `workload` needs them.

    `workload` needs them if the warehouse has no EC2 step times of `workload`, and one of these
    conditions is true:

    - `shape` is True.
    - There are public step times of `workload`, and srift.toml sets no entrypoint for `workload`.

    Imports nothing in these cases:

    - The step times were imported before, even if `srift forget` undid the import.
    - EC2 is emulated.

    shape: True if `workload` is a transformer and the provider is EC2.

    Raises WarehouseError if the warehouse cannot be written.
    """
    spec = workspace.settings.workloads.get(workload)
    public = workload in packaged_names() and (spec is None or spec.entrypoint is None)
    warehouse = workspace.warehouse
    is_needed = (shape or public) and not _was_loaded(warehouse)
    if is_needed and workload not in measured_workloads(warehouse, PROVIDER):
        load_public(workspace)


def forget_import(warehouse: Warehouse, text: str, now: datetime) -> dict[str, Any]:
    """Undo the import whose id begins with `text`: models no longer use its rows and facts.

    Facts are numbers such as parameters and FLOPs. Nothing is deleted. Keys of the result:

        import_id: the complete id of the import.
        rows: number of measurements that are no longer used.
        facts: number of workloads whose imported facts are no longer used.
        sentence: the message to the user.

    Raises SettingsError if no import id, or more than one, begins with `text`.
    """
    with warehouse.transact() as connection:
        imports = {row["import_id"]: row for row in rows_of_query(connection, _IMPORTS)}
        import_ids = [name for name in imports if name.startswith(text)]
        if len(import_ids) != 1:
            raise SettingsError(
                f"{text!r} must be the beginning of exactly one import id, but is the beginning of"
                f" {len(import_ids)}; {nearest_names(text, imports)}"
            )
        import_id = import_ids[0]
        remember(connection)
        note_import(connection, import_id, event="forgotten", noted_at=now)
        change_counts = changes(connection)
    rows, facts = change_counts["rows_gone"], change_counts["facts_gone"]
    sentence = (
        f"import {import_id} is forgotten: {rows} rows and facts of {facts} workloads no longer"
        f" count. The model forgets them when {_refreshes(imports[import_id]['providers'])} runs;"
        " importing the files again restores them"
    )
    return {"import_id": import_id, "rows": rows, "facts": facts, "sentence": sentence}


def list_imports(warehouse: Warehouse) -> list[dict[str, Any]]:
    """Return a row for each import, the oldest first, including imports that were undone."""
    with warehouse.read() as connection:
        return rows_of_query(connection, _IMPORTS)


def _refreshes(providers: Iterable[str]) -> str:
    """Return the commands that refit the models of `providers` without starting machines."""
    return " and ".join(f"`{refresh_command(provider, '0')}`" for provider in providers)
