"""Stage, check and load a file of measurements.

1. `stage` reads the rows into the temporary table `staged`.
2. `problems` checks the staged rows.
3. `append_imports` loads the staged rows.

All functions use the caller's connection, so that one transaction can cover the three steps.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa

from .append import Row, in_utc, insert
from .database import NO_DOWNLOADS, SQL_FOLDER, Connection, rows_of_query, select
from .reads import SETUP

_FOLDER = SQL_FOLDER / "importing"
COLUMNS = (
    *SETUP,
    *("provider", "gradient_bytes", "parameters", "flops_per_sample", "market", "zone", "source"),
    *("step_s", "sync_s", "run_id", "measured_at"),
)
# Step times of one setup differ by tens of percent, or by a factor of 1,000 if the unit is wrong.
_MOST_RATIO = 100.0
# A run may exceed the peak FLOP/s of its device, because Winograd convolutions do only 0.44 of the
# multiplications that are counted.
_HEADROOM = 1.5
Problem = tuple[int, str, str, str]


def scratch() -> Connection:
    """Return a connection to an empty database in memory."""
    return duckdb.connect(config=NO_DOWNLOADS)


def stage(connection: Connection, table: pa.Table) -> None:
    """Load the rows of a measurement file into the temporary tables `texts` and `staged`.

    `texts` has the columns COLUMNS as text, with '' for a missing value. `staged` has typed columns
    (importing/stage.sql).
    table: the rows of the file, with an additional column `place`: the line or row number.
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
    connection.execute("set timezone = 'UTC'")
    connection.execute((_FOLDER / "stage.sql").read_text())


def _ask(connection: Connection, name: str, params: Mapping[str, Any]) -> list[Any]:
    """Run the query in the file importing/{name}.sql, and return its rows."""
    return connection.execute((_FOLDER / f"{name}.sql").read_text(), dict(params)).fetchall()


def remember(connection: Connection) -> None:
    """Copy the imported rows and facts to temporary tables, for `changes`."""
    for name, view in (("rows_before", "stg_imports"), ("facts_before", "stg_workload_facts")):
        connection.execute(f"create or replace temp table {name} as select * from {view}")


def changes(connection: Connection, workloads: Sequence[str] = ()) -> dict[str, int]:
    """Compare the imported rows and facts with the copies that `remember` made.

    Returns the counts rows_gone, facts_gone, facts_new, facts_changed and facts_same. The file
    importing/changes.sql defines them.
    workloads: the workloads that facts_new, facts_changed and facts_same count. The other counts
        cover all workloads.
    """
    text = (_FOLDER / "changes.sql").read_text()
    return rows_of_query(connection, text, {"workloads": list(workloads)})[0]


def problems(connection: Connection, known: Mapping[str, Any]) -> list[Problem]:
    """Return a tuple (place, column, value, rule) for each staged value that breaks a rule.

    For example: (3, "parameters", "x", "must be a whole number"). `place` is the line or row number
    in the file.
    known: the permitted values:

        precisions, strategies, providers: lists of names.
        modes: list of texts `strategy switches`, such as "fsdp compile+offload" or "ddp none".
        latest: the latest permitted time of a measurement.
    """
    return _ask(connection, "problems", known)


def implausible(
    connection: Connection, types: Sequence[Row], workloads: Sequence[str]
) -> list[Problem]:
    """Return a tuple (place, column, value, reason) for each implausible staged row.

    `place` is the line or row number in the file.
    types: one row per known instance type and precision, with the columns provider, name, devices,
        precision and peak_tflops.
    workloads: all staged rows of these workloads are checked. For other workloads, only rows that
        are not stored yet are checked.
    """
    connection.register("known_types", pa.Table.from_pylist(list(types)))
    limits = {"most_ratio": _MOST_RATIO, "headroom": _HEADROOM}
    return _ask(connection, "implausible", limits | {"workloads": list(workloads)})


def staged_counts(connection: Connection) -> dict[str, dict[str, int]]:
    """Count the staged rows of each workload, each provider, each instance type and each mode.

    Returns {title: {name: number of rows}}, such as {"workload": {"vit": 12}}. The modes are
    counted under three titles: precision, strategy and switches.
    """
    counts: dict[str, dict[str, int]] = {}
    for title, name, rows in _ask(connection, "counts", {}):
        counts.setdefault(title, {})[name] = rows
    return counts


def staged_frame(connection: Connection) -> pd.DataFrame:
    """Return the staged rows in the file's order, as a frame with the columns COLUMNS.

    A missing run_id is replaced by a digest of the row's values.
    """
    columns = ", ".join(
        "coalesce(run_id, row_digest) as run_id" if name == "run_id" else name for name in COLUMNS
    )
    return select(connection, f"select {columns} from staged order by place")


def counted_before(connection: Connection) -> tuple[int, int]:
    """Return the number of new staged rows, and the number of staged rows with a new step_s.

    A row is new if it is not stored yet, or if its import was forgotten (undone). A row has a new
    step_s if a stored row with the same run_id has a different step_s.
    """
    [(new, other)] = connection.execute("""
        select
            count(distinct coalesce(staged.run_id, staged.row_digest))
                filter (where known.run_id is null),
            count(*) filter (where staged.run_id is not null and known.step_s <> staged.step_s)
        from staged
        left join stg_imports as known on known.run_id = coalesce(staged.run_id, staged.row_digest)
    """).fetchall()
    return new, other


def append_imports(
    connection: Connection, *, file_digest: str, loaded_at: datetime, import_id: str
) -> None:
    """Append the staged rows to the table raw_imports.

    A row that an earlier import stored is not appended again. The table raw_import_rows records
    that the row also belongs to `import_id`.
    file_digest: the digest of the file's content.
    """
    stamp = {"import_id": import_id, "file_digest": file_digest, "loaded_at": in_utc(loaded_at)}
    connection.register("stamp", pa.Table.from_pylist([stamp]))
    names = [*COLUMNS, "row_digest", *stamp]
    insert(
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
