"""Rows of a file on their way into the warehouse: kept as Parquet meanwhile, compared with what is there, loaded.

However many there are, memory is bounded: DuckDB reads the Parquet file a piece at a time, and spills what it sorts.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .append import Connection, in_utc, insert_chosen
from .database import SQL_FOLDER, DiskFull, apply_migrations, create_views, one_line, quoted, select
from .salvage import NO_DOWNLOADS

_SETUP_COLUMNS = [
    *(
        ("workload", pa.string()),
        ("cluster", pa.string()),
        ("layout", pa.string()),
        ("batch_per_device", pa.string()),
    ),
    *(("accumulation_steps", pa.int64()), ("strategy", pa.string()), ("precision", pa.string())),
    *(("switches", pa.string()), ("provider", pa.string()), ("gradient_bytes", pa.int64())),
    *(("parameters", pa.int64()), ("flops_per_sample", pa.float64())),
]
_RUN_COLUMNS = [
    *(
        ("step_s", pa.float64()),
        ("sync_s", pa.float64()),
        ("market", pa.string()),
        ("zone", pa.string()),
    ),
    *(("run_id", pa.string()), ("source", pa.string()), ("measured_at", pa.timestamp("us"))),
]
# Of a chunk: the measurement columns, where a row stands in its file, all that it says as JSON, and the digest of that
# (as it is where the row has a run_id, else of the first row that says it).
CHUNK = pa.schema(
    [
        ("place", pa.int64()),
        *_SETUP_COLUMNS,
        *_RUN_COLUMNS,
        ("content", pa.string()),
        ("digest", pa.string()),
    ]
)
COLUMNS = [name for name, _ in (*_SETUP_COLUMNS, *_RUN_COLUMNS)]
_PREFIX, _STALE_S = "srift-import-", 86_400.0
_SETUP = ", ".join(name for name, _ in _SETUP_COLUMNS)
_RUN_ID = "coalesce(run_id, row_digest) as run_id"  # of a row that counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A row that has the run_id of another row of its file, and other values."""

    place: int
    run_id: str
    first_place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """The rows of one file with the measurement columns, `place`, `row_digest` (of all that a row says, and how often
    that stood before), in the file's order.
    """

    path: Path

    def __len__(self) -> int:
        return int(pq.read_metadata(self.path).num_rows)

    def contradictions(self) -> list[Contradiction]:
        """Where one run_id stands with several contents."""
        query = f"""
            with named as (
                select run_id, min(place) as first_place, arg_min(row_digest, place) as row_digest
                from {self}
                where run_id is not null
                group by run_id
                having min(row_digest) <> max(row_digest)
            )
            select rows.place, rows.run_id, named.first_place
            from {self} as rows
            join named on named.run_id = rows.run_id and named.row_digest <> rows.row_digest
            order by rows.place
        """
        found = self._ask(query).fetchall()
        return [
            Contradiction(place=place, run_id=run_id, first_place=first)
            for place, run_id, first in found
        ]

    def counted(self, *columns: str) -> list[tuple[Any, ...]]:
        """Each combination of values with its number of rows behind, the most frequent first."""
        names = ", ".join(columns)
        query = f"select {names}, count(*) from {self} group by {names} order by count(*) desc, min(place)"
        return self._ask(query).fetchall()

    def frame(self) -> pd.DataFrame:
        """The rows as the mart `runs` has them: all of them in memory, for a backtest without a warehouse."""
        columns = ", ".join(_RUN_ID if name == "run_id" else name for name in COLUMNS)
        with _room_in(self.path.parent):
            return select(
                _scratch(self.path.parent), f"select {columns} from {self} order by place"
            )

    def __str__(self) -> str:
        """As a relation of a query."""
        return _relation(self.path)

    def _ask(self, query: str) -> Connection:
        with _room_in(self.path.parent):
            return _scratch(self.path.parent).execute(query)


@contextmanager
def staged(chunks: Iterable[pa.Table]) -> Iterator[StagedRows]:
    """The rows of `chunks` (of the schema CHUNK, in the file's order) until the block ends, in a temporary folder.

    Raises what `chunks` raises, and DiskFull where that folder has no room.
    """
    _drop_stale(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        with _room_in(Path(name)):
            path = _digested(Path(name), chunks)
        yield StagedRows(path=path)


def _drop_stale(folder: Path) -> None:
    """Drop what imports left here that were killed a day ago or before."""
    for stale in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if (
                stale.stat().st_uid == os.getuid()
                and stale.stat().st_mtime < time.time() - _STALE_S
            ):
                shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _room_in(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, duckdb.IOException, duckdb.OutOfMemoryException) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"the rows that were read did not fit beside: {one_line(error)}. Nothing was loaded; free some space in"
            f" {folder.parent}, or set TMPDIR to a folder with more, and try again"
        ) from error


def _digested(folder: Path, chunks: Iterable[pa.Table]) -> Path:
    """Write the rows, then once more with their digests, for which all must have been seen."""
    read, path = folder / "read.parquet", folder / "rows.parquet"
    with pq.ParquetWriter(read, CHUNK, compression="zstd") as writer:
        for chunk in chunks:
            writer.write_table(chunk)
    # Equal rows without a run_id are told apart by how many stood before: the later ones are few, and only they are
    # numbered.
    source = _relation(read)
    _scratch(folder).execute(f"""
        copy (
            with again as (
                select place, row_number() over (partition by digest order by place) as nth
                from {source}
                where run_id is null
                qualify nth > 1
            ),
            told as (
                select rows.*, case
                    when again.nth is null then rows.digest
                    else substr(sha256(rows.content || '#' || again.nth), 1, 20)
                end as row_digest
                from {source} as rows
                left join again on again.place = rows.place
            )
            select * exclude (content, digest)
            from told
            order by place
        ) to {quoted(str(path))} (format parquet)
    """)
    read.unlink()
    return path


@contextmanager
def empty_warehouse() -> Iterator[Connection]:
    """A warehouse in memory without a row, to compare with where there is none yet."""
    with duckdb.connect(config=NO_DOWNLOADS) as connection:
        apply_migrations(connection, SQL_FOLDER / "migrations")
        create_views(connection, [SQL_FOLDER / "staging", SQL_FOLDER / "marts"])
        yield connection


def counted_before(connection: Connection, rows: StagedRows) -> tuple[int, int]:
    """How many rows do not count yet, and how many have the run_id of one that counts with another step time."""
    found = connection.execute(f"""
        select
            count(*) filter (where known.run_id is null),
            count(*) filter (where rows.run_id is not null and known.step_s <> rows.step_s)
        from {rows} as rows
        left join stg_imports as known on known.run_id = coalesce(rows.run_id, rows.row_digest)
    """).fetchone()
    return (int(found[0]), int(found[1])) if found else (0, 0)


def rows_to_judge(
    connection: Connection, rows: StagedRows, workloads: Iterable[str], most: int
) -> list[dict[str, Any]]:
    """Rows that do not count yet and those of `workloads`, with `place` and the measurement columns, in file order.

    Of more than `most` rows those of each setup that took least and longest, and the newest.
    """
    judged = f"""
        select *
        from {rows}
        where list_contains($workloads, workload)
            or coalesce(run_id, row_digest) not in (select run_id from stg_imports)
    """
    names = list(workloads)
    found = connection.execute(f"select count(*) from ({judged})", {"workloads": names}).fetchone()
    if found and found[0] > most:
        judged = f"""
            with judged as ({judged}),
            extremes as (
                select unnest([arg_min(place, step_s), arg_max(place, step_s), arg_max(place, measured_at)]) as place
                from judged
                group by {_SETUP}
            )
            select * from judged where place in (select place from extremes)
        """
    query = f"select place, {', '.join(COLUMNS)} from ({judged}) order by place"
    return [
        dict(zip(("place", *COLUMNS), row, strict=True))
        for row in connection.execute(query, {"workloads": names}).fetchall()
    ]


def append_imports(
    connection: Connection,
    rows: StagedRows,
    *,
    file_digest: str,
    loaded_at: datetime,
    import_id: str,
) -> int:
    """Load them; returns how many were new. `import_id` is what they can be forgotten by."""
    names = [*COLUMNS, "row_digest"]
    stamp = {"import_id": quoted(import_id), "file_digest": quoted(file_digest)}
    stamp |= {
        "row_number": "place",
        "loaded_at": f"timestamp '{in_utc(loaded_at):%Y-%m-%d %H:%M:%S.%f}'",
    }
    new = insert_chosen(
        connection,
        "raw_imports",
        [*names, *stamp],
        f"select {', '.join([*names, *stamp.values()])} from {rows} on conflict do nothing",
    )
    insert_chosen(
        connection,
        "raw_import_rows",
        ["import_id", "row_digest"],
        f"""
            select distinct {quoted(import_id)}, rows.row_digest
            from {rows} as rows
            join raw_imports on raw_imports.row_digest = rows.row_digest
            where raw_imports.import_id <> {quoted(import_id)}
            on conflict do nothing
        """,
    )
    return new


def _relation(path: Path) -> str:
    """A Parquet file in a query; folders named `a=b` are no columns of it."""
    return f"read_parquet({quoted(str(path))}, hive_partitioning = false)"


def _scratch(folder: Path) -> Connection:
    """DuckDB in memory, which spills into `folder`."""
    return duckdb.connect(config=NO_DOWNLOADS | {"temp_directory": str(folder)})
