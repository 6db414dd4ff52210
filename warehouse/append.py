"""Appends rows to the raw tables, idempotently: what is there stays, and each returns how many rows were new.

Takes an open connection, so that a caller joins several appends into one transaction (`Warehouse.transact`).
Times may carry any zone and are stored as UTC. A row with a column that its table lacks raises ValueError.

`append` is for rows that have their table's columns; the others here make such rows of what their callers have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa

from . import lake

Row = Mapping[str, Any]
Connection = duckdb.DuckDBPyConnection

_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()
_OFFERS = pa.list_(
    pa.struct(
        {
            "instance_type": _TEXT,
            "count": _WHOLE,
            "market": _TEXT,
            "zone": _TEXT,
            "usd_per_hour": _REAL,
        }
    )
)
_ARROW = {
    "VARCHAR": _TEXT,
    "JSON": _TEXT,
    "BIGINT": _WHOLE,
    "INTEGER": _WHOLE,
    "DOUBLE": _REAL,
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us"),
}

_OWN_TABLE = {"learn": "raw_learning", "elastic": "raw_elastic"}  # by kind of run


def append_records(
    connection: Connection, bodies: Sequence[Row], *, refresh_id: str, loaded_at: datetime
) -> int:
    """Runs as they came back: each body a wire record as a dict, with what is known of its setup under `setup`.

    The first row of a run_id stays, also within `bodies`. Learning and elastic runs have tables of their own: they time
    no steady step.
    """
    rows = [
        {
            "run_id": body["run_id"],
            "kind": body["kind"],
            "status": body["status"],
            "provider": body["setup"]["provider"],
            "lease_id": body["lease_id"],
            "body": dict(body),
        }
        for body in bodies
    ]
    new = 0
    for table in ("raw_records", *_OWN_TABLE.values()):
        mine = [row for row in rows if _OWN_TABLE.get(row["kind"], "raw_records") == table]
        new += append(connection, table, mine, refresh_id=refresh_id, loaded_at=loaded_at)
    return new


def note_import(
    connection: Connection,
    import_id: str,
    *,
    event: str,
    noted_at: datetime,
    files: Sequence[str | None] = (),
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
        row = {"event": event, "noted_at": noted_at, "file": names[0], "facts_file": names[1]}
        append(connection, "raw_import_events", [row], keyed=False, import_id=import_id)


def append_facts(
    connection: Connection,
    facts: Sequence[Row],
    *,
    provider: str,
    import_id: str,
    noted_at: datetime,
) -> None:
    """Facts of workloads that came with an import: what differs from those that count, or is not this import's yet."""
    stamp = {"provider": provider, "digest": "", "noted_at": noted_at, "import_id": import_id}
    rows = [_with_body(fact, "workload") | stamp for fact in facts]
    kept = """
        select * from incoming
        where (provider, workload, body) not in (
                select provider, workload, body::varchar from stg_workload_facts
            )
            or (provider, workload, import_id, body) not in (
                select provider, workload, import_id, body::varchar
                from raw_workload_facts
                where import_id is not null
            )
    """
    _insert(connection, "raw_workload_facts", rows, kept)


def append_offers(
    connection: Connection, offers: Sequence[Row], *, snapshot_id: str, as_of: datetime
) -> int:
    """One snapshot of prices: the columns of the mart `offers`. None or NaN dollars are an unknown price."""
    unknown = {"usd_per_hour": None}
    rows = [
        offer if offer["usd_per_hour"] == offer["usd_per_hour"] else dict(offer) | unknown
        for offer in offers
    ]
    return append(connection, "raw_offers", rows, snapshot_id=snapshot_id, as_of=as_of)


def append_scores(
    connection: Connection, scores: Sequence[Row], *, provider: str, version: str, refresh_id: str
) -> int:
    """A challenger's scoreboard: the columns of the mart `scores`, `group` included."""
    rows = [
        {("group_name" if key == "group" else key): value for key, value in score.items()}
        for score in scores
    ]
    return append(
        connection, "raw_scores", rows, provider=provider, version=version, refresh_id=refresh_id
    )


def note_workloads(
    connection: Connection, workloads: Sequence[Row], *, provider: str, noted_at: datetime
) -> int:
    """Today's definitions: rows of `workload`, `digest` ("" for the facts of an import) and any facts.

    Only what differs from the newest note is added, so a definition that is put back is current again.
    """
    stamp = {"provider": provider, "noted_at": noted_at}
    rows = [_with_body(row, "workload", "digest") | stamp for row in workloads]
    return _note(connection, "raw_workload_facts", "workload", rows)


def note_instance_types(connection: Connection, types: Sequence[Row], *, noted_at: datetime) -> int:
    """Today's definitions of instance types: the columns of the mart `instance_types`, `digest` included."""
    rows = [_with_body(row, "provider", "name", "digest") | {"noted_at": noted_at} for row in types]
    return _note(connection, "raw_instance_types", "name", rows)


def append(
    connection: Connection, table: str, rows: Sequence[Row], *, keyed: bool = True, **stamp: Any
) -> int:
    """Append `rows`, each with the columns of `stamp`, leaving what is there by the primary key (if `keyed`).

    Returns how many were new. Raises ValueError for a column that `table` lacks.
    """
    known = "on conflict do nothing" if keyed else ""
    return _insert(
        connection, table, [dict(row) | stamp for row in rows], f"select * from incoming {known}"
    )


def _with_body(row: Row, *columns: str) -> dict[str, Any]:
    """`columns` as they are, all others in the column `body`."""
    body = {key: value for key, value in row.items() if key not in columns}
    return {name: row[name] for name in columns} | {"body": body}


def _note(connection: Connection, table: str, name: str, rows: Sequence[Row]) -> int:
    changed = f"""
        with newest as (
            select provider, {name}, digest, body, digest = '' as facts_only
            from {table}
            qualify row_number() over (partition by provider, {name}, digest = '' order by noted_order desc) = 1
        )
        select incoming.*
        from incoming
        left join newest
            on newest.provider = incoming.provider and newest.{name} = incoming.{name}
            and newest.facts_only = (incoming.digest = '')
        where newest.digest is distinct from incoming.digest
            or newest.body::varchar is distinct from incoming.body
    """
    return _insert(connection, table, rows, changed)


def _insert(connection: Connection, table: str, rows: Sequence[Row], chosen: str) -> int:
    """Insert what the query `chosen` takes from `incoming`, which are the `rows`, typed as `table` is; how many."""
    if not rows:
        return 0
    asked = "select column_name, data_type from duckdb_columns() where table_name = ? order by column_index"
    known: dict[str, str] = dict(connection.execute(asked, [table]).fetchall())
    given = {key for row in rows for key in row}
    if given - set(known):
        raise ValueError(f"{table} has no column {', '.join(sorted(given - set(known)))}")
    schema = pa.schema(
        [(name, _ARROW.get(kind, _OFFERS)) for name, kind in known.items() if name in given]
    )
    plain = [{key: _plain(value, known[key]) for key, value in row.items()} for row in rows]
    connection.register("incoming", pa.Table.from_pylist(plain, schema=schema))
    try:
        return insert_chosen(connection, table, schema.names, chosen)
    finally:
        connection.unregister("incoming")


def insert_chosen(connection: Connection, table: str, columns: Sequence[str], chosen: str) -> int:
    """Insert what the query `chosen` takes, which has these `columns`; how many rows were new."""
    names = ", ".join(f'"{name}"' for name in columns)
    if lake.is_shared(connection):
        return lake.insert(connection, table, names, chosen)
    before = _number(connection, table)
    connection.execute(f"insert into {table} ({names}) {chosen}")
    return _number(connection, table) - before


def _number(connection: Connection, table: str) -> int:
    found = connection.execute(f"select count(*) from {table}").fetchone()
    return int(found[0]) if found else 0


def in_utc(moment: datetime) -> datetime:
    """Without a zone, as it is stored."""
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment


def _plain(value: Any, kind: str) -> Any:
    if kind == "JSON" and value is not None and not isinstance(value, str):
        return json.dumps(value, sort_keys=True, allow_nan=False)
    if isinstance(value, datetime):
        return None if value != value else in_utc(value)  # pandas' NaT
    return value
