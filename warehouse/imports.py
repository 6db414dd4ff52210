"""Rows of a measurement file on their way into the warehouse.

`stage` reads them into the temporary table `staged` (importing/stage.sql), `problems` checks them
(importing/problems.sql), `append_imports` loads them. The tables lie in the caller's connection, so
that one transaction covers all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa

from .append import Connection, in_utc, insert
from .database import NO_DOWNLOADS, SQL_FOLDER, select
from .reads import SETUP

_FOLDER = SQL_FOLDER / "importing"
SETUP_COLUMNS = (*SETUP, "provider", "flops_per_sample")
_OTHERS = ("gradient_bytes", "parameters", "market", "zone", "source")
COLUMNS = (*SETUP_COLUMNS, *_OTHERS, "step_s", "sync_s", "run_id", "measured_at")
_SETUP = ", ".join(SETUP_COLUMNS)
_JUDGED = f"""
    select {_SETUP}, count(*)::integer as rows, min(place) as place,
        min(step_s) as least_s, arg_min(place, step_s) as least_place,
        max(step_s) as most_s, arg_max(place, step_s) as most_place
    from staged
    where list_contains($workloads, workload)
        or coalesce(run_id, row_digest) not in (select run_id from stg_imports)
    group by {_SETUP}
    order by min(place)
"""


@contextmanager
def scratch() -> Iterator[Connection]:
    """Yield a connection to an empty database in memory."""
    with duckdb.connect(config=NO_DOWNLOADS) as connection:
        yield connection


def stage(connection: Connection, table: pa.Table) -> None:
    """Create `texts`, the contract's columns as text ('' is missing), and `staged`, as typed rows.

    `table` has the file's columns and `place`, the line or row of each.
    """
    connection.register("incoming", table)
    texts = [
        f"coalesce(nullif(trim({name}::varchar), 'nan'), '') as {name}"
        if name in table.column_names
        else f"'' as {name}"
        for name in COLUMNS
    ]
    connection.execute(
        f"create or replace temp table texts as select place, {', '.join(texts)} from incoming"
    )
    connection.unregister("incoming")
    connection.execute("set timezone = 'UTC'")
    connection.execute((_FOLDER / "stage.sql").read_text())


def problems(connection: Connection, known: Mapping[str, Any]) -> list[tuple[int, str, str, str]]:
    """Return place, column, text and broken rule of each bad value.

    `known` has the legal `precisions`, `strategies`, `modes` ("strategy switches") and `providers`,
    and the `latest` time of a measurement.
    """
    return connection.execute((_FOLDER / "problems.sql").read_text(), dict(known)).fetchall()


def staged_frame(connection: Connection) -> pd.DataFrame:
    """Return the staged rows as the mart `runs` has them, in the file's order."""
    columns = ", ".join(
        "coalesce(run_id, row_digest) as run_id" if name == "run_id" else name for name in COLUMNS
    )
    return select(connection, f"select {columns} from staged order by place")


def staged_counts(connection: Connection) -> pd.DataFrame:
    """Return the number of `rows` of each setup in the file."""
    return select(connection, f"select {_SETUP}, count(*) as rows from staged group by all")


def counted_before(connection: Connection) -> tuple[int, int]:
    """Return how many staged rows are new, and how many have a known run_id with another step_s."""
    found = connection.execute("""
        select
            count(distinct coalesce(staged.run_id, staged.row_digest)) filter (where known.run_id is null),
            count(*) filter (where staged.run_id is not null and known.step_s <> staged.step_s)
        from staged
        left join stg_imports as known on known.run_id = coalesce(staged.run_id, staged.row_digest)
    """).fetchall()
    return int(found[0][0]), int(found[0][1])


def setups_to_judge(connection: Connection, workloads: Iterable[str]) -> pd.DataFrame:
    """Return the setups with new rows, and all of `workloads`, with the extremes of `step_s`."""
    return select(connection, _JUDGED, {"workloads": list(workloads)})


def known_setups(connection: Connection) -> pd.DataFrame:
    """Return `least_s` and `most_s` of each setup that counts already, of the staged workloads."""
    return select(
        connection,
        f"""
        select {_SETUP}, min(step_s) as least_s, max(step_s) as most_s
        from runs
        where workload in (select workload from staged)
        group by all
        """,
    )


def append_imports(
    connection: Connection, *, file_digest: str, loaded_at: datetime, import_id: str
) -> int:
    """Load the staged rows, which can be forgotten by `import_id`; returns how many were new."""
    stamp = {"import_id": import_id, "file_digest": file_digest, "loaded_at": in_utc(loaded_at)}
    connection.register("stamp", pa.Table.from_pylist([stamp]))
    names = [*COLUMNS, "row_digest", *stamp]
    new = insert(
        connection,
        "raw_imports",
        [*names, "row_number"],
        f"select {', '.join(names)}, place as row_number from staged, stamp order by place",
    )
    insert(
        connection,
        "raw_import_rows",
        ("import_id", "row_digest"),
        """
            select stamp.import_id, row_digest
            from (select distinct row_digest from staged)
            join raw_imports using (row_digest), stamp
            where raw_imports.import_id <> stamp.import_id
        """,
    )
    connection.unregister("stamp")
    return new
