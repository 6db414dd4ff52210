"""Write metrics of the newest published table for Prometheus, to `published/metrics.prom`.

node_exporter's textfile collector reads the file. In PromQL, the age of the table in seconds is
`time() - srift_published_timestamp_seconds`.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from models.domain.workload import GOAL_COLUMNS
from models.planner.choice_rule import row_misses

_COLUMNS = {
    "srift_choice_feasible": "feasible",
    "srift_choice_hours": "hours",
    "srift_choice_usd": "usd",
    "srift_choice_p_meets_constraint": "p_meets_constraint",
    "srift_published_timestamp_seconds": "published_at",
    "srift_price_timestamp_seconds": "price_as_of",
    "srift_measurement_timestamp_seconds": "newest_measurement_at",
}


def write_metrics(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the published rows of rank 1 to `path`, as Prometheus gauges.

    `srift_choice_feasible` is 1 if the recommended cluster meets the deadline or budget with the
    required probability (default: 50 %), else 0.
    rows: the published table.

    Raises OSError if the file cannot be written.
    """
    registry = CollectorRegistry()
    gauges = {
        column: Gauge(name, f"{column} of the first choice", GOAL_COLUMNS, registry=registry)
        for name, column in _COLUMNS.items()
    }
    for row in rows:
        if row["rank"] > 1:
            continue
        labels = ["" if row[name] is None else row[name] for name in GOAL_COLUMNS]
        values = {**row, "feasible": row["cluster"] is not None and not row_misses(row)}
        for column, gauge in gauges.items():
            value = values[column]
            if value is not None:
                number = value.timestamp() if isinstance(value, datetime) else value
                gauge.labels(*labels).set(number)
    write_to_textfile(str(path), registry)
