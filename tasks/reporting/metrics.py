"""Write metrics of the current publication for Prometheus, to `published/metrics.prom`.

node_exporter's textfile collector reads the file. The age of the table in seconds is
`time() - srift_published_timestamp_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from models.planner.choice_rule import row_misses

Row = Mapping[str, Any]

_GOAL = ("provider", "workload", "goal", "constraint")
_FIGURES = {
    "hours": "hours",
    "usd": "dollars",
    "p_meets_constraint": "chance that the constraint is met",
}
_MOMENTS = {
    "published": ("published_at", ("provider",), "of the publication"),
    "price": ("price_as_of", ("provider",), "of the newest price"),
    "measurement": ("newest_measurement_at", ("provider", "workload"), "of the newest measurement"),
}


def write_metrics(path: Path, rows: Iterable[Row]) -> None:
    """Write metrics of the first choices among the published `rows`.

    Raises OSError if the file cannot be written.
    """
    firsts = [row for row in rows if row["rank"] == 1]
    registry = CollectorRegistry()
    sure = "1 if the first choice meets its goal with the required probability (default: 50 %)"
    feasible = Gauge("srift_choice_feasible", sure, _GOAL, registry=registry)
    figures = {
        name: Gauge(f"srift_choice_{name}", f"First choice: {text}", _GOAL, registry=registry)
        for name, text in _FIGURES.items()
    }
    for row in firsts:
        limits = (row["constraint_hours"], row["constraint_usd"])
        labels = (
            row["provider"],
            row["workload"],
            row["goal"],
            next((f"{one:g}" for one in limits if one), ""),
        )
        feasible.labels(*labels).set(row["cluster"] is not None and not row_misses(row))
        for name, gauge in figures.items():
            if row[name] is not None:
                gauge.labels(*labels).set(row[name])
    for name, (column, by, text) in _MOMENTS.items():
        moment = Gauge(
            f"srift_{name}_timestamp_seconds", f"Unix time {text}", by, registry=registry
        )
        known = [row for row in firsts if row[column] is not None]
        for row in sorted(known, key=lambda one: one[column]):  # the newest is set last
            moment.labels(*(row[label] for label in by)).set(row[column].timestamp())
    write_to_textfile(str(path), registry)
