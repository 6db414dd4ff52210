"""What can be kept of a damaged DuckDB file: its rows, its backups, and what to type to put it right.

Knows files and connections, not our tables; raises nothing of its own but what DuckDB and the disk raise.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import duckdb

NO_DOWNLOADS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false"
}
KEPT_BACKUPS = 3
_SLICE_ROWS = 2048  # DuckDB reads so many values at once, and none of what lies before or behind
_PROBED_ROWS = 20 * _SLICE_ROWS  # less than DuckDB writes to the file before a commit


def is_lock(error: BaseException) -> bool:
    """Does another process hold the file? A damaged *block* is no lock, and waiting for it would be in vain.

    DuckDB has no error class for it: its words are all there is.
    """
    return isinstance(error, duckdb.IOException) and "Could not set lock on file" in str(error)


def fsync(path: Path) -> None:
    """To the disk: a file's content, or the names in a folder. A machine that loses power keeps no name without it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Names of the tables in the database in use."""
    query = "select table_name from duckdb_tables() where not internal and database_name = current_database()"
    return [name for (name,) in connection.execute(f"{query} order by all").fetchall()]


def read_rows(connection: duckdb.DuckDBPyConnection) -> int:
    """Number of rows of all tables, each of which is read, so that DuckDB compares the checksums of their blocks."""
    return sum(_rows(connection, name) for name in tables(connection))


def _rows(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    found = connection.execute(
        f'select count(*), bit_xor(hash(whole)) from "{table}" as whole'
    ).fetchone()
    return int(found[0]) if found else 0


def _extent(connection: duckdb.DuckDBPyConnection, table: str) -> tuple[int, int]:
    """Number of rows, and the row id behind the last one: more than that where rows were deleted. Reads no column."""
    found = connection.execute(
        f"select count(*), coalesce(max(rowid) + 1, 0) from {table}"
    ).fetchone()
    return (int(found[0]), int(found[1])) if found else (0, 0)


def _can_be_read(connection: duckdb.DuckDBPyConnection, table: str) -> bool:
    try:
        _rows(connection, table)
    except duckdb.Error:
        return False
    return True


def probe_indexes(connection: duckdb.DuckDBPyConnection) -> None:
    """Insert a new key beside every key that there is, and roll back: DuckDB loads the nodes on the way to a new key.

    Each is made of the old one by a change at its end, so that the way is as long as can be.
    """
    connection.execute("pragma disable_checkpoint_on_shutdown")  # a check does not write
    keys = connection.execute(
        """
        select table_name, column_name, data_type
        from duckdb_constraints()
        join duckdb_columns() using (table_name)
        where constraint_type in ('PRIMARY KEY', 'UNIQUE') and column_name = constraint_column_names[-1]
        """
    ).fetchall()
    for table, column, kind in keys:
        other = f"\"{column}\" || '~'" if kind == "VARCHAR" else f'"{column}" + 1'
        for first in range(0, _extent(connection, f'"{table}"')[1], _PROBED_ROWS):
            connection.begin()
            try:
                connection.execute(
                    f'insert or ignore into "{table}" select * replace ({other} as "{column}") from "{table}"'
                    f" where rowid >= {first} and rowid < {first + _PROBED_ROWS}"
                )
            finally:
                with suppress(duckdb.Error):
                    connection.rollback()


def carry_over(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    """Insert what can be read of a table of `old` into that of `new`; returns how many rows could not be."""
    rows = f'insert into new."{table}" select * from old."{table}"'
    try:
        connection.execute(rows)
        return 0
    except duckdb.Error:
        if table == "schema_migrations" or _can_be_read(
            connection, table
        ):  # else it is the new file that failed
            raise
    lost, end = _extent(connection, f'old."{table}"')
    for first in range(0, end, _SLICE_ROWS):
        with suppress(duckdb.Error):
            kept = connection.execute(
                f"{rows} where rowid >= {first} and rowid < {first + _SLICE_ROWS}"
            ).fetchone()
            lost -= int(kept[0]) if kept else 0
    return lost


def damaged_names(path: Path) -> list[tuple[Path, Path]]:
    """The file, and DuckDB's log of it if there is one, with the names under which they are kept."""
    now = datetime.now(UTC)
    both = (path, path.with_name(f"{path.name}.wal"))
    return [
        (one, one.with_name(f"damaged-{now:%Y%m%dT%H%M%S}-{one.name}"))
        for one in both
        if one.exists()
    ]


def backups(path: Path) -> list[Path]:
    """Copies of the file that were made before migrations, the oldest first."""
    found = (path.parent / "backups").glob(f"{path.stem}-*-*{path.suffix}")
    return sorted(found, key=lambda path: path.stem.rpartition("-")[2])


def drop_old_backups(path: Path) -> None:
    """Keep the newest of those that can be read; one that cannot goes first."""
    found = backups(path)
    if len(found) > KEPT_BACKUPS:
        for old in sorted(found, key=_is_sound)[:-KEPT_BACKUPS]:  # stable: the oldest first
            old.unlink(missing_ok=True)


def _is_sound(path: Path) -> bool:
    """Whether every row of a backup can be read."""
    try:
        with duckdb.connect(str(path), read_only=True, config=NO_DOWNLOADS) as connection:
            read_rows(connection)
    except duckdb.Error:
        return False
    return True


def _newest_sound_backup(path: Path) -> Path | None:
    return next((one for one in reversed(backups(path)) if _is_sound(one)), None)


def _made_at(backup: Path) -> str:
    """When it was made, by its name: a file that was copied in its turn has another time."""
    try:
        made = datetime.strptime(backup.stem.rpartition("-")[2], "%Y%m%dT%H%M%S%f")
    except ValueError:
        made = datetime.fromtimestamp(backup.stat().st_mtime, UTC)
    return f"{made:%Y-%m-%d %H:%M} UTC"


def put_right(path: Path) -> str:
    """What to type where the file is damaged, and what is lost. Reads the file, and its backups if need be."""
    try:
        with duckdb.connect(str(path), read_only=True, config=NO_DOWNLOADS) as connection:
            unread = [name for name in tables(connection) if not _can_be_read(connection, name)]
    except duckdb.Error as error:
        if is_lock(error):
            return "Another process holds the file: once that has ended, `srift doctor` says what to type"
        return _restore(path, "the file cannot be opened", "all measurements are lost")
    if "schema_migrations" in unread:
        lost = "Srift cannot keep its measurements, most of which DuckDB reads"
        return _restore(path, "the list of its migrations cannot be read", lost)
    rebuild = "To put it right, type\n  srift doctor --rebuild-warehouse\n  srift refresh"
    if not unread:
        return f"Every row of its tables can be read, and nothing is lost. {rebuild}"
    backup = _newest_sound_backup(path)
    other = (
        f"; {backup} is a sound copy of {_made_at(backup)}, without what was loaded since"
        if backup
        else ""
    )
    return (
        f"Some rows of {', '.join(unread)} are lost, and all others can be kept{other}. What was imported can be"
        f" imported again, and a refresh measures anew. {rebuild}"
    )


def _restore(path: Path, why: str, without_backup: str) -> str:
    """What to type where no row of the file can be kept."""
    backup, published = _newest_sound_backup(path), path.parent / "published"
    lines = [
        f"  mv {shlex.quote(str(one))} {shlex.quote(str(to))}" for one, to in damaged_names(path)
    ]
    if backup is not None:
        lost = f"what was loaded since {_made_at(backup)} is lost"
        lines.append(f"  cp {shlex.quote(str(backup))} {shlex.quote(str(path))}")
    else:
        none = (
            "none of its backups can be read whole"
            if backups(path)
            else "there is no backup (migrations make them)"
        )
        lost = f"{none}, so {without_backup}"
    if published.is_dir():
        kept = published.with_name(f"published-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        lines.append(f"  cp -r {shlex.quote(str(published))} {shlex.quote(str(kept))}")
        lost += (
            "; so is the history of recommendations, the regret ledger, drift and alarms of that time, once a"
            f" refresh replaces the published table (below it is kept as {kept.name})"
        )
    return (
        f"No row can be copied out, since {why}: {lost}. The registered models lie in a file of their own. Files"
        " can be imported again (`srift import FILE`) and a refresh measures anew. To put it right, type\n"
        + "\n".join([*lines, "  srift refresh"])
    )
