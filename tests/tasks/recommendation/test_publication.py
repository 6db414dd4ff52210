"""The published table as readers of JSON get it."""

from tests.warehouse.builders import fresh, recommendation, stamp
from warehouse.export import export, published_rows
from warehouse.publication import publish

KEPT = {
    *("workload", "goal", "status", "reason", "rank", "samples", "p_required"),
    *("price_as_of", "newest_measurement_at"),
}


def test_whole_numbers_stay_whole_beside_a_goal_that_nothing_meets(tmp_path):
    warehouse = fresh(tmp_path)
    row = recommendation(goal="fastest", status="infeasible", reason="nothing on offer")
    nothing = {name: value if name in KEPT else None for name, value in row.items()}
    publish(warehouse, [recommendation(), nothing], stamp(1))
    export(warehouse, tmp_path / "published")
    best, none = sorted(published_rows(tmp_path / "published"), key=lambda row: str(row["goal"]))
    assert {
        str(best[name].tzinfo) for name in ("published_at", "price_as_of", "newest_measurement_at")
    } == {"UTC"}
    whole = ("global_batch", "accumulation_steps", "measured_runs", "samples", "rank")
    assert [str(best[name]) for name in whole] == ["16", "1", "2", "1000", "1"]
    assert [none[name] for name in whole] == [None, None, None, 1000, 1]
