"""Write the published copies of the recommendations: DuckDB, Parquet and CSV files.

Readers open these copies, never the pipeline's DuckDB file. Any DuckDB 1.x or 2.x client can read
the copies. A new file replaces the old file by renaming. A reader that has opened the old file can
continue to read it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from .database import (
    SQL_FOLDER,
    Connection,
    Warehouse,
    WarehouseMissing,
    create_views,
    explain_errors,
    fsync,
    quote,
    rows_of_query,
    select,
)

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("recommendations", "recommendation_history", "regret_ledger", "drift", "alarms")
FILES = ("recommendations", "regret_ledger")  # also written as Parquet and CSV files
_KINDS = ("parquet", "csv")
VIEWS = frozenset({"recommendation_changes", "pareto"})
STALE_AFTER_H = 48.0  # an older table has missed at least one nightly publication
_STORAGE = "v1.0.0"  # DuckDB 1.x cannot read the default format of 2.0
# A column without a comment gets the comment of the same column in recommendation_history.
_COMMENTS = """
    with wanted as (
        select table_name, column_name, comment
        from duckdb_columns()
        where list_contains($names, table_name) and database_name = current_database()
    )
    select
        'column ' || wanted.table_name || '.' || wanted.column_name,
        coalesce(wanted.comment, base.comment, '')
    from wanted
    left join wanted as base
        on base.table_name = 'recommendation_history' and base.column_name = wanted.column_name
    union all
    select
        if(list_contains($views, view_name), 'view ', 'table ') || view_name,
        coalesce(comment, '')
    from duckdb_views()
    where list_contains($names, view_name)
"""


def export(warehouse: Warehouse, folder: Path) -> list[Path]:
    """Replace the published files in `folder`, and return their paths.

    The files are recommendations.duckdb, and a .parquet and a .csv file for each name in FILES.
    Raises WarehouseError or OSError, and keeps the previous files, if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "recommendations.duckdb"
    targets = [*(folder / f"{name}.{kind}" for name, kind in product(FILES, _KINDS)), database]
    with ExitStack() as leftovers:
        for target in targets:
            leftovers.callback(_beside(target).unlink, missing_ok=True)
        with explain_errors(database):
            _write(warehouse, folder, database)
        for target in targets:
            fsync(_beside(target))
        for target in targets:
            os.replace(_beside(target), target)
    return targets


def _write(warehouse: Warehouse, folder: Path, database: Path) -> None:
    """Write every published file to a temporary path in `folder`. The caller renames the files.

    database: the final path of the published DuckDB file.
    """
    names = {"names": [*TABLES, *VIEWS], "views": [*VIEWS]}
    with warehouse.read() as connection:
        tables = {
            name: connection.execute(f"select * from {name}").to_arrow_table() for name in TABLES
        }
        comments = connection.execute(_COMMENTS, names).fetchall()
    with duckdb.connect() as connection:
        connection.execute(
            f"attach {quote(str(_beside(database)))} as published (storage_version '{_STORAGE}')"
        )
        connection.execute("use published")
        for name, rows in tables.items():
            connection.register("incoming", rows)
            connection.execute(f"create table {name} as select * from incoming")
        create_views(connection, only=VIEWS)
        for place, comment in comments:
            connection.execute(f"comment on {place} is {quote(comment)}")
        for name, kind in product(FILES, _KINDS):
            columns = "*"
            if (name, kind) == ("recommendations", "csv"):
                columns = "* replace (to_json(cluster_offers) as cluster_offers)"
            path = quote(str(_beside(folder / f"{name}.{kind}")))
            connection.execute(f"copy (select {columns} from {name}) to {path} (format {kind})")
        connection.execute("checkpoint published")
        connection.execute("use memory")
        connection.execute("detach published")


def write_whole(path: Path, text: str) -> None:
    """Replace the content of the file at `path` with `text`, completely or not at all.

    Raises OSError if the text cannot be written.
    """
    beside = _beside(path)
    try:
        beside.write_text(text, encoding="utf-8")
        fsync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Return the temporary path for new content of the file at `path`, in the same folder."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def read_published(
    folder: Path, relation: str = "recommendations", params: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """Return rows of a table or view of the published copy in `folder`.

    params: {column: value that the column must equal}.
    Raises WarehouseMissing if nothing is published, and WarehouseDamaged if the copy cannot be
    read.
    """
    with _open(folder) as connection:
        return select(connection, relation, params)


def ledger_summary(folder: Path, provider: str) -> dict[str, Any]:
    """Compare the provider's published predictions with later measurements.

    Returns the provider's row of report/ledger_summary.sql, or {} if no published recommendation
    of the provider was measured later.

    Raises WarehouseMissing if nothing is published, and WarehouseDamaged if the copy cannot be
    read.
    """
    with _open(folder) as connection:
        rows = rows_of_query(connection, (SQL_FOLDER / "report/ledger_summary.sql").read_text())
    return next((row for row in rows if row["provider"] == provider), {})


def published_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the published table, with None for missing values and times in UTC.

    Raises WarehouseMissing if nothing is published, and WarehouseDamaged if the copy cannot be
    read.
    """
    with _open(folder) as connection:
        rows = rows_of_query(connection, "select * from recommendations")
    return [{name: _plain(value) for name, value in row.items()} for row in rows]


@contextmanager
def _open(folder: Path) -> Iterator[Connection]:
    """Yield a read-only connection to the published copy in `folder`."""
    path = folder / "recommendations.duckdb"
    if not path.exists():
        raise WarehouseMissing(f"nothing has been published in {folder} yet: run `srift refresh`")
    with (
        explain_errors(path, repair="`srift refresh --max-usd 0` writes it again"),
        duckdb.connect(str(path), read_only=True) as connection,
    ):
        yield connection


def _plain(value: Any) -> Any:
    """Convert a value of DuckDB. NaN becomes None, and a time gets the time zone UTC."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
