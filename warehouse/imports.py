"""Rows of a measurement file on their way into the warehouse: temporary tables, checks in SQL, loading.

`stage_texts` -> check `distinct_setups` -> `stage_rows` -> check `bad_rows` -> `append_imports`. The
temporary tables lie in the caller's connection, so that one transaction covers all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa

from .append import Connection, in_utc, insert
from .database import NO_DOWNLOADS, select

SETUP_COLUMNS = {
    "workload": pa.string(),
    "cluster": pa.string(),
    "layout": pa.string(),
    "batch_per_device": pa.string(),
    "accumulation_steps": pa.int32(),
    "strategy": pa.string(),
    "precision": pa.string(),
    "switches": pa.string(),
    "provider": pa.string(),
    "gradient_bytes": pa.int64(),
    "parameters": pa.int64(),
    "flops_per_sample": pa.float64(),
    "market": pa.string(),
    "zone": pa.string(),
    "source": pa.string(),
}
_TIMES = ("step_s", "sync_s", "run_id", "measured_at")
COLUMNS = (*SETUP_COLUMNS, *_TIMES)
_SETUP = ", ".join(SETUP_COLUMNS)
_CONTENT = ", ".join(f"{name}::varchar" for name in COLUMNS)
_STAGED = f"""
    create or replace temp table staged as
    with typed as (
        select
            place, setups.* exclude (setup), try_cast(step_s as double) as step_s,
            try_cast(nullif(sync_s, '') as double) as sync_s, nullif(run_id, '') as run_id,
            timezone('UTC', try_cast(nullif(measured_at, '') as timestamptz)) as measured_at
        from texts
        join setups using (setup)
    ),
    hashed as (select *, md5(to_json([{_CONTENT}])) as content from typed),
    numbered as (
        select *, row_number() over (partition by content order by place) as repeat from hashed
    )
    select
        * exclude (content, repeat),
        case when run_id is null and repeat > 1 then md5(content || repeat) else content end as row_digest
    from numbered
    order by place
"""
# Each check returns the line or row, the column, its text and the rule that it breaks.
_BAD_ROWS = """
    select place, 'step_s', texts.step_s, 'must be seconds above 0'
    from staged join texts using (place)
    where not coalesce(staged.step_s > 0 and isfinite(staged.step_s), false)
    union all
    select place, 'sync_s', texts.sync_s, 'must be seconds, at least 0'
    from staged join texts using (place)
    where texts.sync_s <> '' and not coalesce(staged.sync_s >= 0 and isfinite(staged.sync_s), false)
    union all
    select place, 'measured_at', texts.measured_at, 'must be a time in ISO 8601'
    from staged join texts using (place)
    where texts.measured_at <> '' and staged.measured_at is null
    union all
    select place, 'measured_at', measured_at::varchar, 'is yet to come'
    from staged
    where measured_at > ?
    union all
    select place, 'run_id', run_id, 'has other values in row or line ' || first_place
    from staged
    join (
        select run_id, min(place) as first_place, arg_min(row_digest, place) as first_digest
        from staged
        group by run_id
    ) using (run_id)
    where row_digest <> first_digest
    order by 1, 2
"""
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


def stage_texts(connection: Connection, table: pa.Table) -> None:
    """Create the table `texts`: the contract's columns as text, '' for a missing value.

    `table` has the file's columns and `place`, the line or row of each.
    """
    connection.register("incoming", table)
    given = [name if name in table.column_names else "null" for name in COLUMNS]
    texts = [
        f"coalesce(nullif(trim({value}::varchar), 'nan'), '') as {name}"
        for name, value in zip(COLUMNS, given, strict=True)
    ]
    connection.execute(f"""
        create or replace temp table texts as
        with texts as (select place, {", ".join(texts)} from incoming)
        select *, dense_rank() over (order by {_SETUP}) as setup from texts
    """)
    connection.unregister("incoming")


def distinct_setups(connection: Connection) -> list[dict[str, Any]]:
    """Return the distinct setups of `texts`: number `setup`, first `place`, `rows`, text columns."""
    found = connection.execute(
        f"select setup, min(place) as place, count(*) as rows, {_SETUP} from texts"
        f" group by setup, {_SETUP} order by 2"
    )
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def stage_rows(connection: Connection, setups: Sequence[Mapping[str, Any]]) -> None:
    """Create the table `staged`: typed rows with `place` and `row_digest`.

    `setups` have the number `setup` and validated values. Equal rows without a run_id differ in
    `row_digest`, so that each counts.
    """
    schema = pa.schema({"setup": pa.int64()} | SETUP_COLUMNS)
    connection.register("setups", pa.Table.from_pylist(list(setups), schema=schema))
    connection.execute("set timezone = 'UTC'")
    connection.execute(_STAGED)
    connection.unregister("setups")


def bad_rows(connection: Connection, latest: datetime) -> list[tuple[int, str, str, str]]:
    """Return place, column, text and broken rule of `staged`; no row may be later than `latest`."""
    return connection.execute(_BAD_ROWS, [in_utc(latest)]).fetchall()


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
        select {_SETUP.removesuffix(", market, zone, source")}, min(step_s) as least_s, max(step_s) as most_s
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
