"""Figures for Prometheus: first choices by goal, and moments; unknown values are left out."""

from datetime import UTC, datetime

from prometheus_client.parser import text_string_to_metric_families

from tasks.reporting.metrics import write_metrics

NOON, EVENING = datetime(2026, 11, 25, 12, tzinfo=UTC), datetime(2026, 11, 25, 18, tzinfo=UTC)
ROW = dict.fromkeys(
    ("constraint_hours", "constraint_usd", "p_meets_constraint", "newest_measurement_at")
) | {"provider": "local", "goal": "cheapest", "rank": 1, "published_at": NOON}
ODD = 'a "name"\\'


def row(workload, **changes):
    known = {"workload": workload, "cluster": "2xa", "hours": 1.5, "usd": 0.25}
    return ROW | known | {"price_as_of": NOON} | changes


def test_first_choices_are_written_and_unknown_values_left_out(tmp_path):
    nothing = {"cluster": None, "hours": None, "usd": None, "newest_measurement_at": EVENING}
    rows = [
        row("conv"),
        row("conv", rank=2, hours=9.0),
        row("conv", constraint_hours=2.0, p_meets_constraint=0.75, price_as_of=EVENING),
        row(ODD, **nothing),
        row("late", p_meets_constraint=0.4, p_required=None),
    ]
    write_metrics(tmp_path / "metrics.prom", rows)
    found = {
        (one.name.removeprefix("srift_"), *one.labels.values()): one.value
        for family in text_string_to_metric_families((tmp_path / "metrics.prom").read_text())
        for one in family.samples
    }

    def choice(figure, workload, limit=""):
        labels = {"constraint": limit, "goal": "cheapest", "provider": "local"}
        key = (f"choice_{figure}", *labels.values(), workload)
        return found.get(key)

    assert choice("hours", "conv") == 1.5 and choice("usd", ODD) is None
    assert choice("p_meets_constraint", "conv", "2") == 0.75
    assert choice("p_meets_constraint", "conv") is None
    assert [choice("feasible", name) for name in ("conv", "late", ODD)] == [1.0, 0.0, 0.0]
    assert found["price_timestamp_seconds", "local"] == EVENING.timestamp()
    assert found["measurement_timestamp_seconds", "local", ODD] == EVENING.timestamp()
