"""The warehouse that several machines share: DuckLake, its catalogue in PostgreSQL, its rows in Parquet files.

All that differs from the file of one machine stands here. DuckLake has no keys, checks, sequences or comments of views,
and two appends of one key do not conflict there. Therefore writers take turns by a lock in PostgreSQL, rows pass on
their way in through a temporary table with the constraints of the file, and each process makes the views for itself.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from .database import (
    SQL_FOLDER,
    DiskFull,
    HomeReadOnly,
    MigrationChanged,
    Rebuilt,
    Warehouse,
    WarehouseBusy,
    WarehouseError,
    WarehouseMissing,
    apply_migrations,
    create_views,
    drop_views,
    explained,
    numbered,
    one_line,
    quoted,
    recorded,
    transaction,
)
from .salvage import NO_DOWNLOADS, read_rows

_EXTENSIONS = (
    "postgres_scanner",
    "ducklake",
)  # packages duckdb_extension_* of PyPI, each with its file
_OF_S3 = ("httpfs", "aws")
_SCHEMA = "srift_warehouse"  # of the catalogue's tables in PostgreSQL
# PostgreSQL's settings of a transaction that holds a lock: it idles by design, and where a machine loses its power
# the server is to miss it after a minute instead of two hours (over TCP; this was not tried).
WHILE_LOCKED = {
    "idle_in_transaction_session_timeout": 0,
    "tcp_keepalives_idle": 30,
    "tcp_keepalives_interval": 10,
}
WHILE_LOCKED |= {"tcp_keepalives_count": 3}
TURN_S = 300.0  # of waiting: eight machines that import at once take a minute of it
_WRITER, _OPENER = 5112001, 5112002  # keys of our advisory locks in that database
_TABLES_FIRST = "set search_path = 'shared.main'"
_VIEWS_FIRST = "set search_path = 'memory.main,shared.main'"
# What a migration says that DuckLake does not know; `insert` sees to it instead.
_REFUSED = re.compile(
    r"--[^\n]*|create sequence [^;]*;|,\s*primary key \([^)]*\)|\bprimary key\b"
    r"|\bdefault nextval\('\w+'\)|\bcheck \((?:[^()]|\([^()]*\))*\)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lake:
    """Where a shared warehouse lies: a PostgreSQL database, and a folder or `s3://` prefix for the Parquet files.

    `host` is a name or the folder of a Unix socket. The password is libpq's affair: PGPASSWORD, or a file of passwords.
    """

    host: str
    port: int
    user: str
    database: str
    data: str

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.database} on {self.host}:{self.port}"


class SharedWarehouse(Warehouse):
    """A warehouse in a `lake`, for any number of processes at once; a writer waits at most `wait_s` for its turn."""

    def __init__(
        self, path: Path, lake: Lake, *, wait_s: float = TURN_S, sql_folder: Path = SQL_FOLDER
    ) -> None:
        super().__init__(path, wait_s=wait_s, sql_folder=sql_folder)
        self.lake = lake

    def __str__(self) -> str:
        return f"the shared warehouse {self.lake.name}"

    def exists(self) -> bool:
        """Was it migrated once? Raises WarehouseError where PostgreSQL does not answer."""
        with self._explained(), self._session().cursor(_TABLES_FIRST) as connection:
            return bool(recorded(connection))

    def migrate(self) -> list[str]:
        """As `Warehouse.migrate`, without a copy beside: DuckLake keeps what was, as snapshots."""
        with (
            self._explained(),
            self._turn(_WRITER),
            self._session().cursor(_TABLES_FIRST) as connection,
            transaction(connection),
        ):
            return apply_migrations(connection, self._sql_folder / "migrations", _of_lake)

    def carry_over(self, path: Path) -> dict[str, int]:
        """Copy the rows of the warehouse file `path` that are not here yet; returns how many, by table.

        The file is brought up to date first; each table passes through memory. Raises as `migrate`, of both.
        """
        Warehouse(path, sql_folder=self._sql_folder).migrate()
        self.migrate()
        with (
            Warehouse(path, sql_folder=self._sql_folder).read() as old,
            self.transact() as connection,
        ):
            copied = {
                name: _copied(old, connection, name)
                for name in sorted(_shapes())
                if name != "schema_migrations"
            }
            copied["raw_import_rows"] += _also_held(old, connection)
            return copied

    def _refuse_missing(self) -> None:
        """`_open` does."""

    def verify(self) -> int:
        """Read every row of every table; returns their number. Raises WarehouseError, WarehouseMissing."""
        with self._explained(), self._session().cursor(_TABLES_FIRST) as connection:
            self._session().see_views(self)
            return read_rows(connection)

    def verify_indexes(self) -> None:
        """There are none."""

    def rebuild(self) -> Rebuilt | None:
        """Raises WarehouseError: PostgreSQL and the files' store have backups of their own."""
        raise WarehouseError(
            f"{self} is no file of this machine: restore its database and its files from their backups"
        )

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._explained(), ExitStack() as opened:
            if not read_only:
                opened.enter_context(self._turn(_WRITER))
            session = self._session()
            session.see_views(self)
            connection = opened.enter_context(session.cursor(_VIEWS_FIRST))
            if read_only:  # several reads see one state
                connection.execute("begin transaction read only")
                opened.callback(_rolled_back, connection)
            yield connection

    def _session(self) -> _Session:
        return _session(self.lake, self._sql_folder, os.getpid())

    @contextmanager
    def _turn(self, key: int) -> Iterator[None]:
        """One process at a time: PostgreSQL holds the lock, and lets go when this process or its machine dies."""
        with self._session().cursor(_VIEWS_FIRST) as connection:
            connection.begin()  # of its own: DuckDB may end PostgreSQL's before DuckLake has committed
            try:
                try:
                    lock(connection, key, self._wait_s)
                except duckdb.IOException as error:
                    if "lock timeout" not in str(error):
                        raise
                    raise WarehouseBusy(
                        f"{self}: others have written to it for {self._wait_s:g} s, now {_holder(connection, key)}."
                        " Nothing was changed; wait until that ends, or end it, and try again. Readers need not wait"
                    ) from error
                yield
            finally:
                _rolled_back(connection)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException) as error:
            problem = explained(self.path, error)
            if isinstance(
                problem, DiskFull | HomeReadOnly
            ):  # of this machine, while the published copies are written
                raise problem from error
            _session.cache_clear()  # a connection that broke stays broken
            said = f"{self}: {one_line(error)}. Nothing of this transaction was kept"
            if isinstance(error, duckdb.TransactionException) and "conflict" in str(error).lower():
                raise WarehouseBusy(
                    f"{said}; another program changed the same rows: try again"
                ) from error
            raise WarehouseError(
                f"{said}; see that PostgreSQL and the files can be reached, and try again"
            ) from error


class _Session:
    """DuckDB in this process with the lake attached: opening takes half a second, a cursor of it a few milliseconds."""

    def __init__(self, lake: Lake, sql_folder: Path) -> None:
        self._sql_folder = sql_folder
        self._has_views, self._making_views = False, threading.Lock()
        self._connection = duckdb.connect(config=NO_DOWNLOADS)
        in_s3 = lake.data.startswith("s3://")
        for name in (*_EXTENSIONS, *(_OF_S3 if in_s3 else ())):
            self._connection.execute(f"load {quoted(str(_extension(name)))}")
        if in_s3:
            self._connection.execute(
                f"create secret (type s3, provider credential_chain{_endpoint()})"
            )
        address = _address(lake)
        self._connection.execute(f"attach {quoted(address)} as turns (type postgres, read_only)")
        with self.cursor(_VIEWS_FIRST) as opening:
            opening.begin()
            lock(opening, _OPENER, TURN_S)  # the first one makes DuckLake's tables
            self._connection.execute(
                f"attach {quoted('ducklake:postgres:' + address)} as shared"
                f" (data_path {quoted(lake.data)}, metadata_schema {quoted(_SCHEMA)})"
            )
            opening.rollback()

    @contextmanager
    def cursor(self, search_path: str) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection of its own, with transactions of its own."""
        with self._connection.cursor() as connection:
            connection.execute("use memory")
            with suppress(duckdb.CatalogException):  # before the lake is attached
                connection.execute(search_path)
            yield connection

    def see_views(self, warehouse: SharedWarehouse) -> None:
        """Make the views of this version, once. Raises where the lake is none of this version."""
        with self._making_views:
            self._see_views(warehouse)

    def _see_views(self, warehouse: SharedWarehouse) -> None:
        if self._has_views:
            return
        with self.cursor(_TABLES_FIRST) as connection:
            known, files = recorded(connection), numbered(self._sql_folder / "migrations")
        if not known:
            raise WarehouseMissing(f"{warehouse} is empty yet: run `srift refresh` first")
        if set(known) - set(files):
            raise MigrationChanged(
                f"{warehouse} was migrated by a newer version of Srift: use that one"
            )
        if set(files) - set(known):
            raise WarehouseError(
                f"{warehouse} is of an older version of Srift: `srift refresh` brings it up to date"
            )
        with self.cursor(_VIEWS_FIRST) as connection, transaction(connection):
            drop_views(connection)
            create_views(connection, [self._sql_folder / "staging", self._sql_folder / "marts"])
        self._has_views = True


@cache
def _session(lake: Lake, sql_folder: Path, process: int) -> _Session:
    """`process` since what a fork copies of DuckDB is of no use."""
    return _Session(lake, sql_folder)


def lock(connection: duckdb.DuckDBPyConnection, key: int, wait_s: float) -> None:
    """Hold PostgreSQL's lock `key` until the transaction of `connection` ends. Raises duckdb.IOException."""
    wait_ms = max(1, round(wait_s * 1000))  # 0 would be without end
    _ask(connection, f"select set_config('lock_timeout', '{wait_ms}', true)")
    for setting, value in WHILE_LOCKED.items():
        _ask(connection, f"select set_config('{setting}', '{value}', true)")
    _ask(connection, f"select pg_advisory_xact_lock({key})::text")


def _holder(connection: duckdb.DuckDBPyConnection, key: int) -> str:
    _rolled_back(connection)  # PostgreSQL answers nothing more in a transaction that failed
    with suppress(duckdb.Error):
        asked = "select application_name from pg_locks join pg_stat_activity using (pid)"
        found = _ask(
            connection, f"{asked} where locktype = 'advisory' and granted and objid = {key}"
        )
        if found:
            return str(found[0][0])
    return "another process"


def _ask(connection: duckdb.DuckDBPyConnection, query: str) -> list[tuple[object, ...]]:
    return connection.execute(f"select * from postgres_query('turns', {quoted(query)})").fetchall()


def _rolled_back(connection: duckdb.DuckDBPyConnection) -> None:
    with suppress(duckdb.Error):
        connection.rollback()


def _extension(name: str) -> Path:
    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for file in Path(folder).rglob("*.duckdb_extension"):
            return file
    missing = f"duckdb-extension-{name.replace('_', '-')}"
    raise WarehouseError(
        f"a shared warehouse takes the package {missing}: pip install 'srift[shared]'"
    )


def _endpoint() -> str:
    """Of a store that is not AWS's, by the variables that AWS's own programs heed."""
    url = urlsplit(
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    )
    if not url.netloc:
        return ""
    secure = "true" if url.scheme == "https" else "false"
    return f", endpoint {quoted(url.netloc)}, url_style 'path', use_ssl {secure}"


def _address(lake: Lake) -> str:
    """In libpq's words."""
    who = f"srift on {socket.gethostname()}, process {os.getpid()}"
    parts = {
        "host": lake.host,
        "port": lake.port,
        "user": lake.user,
        "dbname": lake.database,
        "application_name": who,
    }
    escaped = {name: re.sub(r"(['\\])", r"\\\1", str(value)) for name, value in parts.items()}
    return " ".join(f"{name}='{value}'" for name, value in escaped.items())


def _of_lake(migration: str) -> str:
    return _REFUSED.sub("", migration)


def is_shared(connection: duckdb.DuckDBPyConnection) -> bool:
    """Is it of a shared warehouse?"""
    query = "select 1 from duckdb_databases() where database_name = 'shared' and type = 'ducklake'"
    return connection.execute(query).fetchone() is not None


def insert(connection: duckdb.DuckDBPyConnection, table: str, columns: str, chosen: str) -> int:
    """Insert what the query `chosen` takes from `incoming`, less rows whose key is there; returns how many.

    Raises duckdb.ConstraintException as the file of one machine does. The writers' lock makes what is read here true
    until the commit, and `noted_order` the order of commits.
    """
    definition, keys = _shapes()[table]
    connection.execute("drop table if exists temp.checked")
    if "nextval" in definition:
        found = connection.execute(
            f"select coalesce(max(noted_order), 0) + 1 from shared.main.{table}"
        ).fetchone()
        connection.execute(
            f"create or replace temp sequence noted_order start {found[0] if found else 1}"
        )
    connection.execute(definition)
    connection.execute(f"insert into temp.checked ({columns}) {chosen}")
    known = f"anti join shared.main.{table} using ({', '.join(keys)})" if keys else ""
    query = f"insert into shared.main.{table} by name select checked.* from temp.checked as checked {known}"
    new = connection.execute(query).fetchone()
    connection.execute("drop table temp.checked")
    return int(new[0]) if new else 0


def _copied(
    old: duckdb.DuckDBPyConnection, connection: duckdb.DuckDBPyConnection, table: str
) -> int:
    """A table without a key gets the rows of which none is equal; what was noted later there is later here."""
    rows = old.execute(f"select * from {table}").to_arrow_table()
    names = [f'"{name}"' for name in rows.column_names if name != "noted_order"]
    same = " and ".join(f"known.{name} is not distinct from incoming.{name}" for name in names)
    chosen = f"select {', '.join(names)} from incoming where not exists (select 1 from {table} as known where {same})"
    if "noted_order" in rows.column_names:
        chosen += " order by incoming.noted_order"
    connection.register("incoming", rows)
    try:
        return insert(connection, table, ", ".join(names), chosen)
    finally:
        connection.unregister("incoming")


def _also_held(old: duckdb.DuckDBPyConnection, connection: duckdb.DuckDBPyConnection) -> int:
    """Note the imports of the file that hold rows which other imports had brought here before."""
    connection.register(
        "incoming", old.execute("select import_id, row_digest from raw_imports").to_arrow_table()
    )
    chosen = """
        select incoming.import_id, incoming.row_digest
        from incoming
        join raw_imports on raw_imports.row_digest = incoming.row_digest
        where raw_imports.import_id <> incoming.import_id
    """
    try:
        return insert(connection, "raw_import_rows", "import_id, row_digest", chosen)
    finally:
        connection.unregister("incoming")


@cache
def _shapes(sql_folder: Path = SQL_FOLDER) -> dict[str, tuple[str, Sequence[str]]]:
    """By table: the statement that makes it as the temporary table `checked`, with all constraints; and its key."""
    with duckdb.connect(config=NO_DOWNLOADS) as connection:
        apply_migrations(connection, sql_folder / "migrations")
        made = connection.execute("select table_name, sql from duckdb_tables()").fetchall()
        keys: dict[str, Sequence[str]] = dict(
            connection.execute(
                "select table_name, constraint_column_names from duckdb_constraints()"
                " where constraint_type = 'PRIMARY KEY'"
            ).fetchall()
        )
    return {
        name: (
            statement.replace(f"CREATE TABLE {name}(", "CREATE TEMP TABLE checked(", 1),
            keys.get(name, ()),
        )
        for name, statement in made
    }
