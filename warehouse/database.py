"""Opens, migrates, transacts and selects: all that uses the working DuckDB file does so here, a transaction at a time.

Nobody outside this room writes SQL: others hand rows to `append` and read marts by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import duckdb
import tenacity

from .salvage import (
    NO_DOWNLOADS,
    carry_over,
    damaged_names,
    drop_old_backups,
    fsync,
    is_lock,
    probe_indexes,
    put_right,
    read_rows,
    tables,
)

if TYPE_CHECKING:  # it takes half a second, which looking up the published table does without
    import pandas as pd

SQL_FOLDER = Path(__file__).parent
WAIT_S = 60.0  # for who has the file
_IN_THIS_PROCESS = (
    threading.Lock()
)  # DuckDB refuses a reader beside a writer of the same file within one process
_VIEW = re.compile(r"create or replace view (\w+)")
_SOURCE = re.compile(r"\b(?:from|join)\s+(\w+)")
_SPARE_BYTES = 16 * 2**20  # what a migration of an empty warehouse writes, many times over
# DuckDB has no error classes for these: its words and the system's are all there is.
_FULL = re.compile("No space left on device|Disk quota exceeded|[Oo]ut of disk")
_READ_ONLY = re.compile("Read-only file system|Permission denied")
_DAMAGED = re.compile(
    "not a valid DuckDB database|[Cc]orrupt|checksum|replaying WAL|Could not read (?:enough|all|from)"
)
_INSIDE_DUCKDB = (duckdb.InternalException, duckdb.FatalException)
_OF_FILE_OR_DISK = (
    *_INSIDE_DUCKDB,
    *(
        duckdb.IOException,
        duckdb.TransactionException,
        duckdb.SerializationException,
        duckdb.OutOfMemoryException,
    ),
)
# Values and paths may hold any word: of these errors only DuckDB's own words count.
_QUOTED = re.compile(r'"[^"]*"|(?<!\w)\'[^\']*\'(?!\w)|\S*/\S*')


class WarehouseError(Exception):
    """The warehouse could not do what it was asked; the message says what to do."""


class WarehouseBusy(WarehouseError):
    """Another process or thread held the file for longer than we wait."""


class WarehouseMissing(WarehouseError):
    """There is no warehouse at that path yet."""


class DiskFull(WarehouseError):
    """There is no space left for what was to be written."""


class HomeReadOnly(WarehouseError):
    """The file or its folder must not be written."""


class WarehouseDamaged(WarehouseError):
    """The file is no database, or some of its blocks do not match their checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What a rebuild kept: `rows` in all, those `lost` by table, and where the damaged file lies now."""

    rows: int
    lost: dict[str, int]
    damaged: Path


class MigrationChanged(WarehouseError):
    """What was applied to the file is not what the migration files say."""


class Warehouse:
    """The working DuckDB file at `path`. Open for one transaction at a time; waits at most `wait_s` for others."""

    def __init__(
        self,
        path: Path,
        *,
        wait_s: float = WAIT_S,
        sleep: Callable[[float], None] = time.sleep,
        sql_folder: Path = SQL_FOLDER,
    ) -> None:
        self.path = path
        self._wait_s = wait_s
        self._sleep = sleep
        self._sql_folder = sql_folder

    def migrate(self) -> list[str]:
        """Apply what is new in migrations/ and recreate every view, in one transaction. Returns the names applied.

        Where a migration is new to a file with content, the file is first copied to `backups/` beside it, the copy is
        read whole, and the last few copies are kept. Raises MigrationChanged where an applied file was edited since, or
        came from a newer version, DiskFull where there is no room for the copy, and WarehouseDamaged where the copy
        cannot be read; nothing was changed then.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = self._sql_folder / "migrations"
        with self._alone(), ExitStack() as opened:
            # Closed after DuckDB's own handle: a process that closes any handle of a file loses its lock on it.
            source = opened.enter_context(self.path.open("rb")) if self.path.is_file() else None
            connection = opened.enter_context(self._connect(read_only=False))
            known = recorded(connection)
            pending = source is not None and known and set(numbered(folder)) - set(known)
            backup = (
                self._back_up(connection, source, max(known))
                if source is not None and pending
                else None
            )
            try:
                with transaction(connection):
                    applied = apply_migrations(connection, folder)
                    drop_views(connection)
                    create_views(
                        connection, [self._sql_folder / "staging", self._sql_folder / "marts"]
                    )
            except BaseException as error:
                # Rolled back: a retry would make the same copy again. Where file or disk failed, it may be needed.
                if backup is not None and not isinstance(error, (*_OF_FILE_OR_DISK, OSError)):
                    backup.unlink(missing_ok=True)
                raise
            finally:
                if backup is not None:
                    drop_old_backups(self.path)
        return applied

    def verify(self) -> int:
        """Read every row of every table, so that DuckDB compares the checksums of their blocks; returns their number.

        Raises WarehouseDamaged, WarehouseBusy, WarehouseMissing.
        """
        with self._any_failure_is_damage(), self.read() as connection:
            return read_rows(connection)

    def verify_indexes(self) -> None:
        """Read the index of every table, by inserting keys and rolling back: only inserts read indexes.

        The file must be writable and is not changed. Raises as `verify`, and HomeReadOnly.
        """
        self._refuse_missing()
        if not os.access(self.path, os.W_OK):
            raise HomeReadOnly(
                f"{self.path} cannot be written, and its indexes are checked by an insert"
            )
        with self._any_failure_is_damage(), self._open(read_only=False) as connection:
            probe_indexes(connection)

    def rebuild(self) -> Rebuilt | None:
        """Copy every row that can be read into a new file in place of a damaged one, which is kept under another name.

        None, and nothing is changed, where there is no damage. Raises WarehouseDamaged where the file cannot be opened
        or the list of its migrations not be read, WarehouseMissing, WarehouseBusy, DiskFull.
        """
        with suppress(WarehouseDamaged):
            self.verify()
            self.verify_indexes()
            return None
        new = self.path.with_name(f".{self.path.name}.rebuilt")
        with self._alone(), ExitStack() as leftovers:
            for path in (new, new.with_name(f"{new.name}.wal")):
                path.unlink(missing_ok=True)
                leftovers.callback(path.unlink, missing_ok=True)
            with duckdb.connect(config=NO_DOWNLOADS) as connection:
                # Attached until the new file is in place, so that no other process writes into the old one.
                connection.execute(f"attach {quoted(str(self.path))} as old (read_only)")
                connection.execute(f"attach {quoted(str(new))} as new")
                connection.execute("copy from database old to new (schema)")
                connection.execute("use old")
                lost = {name: carry_over(connection, name) for name in tables(connection)}
                connection.execute("use new")
                rows = read_rows(connection)
                connection.execute("use memory")
                connection.execute("detach new")
                fsync(new)
                moves = damaged_names(self.path)
                for one, away in reversed(moves):  # the log first: it is of the old file
                    os.replace(one, away)
                os.replace(new, self.path)
                fsync(self.path.parent)
        return Rebuilt(
            rows=rows, lost={name: some for name, some in lost.items() if some}, damaged=moves[0][1]
        )

    def _back_up(
        self, connection: duckdb.DuckDBPyConnection, source: BinaryIO, number: int
    ) -> Path:
        """A copy of the file of schema `number`, read whole and on the disk. `connection` keeps others from writing."""
        connection.execute(
            "checkpoint"
        )  # what a killed process left in the log beside goes into the file
        size = os.fstat(source.fileno()).st_size
        folder = self.path.parent / "backups"
        free = shutil.disk_usage(self.path.parent).free
        if free < 2 * size + _SPARE_BYTES:  # the copy, and what the migration may write
            raise DiskFull(
                f"{self.path} is to be migrated, which takes a copy of its {size / 2**20:.0f} MiB and as much again,"
                f" and the disk has {free / 2**20:.0f} MiB left. Nothing was changed; free some space and try again"
            )
        folder.mkdir(exist_ok=True)
        name = (
            f"{self.path.stem}-{number:03d}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}{self.path.suffix}"
        )
        partial = folder / f".{name}"
        try:
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)
                target.flush()
                os.fsync(target.fileno())
            with duckdb.connect(str(partial), config=NO_DOWNLOADS) as copy:
                read_rows(copy)
                probe_indexes(copy)
            os.replace(partial, folder / name)
            fsync(folder)
        finally:
            partial.unlink(missing_ok=True)
        return folder / name

    @contextmanager
    def transact(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """One transaction: committed at the end of the block, rolled back when the block raises, closed either way.

        Raises WarehouseBusy. Not to be nested: the inner one would wait for the outer one.
        """
        with self._open(read_only=False) as connection, transaction(connection):
            yield connection

    @contextmanager
    def read(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A read-only connection, for several reads of the same state. Raises WarehouseBusy, WarehouseMissing."""
        self._refuse_missing()
        with self._open(read_only=True) as connection:
            yield connection

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Was anything ever stored?"""
        return self.path.exists()

    def _refuse_missing(self) -> None:
        if not self.exists():
            raise WarehouseMissing(
                f"there is no warehouse at {self.path} yet: run `srift refresh` first"
            )

    def select(self, relation: str, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Rows of a relation whose columns equal `params`, as a frame; or, inside this room, of a query with `$name`s.

        Raises WarehouseBusy, WarehouseMissing, and duckdb.Error for a relation or column that does not exist.
        """
        with self.read() as connection:
            return select(connection, relation, params)

    def frames(self, relations: Mapping[str, Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
        """Rows of several relations at one moment, each as `select` filters it, by name.

        A relation that a file of an older version lacks is an empty frame. Raises WarehouseBusy, WarehouseMissing.
        """
        with self.read() as connection:
            return {
                name: select(connection, name, params)
                if has_relation(connection, name)
                else _nothing(connection)
                for name, params in relations.items()
            }

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._alone(), self._connect(read_only=read_only) as connection:
            yield connection

    @contextmanager
    def _any_failure_is_damage(self) -> Iterator[None]:
        """A mistake inside DuckDB while it does no more than read what is there is the file's."""
        try:
            yield
        except WarehouseError as error:
            inner = error.__cause__
            if type(error) is not WarehouseError or not isinstance(inner, _INSIDE_DUCKDB):
                raise
            raise WarehouseDamaged(
                f"{self.path} is damaged: {one_line(inner)}. {put_right(self.path)}"
            ) from inner

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread of this process is at the file; what DuckDB says of disk and file becomes a sentence."""
        if not _IN_THIS_PROCESS.acquire(timeout=self._wait_s):
            raise WarehouseBusy(
                f"{self.path}: another thread of this process held it for {self._wait_s:g} s; try again"
            )
        try:
            yield
        except duckdb.Error as error:
            problem = explained(self.path, error)
            if problem is None:
                raise
            if isinstance(problem, WarehouseDamaged):
                raise WarehouseDamaged(f"{problem}. {put_right(self.path)}") from error
            raise problem from error
        finally:
            _IN_THIS_PROCESS.release()

    def _connect(self, *, read_only: bool) -> duckdb.DuckDBPyConnection:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_lock),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            stop=tenacity.stop_after_delay(self._wait_s),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(
                duckdb.connect, str(self.path), read_only=read_only, config=NO_DOWNLOADS
            )
        except duckdb.IOException as error:
            if not is_lock(error):
                raise
            holder = re.search(r"PID (\d+)", str(error))
            who = f"process {holder[1]}" if holder else "another process"
            raise WarehouseBusy(
                f"{self.path}: {who} has held it for {self._wait_s:g} s. Nothing was changed; "
                "wait until that process ends, or end it, and try again. To only read, open the published copy."
            ) from error


def explained(path: Path, error: duckdb.Error) -> WarehouseError | None:
    """What DuckDB said of the file at `path`, as a sentence, where disk or file is to blame; None for others."""
    if not isinstance(error, _OF_FILE_OR_DISK):
        return None
    said, kept = one_line(error), "Nothing of this transaction was kept"
    words = str(error)
    for name in (path, path.parent):
        words = words.replace(str(name), "")
    words = _QUOTED.sub("", words)
    if _FULL.search(words):
        return DiskFull(
            f"the disk is full: {said}. {kept}; free some space at {path.parent} and try again"
        )
    if _READ_ONLY.search(words):
        return HomeReadOnly(
            f"{path} cannot be opened or written: {said}. {kept}; make its folder writable, or set SRIFT_HOME to one"
            " that is, and try again"
        )
    if isinstance(error, duckdb.SerializationException) or _DAMAGED.search(words):
        return WarehouseDamaged(f"{path} is damaged: {said}. {kept}")
    if isinstance(error, _INSIDE_DUCKDB):
        return WarehouseError(
            f"{path}: {said}. {kept}; `srift doctor` tells whether the file is damaged"
        )
    if isinstance(error, duckdb.IOException):
        return WarehouseError(f"{path}: {said}. {kept}; put that right and try again")
    return None


def one_line(error: Exception) -> str:
    """The first line of what it says, without a full stop."""
    return str(error).splitlines()[0].rstrip(".!") if str(error) else type(error).__name__


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
        if hasattr(kind, "na_value") and kind.kind in "iu":  # pandas' own kind of whole numbers
            frame[column] = frame[column].astype(
                float
            )  # arithmetic chokes on pandas' NA; NaN is unknown everywhere
    return frame


def _nothing(connection: duckdb.DuckDBPyConnection) -> pd.DataFrame:
    """A frame without rows and columns."""
    return connection.execute("select null as nothing limit 0").df()[[]]


def has_relation(connection: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Is there a table or view of that name? A file of an older version may lack the newer ones."""
    asked = f"select 1 from information_schema.tables where table_name = {quoted(name)}"  # a parameter loads pandas
    return connection.execute(asked).fetchone() is not None


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
    needs = {
        name: {source for source in _SOURCE.findall(text) if source in texts}
        for name, text in texts.items()
    }
    for name in TopologicalSorter(needs).static_order():
        connection.execute(texts[name])


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Committed at the end of the block, rolled back when the block raises."""
    connection.begin()
    try:
        yield
    except BaseException:
        with suppress(
            duckdb.Error
        ):  # DuckDB may have rolled back already; the first error is the story
            connection.rollback()
        raise
    connection.commit()


def quoted(text: str) -> str:
    """As a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


_LIST_OF_MIGRATIONS = """
    create table if not exists schema_migrations (
        number integer primary key, name varchar not null, digest varchar not null, applied_at timestamp not null
    )
"""


def numbered(folder: Path) -> dict[int, Path]:
    """Migration files by number."""
    return {int(file.stem.split("_")[0]): file for file in sorted(folder.glob("*.sql"))}


def recorded(connection: duckdb.DuckDBPyConnection) -> dict[int, tuple[str, str]]:
    """Name and digest of each migration that was applied, by number; none in a new file."""
    if not has_relation(connection, "schema_migrations"):
        return {}
    rows = connection.execute("select number, name, digest from schema_migrations").fetchall()
    return {number: (name, digest) for number, name, digest in rows}


def apply_migrations(
    connection: duckdb.DuckDBPyConnection, folder: Path, of_dialect: Callable[[str], str] = str
) -> list[str]:
    """Apply the files of `folder` that are new, each as `of_dialect` has it, and return their names.

    Raises MigrationChanged where one was edited since, or is unknown.
    """
    connection.execute(of_dialect(_LIST_OF_MIGRATIONS))
    known, files = recorded(connection), numbered(folder)
    for number, (name, _) in sorted(known.items()):
        if number not in files:
            raise MigrationChanged(
                f"the warehouse has migration {name}, which this version of Srift lacks: use the newer one"
            )
    applied: list[str] = []
    for number, file in sorted(files.items()):
        text = file.read_text()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if number not in known:
            connection.execute(of_dialect(text))
            connection.execute(
                "insert into schema_migrations values (?, ?, ?, ?)",
                [number, file.stem, digest, datetime.now(UTC).replace(tzinfo=None)],
            )
            applied.append(file.stem)
        elif known[number][1] != digest:
            raise MigrationChanged(
                f"migration {file.name} was changed after it was applied: put it back as it was and write the change "
                "as the next number"
            )
    return applied
