"""Writes the published copies (DuckDB, Parquet, CSV) beside and renames them: old readers keep the old file whole.

Readers never open the working file; they open what is written here, with any DuckDB 1.x or 2.x client.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from .database import (
    SQL_FOLDER,
    Warehouse,
    WarehouseDamaged,
    WarehouseMissing,
    create_views,
    explained,
    has_relation,
    one_line,
    quoted,
    select,
)
from .salvage import fsync

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("recommendations", "recommendation_history", "regret_ledger", "drift", "alarms")
FILES = ("recommendations", "regret_ledger")  # that stand beside as .parquet and .csv too
VIEWS = frozenset({"recommendation_changes", "pareto"})
STALE_AFTER_H = 48.0  # of a publication: a nightly one was left out
_STORAGE = "v1.0.0"  # readable by 1.x: what 2.0 writes by default is not


def export(warehouse: Warehouse, folder: Path) -> list[Path]:
    """Replace recommendations.duckdb, and .parquet and .csv of each of FILES, by the current state; returns the paths.

    Raises WarehouseBusy, WarehouseMissing, DiskFull, HomeReadOnly, OSError; then the old files stay as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / "recommendations.duckdb"]
    targets += [folder / f"{name}.{kind}" for name in FILES for kind in ("parquet", "csv")]
    beside = {target: _beside(target) for target in targets}
    sources = {
        name: beside.get(folder / f"{name}.parquet", _beside(folder / f"{name}.parquet"))
        for name in TABLES
    }
    with ExitStack() as leftovers:
        log = beside[targets[0]].with_name(
            f"{beside[targets[0]].name}.wal"
        )  # DuckDB's, where it was stopped midway
        for path in {*beside.values(), *sources.values(), log}:
            leftovers.callback(path.unlink, missing_ok=True)
            path.unlink(missing_ok=True)
        with warehouse.read() as connection:
            comments = _comments(connection)
            for name, path in sources.items():
                _copy(connection, f"select * from {name}", path, "format parquet")
            for name in FILES:
                offers = (
                    " replace (to_json(cluster_offers) as cluster_offers)"
                    if name == "recommendations"
                    else ""
                )
                _copy(
                    connection,
                    f"select *{offers} from {name}",
                    beside[folder / f"{name}.csv"],
                    "format csv, header",
                )
        try:
            _write_database(beside[targets[0]], sources, comments)
        except duckdb.Error as error:
            raise (explained(targets[0], error) or error) from error
        for target in targets:
            fsync(beside[target])
        for target in targets:
            os.replace(beside[target], target)
    return targets


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, written beside it and renamed; where that fails the old one stays."""
    beside = _beside(path)
    try:
        beside.write_text(text, encoding="utf-8")
        fsync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Where a file is written before it is renamed into place."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def read_published(
    folder: Path, relation: str = "recommendations", params: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """A relation of the published copy as a frame.

    Raises WarehouseMissing where nothing was published yet, or by an older version that had no such relation, and
    WarehouseDamaged where the copy cannot be read.
    """
    with _opened(folder, relation) as connection:
        return select(connection, relation, params)


@contextmanager
def _opened(folder: Path, relation: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """The published copy, which holds `relation`; raises as `read_published`."""
    path = folder / "recommendations.duckdb"
    if not path.exists():
        raise WarehouseMissing(
            f"nothing has been published in {folder} yet: run `srift refresh` first"
        )
    try:
        with duckdb.connect(str(path), read_only=True) as connection:
            if not has_relation(connection, relation):
                raise WarehouseMissing(f"{path} has no {relation} yet: run `srift refresh` first")
            yield connection
    except duckdb.Error as error:
        problem = explained(path, error)
        if not isinstance(problem, WarehouseDamaged):
            raise (problem or error) from error
        raise WarehouseDamaged(
            f"the published copy is damaged: {one_line(error)}. Nothing is lost: it is a copy of what the warehouse"
            " holds, and a refresh writes it anew (`srift refresh --max-usd 0`, with your --provider, measures nothing)"
        ) from error


def _copy(connection: duckdb.DuckDBPyConnection, query: str, path: Path, options: str) -> None:
    connection.execute(f"copy ({query}) to {quoted(str(path))} ({options})")


def _comments(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """The statements that comment the exported tables as the warehouse comments its views."""
    whole = connection.execute(
        "select view_name, comment from duckdb_views() where view_name in ? and comment is not null",
        [list(TABLES)],
    ).fetchall()
    columns = connection.execute(
        "select table_name, column_name, comment from duckdb_columns() where table_name in ? and comment is not null",
        [list(TABLES)],
    ).fetchall()
    return [
        *(f"comment on table {name} is {quoted(text)}" for name, text in whole),
        *(
            f'comment on column {name}."{column}" is {quoted(text)}'
            for name, column, text in columns
        ),
    ]


def _write_database(path: Path, sources: dict[str, Path], comments: list[str]) -> None:
    with duckdb.connect() as connection:
        connection.execute(
            f"attach {quoted(str(path))} as published (storage_version {quoted(_STORAGE)})"
        )
        connection.execute("use published")
        for table, source in sources.items():
            connection.execute(
                f"create table {table} as select * from read_parquet({quoted(str(source))})"
            )
        for comment in comments:
            connection.execute(comment)
        create_views(connection, [SQL_FOLDER / "marts"], only=VIEWS)
        connection.execute("checkpoint published")
        connection.execute("use memory")
        connection.execute("detach published")


def published_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the current publication: None where a value is missing, times with their zone.

    Raises WarehouseMissing and WarehouseDamaged as `read_published`.
    """
    with _opened(folder, "recommendations") as connection:
        found = connection.execute("select * from recommendations")
        names, values = [one[0] for one in found.description or ()], found.fetchall()
    return [{name: _plain(value) for name, value in zip(names, row, strict=True)} for row in values]


def _plain(value: Any) -> Any:
    """As a reader means it: what is no number is missing, and times are UTC."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
