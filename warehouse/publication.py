"""Publishes one provider's recommendations, or refuses: checks/*.sql must return no row. Never exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from .append import Connection, Row, append
from .database import SQL_FOLDER, Warehouse, WarehouseError

_STAMPED = ("publication_id", "published_at", "provider", "model_version")


class PublicationRefused(WarehouseError):
    """Checks found rows that must not be published; nothing of the publication was. `failures` names each."""

    def __init__(self, publication_id: str, failures: Sequence[str]) -> None:
        self.failures = list(failures)
        shown = "\n".join(f"  {failure}" for failure in self.failures[:20])
        more = f"\n  and {len(self.failures) - 20} more" if len(self.failures) > 20 else ""
        super().__init__(
            f"publication {publication_id} was refused and nothing of it published; the last one stays:\n{shown}{more}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a publication is called, its provider, its refresh, and the version of the model ("" before the first)."""

    publication_id: str
    published_at: datetime
    provider: str
    refresh_id: str
    model_version: str


def publish(warehouse: Warehouse, rows: Sequence[Row], publication: Publication) -> int:
    """Store a publication if every check agrees; returns how many rows are new (0 where it was stored before).

    `rows` hold the published columns; publication_id, published_at, provider and model_version may be left out.
    Raises PublicationRefused, WarehouseBusy, and ValueError for a missing or unknown column.
    """
    with warehouse.transact() as connection:
        new = append_publication(connection, rows, publication)
        failures = run_checks(connection, publication.publication_id)
        if failures:
            raise PublicationRefused(publication.publication_id, failures)
    return new


def append_publication(
    connection: Connection, rows: Sequence[Row], publication: Publication
) -> int:
    """Append a publication unchecked, within the caller's transaction; the caller runs the checks before it commits."""
    header = asdict(publication)
    stamp = {name: header[name] for name in _STAMPED}
    asked = "select column_name from duckdb_columns() where table_name = 'raw_recommendations'"
    columns = [name for (name,) in connection.execute(asked).fetchall()]
    for row in rows:
        missing = [name for name in columns if name not in row and name not in _STAMPED]
        if missing:
            raise ValueError(
                f"a recommendation for {row.get('workload')!r} lacks {', '.join(missing)}"
            )
    if not append(connection, "raw_publications", [header]):
        return 0
    return append(
        connection, "raw_recommendations", [stamp | dict(row) for row in rows], keyed=False
    )


def run_checks(
    connection: Connection, publication_id: str, folder: Path = SQL_FOLDER / "checks"
) -> list[str]:
    """Problems of a publication by the checks in `folder`, each as `check: what is wrong`; empty: it may be shown."""
    provider = connection.execute(
        "select provider from raw_publications where publication_id = ?", [publication_id]
    ).fetchone()
    connection.execute(
        "create or replace temp table published as"
        " select *, row_number() over () as row_id from raw_recommendations where publication_id = ?",
        [publication_id],
    )
    failures: list[str] = []
    for file in sorted(folder.glob("*.sql")):
        text = file.read_text()
        params = {"provider": provider[0] if provider else None} if "$provider" in text else {}
        failures += [
            f"{file.stem}: {problem}" for (problem,) in connection.execute(text, params).fetchall()
        ]
    connection.execute("drop table temp.published")
    return failures
