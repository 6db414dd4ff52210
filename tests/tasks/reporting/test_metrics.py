"""Figures for Prometheus: first choices by goal, and moments; unknown values are left out."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tasks.reporting.metrics import write_metrics

NOON, EVENING = datetime(2026, 11, 25, 12, tzinfo=UTC), datetime(2026, 11, 25, 18, tzinfo=UTC)


def row(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "provider": "local",
        "workload": "conv",
        "goal": "cheapest",
        "rank": 1,
        "cluster": "2xa",
    }
    found |= {
        "constraint_hours": None,
        "constraint_usd": None,
        "hours": 1.5,
        "usd": 0.25,
        "p_meets_constraint": None,
    }
    return (
        found | {"published_at": NOON, "price_as_of": NOON, "newest_measurement_at": None} | changes
    )


def test_first_choices_are_told_by_goal_and_what_is_unknown_is_left_out(tmp_path: Path) -> None:
    goal = {"goal": "cheapest_within_deadline", "constraint_hours": 2.0, "p_meets_constraint": 0.75}
    nothing = {
        "workload": 'a "name"\\',
        "cluster": None,
        "hours": None,
        "usd": None,
        "newest_measurement_at": EVENING,
    }
    unlikely = {"workload": "late", "p_meets_constraint": 0.4, "p_required": None}
    rows = [
        row(),
        row(rank=2, hours=9.0),
        row(**goal, price_as_of=EVENING),
        row(**nothing),
        row(**unlikely),
    ]
    write_metrics(tmp_path / "metrics.prom", rows)
    text = (tmp_path / "metrics.prom").read_text()
    found = {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
    assert found["srift_choice_hours", "", "cheapest", "local", "conv"] == 1.5
    assert (
        found["srift_choice_p_meets_constraint", "2", "cheapest_within_deadline", "local", "conv"]
        == 0.75
    )
    assert ("srift_choice_p_meets_constraint", "", "cheapest", "local", "conv") not in found
    feasible = {
        name: found["srift_choice_feasible", "", "cheapest", "local", name]
        for name in ("conv", "late")
    }
    assert feasible == {"conv": 1.0, "late": 0.0}
    assert found["srift_choice_feasible", "", "cheapest", "local", 'a "name"\\'] == 0.0
    assert ("srift_choice_usd", "", "cheapest", "local", 'a "name"\\') not in found
    assert found["srift_price_timestamp_seconds", "local"] == EVENING.timestamp()
    assert (
        found["srift_measurement_timestamp_seconds", "local", 'a "name"\\'] == EVENING.timestamp()
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.prom"]
