"""Figures for Prometheus: first choices by goal, and moments; unknown values are left out."""

from prometheus_client.parser import text_string_to_metric_families

from tasks.reporting.metrics import write_metrics
from tests.warehouse.builders import NOON, recommendation

ROW = recommendation(provider="local", published_at=NOON, newest_measurement_at=None)
ODD = 'a "name"\\'


def test_first_choices_are_written_and_unknown_values_left_out(tmp_path):
    late = {"p_meets_constraint": 0.4, "p_required": None, "constraint_hours": 2.0}
    rows = [
        ROW | {"workload": "conv"},
        ROW | {"workload": "conv", "rank": 2, "hours": 9.0},
        ROW | {"workload": "late"} | late,
        ROW | {"workload": ODD, "cluster": None, "hours": None, "newest_measurement_at": NOON},
    ]
    write_metrics(tmp_path / "metrics.prom", rows)
    found = {
        (sample.name.removeprefix("srift_"), sample.labels["workload"]): sample.value
        for family in text_string_to_metric_families((tmp_path / "metrics.prom").read_text())
        for sample in family.samples
    }
    assert found["choice_hours", "conv"] == 1.0 and ("choice_hours", ODD) not in found
    assert found["choice_p_meets_constraint", "late"] == 0.4
    assert [found["choice_feasible", name] for name in ("conv", "late", ODD)] == [1.0, 0.0, 0.0]
    assert found["measurement_timestamp_seconds", ODD] == NOON.timestamp()
    assert found["published_timestamp_seconds", "conv"] == NOON.timestamp()
