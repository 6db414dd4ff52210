"""Share a warehouse between machines with DuckLake, whose catalogue is in PostgreSQL.

Only the holder of a PostgreSQL advisory lock may write, because DuckLake has no primary keys. Each
process creates the views in memory, because the catalogue does not store them.
"""

import importlib.util
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from .append import insert
from .database import (
    NO_DOWNLOADS,
    Connection,
    DiskFull,
    Warehouse,
    WarehouseBusy,
    WarehouseError,
    create_tables,
    create_views,
    explain_error,
    quote,
    raw_tables,
    roll_back,
    schema_digest,
    summary_line,
    transaction,
)

_SCHEMA = "srift_warehouse"  # the catalogue's schema in PostgreSQL
TURN_S = 300.0  # maximum wait for a lock; if eight machines import at once, the last waits 60 s
_WRITER, _OPENER = 5112001, 5112002  # keys of the advisory locks
_TABLES_FIRST = "set search_path = 'shared.main'"
_VIEWS_FIRST = "set search_path = 'memory.main,shared.main'"


@dataclass(frozen=True, kw_only=True)
class Lake:
    """The location of a shared warehouse: a PostgreSQL database and a folder or S3 prefix.

    url: `postgresql://user@host:port/database`. libpq reads the password from PGPASSWORD or
    ~/.pgpass.
    data: folder or `s3://` prefix of the Parquet files.
    """

    url: str
    data: str


class SharedWarehouse(Warehouse):
    """A warehouse in DuckLake. Processes on several machines can use it.

    wait_s: maximum number of seconds that a writer waits for other writers.
    """

    def __init__(self, path: Path, lake: Lake, *, wait_s: float = TURN_S) -> None:
        super().__init__(path, wait_s=wait_s)
        self.lake = lake

    def __str__(self) -> str:
        return f"the shared warehouse {self.lake.url}"

    def exists(self) -> bool:
        """Return True if the shared warehouse has its tables.

        Raises WarehouseError if PostgreSQL does not answer.
        """
        with self._explain_errors(), _session(self.lake).cursor(_TABLES_FIRST) as connection:
            return schema_digest(connection) is not None

    def create(self) -> None:
        """Create the tables if there are none. Create the views in this process's memory."""
        with self._open(read_only=False):
            pass

    def carry_over(self, file: Warehouse) -> dict[str, int]:
        """Copy the rows of `file` that this warehouse lacks, and return {table: number of rows}."""
        self.create()
        with file.read() as old, self.transact() as connection:
            copied = {name: _copy(old, connection, name) for name in raw_tables(old)}
            held = "select distinct import_id, row_digest from raw_imports"
            connection.register("incoming", old.execute(held).to_arrow_table())
            elsewhere = (
                "select incoming.* from incoming"
                " anti join raw_imports using (import_id, row_digest)"
            )
            copied["raw_import_rows"] += insert(
                connection, "raw_import_rows", ("import_id", "row_digest"), elsewhere
            )
            return copied

    def back_up(self) -> None:
        """Do nothing: operators back up PostgreSQL and the file store."""

    def restore(self) -> Path:
        """Raise WarehouseError: operators restore PostgreSQL and the file store themselves."""
        raise WarehouseError(
            f"Srift has no backup of {self}: restore PostgreSQL and the data files from your backup"
        )

    @contextmanager
    def transact(self) -> Iterator[Connection]:
        """Yield a connection with a transaction, which is committed at the end of the block.

        If this process has lost the lock for writers, the end of the block rolls the transaction
        back and raises WarehouseError.
        """
        with super().transact() as connection:
            yield connection
            # PostgreSQL has one session for the lock and one for the rows. If only the session with
            # the lock has ended, another process may be writing.
            try:
                _ask(self._locked, f"select pg_advisory_xact_lock({_WRITER})::text")
            except duckdb.Error:
                raise duckdb.IOException(
                    "this process lost the lock for writers, so its changes were undone"
                ) from None

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[Connection]:
        with self._explain_errors(), ExitStack() as opened:
            if not read_only:
                opened.enter_context(self._turn())
            session = _session(self.lake)
            session.make_views(self)
            connection = opened.enter_context(session.cursor(_VIEWS_FIRST))
            if read_only:  # all reads of the block see the same state
                connection.execute("begin transaction read only")
                opened.callback(roll_back, connection)
            yield connection

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the advisory lock for writers during the block.

        Raises WarehouseBusy if another process does not release the lock within `wait_s` seconds.
        """
        # A separate connection holds the lock. If the lock and the rows shared a transaction,
        # DuckDB might commit in PostgreSQL, and thereby release the lock, before DuckLake commits.
        with _session(self.lake).cursor(_VIEWS_FIRST) as connection:
            connection.begin()
            try:
                lock(connection, _WRITER, self._wait_s)
                self._locked = connection
                yield
            except duckdb.IOException as error:
                if "lock timeout" not in str(error):
                    raise
                raise WarehouseBusy(
                    f"{self}: {_holder(connection)} has held the lock for {self._wait_s:g} s;"
                    " nothing was changed. Wait until that process ends, or end it, and try again"
                ) from error
            finally:
                roll_back(connection)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Convert errors of DuckDB, DuckLake and PostgreSQL to WarehouseError."""
        try:
            yield
        except (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException) as error:
            if isinstance(problem := explain_error(self.path, error), DiskFull):
                raise problem from error
            _session.cache_clear()  # a broken connection stays broken
            if isinstance(error, duckdb.TransactionException) and "conflict" in str(error).lower():
                raise WarehouseBusy(
                    f"{self}: another process changed the same rows; nothing was stored. Try again"
                ) from error
            raise WarehouseError(
                f"{self}: {summary_line(error)}. Check PostgreSQL and access to the data files"
            ) from error


class _Session:
    """The DuckDB instance of this process, with the shared warehouse attached."""

    def __init__(self, lake: Lake) -> None:
        self._has_views, self._making_views = False, threading.Lock()
        self._connection = duckdb.connect(config=NO_DOWNLOADS)
        in_s3 = lake.data.startswith("s3://")
        for name in ("postgres_scanner", "ducklake", *(("httpfs", "aws") if in_s3 else ())):
            self._connection.execute(f"load {quote(str(_extension(name)))}")
        if in_s3:
            self._connection.execute(
                f"create secret (type s3, provider credential_chain{_endpoint()})"
            )
        address = _address(lake)
        self._connection.execute(f"attach {quote(address)} as turns (type postgres, read_only)")
        with self.cursor(_VIEWS_FIRST) as opening:
            opening.begin()
            lock(opening, _OPENER, TURN_S)  # DuckLake's tables are created only once
            self._connection.execute(
                f"attach {quote('ducklake:postgres:' + address)} as shared"
                f" (data_path {quote(lake.data)}, metadata_schema {quote(_SCHEMA)})"
            )
            opening.rollback()

    @contextmanager
    def cursor(self, search_path: str) -> Iterator[Connection]:
        """Yield a connection whose transactions are independent of other connections.

        search_path: the SQL statement that sets the order in which schemas are searched.
        """
        with self._connection.cursor() as connection:
            connection.execute("use memory")
            with suppress(duckdb.CatalogException):  # before the lake is attached
                connection.execute(search_path)
            yield connection

    def make_views(self, warehouse: SharedWarehouse) -> None:
        """Create missing tables and all views, at the first call only.

        Raises WarehouseError if another version of Srift created the tables.
        """
        with self._making_views:
            if self._has_views:
                return
            with self.cursor(_TABLES_FIRST) as connection, transaction(connection):
                create_tables(connection, str(warehouse))
            with self.cursor(_VIEWS_FIRST) as connection, transaction(connection):
                create_views(connection)
            self._has_views = True


@cache  # attaching the warehouse takes half a second
def _session(lake: Lake) -> _Session:
    return _Session(lake)


def lock(connection: Connection, key: int, wait_s: float) -> None:
    """Acquire PostgreSQL's advisory lock `key`. The end of the transaction releases the lock.

    Raises duckdb.IOException if the lock is not free within `wait_s` seconds.
    """
    wait_ms = max(1, round(wait_s * 1000))  # 0 means no limit
    # The session idles while it holds the lock. With these keepalives, PostgreSQL detects a dead
    # client machine after one minute instead of two hours.
    settings = (
        f"select concat(set_config('lock_timeout', '{wait_ms}', true),"
        " set_config('idle_in_transaction_session_timeout', '0', true),"
        " set_config('tcp_keepalives_idle', '30', true),"
        " set_config('tcp_keepalives_interval', '10', true),"
        " set_config('tcp_keepalives_count', '3', true))"
    )
    _ask(connection, settings)
    _ask(connection, f"select pg_advisory_xact_lock({key})::text")


def _holder(connection: Connection) -> str:
    """Return the name of the process that holds the lock for writers.

    Returns "another process" if the name is unknown.
    """
    roll_back(connection)  # PostgreSQL answers no query in a failed transaction
    query = (
        "select application_name from pg_locks join pg_stat_activity using (pid)"
        f" where locktype = 'advisory' and granted and objid = {_WRITER}"
    )
    with suppress(duckdb.Error):
        for row in _ask(connection, query):
            return str(row[0])
    return "another process"


def _ask(connection: Connection, query: str) -> list[tuple[object, ...]]:
    """Run the query in PostgreSQL, and return its rows."""
    return connection.execute(f"select * from postgres_query('turns', {quote(query)})").fetchall()


def _extension(name: str) -> Path:
    """Return the path of a DuckDB extension. Raises WarehouseError if it is not installed."""
    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for file in Path(folder).rglob("*.duckdb_extension"):
            return file
    raise WarehouseError(f"DuckDB's extension {name} is missing: run pip install 'srift[shared]'")


def _endpoint() -> str:
    """Return SQL text with the endpoint of an S3-compatible store, for DuckDB's CREATE SECRET.

    The endpoint is read from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. Returns "" if neither is set.
    """
    url = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", ""))
    if not url.netloc:
        return ""
    secure = "true" if url.scheme == "https" else "false"
    return f", endpoint {quote(url.netloc)}, url_style 'path', use_ssl {secure}"


def _address(lake: Lake) -> str:
    """Return the libpq connection string for the PostgreSQL database of `lake`."""
    from psycopg2.extensions import make_dsn  # of the extra `shared`

    process = f"srift on {socket.gethostname()}, process {os.getpid()}"
    dsn: str = make_dsn(lake.url, application_name=process)
    return dsn


def _copy(old: Connection, connection: Connection, table: str) -> int:
    """Copy missing rows of `table` from `old` to `connection`, and return their number.

    If the table stores the order of insertion (`noted_order`), the copied rows keep this order.
    """
    rows = old.execute(f"select * from {table}").to_arrow_table()
    names = [name for name in rows.column_names if name != "noted_order"]
    columns = ", ".join(f'"{name}"' for name in names)
    order = "order by noted_order" if "noted_order" in rows.column_names else ""
    connection.register("incoming", rows)
    new = (
        f"select {columns} from incoming where ({columns}) not in (select ({columns}) from {table})"
    )
    return insert(connection, table, names, f"{new} {order}")
