"""Rows for the warehouse's tests: one sound example of each (rows.json), changed by keyword."""

import json
import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from warehouse.append import append_records, note_instance_types, note_workloads
from warehouse.database import Warehouse
from warehouse.publication import Publication

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ROWS = json.loads(Path(__file__).with_name("rows.json").read_text())
PROFILE, DEFINED, TYPES = ROWS["profile"], ROWS["defined"], ROWS["types"]
INFEASIBLE = ROWS["infeasible"]  # changes of a recommendation that nothing meets

CONTRACT = ROWS["contract"]  # the columns of the published table


def fresh(folder):
    """A new warehouse in `folder`."""
    path = folder / "warehouse.duckdb"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_created())
    return Warehouse(path)


@cache
def _created():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "warehouse.duckdb"
        Warehouse(path).create()
        return path.read_bytes()


def write(warehouse, call, *words, **named):
    """A call of `warehouse.append` in a transaction of its own."""
    with warehouse.transact() as connection:
        return call(connection, *words, **named)


def define(warehouse, digest="w1", type_digest="s1"):
    """Note the definitions of tiny and small with these digests; return how many were new."""
    workloads, types = [DEFINED[0] | {"digest": digest}], [TYPES[0] | {"digest": type_digest}]
    return (
        write(warehouse, note_workloads, workloads, provider="local", noted_at=NOON),
        write(warehouse, note_instance_types, types, noted_at=NOON),
    )


def load(warehouse, *bodies, refresh_id="r", at=NOON):
    return write(warehouse, append_records, bodies, refresh_id=refresh_id, loaded_at=at)


def known(home):
    """Return status by run of the warehouse in `home`."""
    records = Warehouse(home / "warehouse.duckdb").select("raw_runs")
    return dict(zip(records["run_id"], records["status"], strict=True))


def setup(**changes):
    return ROWS["setup"] | changes


def record(run_id, **changes):
    """A wire record of a training run."""
    at = NOON.timestamp()
    whole = {"run_id": run_id, "started_unix": at, "ended_unix": at + 10.0}
    return json.loads(json.dumps(ROWS["record"])) | whole | changes


def body(run_id, *, of=None, **changes):
    """A record with its setup, as `append_records` takes it."""
    return record(run_id, **changes) | {"setup": of or setup()}


def refused(**setups):
    """A row of the controller about a launch that was refused."""
    row = body("b", status="refused", kind="launch", reason="no capacity", values={}, **setups)
    del row["attempt"]
    return row


def recommendation(**changes):
    row = ROWS["recommendation"] | {"price_as_of": NOON, "newest_measurement_at": NOON} | changes
    step = row["step_s"] and abs(row["step_s"])
    shares = {"compute": 0.5, "communication": 0.75, "exposed_communication": 0.25, "input": 0.25}
    parts = {f"{name}_s": step and share * step for name, share in shares.items()}
    return {"usd_machines": row["usd"]} | parts | row


def lease(ended_at=NOON, **changes):
    return ROWS["lease"] | {"started_at": ended_at, "ended_at": ended_at} | changes


def offered(name, count, usd_per_hour):
    row = {"instance_type": name, "count": count, "market": "spot", "zone": "here"}
    return row | {"usd_per_hour": usd_per_hour}


def stamp(n, provider="local", model_version="1"):
    """The n-th publication."""
    return Publication(
        publication_id=f"{provider}-{n}",
        published_at=NOON + timedelta(days=n),
        provider=provider,
        refresh_id=f"refresh-{n}",
        model_version=model_version,
    )


def judgement(promise_id="p1", evidence="e1", **changes):
    """A promise of the first publication, judged by two runs of the choice and one of a rival."""
    times = {"published_at": NOON, "newest_measured_at": NOON + timedelta(hours=2)}
    times["first_measured_at"] = NOON + timedelta(hours=1)
    name = {"promise_id": promise_id, "evidence": evidence}
    return ROWS["judgement"] | name | times | changes
