"""Create, open, back up and restore the DuckDB file in which the pipeline stores its data.

WarehouseError
+-- WarehouseBusy        another process or thread holds the file
+-- WarehouseMissing     there is no backup or no published copy
+-- WarehouseDamaged     the file is corrupt; `srift restore` restores its backup
+-- DiskFull             a file cannot be written
+-- PublicationRefused   a check found rows that must not be published (publication.py)
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

if TYPE_CHECKING:  # pandas takes half a second; reading published rows does not need it
    import pandas as pd

Connection = duckdb.DuckDBPyConnection
SQL_FOLDER = Path(__file__).parent
SCHEMA = SQL_FOLDER / "schema.sql"
WAIT_S = 60.0
NO_DOWNLOADS: dict[str, Any] = {"autoinstall_known_extensions": "false"}
# DuckDB cannot open a file for reading while the same process has it open for writing, so threads
# take turns. The lock is reentrant, because nested reads of one thread share the open file. Sharing
# the file saves 25 ms per read.
_IN_THIS_PROCESS = threading.RLock()
_SOURCE = re.compile(r"\b(?:from|join)\s+(\w+)")
# DuckDB has no exception classes for these causes. Only the messages tell them apart.
_LOCKED = "Could not set lock on file"
_FULL = re.compile("No space left on device|Disk quota exceeded|[Oo]ut of disk")
_REPLAY = "replaying WAL"
_DAMAGED = re.compile(
    f"not a valid DuckDB database|[Cc]orrupt|checksum|{_REPLAY}|Could not read (?:enough|all|from)"
)
_RESTORE = "`srift restore` restores the backup of the last refresh"
_INSIDE_DUCKDB = (duckdb.InternalException, duckdb.FatalException, duckdb.SerializationException)


class WarehouseError(Exception):
    """An operation on the warehouse failed. The message names the operator's next step."""

    exit_code = 1


class WarehouseBusy(WarehouseError):
    pass


class WarehouseMissing(WarehouseError):
    pass


class DiskFull(WarehouseError):
    pass


class WarehouseDamaged(WarehouseError):
    pass


class Warehouse:
    """The DuckDB file at `path`, in which the pipeline stores its data.

    wait_s: maximum number of seconds to wait while another process or thread uses the file.
    """

    def __init__(self, path: Path, *, wait_s: float = WAIT_S) -> None:
        self.path, self._wait_s = path, wait_s

    def __str__(self) -> str:
        return str(self.path)

    @property
    def backup(self) -> Path:
        """The path of the backup. Each refresh replaces the backup when it ends."""
        return self.path.with_name(f"{self.path.stem}-backup{self.path.suffix}")

    def create(self) -> None:
        """Create the tables if the file has none, and replace every view, in one transaction.

        Raises WarehouseError if another version of Srift created the tables.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.transact() as connection:
            create_tables(connection, str(self))
            create_views(connection)

    def exists(self) -> bool:
        return self.path.exists()

    @contextmanager
    def transact(self) -> Iterator[Connection]:
        """Yield a connection with a transaction, which is committed at the end of the block.

        An exception in the block rolls the transaction back. Transactions cannot be nested. Raises
        WarehouseBusy if another process or thread uses the file.
        """
        with self._open(read_only=False) as connection, transaction(connection):
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a read-only connection, or a connection to an empty warehouse if there is no file.

        Raises WarehouseBusy if another process or thread uses the file.
        """
        with (
            self._open(read_only=True)
            if self.exists()
            else empty_warehouse().cursor() as connection
        ):
            yield connection

    def select(self, relation: str, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Return rows of a table or view, or the result of a query.

        relation: name of a table or view, or the text of an SQL query.
        params: for a table or view, {column: value that the column must equal}. For a query, the
            values of its parameters, as {name: value} for `$name`.
        Raises WarehouseBusy if another process or thread uses the file, and duckdb.Error for an
        unknown relation or column.
        """
        with self.read() as connection:
            return select(connection, relation, params)

    def verify(self) -> int:
        """Read every row of the raw tables to check the file, and return the number of rows.

        Raises WarehouseDamaged if the file cannot be read.
        """
        with self.read() as connection:
            return count_rows(connection)

    def back_up(self) -> None:
        """Replace the backup with a verified copy of the file.

        Raises WarehouseDamaged if the copy cannot be read, and DiskFull if it cannot be written.
        After an error, the previous backup is unchanged.
        """
        partial = self.backup.with_name(f".{self.backup.name}")
        try:
            with self._open(read_only=False) as connection:
                connection.execute("checkpoint")
                shutil.copyfile(self.path, partial)  # the connection keeps other writers out
            with self._alone(), duckdb.connect(str(partial), config=NO_DOWNLOADS) as copy:
                count_rows(copy)
            fsync(partial)
            os.replace(partial, self.backup)
        except OSError as error:
            raise DiskFull(
                f"the backup {self.backup} cannot be written: {error.strerror}"
            ) from error
        finally:
            partial.unlink(missing_ok=True)

    def restore(self) -> Path:
        """Replace the file with the backup, and return the new path of the damaged file.

        Raises WarehouseMissing if there is no backup.
        """
        if not self.backup.exists():
            raise WarehouseMissing(
                f"there is no backup {self.backup}: move {self.path} away and run `srift refresh`"
            )
        damaged = self.path.with_name(
            f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{self.path.name}"
        )
        with self._alone():
            partial = self.path.with_name(f".{self.path.name}.restored")
            shutil.copyfile(self.backup, partial)
            fsync(partial)
            # A link keeps the damaged file at its path until the backup replaces it. If the path
            # had no file, a concurrent command would create an empty warehouse.
            # The write-ahead log belongs to the damaged file, so it moves with that file.
            log = f"{self.path}.wal"
            for file, target in ((self.path, damaged), (log, f"{damaged}.wal")):
                with suppress(FileNotFoundError):
                    os.link(file, target)
            Path(log).unlink(missing_ok=True)
            os.replace(partial, self.path)
            fsync(self.path.parent)
        return damaged

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[Connection]:
        """Yield a connection, and make other threads of this process wait."""
        with self._alone(), self._connect(read_only=read_only) as connection:
            yield connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file against other threads, and convert DuckDB errors to WarehouseError."""
        if not _IN_THIS_PROCESS.acquire(timeout=self._wait_s):
            raise WarehouseBusy(
                f"{self.path}: another thread of this process has held the file for"
                f" {self._wait_s:g} s; nothing was changed. Try again"
            )
        try:
            with explain_errors(self.path):
                yield
        finally:
            _IN_THIS_PROCESS.release()

    def _connect(self, *, read_only: bool) -> Connection:
        """Connect to the file, and retry while another process holds the file.

        Raises WarehouseBusy if the other process does not release the file in time.
        """
        give_up, pause_s = time.monotonic() + self._wait_s, 0.05
        while True:
            try:
                return duckdb.connect(self.path, read_only=read_only, config=NO_DOWNLOADS)
            except duckdb.IOException as error:
                if _LOCKED not in str(error):
                    raise
                if time.monotonic() >= give_up:
                    holder = re.search(r"PID (\d+)", str(error))
                    process = f"process {holder[1]}" if holder else "another process"
                    raise WarehouseBusy(
                        f"{self.path}: {process} has held the file for {self._wait_s:g} s; nothing"
                        " was changed. Wait until that process ends, or end it, and try again"
                    ) from error
            # Random, so that waiting processes take turns.
            time.sleep(random.uniform(0.0, pause_s))
            pause_s = min(2 * pause_s, 1.0)


@contextmanager
def explain_errors(path: Path, repair: str = _RESTORE) -> Iterator[None]:
    """Convert DuckDB errors in the block to WarehouseError.

    Only I/O errors and signs of a damaged file are converted. Other errors are raised unchanged.
    path: the DuckDB file.
    repair: a sentence on how to repair the file if it is damaged.
    """
    try:
        yield
    except duckdb.Error as error:
        if problem := explain_error(path, error, repair):
            raise problem from error
        raise


def explain_error(path: Path, error: duckdb.Error, repair: str = _RESTORE) -> WarehouseError | None:
    """Return the WarehouseError that explains a DuckDB error of the database file at `path`.

    Returns None if the error is neither an I/O error nor a sign of a damaged file.
    repair: a sentence on how to repair the file if it is damaged.
    """
    words, first_line = str(error).replace(str(path), ""), summary_line(error)
    if not isinstance(error, (duckdb.IOException, *_INSIDE_DUCKDB)) and _REPLAY not in words:
        return None  # other errors may quote user data that looks like these messages
    if _FULL.search(words):
        return DiskFull(f"the disk is full: {first_line}; free some space in {path.parent}")
    if not isinstance(error, duckdb.IOException) or _DAMAGED.search(words):
        return WarehouseDamaged(f"{path} is damaged: {first_line}. {repair}")
    return WarehouseError(f"{path}: {first_line}. The transaction was rolled back")


def summary_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0].rstrip(".!")


def select(
    connection: Connection, relation: str, params: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """Return rows of a table, view or query on an open connection. See `Warehouse.select`."""
    params = dict(params or {})
    query = relation
    if relation.isidentifier():
        wanted = " and ".join(f'"{column}" = ${column}' for column in params)
        query = f"select * from {relation}" + (f" where {wanted}" if wanted else "")
    frame = connection.execute(query, params).df()
    for column in frame.columns:
        kind = frame[column].dtype
        if hasattr(kind, "na_value") and kind.kind in "iu":
            frame[column] = frame[column].astype(float)  # a missing number is NaN in every column
    return frame


def rows_of_query(
    connection: Connection, query: str, params: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a query as dictionaries {column name: Python value}."""
    found = connection.execute(query, dict(params or {}))
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def count_rows(connection: Connection) -> int:
    """Read every column of all raw tables, to find damage, and return the total number of rows."""
    counts = [
        connection.execute(f"select count(*), bit_xor(hash(t)) from {name} as t").fetchall()[0][0]
        for name in raw_tables(connection)
    ]
    return sum(counts)


def raw_tables(connection: Connection) -> list[str]:
    """Return the names of the raw tables, in alphabetical order."""
    query = "select table_name from duckdb_tables() where table_name like 'raw%' order by 1"
    return [name for (name,) in connection.execute(query).fetchall()]


def create_tables(connection: Connection, name: str) -> None:
    """Create the tables if the database is empty.

    name: the name of the database in error messages.
    Raises WarehouseError if another version of Srift created the existing tables.
    """
    text = SCHEMA.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    known = schema_digest(connection)
    if known is None:
        connection.execute(text)
        connection.execute("insert into srift_schema values (?, now()::timestamp)", [digest])
    elif known != digest:
        raise WarehouseError(
            f"another version of Srift created {name}: use that version, or set SRIFT_HOME to"
            " another folder"
        )


def schema_digest(connection: Connection) -> str | None:
    """Return the SHA-256 digest of the schema.sql that created the tables.

    Returns None if the database is empty.
    """
    try:
        row = connection.execute("select digest from srift_schema").fetchone()
    except duckdb.CatalogException:
        return None
    return str(row[0]) if row else None


def create_views(connection: Connection, only: frozenset[str] | None = None) -> None:
    """Create the views of staging/ and marts/, each after the views that it reads.

    only: names of the views to create; None means all views.
    """
    files = [*SQL_FOLDER.glob("staging/*.sql"), *SQL_FOLDER.glob("marts/*.sql")]
    texts = {file.stem: file.read_text() for file in files if only is None or file.stem in only}
    needs = {name: set(_SOURCE.findall(text)) & set(texts) for name, text in texts.items()}
    for name in TopologicalSorter(needs).static_order():
        connection.execute(texts[name])


@cache  # before the first refresh, a dry run reads a hundred times
def empty_warehouse() -> Connection:
    """Return a database in memory with all tables and views, but without rows.

    All callers share this database, so each must use a cursor and roll back its changes.
    """
    connection = duckdb.connect(config=NO_DOWNLOADS)
    create_tables(connection, "memory")
    create_views(connection)
    return connection


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Commit at the end of the block; roll back if the block raises."""
    connection.begin()
    try:
        yield
    except BaseException:
        roll_back(connection)
        raise
    connection.commit()


def roll_back(connection: Connection) -> None:
    with suppress(duckdb.Error):  # DuckDB may have rolled back already
        connection.rollback()


def quote(text: str) -> str:
    """Return the text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def fsync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
