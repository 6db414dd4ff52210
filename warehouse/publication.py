"""Publish a provider's recommendations, unless a check (checks/*.sql) finds a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from .append import Connection, Row, append
from .database import SQL_FOLDER, Warehouse, WarehouseError

_STAMPED = ("publication_id", "published_at", "provider", "model_version")
_SHOWN = 20


class PublicationRefused(WarehouseError):
    """Checks found problems in a publication, so it was not stored.

    failures: one text `check: problem` for each problem.
    """

    def __init__(self, publication_id: str, failures: Sequence[str]) -> None:
        self.failures = list(failures)
        lines = self.failures[:_SHOWN]
        if len(self.failures) > _SHOWN:
            lines.append(f"and {len(self.failures) - _SHOWN} more")
        super().__init__(
            "\n  ".join(
                [
                    f"publication {publication_id} was refused, and the last publication stays:",
                    *lines,
                ]
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The id, time, provider, refresh and model version of a publication.

    model_version: empty if the provider has no model yet.
    """

    publication_id: str
    published_at: datetime
    provider: str
    refresh_id: str
    model_version: str


def publish(warehouse: Warehouse, rows: Sequence[Row], publication: Publication) -> int:
    """Store a publication if every check passes, and return the number of new rows.

    Raises PublicationRefused if a check fails, WarehouseBusy if another process holds the
    warehouse, and ValueError if a column is missing or unknown.
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
    """Append a publication without checks, in the caller's transaction.

    Returns the number of new rows. A publication whose id is already stored is skipped. Raises
    ValueError if a column is missing or unknown.
    """
    header = asdict(publication)
    stamp = {name: header[name] for name in _STAMPED}
    columns = [column[0] for column in connection.table("raw_recommendations").description]
    for row in rows:
        missing = [name for name in columns if name not in row and name not in _STAMPED]
        if missing:
            raise ValueError(
                f"a recommendation of {row.get('workload')!r} lacks the columns {missing}"
            )
    if not append(connection, "raw_publications", [header]):
        return 0
    return append(connection, "raw_recommendations", [stamp | dict(row) for row in rows])


def run_checks(connection: Connection, publication_id: str) -> list[str]:
    """Run every check on a publication.

    Returns one text `check: problem` for each problem.
    """
    provider = connection.execute(
        "select provider from raw_publications where publication_id = ?", [publication_id]
    ).fetchone()
    connection.execute(
        "create or replace temp table published as"
        " select *, row_number() over () as row_id from raw_recommendations"
        " where publication_id = ?",
        [publication_id],
    )
    failures: list[str] = []
    for file in sorted(SQL_FOLDER.glob("checks/*.sql")):
        text = file.read_text()
        params = {"provider": provider[0] if provider else None} if "$provider" in text else {}
        found = connection.execute(text, params).fetchall()
        failures += [f"{file.stem}: {problem}" for (problem,) in found]
    connection.execute("drop table temp.published")
    return failures
