"""`srift import`: measurements made elsewhere, loaded in one transaction or refused whole."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from warehouse.append import append_imports, note_workloads
from warehouse.database import Warehouse

from .measurements import read_facts, read_measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of a file: its rows, how many were new, and sentences worth saying."""

    rows: int
    new: int
    sentences: tuple[str, ...]


def import_measurements(warehouse: Warehouse, path: Path, *, workloads: Path | None, now: datetime) -> Imported:
    """`srift import`: load `path` and, if given, the facts in `workloads`, in one transaction; twice changes nothing.

    Raises ImportRefused and WarehouseBusy; nothing was loaded then.
    """
    measured = read_measurements(path)
    facts = read_facts(workloads) if workloads else []
    rows = [
        {
            "identity": identity,
            "row_number": place,
            "provider": row.provider,
            "body": row.model_dump(mode="json"),
        }
        for row, place, identity in zip(measured.rows, measured.places, measured.identities, strict=True)
    ]
    with warehouse.transact() as connection:
        new = append_imports(connection, rows, file_digest=measured.file_digest, loaded_at=now)
        for provider in sorted({row.provider for row in measured.rows}):
            note_workloads(connection, [dict(fact) | {"digest": ""} for fact in facts], provider=provider, noted_at=now)
    ignored = [f"column {name} is not one of the contract's and was ignored" for name in measured.ignored]
    return Imported(rows=len(rows), new=new, sentences=tuple(ignored))
