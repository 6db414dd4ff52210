"""The published table as readers of JSON get it."""

from __future__ import annotations

from pathlib import Path

from tasks.published import published_rows
from tests.warehouse.builders import fresh, recommendation, stamp
from warehouse.export import export
from warehouse.publication import publish

BLANK = dict.fromkeys(
    (
        *("cluster", "cluster_offers", "layout", "batch_per_device", "accumulation_steps", "strategy", "precision"),
        *("region", "step_s", "step_low_s", "step_high_s", "samples_per_s", "hours", "hours_p90", "usd", "usd_p90"),
        *("usd_per_million_samples", "p_best", "bottleneck", "measured_runs", "global_batch"),
    )
)


def test_whole_numbers_stay_whole_beside_a_goal_that_nothing_meets(tmp_path: Path) -> None:
    warehouse = fresh(tmp_path)
    nothing = recommendation(goal="fastest", status="infeasible", reason="nothing on offer", **BLANK)
    publish(warehouse, [recommendation(), nothing], **stamp(1))
    export(warehouse, tmp_path / "published")
    best, none = sorted(published_rows(tmp_path / "published"), key=lambda row: str(row["goal"]))
    assert {str(best[name].tzinfo) for name in ("published_at", "price_as_of", "newest_measurement_at")} == {"UTC"}
    whole = ("global_batch", "accumulation_steps", "measured_runs", "samples", "rank")
    assert [str(best[name]) for name in whole] == ["16", "1", "2", "1000", "1"]
    assert [none[name] for name in whole] == [None, None, None, 1000, 1]
