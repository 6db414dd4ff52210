"""Appends rows to the raw tables, idempotently: what is there stays, and each returns how many rows were new.

Takes an open connection, so that a caller joins several appends into one transaction (`Warehouse.transact`).
Times may carry any zone and are stored as UTC. A row with a column that its table lacks raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa

Row = Mapping[str, Any]
Connection = duckdb.DuckDBPyConnection

_OFFER = pa.struct(
    [
        ("instance_type", pa.string()),
        ("count", pa.int64()),
        ("market", pa.string()),
        ("zone", pa.string()),
        ("usd_per_hour", pa.float64()),
    ]
)
_ARROW = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "BIGINT": pa.int64(),
    "INTEGER": pa.int64(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us"),
}


def append_records(connection: Connection, bodies: Sequence[Row], *, refresh_id: str, loaded_at: datetime) -> int:
    """Runs as they came back: each body a wire record as a dict, with the controller's envelope under `setup`.

    The first row of a run_id stays, also within `bodies`.
    """
    rows = [
        {
            "run_id": body["run_id"],
            "kind": body["kind"],
            "status": body["status"],
            "provider": body["setup"]["provider"],
            "lease_id": body["lease_id"],
            "refresh_id": refresh_id,
            "body": dict(body),
            "loaded_at": loaded_at,
        }
        for body in bodies
    ]
    return append(connection, "raw_records", rows)


def append_imports(
    connection: Connection, rows: Sequence[Row], *, file_digest: str, loaded_at: datetime, import_id: str | None = None
) -> int:
    """Measurements made elsewhere: rows of `identity`, `row_number`, `provider`, `body` (the measurement columns), and
    `row_digest` where the identity does not tell all of them.

    `import_id` (else the file's digest) is what they can be forgotten by.
    """
    stamp = {"file_digest": file_digest, "loaded_at": loaded_at}
    stored = [{"row_digest": row["identity"]} | dict(row) | stamp for row in rows]
    held = [{"import_id": import_id or file_digest, "row_digest": row["row_digest"]} for row in stored]
    append(connection, "raw_import_rows", held)
    return append(connection, "raw_imports", stored)


def note_import(
    connection: Connection, import_id: str, *, event: str, noted_at: datetime, files: Sequence[str | None] = ()
) -> None:
    """An import was made (`event` "imported", of the files of rows and of facts) or "forgotten".

    From then on its rows and facts count, or do not. What was noted last is not noted again.
    """
    known = connection.execute(
        "select event, file, facts_file from raw_import_events where import_id = ? order by noted_order desc limit 1",
        [import_id],
    ).fetchone()
    names = (*files, None, None)[:2]
    if known is None or known[0] != event or (event == "imported" and known[1:] != names):
        row = {"import_id": import_id, "event": event, "noted_at": noted_at}
        append(connection, "raw_import_events", [row | {"file": names[0], "facts_file": names[1]}], keyed=False)


def append_facts(
    connection: Connection, facts: Sequence[Row], *, provider: str, import_id: str, noted_at: datetime
) -> None:
    """Facts of workloads that came with an import: what differs from those that count, or is not this import's yet."""
    rows = [
        {
            "provider": provider,
            "workload": fact["workload"],
            "digest": "",
            "body": {key: value for key, value in fact.items() if key != "workload"},
            "noted_at": noted_at,
            "import_id": import_id,
        }
        for fact in facts
    ]
    with _incoming(connection, "raw_workload_facts", rows) as columns:
        if columns:
            connection.execute(f"""
                insert into raw_workload_facts ({columns})
                select {columns} from incoming
                where (provider, workload, body) not in (
                        select provider, workload, body::varchar from stg_workload_facts
                    )
                    or (provider, workload, import_id, body) not in (
                        select provider, workload, import_id, body::varchar
                        from raw_workload_facts
                        where import_id is not null
                    )
            """)


def append_leases(connection: Connection, leases: Sequence[Row]) -> int:
    """Clusters that were held: the columns of raw_leases."""
    return append(connection, "raw_leases", leases)


def append_machines(connection: Connection, machines: Sequence[Row]) -> int:
    """Machines that were held: the columns of raw_machines."""
    return append(connection, "raw_machines", machines)


def append_offers(connection: Connection, offers: Sequence[Row], *, snapshot_id: str, as_of: datetime) -> int:
    """One snapshot of prices: the columns of the mart `offers`. None or NaN dollars are an unknown price."""
    rows = [dict(offer) | {"snapshot_id": snapshot_id, "as_of": as_of} for offer in offers]
    for row in rows:
        if row["usd_per_hour"] != row["usd_per_hour"]:
            row["usd_per_hour"] = None
    return append(connection, "raw_offers", rows)


def append_model(connection: Connection, model: Row) -> int:
    """One challenger: the columns of raw_models."""
    return append(connection, "raw_models", [model])


def append_scores(
    connection: Connection, scores: Sequence[Row], *, provider: str, version: str, refresh_id: str
) -> int:
    """A challenger's scoreboard: the columns of the mart `scores`, `group` included."""
    stamp = {"provider": provider, "version": version, "refresh_id": refresh_id}
    rows = [{("group_name" if key == "group" else key): value for key, value in score.items()} for score in scores]
    return append(connection, "raw_scores", [row | stamp for row in rows])


def append_ledger(connection: Connection, rows: Sequence[Row], *, refresh_id: str, judged_at: datetime) -> int:
    """Promises judged: the columns of raw_ledger. One that was judged by the same runs before is not added."""
    stamp = {"refresh_id": refresh_id, "judged_at": judged_at}
    return append(connection, "raw_ledger", [dict(row) | stamp for row in rows])


def append_drift(
    connection: Connection, rows: Sequence[Row], *, provider: str, refresh_id: str, judged_at: datetime
) -> int:
    """Groups of recent runs judged by a refresh: the columns of the mart `drift`."""
    stamp = {"provider": provider, "refresh_id": refresh_id, "judged_at": judged_at}
    return append(connection, "raw_drift", [dict(row) | stamp for row in rows])


def append_alarms(
    connection: Connection, rows: Sequence[Row], *, provider: str, refresh_id: str, judged_at: datetime
) -> int:
    """Slow runs: the columns of the mart `alarms`. One that was judged before is not judged again."""
    stamp = {"provider": provider, "refresh_id": refresh_id, "judged_at": judged_at}
    return append(connection, "raw_alarms", [dict(row) | stamp for row in rows])


def append_timings(connection: Connection, seconds: Mapping[str, float], *, refresh_id: str) -> int:
    """Seconds of a refresh that are not steps of a benchmark, by phase."""
    rows = [{"refresh_id": refresh_id, "phase": phase, "seconds": spent} for phase, spent in seconds.items()]
    return append(connection, "raw_timings", rows)


def note_workloads(connection: Connection, workloads: Sequence[Row], *, provider: str, noted_at: datetime) -> int:
    """Today's definitions: rows of `workload`, `digest` ("" for the facts of an import) and any facts.

    Only what differs from the newest note is added, so a definition that is put back is current again.
    """
    rows = [
        {
            "provider": provider,
            "workload": row["workload"],
            "digest": row["digest"],
            "body": {key: value for key, value in row.items() if key not in ("workload", "digest")},
            "noted_at": noted_at,
        }
        for row in workloads
    ]
    return _note(connection, "raw_workload_facts", "workload", rows)


def note_instance_types(connection: Connection, types: Sequence[Row], *, noted_at: datetime) -> int:
    """Today's definitions of instance types: the columns of the mart `instance_types`, `digest` included."""
    rows = [
        {
            "provider": row["provider"],
            "name": row["name"],
            "digest": row["digest"],
            "body": {key: value for key, value in row.items() if key not in ("provider", "name", "digest")},
            "noted_at": noted_at,
        }
        for row in types
    ]
    return _note(connection, "raw_instance_types", "name", rows)


def append(connection: Connection, table: str, rows: Sequence[Row], *, keyed: bool = True) -> int:
    """Append `rows` to `table`, leaving what is there by its primary key (if `keyed`); returns how many were new."""
    with _incoming(connection, table, rows) as columns:
        if not columns:
            return 0
        known = "on conflict do nothing" if keyed else ""
        query = f"insert into {table} ({columns}) select {columns} from incoming {known} returning 1"
        return len(connection.execute(query).fetchall())


def _note(connection: Connection, table: str, name: str, rows: Sequence[Row]) -> int:
    with _incoming(connection, table, rows) as columns:
        if not columns:
            return 0
        query = f"""
            with newest as (
                select provider, {name}, digest, body, digest = '' as facts_only
                from {table}
                qualify row_number() over (partition by provider, {name}, digest = '' order by noted_order desc) = 1
            )
            insert into {table} ({columns})
            select {", ".join(f"incoming.{column.strip()}" for column in columns.split(","))}
            from incoming
            left join newest
                on newest.provider = incoming.provider and newest.{name} = incoming.{name}
                and newest.facts_only = (incoming.digest = '')
            where newest.digest is distinct from incoming.digest
                or newest.body::varchar is distinct from incoming.body
            returning 1
        """
        return len(connection.execute(query).fetchall())


@contextmanager
def _incoming(connection: Connection, table: str, rows: Sequence[Row]) -> Iterator[str]:
    """Register `rows` as `incoming`, typed as `table` is; yields their columns, "" for no row."""
    if not rows:
        yield ""
        return
    known: dict[str, str] = dict(
        connection.execute(
            "select column_name, data_type from duckdb_columns() where table_name = ? order by column_index", [table]
        ).fetchall()
    )
    given = {key for row in rows for key in row}
    if given - set(known):
        raise ValueError(f"{table} has no column {', '.join(sorted(given - set(known)))}")
    schema = pa.schema([(name, _ARROW.get(kind, pa.list_(_OFFER))) for name, kind in known.items() if name in given])
    plain = [{key: _plain(value, known[key]) for key, value in row.items()} for row in rows]
    connection.register("incoming", pa.Table.from_pylist(plain, schema=schema))
    try:
        yield ", ".join(f'"{name}"' for name in schema.names)
    finally:
        connection.unregister("incoming")


def _plain(value: Any, kind: str) -> Any:
    if kind == "JSON" and value is not None and not isinstance(value, str):
        return json.dumps(value, sort_keys=True, allow_nan=False)
    if isinstance(value, datetime):
        if value != value:  # pandas' NaT
            return None
        return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
    return value
