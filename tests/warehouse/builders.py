"""Rows for the warehouse's tests: one sound example of each, changed by keyword."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from warehouse.database import Warehouse
from warehouse.publication import Publication

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)

# The columns of the published table, which are a contract.
CONTRACT = [
    "publication_id",
    "published_at",
    "provider",
    "workload",
    "samples",
    "global_batch",
    "goal",
    "constraint_hours",
    "constraint_usd",
    "p_required",
    "rank",
    "status",
    "cluster",
    "cluster_offers",
    "layout",
    "batch_per_device",
    "accumulation_steps",
    "strategy",
    "precision",
    "region",
    "step_s",
    "step_low_s",
    "step_high_s",
    "samples_per_s",
    "hours",
    "hours_p90",
    "usd",
    "usd_p90",
    "usd_per_million_samples",
    "p_meets_constraint",
    "p_best",
    "bottleneck",
    "measured_runs",
    "reason",
    "price_as_of",
    "newest_measurement_at",
    "model_version",
    "market",
    "usd_machines",
    "usd_storage",
    "usd_other",
    "interruption_risk",
    "expected_interruptions",
    "interruption_source",
    "placement_score",
    "switches",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
    "input_s",
]


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


_SPLIT: dict[str, Any] = {
    "layout": "1",
    "batch_per_device": "8",
    "accumulation_steps": 1,
    "strategy": "ddp",
    "precision": "fp32",
    "switches": "none",
    "market": "spot",
}


def setup(**changes: Any) -> dict[str, Any]:
    return (
        _SPLIT
        | {
            "provider": "local",
            "workload": "tiny",
            "cluster": "2xsmall",
            "zone": "here",
            "region": "here",
            "usd_per_hour": 0.02,
            "reason_wanted": "a pilot",
            "instance_types": ["small", "small"],
            "instance_digests": ["s1", "s1"],
            "workload_digest": "w1",
            "code_commit": "abc",
        }
        | changes
    )


def record(run_id: str, **changes: Any) -> dict[str, Any]:
    """A wire record of a training run."""
    return {
        "run_id": run_id,
        "lease_id": "lease",
        "attempt": 1,
        "kind": "train",
        "devices": [],
        "cause": "",
        "status": "measured",
        "reason": "",
        "item": {},
        "workload_digest": "w1",
        "started_unix": NOON.timestamp(),
        "ended_unix": NOON.timestamp() + 10.0,
        "fingerprint": "cpu",
        "torch_version": "2",
        "values": {
            "step_s": 0.5,
            "step_spread": 0.01,
            "sync_s": 0.1,
            "parameters": 10,
            "gradient_bytes": 40,
            "flops_per_sample": None,
        },
    } | changes


def body(run_id: str, *, of: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A record with its setup, as `append_records` takes it."""
    return record(run_id, **changes) | {"setup": of or setup()}


PROFILE = {
    "parameters": 10,
    "gradient_bytes": 40,
    "flops_per_sample": 3.0,
    "rows": [
        {
            "batch": 8,
            "forward_s": 0.1,
            "backward_s": 0.2,
            "optimizer_s": 0.01,
            "peak_bytes": None,
            "repeats": 5,
        }
    ],
    "buckets": [{"bytes": 30, "ready_fraction": 0.4}, {"bytes": 10, "ready_fraction": 1.0}],
}
DEFINED = [{"workload": "tiny", "digest": "w1", "samples": 1000}]
TYPES = [
    {
        "provider": "local",
        "name": "small",
        "digest": "s1",
        "devices": 1,
        "device": "cpu",
        "device_tflops": None,
        "cores": 0.2,
        "memory_gib": 2.0,
        "device_memory_gib": 2.0,
        "bandwidth_gbps": 0.2,
    }
]


def recommendation(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = _SPLIT | {
        "workload": "tiny",
        "samples": 1000,
        "global_batch": 16,
        "goal": "cheapest",
        "rank": 1,
        "status": "recommended",
        "constraint_hours": None,
        "constraint_usd": None,
        "p_required": 0.9,
        "cluster": "2xsmall",
        "cluster_offers": [offered("small", 2, 0.01)],
        "region": "here",
        "step_s": 0.5,
        "step_low_s": 0.4,
        "step_high_s": 0.6,
        "samples_per_s": 32.0,
        "bottleneck": "compute",
        "hours": 1.0,
        "hours_p90": 1.2,
        "usd": 0.02,
        "usd_p90": 0.03,
        "usd_per_million_samples": 20.0,
        "usd_storage": 0.0,
        "usd_other": 0.0,
        "p_meets_constraint": None,
        "p_best": 0.7,
        "measured_runs": 2,
        "reason": "it costs least",
        "price_as_of": NOON,
        "newest_measurement_at": NOON,
        "interruption_risk": 0.2,
        "expected_interruptions": 0.25,
        "interruption_source": "as srift.toml states",
        "placement_score": None,
    }
    row |= changes
    shares = {
        "compute_s": 0.5,
        "communication_s": 0.75,
        "exposed_communication_s": 0.25,
        "input_s": 0.25,
    }
    parts = {name: row["step_s"] and share * abs(row["step_s"]) for name, share in shares.items()}
    return {"usd_machines": row["usd"]} | parts | row


_EMPTY = """cluster layout batch_per_device accumulation_steps step_s step_low_s step_high_s
    samples_per_s hours hours_p90 usd usd_p90 usd_per_million_samples p_best"""
# Changes for a recommendation that nothing meets.
INFEASIBLE = dict.fromkeys(_EMPTY.split()) | {"cluster_offers": [], "status": "infeasible"}


def offered(name: str, count: int, usd_per_hour: float | None) -> dict[str, Any]:
    return {
        "instance_type": name,
        "count": count,
        "market": "spot",
        "zone": "here",
        "usd_per_hour": usd_per_hour,
    }


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
    return {
        "promise_id": promise_id,
        "evidence": evidence,
        "evidence_runs": 3,
        "runs": 2,
        "provider": "local",
        "publication_id": "local-1",
        "published_at": NOON,
        "model_version": "1",
        "workload": "tiny",
        "goal": "cheapest",
        "cluster": "2xsmall",
        "market": "spot",
        "met_constraint": None,
        "promised_step_s": 0.5,
        "promised_step_low_s": 0.4,
        "promised_step_high_s": 0.6,
        "promised_hours": 1.0,
        "promised_usd": 0.02,
        "measured_step_s": 0.55,
        "measured_hours": 1.1,
        "measured_usd": 0.022,
        "within_interval": True,
        "rivals_named": 2,
        "rivals_measured": 1,
        "verdict": "compared",
        "regret": 0.1,
        "first_measured_at": NOON + timedelta(hours=1),
        "newest_measured_at": NOON + timedelta(hours=2),
    } | changes
