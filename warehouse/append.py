"""Append rows to the raw tables, except rows whose key is already stored.

Each function takes an open connection, so that a caller can make several appends in one transaction
(`Warehouse.transact`). Times are stored in UTC.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from .database import SQL_FOLDER, Connection

Row = Mapping[str, Any]

# {table: columns of its key, as SQL}
_KEYS = {
    "raw_runs": "run_id",
    "raw_imports": "row_digest",
    "raw_import_rows": "import_id, row_digest",
    "raw_offers": "snapshot_id, provider, instance_type, market, region, zone",
    "raw_leases": "lease_id",
    "raw_downloads": "workload, workload_digest, planned_at",
    "raw_machines": "lease_id, node, number",
    "raw_claims": "event, refresh_id",
    "raw_models": "provider, version, refresh_id",
    "raw_scores": 'provider, version, refresh_id, split, "group"',
    "raw_publications": "publication_id",
    "raw_ledger": "promise_id, evidence",
    "raw_drift": "refresh_id, provider, scope, instance_type, zone",
    "raw_alarms": "run_id",
}


def append_records(
    connection: Connection, bodies: Sequence[Row], *, refresh_id: str, loaded_at: datetime
) -> int:
    """Append run records to the table raw_runs, and return the number of new rows.

    bodies: records as dictionaries (tasks/node/record.py). A value that cannot be cast to the type
    of its column is stored as null.
    """
    stamp = {"refresh_id": refresh_id, "loaded_at": in_utc(loaded_at).isoformat()}
    texts = [json.dumps({**body, **stamp}) for body in bodies]
    types = _columns(connection, "raw_runs")
    connection.register("texts", pa.table({"body": pa.array(texts, pa.string())}))
    # A machine may write an invalid record.
    values = ", ".join(
        f"try_cast(body {'->>' if kind == 'VARCHAR' else '->'} '$.{name}' as {kind}) as {name}"
        for name, kind in types.items()
    )
    flat = (SQL_FOLDER / "records.sql").read_text()
    return insert(connection, "raw_runs", list(types), f"select {values} from ({flat})")


def note_import(
    connection: Connection,
    import_id: str,
    *,
    event: str,
    noted_at: datetime,
    files: Sequence[str | None] = (None, None),
) -> None:
    """Record that an import was made, or that it was forgotten (undone).

    event: "imported" or "forgotten".
    files: (name of the measurement file or None, name of the facts file or None).
    """
    file, facts_file = files
    row = {"import_id": import_id, "event": event, "file": file, "facts_file": facts_file}
    _note(connection, "raw_import_events", "import_id", [row | {"noted_at": noted_at}])


def note_workloads(connection: Connection, workloads: Sequence[Row], **stamp: Any) -> int:
    """Append workload definitions and facts that have changed; return the number of new rows.

    A definition is compared with the newest stored definition of the same workload. Facts are
    compared with the newest stored facts.

    workloads: definitions or facts. A definition from srift.toml has a `digest`. Facts
    (parameters, FLOPs, ...) from an import have an empty `digest` and an `import_id`.
    stamp: columns to add to every row.
    """
    rows = [dict(row) | stamp for row in workloads]
    return _note(connection, "raw_workload_facts", "provider, workload, digest = ''", rows)


def note_instance_types(connection: Connection, types: Sequence[Row], *, noted_at: datetime) -> int:
    """Append the definitions of instance types that are new or have changed; return their number.

    types: rows with the columns of the mart `instance_types`.
    """
    known = _columns(connection, "raw_instance_types").keys()
    rows = [
        {name: row[name] for name in known & row.keys()} | {"noted_at": noted_at} for row in types
    ]
    return _note(connection, "raw_instance_types", "provider, name", rows)


def _note(connection: Connection, table: str, key: str, rows: Sequence[Row]) -> int:
    """Append rows that differ from the newest stored row with the same key; return their number.

    key: SQL expressions that form the key, separated by commas.
    """
    names = [
        name for name in _columns(connection, table) if name not in ("noted_at", "noted_order")
    ]
    columns = ", ".join(names)
    changed = f"""
        select * from incoming
        where ({columns}) not in (
            select ({columns})
            from {table}
            qualify row_number() over (partition by {key} order by noted_order desc) = 1
        )
    """
    complete = [dict.fromkeys(names) | dict(row) for row in rows]
    return append(connection, table, complete, chosen=changed)


def append(
    connection: Connection,
    table: str,
    rows: Sequence[Row],
    *,
    chosen: str = "select * from incoming",
    **stamp: Any,
) -> int:
    """Append rows to `table`, and return the number of new rows.

    Rows whose key is already stored are skipped.
    chosen: an SQL query that selects the rows to append. The query reads `rows` as the table
        `incoming`.
    stamp: columns to add to every row.
    Raises ValueError if a row has a column that `table` lacks.
    """
    if not rows:
        return 0
    # Arrow converts times to UTC, but does not know NaT, which is unequal to itself.
    plain = [
        {
            key: None if isinstance(value, datetime) and value != value else value
            for key, value in {**row, **stamp}.items()
        }
        for row in rows
    ]
    known = connection.execute(f"select * from {table} limit 0").to_arrow_table().schema
    given = {key for row in plain for key in row}
    if unknown := given - set(known.names):
        raise ValueError(f"{table} has no column {', '.join(sorted(unknown))}")
    schema = pa.schema([field for field in known if field.name in given])
    connection.register("incoming", pa.Table.from_pylist(plain, schema=schema))
    return insert(connection, table, schema.names, chosen)


def insert(connection: Connection, table: str, columns: Sequence[str], chosen: str) -> int:
    """Insert the result of a query into `table`, and return the number of new rows.

    A row is skipped if a row with the same key is already stored or occurs earlier in the result.
    _KEYS has the key columns of each table.
    columns: the names of the result's columns.
    chosen: the SQL query.
    """
    keys = _KEYS.get(table, "")
    names = ", ".join(f'"{name}"' for name in columns)
    query = f"select {names}, row_number() over () as append_order from ({chosen})"
    if keys:
        query = f"""
            select * from ({query}) anti join {table} using ({keys})
            qualify row_number() over (partition by {keys} order by append_order) = 1
        """
    order = ""
    if "noted_order" in _columns(connection, table):
        order = (
            f", append_order + (select coalesce(max(noted_order), 0) from {table}) as noted_order"
        )
    [(count,)] = connection.execute(
        f"insert into {table} by name select * exclude (append_order){order}"
        f" from ({query}) order by append_order"
    ).fetchall()
    return int(count)


def _columns(connection: Connection, table: str) -> dict[str, str]:
    """Return the columns of a table as {name: data type}."""
    query = f"select column_name, column_type from (describe {table})"
    return dict(connection.execute(query).fetchall())


def in_utc(moment: datetime) -> datetime:
    """Return the time in UTC as a naive datetime; a naive `moment` must already be in UTC."""
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
