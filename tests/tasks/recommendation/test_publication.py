"""The published table as readers of JSON get it."""

from dataclasses import replace

from tasks.data_files.imports import ImportFiles, import_measurements
from tasks.recommendation.publication import after_refresh
from tests.installed import NOON, DescribedMachines, install
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


ROWS = "workload,cluster,batch_per_device,step_s\n" + "".join(
    f"foreign,1xs.small,{n},0.{n}\n" for n in (4, 5)
)
FACTS = "workload,parameters,gradient_bytes,samples\nforeign,25,100,\npaper,25,100,5000\n"


def test_after_a_refresh_where_machines_cost_only_what_is_known_there_is_shown_and_the_next_command(
    tmp_path,
):
    here = install(tmp_path, "conv", "new_workload", provider=DescribedMachines(name="ec2"))
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "facts.csv").write_text(FACTS)
    infeasible = {"status": "infeasible", "cluster": None, "rank": 1}
    rows = [
        {"provider": "ec2", "workload": "conv"} | infeasible,
        {"provider": "ec2", "workload": "new_workload", "cluster": "1xs.small", "rank": 1},
        {"provider": "local", "workload": "conv", "cluster": "1xs.small", "rank": 1},
    ]
    shown, said = after_refresh(here, rows[:1])
    assert shown == [] and "conv" in said[0] and "srift import" in said[-1]
    import_measurements(
        here.warehouse,
        ImportFiles(measurements=tmp_path / "rows.csv", workloads=tmp_path / "facts.csv"),
        NOON,
    )
    shown, said = after_refresh(here, rows)
    unknown, imported = said
    assert shown == rows[1:2] and unknown.endswith(": conv")
    assert "foreign, paper; `srift recommend foreign --provider ec2 --deadline 12h" in imported
    assert after_refresh(replace(here, provider=DescribedMachines()), rows) == (rows[2:], [])
