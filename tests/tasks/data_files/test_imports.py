"""`srift import` and `srift forget`: what is loaded, refused, and counts afterwards."""

import math
from dataclasses import asdict

import pandas as pd
import pytest

from tasks.data_files.file_reader import ImportRefused
from tasks.data_files.imports import forget_import, import_measurements, list_imports
from tasks.workspace.settings import SettingsError
from tests.warehouse.builders import NOON
from warehouse.database import Warehouse
from warehouse.reads import training_frames

LEAST = """workload,cluster,batch_per_device,step_s
tiny,2xg4dn.12xlarge,32,0.5
tiny,2xg4dn.12xlarge,32,0.51
tiny,1xg4dn.12xlarge,16,0.2
"""
FACTS = "workload,parameters,gradient_bytes,flops_per_sample\ntiny,1e6,4000000,1e9\n"


def written(folder, text, name="rows.csv"):
    path = folder / name
    path.write_text(text)
    return path


def load(warehouse, text=LEAST, facts="", **options):
    folder = warehouse.path.parent
    return import_measurements(
        warehouse,
        NOON,
        measurements=written(folder, text) if text else None,
        workloads=written(folder, facts, "facts.csv") if facts else None,
        **options,
    )


def runs(warehouse):
    return training_frames(warehouse, "ec2")["runs"]


def row(**changes):
    """A file of one row."""
    values = {"workload": "tiny", "cluster": "2xg4dn.12xlarge", "batch_per_device": 32}
    values |= {"step_s": 0.5} | changes
    return ",".join(values) + "\n" + ",".join(str(value) for value in values.values()) + "\n"


def assert_refused(warehouse, text, facts=""):
    with pytest.raises(ImportRefused):
        load(warehouse, text, facts)


def test_rows_and_facts_count_and_loading_twice_changes_nothing(warehouse):
    first = load(warehouse, facts=FACTS)
    assert (first.rows, first.new, first.counts["facts of workloads"]["new"]) == (3, 3, 1)
    assert first.counts["workload"] == {"tiny": 3}
    assert first.counts["instance type"] == {"g4dn.12xlarge": 3}
    again = load(warehouse, facts=FACTS)
    assert (again.new, again.import_id) == (0, first.import_id)
    assert again.counts["facts of workloads"]["same"] == 1
    found = runs(warehouse)
    assert sorted(found.step_s) == [0.2, 0.5, 0.51] and set(found.parameters) == {1e6}
    assert set(found.precision + found.strategy + found.switches) == {"fp32ddpnone"}
    changed = load(warehouse, facts=FACTS.replace("1e6", "2e6"))
    assert changed.counts["facts of workloads"]["changed"] == 1
    assert set(runs(warehouse).parameters) == {2e6}


COLUMNS = """
cluster=1xg5.12xlarge+2xg4dn.12xlarge layout=4+4+2 accumulation_steps=2 batch_per_device=32.0+16+16
precision=float16 strategy=FSDP switches=offload+checkpointing provider=ec2 gradient_bytes=4e6
sync_s=0.1 market=spot zone=a run_id=r1 source=lab parameters=1e6 flops_per_sample=2.5
measured_at=2026-01-02T12:00:00+02:00
"""


def test_every_column_is_read(warehouse):
    load(warehouse, row(**dict(pair.split("=") for pair in COLUMNS.split())))
    [found] = runs(warehouse).to_dict("records")
    expected = {
        "batch_per_device": "32+16+16",
        "layout": "4+4+2",
        "precision": "fp16",
        "strategy": "fsdp",
        "switches": "checkpointing+offload",
        "accumulation_steps": 2,
        "gradient_bytes": 4e6,
        "sync_s": 0.1,
        "run_id": "r1",
        "measured_at": pd.Timestamp("2026-01-02 10:00"),
        "source": "lab",
    }
    assert found.items() >= expected.items()


def test_parquet_and_csv_say_the_same(warehouse, tmp_path):
    load(warehouse, LEAST)
    frame = pd.read_csv(tmp_path / "rows.csv")
    frame["batch_per_device"] = frame["batch_per_device"].astype(float)
    frame["sync_s"] = math.nan
    frame.to_parquet(tmp_path / "rows.parquet")
    file = tmp_path / "rows.parquet"
    assert import_measurements(warehouse, NOON, measurements=file).new == 0


BAD = """
step_s=0 step_s=fast step_s=inf step_s= sync_s=-1 sync_s=99 workload= workload=a/b cluster=g5.12xlarge
cluster=99999999xg5.12xlarge batch_per_device=32+32+32 layout=0 accumulation_steps=1.5
precision=fp8 strategy=magic switches=offload provider=moon flops_per_sample=-1
measured_at=yesterday measured_at=2027-01-01
"""


@pytest.mark.parametrize("change", BAD.split())
def test_a_bad_row_is_named_and_nothing_is_loaded(warehouse, change):
    column, _, text = change.partition("=")
    with pytest.raises(ImportRefused) as refused:
        load(warehouse, row(**{column: text}), FACTS, force=True)
    assert f"line 2, column {column}" in str(refused.value) and len(refused.value.problems) == 1
    assert not list_imports(warehouse) and warehouse.select("workloads").empty


def test_all_bad_rows_are_named_by_their_lines(warehouse):
    text = LEAST + "\ntiny,1xg5.xlarge,8,-1\ntiny,1xg5.xlarge,8\ntiny,x,8,1\ntiny,x,8,1\n"
    with pytest.raises(ImportRefused) as refused:
        load(warehouse, text)
    lines = sorted(problem.split(", ")[0] for problem in refused.value.problems)
    assert lines == ["line 6", "line 7", "line 8", "line 9"]


def test_files_of_another_form_are_refused(warehouse, tmp_path):
    texts = ("", "workload,cluster\na,1xb\n", LEAST + "a,1xb,8,1,9\n", "workload;cluster\n")
    texts += (LEAST.splitlines()[0], LEAST.replace("step_s", "step_s,step_s").replace("0.", "1,0."))
    paths = [written(tmp_path, text, f"{number}.csv") for number, text in enumerate(texts)]
    (tmp_path / "odd.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.parquet").write_bytes(b"PAR1")
    paths += [tmp_path / name for name in ("odd.csv", "odd.parquet", "none.csv", "")]
    for path in paths:
        with pytest.raises(ImportRefused):
            import_measurements(warehouse, NOON, measurements=path)


def test_one_run_id_with_two_contents_is_refused_in_a_file_and_first_counts_between_files(
    warehouse,
):
    head, line = row(run_id="r").splitlines()
    assert load(warehouse, f"{head}\n{line}\n{line}\n").new == 1
    other = line.replace("0.5", "0.6")
    assert_refused(warehouse, f"{head}\n{line}\n{other}\n")
    loaded = load(warehouse, f"{head}\n{other}\n")
    assert loaded.new == 0 and runs(warehouse).step_s.tolist() == [0.5]


@pytest.mark.parametrize(
    "text",
    [
        LEAST + "tiny,2xg4dn.12xlarge,32,500\n",
        row(cluster="2xg4dn.12xlage"),
        row(layout="5+4"),
        row(precision="bf16"),
        row(step_s=1e-5, flops_per_sample=1e9),
    ],
)
def test_implausible_rows_take_force(warehouse, text):
    assert_refused(warehouse, text)
    assert runs(warehouse).empty
    assert load(warehouse, text, force=True).new > 0


def test_facts_make_rows_implausible(warehouse):
    load(warehouse, row(step_s=1e-5))
    assert_refused(warehouse, row(step_s=1e-5), FACTS)


def test_a_dry_run_loads_nothing_and_creates_no_file(warehouse, tmp_path):
    missing = Warehouse(tmp_path / "missing" / "warehouse.duckdb")
    missing.path.parent.mkdir()
    assert load(missing, dry_run=True).new > 0 and not missing.exists()
    found = load(warehouse, facts=FACTS, dry_run=True)
    assert (found.new, found.counts["facts of workloads"]["new"]) == (3, 1)
    assert list_imports(warehouse) == []
    assert asdict(found)["providers"] == ("ec2",)


def test_a_forgotten_import_no_longer_counts_and_comes_back(warehouse):
    loaded = load(warehouse, facts=FACTS)
    forgotten = forget_import(warehouse, loaded.import_id[:6], NOON)
    assert (forgotten["rows"], forgotten["facts"]) == (3, 1) and runs(warehouse).empty
    assert warehouse.select("workloads").empty
    again = forget_import(warehouse, loaded.import_id, NOON)
    assert (again["rows"], again["facts"]) == (0, 0)
    assert list_imports(warehouse)[0]["forgotten"]
    assert load(warehouse, facts=FACTS).new == 3 and len(runs(warehouse)) == 3
    [listed] = list_imports(warehouse)
    assert (listed["rows"], listed["facts"], listed["file"]) == (3, 1, "rows.csv")
    load(warehouse, row(step_s=0.7))
    for text in ("nothing", ""):  # none, and both
        with pytest.raises(SettingsError):
            forget_import(warehouse, text, NOON)


def test_a_row_counts_while_an_import_that_holds_it_does(warehouse):
    """Two files share a row."""
    head, *rows = LEAST.splitlines()
    files = ["\n".join([head, *some]) for some in (rows[:2], rows[1:])]
    first, second = (load(warehouse, text).import_id for text in files)
    forget_import(warehouse, first, NOON)
    assert len(runs(warehouse)) == 2
    assert load(warehouse, files[0]).new == 1 and len(runs(warehouse)) == 3
    for import_id, left in ((second, 2), (first, 0)):
        forget_import(warehouse, import_id, NOON)
        assert len(runs(warehouse)) == left


def test_facts_alone_are_an_import(warehouse):
    loaded = load(warehouse, "", FACTS)
    assert loaded.rows == 0 and loaded.counts["facts of workloads"]["new"] == 1
    assert warehouse.select("workloads").parameters.tolist() == [1e6]
    few = FACTS.replace("4000000", "100")
    for wrong in (FACTS + FACTS.splitlines()[1], FACTS.replace("1e6", "-1"), few):
        assert_refused(warehouse, "", wrong)
    assert_refused(warehouse, row(parameters=10**6, gradient_bytes=100))


def test_facts_of_two_imports_count_until_both_are_forgotten(warehouse):
    ids = [load(warehouse, "", text).import_id for text in (FACTS, FACTS + "big,20,80,\n")]
    assert forget_import(warehouse, ids[0], NOON)["facts"] == 0
    assert forget_import(warehouse, ids[1], NOON)["facts"] == 2
