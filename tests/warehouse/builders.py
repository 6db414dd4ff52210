"""Rows for the warehouse's tests: one sound example of each (rows.json), changed by keyword."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from warehouse.database import Warehouse
from warehouse.publication import Publication

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
ROWS: dict[str, Any] = json.loads(Path(__file__).with_name("rows.json").read_text())
PROFILE, DEFINED, TYPES = ROWS["profile"], ROWS["defined"], ROWS["types"]
INFEASIBLE = ROWS["infeasible"]  # changes of a recommendation that nothing meets

CONTRACT = ROWS["contract"]  # the columns of the published table


def fresh(folder: Path) -> Warehouse:
    """A new warehouse in `folder`."""
    path = folder / "warehouse.duckdb"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_created())
    return Warehouse(path)


@cache
def _created() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "warehouse.duckdb"
        Warehouse(path).create()
        return path.read_bytes()


def setup(**changes: Any) -> dict[str, Any]:
    return ROWS["setup"] | changes


def record(run_id: str, **changes: Any) -> dict[str, Any]:
    """A wire record of a training run."""
    at = NOON.timestamp()
    whole = {"run_id": run_id, "started_unix": at, "ended_unix": at + 10.0}
    return json.loads(json.dumps(ROWS["record"])) | whole | changes


def body(run_id: str, *, of: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A record with its setup, as `append_records` takes it."""
    return record(run_id, **changes) | {"setup": of or setup()}


def recommendation(**changes: Any) -> dict[str, Any]:
    row = ROWS["recommendation"] | {"price_as_of": NOON, "newest_measurement_at": NOON} | changes
    step = abs(row["step_s"] or 0.0) or None
    shares = {"compute": 0.5, "communication": 0.75, "exposed_communication": 0.25, "input": 0.25}
    parts = {f"{name}_s": step and share * step for name, share in shares.items()}
    return {"usd_machines": row["usd"]} | parts | row


def offered(name: str, count: int, usd_per_hour: float | None) -> dict[str, Any]:
    row = {"instance_type": name, "count": count, "market": "spot", "zone": "here"}
    return row | {"usd_per_hour": usd_per_hour}


def stamp(n: int, provider: str = "local", model_version: str = "1") -> Publication:
    """The n-th publication."""
    return Publication(
        publication_id=f"{provider}-{n}",
        published_at=NOON + timedelta(days=n),
        provider=provider,
        refresh_id=f"refresh-{n}",
        model_version=model_version,
    )


def judgement(promise_id: str = "p1", evidence: str = "e1", **changes: Any) -> dict[str, Any]:
    """A promise of the first publication, judged by two runs of the choice and one of a rival."""
    times = {"published_at": NOON, "newest_measured_at": NOON + timedelta(hours=2)}
    times["first_measured_at"] = NOON + timedelta(hours=1)
    name = {"promise_id": promise_id, "evidence": evidence}
    return ROWS["judgement"] | name | times | changes
