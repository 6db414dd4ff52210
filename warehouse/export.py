"""Writes the published copies (DuckDB, Parquet, CSV) beside and renames them: old readers keep the old file whole.

Readers never open the working file; they open what is written here, with any DuckDB 1.x or 2.x client.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from .database import SQL_FOLDER, Warehouse, WarehouseMissing, create_views, select

TABLES = ("recommendations", "recommendation_history")
VIEWS = frozenset({"recommendation_changes", "pareto"})
_STORAGE = "v1.0.0"  # readable by 1.x: what 2.0 writes by default is not


def export(warehouse: Warehouse, folder: Path) -> list[Path]:
    """Replace recommendations.duckdb, .parquet and .csv in `folder` by the current state; returns their paths.

    Raises WarehouseBusy, WarehouseMissing, and OSError (a full disk); then the old files stay as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = {
        kind: folder / f".recommendations.{os.getpid()}.{kind}" for kind in ("duckdb", "parquet", "csv", "history")
    }
    with ExitStack() as leftovers:
        for path in beside.values():
            leftovers.callback(path.unlink, missing_ok=True)
            path.unlink(missing_ok=True)
        with warehouse.read() as connection:
            comments = _comments(connection)
            _copy(connection, "select * from recommendations", beside["parquet"], "format parquet")
            _copy(connection, "select * from recommendation_history", beside["history"], "format parquet")
            _copy(
                connection,
                "select * replace (to_json(cluster_offers) as cluster_offers) from recommendations",
                beside["csv"],
                "format csv, header",
            )
        sources = dict(zip(TABLES, (beside["parquet"], beside["history"]), strict=True))
        _write_database(beside["duckdb"], sources, comments)
        targets = [folder / f"recommendations.{kind}" for kind in ("duckdb", "parquet", "csv")]
        for target in targets:
            os.replace(beside[target.suffix[1:]], target)
    return targets


def read_published(
    folder: Path, relation: str = "recommendations", params: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """A relation of the published copy as a frame. Raises WarehouseMissing where nothing was published yet."""
    path = folder / "recommendations.duckdb"
    if not path.exists():
        raise WarehouseMissing(f"nothing has been published in {folder} yet: run `srift refresh` first")
    with duckdb.connect(str(path), read_only=True) as connection:
        return select(connection, relation, params)


def _copy(connection: duckdb.DuckDBPyConnection, query: str, path: Path, options: str) -> None:
    connection.execute(f"copy ({query}) to {_quoted(str(path))} ({options})")


def _comments(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """The statements that comment the exported tables as the warehouse comments its views."""
    whole = connection.execute(
        "select view_name, comment from duckdb_views() where view_name in ? and comment is not null", [list(TABLES)]
    ).fetchall()
    columns = connection.execute(
        "select table_name, column_name, comment from duckdb_columns() where table_name in ? and comment is not null",
        [list(TABLES)],
    ).fetchall()
    return [
        *(f"comment on table {name} is {_quoted(text)}" for name, text in whole),
        *(f'comment on column {name}."{column}" is {_quoted(text)}' for name, column, text in columns),
    ]


def _write_database(path: Path, sources: dict[str, Path], comments: list[str]) -> None:
    with duckdb.connect() as connection:
        connection.execute(f"attach {_quoted(str(path))} as published (storage_version {_quoted(_STORAGE)})")
        connection.execute("use published")
        for table, source in sources.items():
            connection.execute(f"create table {table} as select * from read_parquet({_quoted(str(source))})")
        for comment in comments:
            connection.execute(comment)
        create_views(connection, [SQL_FOLDER / "marts"], only=VIEWS)
        connection.execute("checkpoint published")
        connection.execute("use memory")
        connection.execute("detach published")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
