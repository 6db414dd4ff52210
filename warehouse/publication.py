"""Store a provider's table of recommendations, unless a check (checks/*.sql) finds a problem."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from .append import Row, append
from .database import SQL_FOLDER, Connection, Warehouse, WarehouseError

_SHOWN = 20


class PublicationRefused(WarehouseError):
    """Checks found problems in a table of recommendations, so the table was not stored.

    failures: one text `check: problem` per problem.
    """

    def __init__(self, publication_id: str, failures: Sequence[str]) -> None:
        self.failures = list(failures)
        refused = f"publication {publication_id} was refused; the previous publication stays:"
        super().__init__("\n  ".join([refused, *self.failures[:_SHOWN]]))


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The id, time, provider, refresh and model version of a published table.

    model_version: "" if the provider has no model yet.
    """

    publication_id: str
    published_at: datetime
    provider: str
    refresh_id: str
    model_version: str


def publish(warehouse: Warehouse, rows: Sequence[Row], publication: Publication) -> int:
    """Store a table of recommendations if every check passes, and return the number of new rows.

    Returns 0 if the publication id is already stored. Raises PublicationRefused if a check fails,
    WarehouseBusy if another process holds the warehouse, and ValueError if a column is unknown.
    """
    header = asdict(publication)
    with warehouse.transact() as connection:
        if not append(connection, "raw_publications", [header]):
            return 0
        del header["refresh_id"]  # not a column of raw_recommendations
        new = append(connection, "raw_recommendations", [header | dict(row) for row in rows])
        failures = run_checks(connection, publication)
        if failures:
            raise PublicationRefused(publication.publication_id, failures)
    return new


def run_checks(connection: Connection, publication: Publication) -> list[str]:
    """Run every check (checks/*.sql) on a stored table of recommendations.

    Returns a text `check: problem` for each problem.
    """
    connection.execute(
        "create or replace temp table published as"
        " select *, row_number() over () as row_id from raw_recommendations"
        " where publication_id = ?",
        [publication.publication_id],
    )
    failures: list[str] = []
    for file in sorted(SQL_FOLDER.glob("checks/*.sql")):
        text = file.read_text()
        params = {"provider": publication.provider} if "$provider" in text else {}
        found = connection.execute(text, params).fetchall()
        failures += [f"{file.stem}: {problem}" for (problem,) in found]
    connection.execute("drop table temp.published")
    return failures
