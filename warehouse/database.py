"""Opens, migrates, transacts and selects: the only file that opens the working DuckDB file, one transaction at a time.

Nobody outside this room writes SQL: others hand rows to `append` and read marts by name.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import tenacity

SQL_FOLDER = Path(__file__).parent
_NO_DOWNLOADS: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": "false"}
_IN_THIS_PROCESS = threading.Lock()  # DuckDB refuses a reader beside a writer of the same file within one process
_VIEW = re.compile(r"create or replace view (\w+)")
_SOURCE = re.compile(r"\b(?:from|join)\s+(\w+)")


class WarehouseError(Exception):
    """The warehouse could not do what it was asked; the message says what to do."""


class WarehouseBusy(WarehouseError):
    """Another process or thread held the file for longer than we wait."""


class WarehouseMissing(WarehouseError):
    """There is no warehouse at that path yet."""


class MigrationChanged(WarehouseError):
    """What was applied to the file is not what the migration files say."""


class Warehouse:
    """The working DuckDB file at `path`. Open for one transaction at a time; waits at most `wait_s` for others."""

    def __init__(
        self,
        path: Path,
        *,
        wait_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        sql_folder: Path = SQL_FOLDER,
    ) -> None:
        self.path = path
        self._wait_s = wait_s
        self._sleep = sleep
        self._sql_folder = sql_folder

    def migrate(self) -> list[str]:
        """Apply what is new in migrations/ and recreate every view, in one transaction. Returns the names applied.

        Raises MigrationChanged where an applied file was edited since, or came from a newer version.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.transact() as connection:
            applied = _apply_migrations(connection, self._sql_folder / "migrations")
            drop_views(connection)
            create_views(connection, [self._sql_folder / "staging", self._sql_folder / "marts"])
        return applied

    @contextmanager
    def transact(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """One transaction: committed at the end of the block, rolled back when the block raises, closed either way.

        Raises WarehouseBusy. Not to be nested: the inner one would wait for the outer one.
        """
        with self._open(read_only=False) as connection:
            connection.begin()
            try:
                yield connection
            except BaseException:
                with suppress(duckdb.Error):  # DuckDB may have rolled back already; the first error is the story
                    connection.rollback()
                raise
            connection.commit()

    @contextmanager
    def read(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A read-only connection, for several reads of the same state. Raises WarehouseBusy, WarehouseMissing."""
        if not self.path.exists():
            raise WarehouseMissing(f"there is no warehouse at {self.path} yet: run `srift refresh` first")
        with self._open(read_only=True) as connection:
            yield connection

    def select(self, relation: str, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Rows of a relation whose columns equal `params`, as a frame; or, inside this room, of a query with `$name`s.

        Raises WarehouseBusy, WarehouseMissing, and duckdb.Error for a relation or column that does not exist.
        """
        with self.read() as connection:
            return select(connection, relation, params)

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        if not _IN_THIS_PROCESS.acquire(timeout=self._wait_s):
            raise WarehouseBusy(
                f"{self.path}: another thread of this process held it for {self._wait_s:g} s; try again"
            )
        try:
            with self._connect(read_only=read_only) as connection:
                yield connection
        except duckdb.IOException as error:  # a full disk, an unreadable file
            raise WarehouseError(
                f"{self.path}: {error}. Nothing of this transaction was kept; put that right and try again."
            ) from error
        finally:
            _IN_THIS_PROCESS.release()

    def _connect(self, *, read_only: bool) -> duckdb.DuckDBPyConnection:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_lock),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            stop=tenacity.stop_after_delay(self._wait_s),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(duckdb.connect, str(self.path), read_only=read_only, config=_NO_DOWNLOADS)
        except duckdb.IOException as error:
            if not _is_lock(error):
                raise
            holder = re.search(r"PID (\d+)", str(error))
            who = f"process {holder[1]}" if holder else "another process"
            raise WarehouseBusy(
                f"{self.path}: {who} has held it for {self._wait_s:g} s. Nothing was changed; "
                "wait until that process ends, or end it, and try again. To only read, open the published copy."
            ) from error


def select(
    connection: duckdb.DuckDBPyConnection, relation: str, params: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """As `Warehouse.select`, on a connection that is already open."""
    params = dict(params or {})
    query = relation
    if relation.isidentifier():
        wanted = " and ".join(f'"{column}" = ${column}' for column in params)
        query = f"select * from {relation}" + (f" where {wanted}" if wanted else "")
    frame = connection.execute(query, params).df()
    for column in frame.columns:
        kind = frame[column].dtype
        if isinstance(kind, pd.api.extensions.ExtensionDtype) and pd.api.types.is_integer_dtype(kind):
            frame[column] = frame[column].astype(float)  # arithmetic chokes on pandas' NA; NaN is unknown everywhere
    return frame


def has_relation(connection: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Is there a table or view of that name? A file of an older version may lack the newer ones."""
    query = "select 1 from information_schema.tables where table_name = ?"
    return connection.execute(query, [name]).fetchone() is not None


def drop_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Drop every view, so that one whose file is gone does not linger."""
    names = connection.execute("select view_name from duckdb_views() where not internal").fetchall()
    for (name,) in names:
        connection.execute(f'drop view if exists "{name}"')


def create_views(
    connection: duckdb.DuckDBPyConnection, folders: list[Path], only: frozenset[str] | None = None
) -> None:
    """Run the view files of `folders`, each after the views that it reads from; `only` those names, if given."""
    texts: dict[str, str] = {}
    for file in sorted(file for folder in folders for file in folder.glob("*.sql")):
        text = file.read_text()
        named = _VIEW.search(text)
        if named is None or named[1] != file.stem:
            raise WarehouseError(f"{file.name}: must create the view {file.stem}, and only that")
        if only is None or file.stem in only:
            texts[file.stem] = text
    needs = {name: {source for source in _SOURCE.findall(text) if source in texts} for name, text in texts.items()}
    for name in TopologicalSorter(needs).static_order():
        connection.execute(texts[name])


def _apply_migrations(connection: duckdb.DuckDBPyConnection, folder: Path) -> list[str]:
    connection.execute(
        "create table if not exists schema_migrations"
        " (number integer primary key, name varchar not null, digest varchar not null, applied_at timestamp not null)"
    )
    recorded = {
        number: (name, digest)
        for number, name, digest in connection.execute("select number, name, digest from schema_migrations").fetchall()
    }
    files = {int(file.stem.split("_")[0]): file for file in sorted(folder.glob("*.sql"))}
    for number, (name, _) in sorted(recorded.items()):
        if number not in files:
            raise MigrationChanged(
                f"the warehouse has migration {name}, which this version of Srift lacks: use the newer one"
            )
    applied: list[str] = []
    for number, file in sorted(files.items()):
        text = file.read_text()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if number not in recorded:
            connection.execute(text)
            connection.execute(
                "insert into schema_migrations values (?, ?, ?, ?)",
                [number, file.stem, digest, datetime.now(UTC).replace(tzinfo=None)],
            )
            applied.append(file.stem)
        elif recorded[number][1] != digest:
            raise MigrationChanged(
                f"migration {file.name} was changed after it was applied: put it back as it was and write the change "
                "as the next number"
            )
    return applied


def _is_lock(error: BaseException) -> bool:
    return isinstance(error, duckdb.IOException) and "lock" in str(error).lower()
