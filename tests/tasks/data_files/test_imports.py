"""Measurements made elsewhere: defaults, identities, and refusals that name line, column and reason."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.workload import MODES, Mode
from tasks.data_files import imports, measurements
from tasks.data_files.imports import (
    Forgotten,
    Imported,
    ImportFiles,
    forget_import,
    import_measurements,
    list_imports,
)
from tasks.data_files.measurements import ImportRefused, Measurement, read_measurements
from tasks.workspace.settings import SettingsError
from tests.warehouse.builders import NOON, fresh, sql_of
from warehouse.database import Warehouse
from warehouse.reads import mart, training_frames

SHARED = Path(__file__).parents[4] / "shared" / "data"

LEAST = """workload,cluster,batch_per_device,step_s
tiny,2xg9.small,8,0.5
tiny,2xg9.small,8,0.5
tiny,1xg9.big+2xg9.small,32+8+8,0.25
"""
FULL = """workload,cluster,layout,batch_per_device,accumulation_steps,strategy,precision,switches,step_s,sync_s,\
provider,gradient_bytes,parameters,flops_per_sample,market,zone,run_id,source,measured_at
tiny,2xg9.small,4+2,8+4,2,ddp,bf16,compile,0.5,0.1,local,4.4e7,11000000,1e9,spot,a,run-1,mine,2026-01-02T03:00:00+02:00
"""


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return fresh(tmp_path)


def written(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(
    warehouse: Warehouse,
    path: Path,
    workloads: Path | None = None,
    at: datetime = NOON,
    **how: bool,
) -> Imported:
    return import_measurements(
        warehouse, ImportFiles(measurements=path, workloads=workloads), at, **how
    )


def load_facts(warehouse: Warehouse, path: Path, provider: str | None = None) -> Imported:
    return import_measurements(warehouse, ImportFiles(workloads=path, provider=provider), NOON)


def forget(warehouse: Warehouse, import_id: str) -> Forgotten:
    return forget_import(warehouse, import_id, NOON)


def runs(warehouse: Warehouse, provider: str = "ec2") -> pd.DataFrame:
    return training_frames(warehouse, provider)["runs"]


def test_absent_columns_take_their_defaults_and_unknown_ones_are_ignored_aloud(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    loaded = load(
        warehouse,
        written(tmp_path, LEAST.replace("step_s\n", "step_s,low_s\n").replace("5\n", "5,1\n")),
    )
    assert (loaded.rows, loaded.new, loaded.without_layout, loaded.precisions) == (
        3,
        3,
        3,
        {"fp32": 3},
    )
    ignored, unknown = loaded.sentences
    assert "low_s" in ignored and unknown.startswith("nobody knows g9.big, g9.small")
    frame = runs(warehouse).sort_values("step_s")
    stated = frame[["accumulation_steps", "strategy", "precision", "switches", "source"]]
    assert stated.values.tolist() == [[1, "ddp", "fp32", "none", "import"]] * 3
    assert frame[["layout", "sync_s", "market", "parameters", "measured_at"]].isna().all(axis=None)
    assert frame.batch_per_device.tolist() == ["32+8+8", "8", "8"]


def test_every_column_arrives(warehouse: Warehouse, tmp_path: Path) -> None:
    load(warehouse, written(tmp_path, FULL))
    with read_measurements(tmp_path / "rows.csv") as measured:
        alone = measured.frame()  # as a backtest has it, without a warehouse
    no_file_has = {
        "reference_s",
        "reference_spread",
        "reference_blocks",
        "usual_reference_s",
        "input_s",
        "loader_workers",
    }
    assert runs(warehouse, "local")[sorted(no_file_has)].isna().all(axis=None)
    assert set(alone.columns) | no_file_has == set(
        runs(warehouse, "local").columns
    ) and alone.run_id.tolist() == ["run-1"]
    row = runs(warehouse, "local").drop(columns=sorted(no_file_has)).iloc[0].to_dict()
    assert row.pop("measured_at") == pd.Timestamp("2026-01-02 01:00")  # kept in UTC
    assert pd.isna(row.pop("step_spread"))
    setup: dict[str, object] = {
        "workload": "tiny",
        "cluster": "2xg9.small",
        "layout": "4+2",
        "batch_per_device": "8+4",
    }
    setup |= {
        "accumulation_steps": 2,
        "strategy": "ddp",
        "precision": "bf16",
        "switches": "compile",
    }
    facts = {"parameters": 11_000_000, "gradient_bytes": 44_000_000, "flops_per_sample": 1e9}
    origin = {
        "run_id": "run-1",
        "provider": "local",
        "market": "spot",
        "zone": "a",
        "source": "mine",
    }
    assert row == {**setup, **facts, **origin, "step_s": 0.5, "sync_s": 0.1}


def test_loading_twice_changes_nothing_and_repeats_count_as_repeats(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    load(warehouse, written(tmp_path, LEAST))
    assert load(warehouse, written(tmp_path, LEAST, "copy.csv")).new == 0
    pd.read_csv(tmp_path / "copy.csv").assign(layout=None).to_parquet(tmp_path / "rows.parquet")
    assert load(warehouse, tmp_path / "rows.parquet").new == 0
    third = LEAST + "tiny,2xg9.small,8,0.5\n"
    assert (
        load(warehouse, written(tmp_path, third)).new == 1
    )  # a third occurrence of the same content
    assert len(runs(warehouse)) == 4


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("tiny,2xa,8,-1", "line 3, column step_s: Input should be greater than 0"),
        ("tiny,2xa,8,nan", "line 3, column step_s: Input should be a finite number"),
        ("tiny,2xa,8,", "line 3, column step_s: is empty"),
        ("tiny,2xa,8,fast", "line 3, column step_s: Input should be a valid number"),
        (
            "tiny,two of a,8,1",
            "line 3, column cluster: cluster 'two of a': 'two of a' is not of the form 4xNAME",
        ),
        ("tiny,0xa,8,1", "line 3, column cluster: "),
        (
            "tiny,2xa,8+8+8,1",
            "line 3, column batch_per_device: batch_per_device '8+8+8': 3 numbers for 2 instances",
        ),
        ("tiny,2xa,0,1", "line 3, column batch_per_device: "),
        ("tiny,2xa,1.5,1", "line 3, column batch_per_device: "),
        (",2xa,8,1", "line 3, column workload: is empty"),
        ("tiny,2xa,8,1,extra", "line 3: more values than the header has columns"),
    ],
)
def test_one_bad_row_refuses_the_file_by_line_column_and_reason(
    warehouse: Warehouse, tmp_path: Path, row: str, says: str
) -> None:
    good = LEAST.splitlines()
    with pytest.raises(ImportRefused) as refusal:
        load(warehouse, written(tmp_path, "\n".join([*good[:2], row, *good[2:]]) + "\n"))
    assert len(refusal.value.problems) == 1
    assert refusal.value.problems[0].startswith(says)
    assert runs(warehouse).empty


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"precision": "fp8"},
            "column precision: unknown precision 'fp8', which no model predicts; known: fp32, tf32, bf16, fp16",
        ),
        (
            {"strategy": "pipeline"},
            "column strategy: unknown strategy 'pipeline', which no model predicts; known: ddp, fsdp",
        ),
        (
            {"strategy": "tp"},
            "column strategy: unknown strategy 'tp', which no model predicts; known: ddp, fsdp",
        ),
        (
            {"switches": "flash+compile"},
            "column switches: unknown switches 'flash+compile', which no model predicts; known: none,",
        ),
        (
            {"strategy": "adasum", "layout": "1"},
            "column strategy: adasum cannot train on 1 devices: gradients",
        ),
        (
            {"strategy": "ddp-mstopk", "layout": "1"},
            "column strategy: ddp-mstopk cannot train on 1 devices: gradients",
        ),
        (
            {"switches": "offload"},
            "column switches: offload with ddp: no states are shared out; offload goes with",
        ),
        (
            {"strategy": "ddp", "switches": "offload+compile"},
            "column switches: compile+offload with ddp: no states",
        ),
    ],
)
def test_a_kind_of_row_that_no_model_predicts_refuses_the_file_by_name(
    warehouse: Warehouse, tmp_path: Path, columns: dict[str, str], says: str
) -> None:
    usual = dict.fromkeys(columns, "")
    rows = [
        {"workload": "vit", "cluster": "1xg5.xlarge", "batch_per_device": 8, "step_s": 0.5} | usual
    ] * 2
    rows[1] = rows[1] | columns
    pd.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ImportRefused) as refusal:
        load(warehouse, tmp_path / "rows.csv")
    assert len(refusal.value.problems) == 1
    assert refusal.value.problems[0].startswith(f"line 3, {says}")
    assert runs(warehouse).empty


def test_every_mode_that_a_model_knows_is_imported_however_its_switches_are_ordered(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    columns = [mode._asdict() for mode in MODES]
    for one in columns:
        one["switches"] = "+".join(reversed(one["switches"].split("+")))
    row = {"workload": "vit", "cluster": "2xg5.xlarge", "batch_per_device": 8, "step_s": 0.5}
    pd.DataFrame([row | one for one in columns]).to_csv(tmp_path / "rows.csv", index=False)
    load(warehouse, tmp_path / "rows.csv")
    imported = runs(warehouse)
    assert {Mode(*one) for one in imported[list(Mode._fields)].itertuples(index=False)} == set(
        MODES
    )


def test_what_cannot_be_read_is_refused(warehouse: Warehouse, tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(
        b"workload,cluster,batch_per_device,step_s\n\xff\xfe,1xa,8,1\n"
    )
    (tmp_path / "not.parquet").write_bytes(b"hello")
    for name, says in (("none.csv", ": .*No such file"), ("binary.csv", ""), ("not.parquet", "")):
        with pytest.raises(ImportRefused, match=f"it cannot be read{says}"):
            load(warehouse, tmp_path / name)
    reader, writer = os.pipe()
    os.close(writer)
    try:
        with pytest.raises(ImportRefused, match="it is not a regular file"):
            load(warehouse, Path(f"/dev/fd/{reader}"))  # not taken for an empty file
    finally:
        os.close(reader)


def test_facts_of_workloads_come_before_those_of_rows(warehouse: Warehouse, tmp_path: Path) -> None:
    facts = written(
        tmp_path, "workload,parameters,gradient_bytes,samples\ntiny,10,40,1000\n", "facts.csv"
    )
    rows = written(
        tmp_path, LEAST.replace("step_s\n", "step_s,parameters\n").replace("0.5\n", "0.5,99\n")
    )
    load(warehouse, rows, facts)
    load(warehouse, rows, facts)
    assert runs(warehouse).parameters.tolist() == [10, 10, 10]
    workloads = mart(warehouse, "workloads", provider="ec2")
    assert workloads[["workload", "parameters", "gradient_bytes", "samples"]].values.tolist() == [
        ["tiny", 10, 40, 1000]
    ]
    with pytest.raises(ImportRefused, match=r"it looks like measurements.*without --workloads"):
        load_facts(warehouse, rows)
    with pytest.raises(ImportRefused, match="line 2, column parameters"):
        load(
            warehouse,
            rows,
            written(tmp_path, "workload,parameters,gradient_bytes\ntiny,none,40\n", "facts.csv"),
        )


@pytest.mark.skipif(not SHARED.exists(), reason="the measured data lie outside the repository")
def test_the_measured_data_load_whole_and_once(warehouse: Warehouse) -> None:
    path, facts = SHARED / "training_runs.csv", SHARED / "workloads.csv"
    assert load(warehouse, path, facts).new == 4853
    assert load(warehouse, path, facts).new == 0
    frames = training_frames(warehouse, "ec2")
    assert len(frames["runs"]) == 4853
    assert len(frames["workloads"]) == 4
    assert frames["runs"].gradient_bytes.notna().all()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workload,batch_per_device,step_s\n", "there is no column 'cluster'"),
        (
            FULL + FULL.splitlines()[1].replace("0.5", "0.6"),
            "line 3, column run_id: 'run-1' stands on line 2 with other values",
        ),
        (
            FULL.replace(",local,", ",locl,"),
            "column provider: unknown provider 'locl'; did you mean 'local'",
        ),
        (LEAST.replace("tiny,2xg9", "tiny,99999999xg9"), "more than 10,000 instances"),
        (
            LEAST.replace("step_s\n", "step_s,acumulation_steps\n"),
            "'acumulation_steps' is not known: did you mean 'acc",
        ),
        (
            LEAST.replace("step_s\n", "step_s,layuot\n"),
            "column 'layuot' is not known: did you mean 'layout'",
        ),
        (
            LEAST.replace("step_s\n", "step_s,Zones\n"),
            "column 'Zones' is not known: did you mean 'zone'",
        ),
        (LEAST.replace("step_s\n", "step_s,step_s\n"), "column 'step_s' stands more than once"),
        (LEAST.replace(",", ";"), "its columns are separated by ';'; separate them by ','"),
        (
            "workload,parameters,gradient_bytes\nw,1,4\n",
            "it looks like facts of workloads, .*--workloads",
        ),
        (
            LEAST.replace("tiny", "ti\0ny", 1),
            r"line 2, column workload: it holds the invisible character U\+0000",
        ),
        (
            LEAST.replace("tiny", "ti\u200bny", 1),
            r"line 2, column workload: it holds the invisible character U\+200B",
        ),
        (
            FULL.replace(",bf16,", ",bananas,"),
            "column precision: unknown precision 'bananas', .*fp32, tf32, bf16",
        ),
        (
            FULL.replace(",bf16,", ",bf61,"),
            "column precision: unknown precision 'bf61', which .*bf16",
        ),
        (FULL.replace(",ddp,", ",fdsp,"), "column strategy: unknown strategy 'fdsp', .*fsdp"),
        (
            FULL.replace("2026-01-02T", "2031-01-02T"),
            "column measured_at: 2031-01-02 01:00 UTC is yet to come",
        ),
        (
            LEAST.replace("tiny", "tïny", 1),
            "line 2, column workload: the name 'tïny' must be of letters, digits",
        ),
        (
            LEAST.replace("2xg9.small", "2xg5.xlrge", 1),
            "has no instance type 'g5.xlrge': did you mean 'g5.xlarge'",
        ),
        (
            LEAST + "tiny,2xg9.small,8,500\n",
            "line 5, column step_s: 500 is 1,000 times the 0.5 .* in line 2",
        ),
    ],
)
def test_what_can_hardly_be_meant_is_refused_by_its_reason(
    warehouse: Warehouse, tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ImportRefused, match=says):
        load(warehouse, written(tmp_path, text))
    assert runs(warehouse).empty


def test_blanks_are_dropped_and_case_of_a_precision_is_not_distinguished(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    loaded = load(
        warehouse,
        written(
            tmp_path, " workload, cluster ,batch_per_device, step_s\n tiny, 2xg9.small ,8,0.5\n"
        ),
    )
    assert any("1 value of workload, 1 value of cluster" in one for one in loaded.sentences)
    assert load(warehouse, written(tmp_path, LEAST, "plain.csv")).new == 2, "one of them was there"
    named = load(
        warehouse,
        written(
            tmp_path, FULL.replace(",bf16,", ",Float32,").replace(",ddp,", ",DDP,"), "full.csv"
        ),
    )
    assert (named.precisions, named.strategies) == ({"fp32": 1}, {"ddp": 1})
    assert runs(warehouse, "local").precision.tolist() == ["fp32"]


BLANK = st.text(" \t", max_size=2)


@given(st.lists(BLANK, min_size=12, max_size=12))
def test_no_blank_around_a_value_makes_it_another_row(blanks: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        lines = LEAST.splitlines()[:3]
        first = ",".join(
            pad + cell + pad for pad, cell in zip(blanks, lines[1].split(","), strict=False)
        )
        header = ",".join(
            pad + cell for pad, cell in zip(blanks[8:], lines[0].split(","), strict=True)
        )
        with (
            read_measurements(written(Path(name), "\n".join([header, first, lines[2]]))) as padded,
            read_measurements(written(Path(name), "\n".join(lines), "plain.csv")) as plain,
        ):
            assert padded.frame().run_id.tolist() == plain.frame().run_id.tolist()


ODD = """workload,cluster,batch_per_device,step_s,sync_s,source,measured_at,run_id
tiny,2xg9.small,8,0.5,,"100%s ""of"" ours",2026-01-02T03:00:00.120+02:00,
tiny,2xg9.small,8,1e-05,0,"100%s ""of"" ours",,a%b
tiny,2xg9.small,8,0.5,,"100%s ""of"" ours",2026-01-02T01:00:00.12,
tiny,1xg9.small,8,0.5,,,,
tiny,2xg9.small,8,2,0.1,"100%s ""of"" ours",2026-01-02,c
"""


@pytest.mark.parametrize(("chunk", "remembered"), [(50_000, 50_000), (2, 1)])
def test_a_row_is_known_by_all_that_it_says_in_any_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, remembered: int
) -> None:
    monkeypatch.setattr(measurements, "_CHUNK_ROWS", chunk)
    monkeypatch.setattr(measurements, "_MOST_SETUPS", remembered)
    with read_measurements(written(tmp_path, ODD)) as measured:
        frame, stripped = measured.frame(), measured.stripped
        found = pd.read_parquet(measured.rows.path)
    rows = csv.DictReader(ODD.splitlines())
    said = [
        Measurement.model_validate({name: value for name, value in row.items() if value})
        for row in rows
    ]
    texts = [
        json.dumps(row.model_dump(mode="json", exclude={"switches"}), sort_keys=True)
        for row in said
    ]
    marks = ["#1", "", "#2", "#1", ""]
    assert found.row_digest.tolist() == [
        hashlib.sha256((text + mark).encode()).hexdigest()[:20]
        for text, mark in zip(texts, marks, strict=True)
    ]
    assert frame.run_id.tolist()[1::3] == ["a%b", "c"] and frame.step_s.tolist() == [
        row.step_s for row in said
    ]
    assert found.place.tolist() == [2, 3, 4, 5, 6] and not stripped


def test_a_parquet_file_may_have_any_columns_in_a_folder_of_any_name(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "workload=other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    row = {"workload": "tiny", "cluster": "2xg9.small", "batch_per_device": 8, "step_s": 0.5}
    moment = pd.Timestamp("2026-01-02 03:04:05.123456789")
    pd.DataFrame([row | {"notes": [1, 2], "measured_at": moment}] * 2).to_parquet(
        tmp_path / "rows.parquet"
    )
    assert load(warehouse, tmp_path / "rows.parquet").workloads == {"tiny": 2}
    assert runs(warehouse).measured_at.tolist() == [pd.Timestamp("2026-01-02 03:04:05.123456")] * 2
    pd.DataFrame([row | {"layout": [1, 2]}]).to_parquet(tmp_path / "odd.parquet")
    with pytest.raises(ImportRefused, match="row 1, column layout: "):
        load(warehouse, tmp_path / "odd.parquet")
    assert not list(temporary.iterdir())


def test_imported_rows_cannot_pass_as_measured_here(warehouse: Warehouse, tmp_path: Path) -> None:
    load(warehouse, written(tmp_path, FULL.replace(",mine,", ",srift,")))
    assert runs(warehouse, "local").source.tolist() == ["import"]


def test_a_number_that_no_run_has_is_refused(warehouse: Warehouse, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="line 2, column accumulation_steps: "):
        load(warehouse, written(tmp_path, FULL.replace(",2,ddp", ",3e9,ddp")))


def test_of_very_many_rows_the_extremes_of_each_setup_are_judged(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_MOST_JUDGED", 4)
    usual = "".join(f"tiny,2xg9.small,{batch},0.{n}\n" for batch in (8, 16) for n in range(4, 9))
    header = LEAST.splitlines()[0] + "\n"
    odd = "tiny,2xg9.small,8,500\n"
    with pytest.raises(ImportRefused, match=r"line 12, column step_s: 500 is"):
        load(warehouse, written(tmp_path, header + usual + odd))
    assert load(warehouse, written(tmp_path, header + usual)).new == 10


def test_what_is_read_is_printed_back(warehouse: Warehouse, tmp_path: Path) -> None:
    text = """workload,cluster,batch_per_device,step_s,layout,precision
vit,1xp4d.24xlarge,64,0.45,1,fp32
vit,1xp4d.24xlarge,64,0.45,8,fp32
vit,1xg5.xlarge,32,0.6,,BF16
cnn,2xg4dn.12xlarge+1xg9.mine,32,0.6,,fp32
"""
    loaded = load(warehouse, written(tmp_path, text))
    assert loaded.workloads == {"vit": 3, "cnn": 1} and loaded.without_layout == 2
    read = {
        one.name: (one.device, one.least_devices, one.most_devices, one.rows)
        for one in loaded.types
    }
    assert read == {
        "p4d.24xlarge": ("A100", 1, 8, 2),
        "g5.xlarge": ("A10G", 1, 1, 1),
        "g4dn.12xlarge": ("T4", 4, 4, 1),
        "g9.mine": ("", 1, 1, 1),
    }
    said = loaded.as_text()
    for words in (
        "4 rows, 4 of them new",
        "p4d.24xlarge (1 to 8 devices of A100, 2 rows)",
        "layout: absent in 2 rows, taken as all devices",
        "precision: fp32 (3 rows), bf16 (1 row)",
        "nobody knows g9.mine: predicted from its own rows, and unpriced; without a layout it is taken",
        f"srift forget {loaded.import_id}",
        "srift refresh --provider ec2 --max-usd 0",
    ):
        assert words in said


def test_a_dry_run_judges_and_tells_and_loads_nothing(warehouse: Warehouse, tmp_path: Path) -> None:
    def rehearse(path: Path) -> Imported:
        return load(warehouse, path, dry_run=True)

    first = rehearse(written(tmp_path, LEAST))
    assert (first.new, "nothing was loaded" in first.as_text()) == (3, True)
    assert runs(warehouse).empty and list_imports(warehouse) == []
    load(warehouse, written(tmp_path, LEAST))
    assert rehearse(written(tmp_path, LEAST)).new == 0
    with pytest.raises(ImportRefused, match="1,000 times"):
        rehearse(written(tmp_path, LEAST.replace("0.5", "500"), "ms.csv"))
    warehouse.path.unlink()
    assert rehearse(written(tmp_path, LEAST)).new == 3 and not warehouse.path.exists()


def test_force_loads_what_is_hardly_so_and_such_rows_are_not_judged_again(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    path = written(tmp_path, LEAST + "tiny,2xg5.xlrge,8,500\ntiny,2xg5.xlrge,8,0.5\n")
    with pytest.raises(ImportRefused, match="--force loads them") as refused:
        load(warehouse, path)
    assert len(refused.value.problems) == 3  # two misspelt types, and 1,000 times
    assert load(warehouse, path, force=True).new == 5
    assert load(warehouse, path).new == 0
    bad = written(tmp_path, LEAST.replace("tiny", "tïny"), "named.csv")
    with pytest.raises(ImportRefused, match="the name 'tïny'"):
        load(warehouse, bad, force=True)


def test_facts_of_an_import_judge_its_rows(warehouse: Warehouse, tmp_path: Path) -> None:
    rows = written(tmp_path, LEAST.replace("g9.small", "g4dn.xlarge"))
    load(warehouse, rows)
    facts = written(
        tmp_path,
        "workload,parameters,gradient_bytes,flops_per_sample\ntiny,1,4,9e11\n",
        "facts.csv",
    )
    with pytest.raises(
        ImportRefused, match=r"line 2, column step_s: .*14.4 TFLOP/s; a T4 has at most 8.1"
    ):
        load(warehouse, rows, facts)
    assert mart(warehouse, "workloads", provider="ec2").flops_per_sample.isna().all()


FACTS = "workload,parameters,gradient_bytes,samples\n"


def counted(loaded: Imported) -> list[int]:
    return [loaded.facts[what] for what in ("new", "changed", "the same")]


def test_facts_are_loaded_alone_and_counted(warehouse: Warehouse, tmp_path: Path) -> None:
    def loaded_facts(text: str, provider: str | None = None) -> list[int]:
        return counted(
            load_facts(warehouse, written(tmp_path, FACTS + text, "facts.csv"), provider)
        )

    assert loaded_facts("tiny,10,40,1000\nbig,20,80,\n") == [2, 0, 0]
    assert loaded_facts("tiny,10,40,1000\nbig,20,80,\n") == [0, 0, 2]
    assert loaded_facts("tiny,11,40,1000\nbig,20,80,\nhuge,30,120,\n") == [1, 1, 1]
    assert loaded_facts("tiny,11,40,1000\n", "local") == [1, 0, 0]
    known = mart(warehouse, "workloads", provider="ec2").set_index("workload")
    assert known.parameters.to_dict() == {"tiny": 11, "big": 20, "huge": 30}
    empty = written(tmp_path, LEAST.splitlines()[0] + "\n")
    loaded = load(warehouse, empty, written(tmp_path, FACTS + "other,1,4,\n", "facts.csv"))
    assert (loaded.rows, counted(loaded)) == (0, [1, 0, 0]) and "has no row" in loaded.as_text()
    assert "other" in set(mart(warehouse, "workloads", provider="ec2").workload)
    with pytest.raises(ImportRefused, match="the name 'ö' must be"):
        loaded_facts("ö,1,4,\n")


def test_a_fact_that_a_later_file_leaves_out_is_still_known_and_its_other_columns_are_named(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    def loaded(text: str) -> Imported:
        return load_facts(warehouse, written(tmp_path, text, "facts.csv"))

    loaded("workload,parameters,gradient_bytes,flops_per_sample\ntiny,10,40,1e6\n")
    later = loaded("workload,parameters,gradient_bytes,colour\ntiny,11,40,red\n")
    assert (
        counted(later) == [0, 1, 0]
        and "column colour is not one of the contract's" in later.as_text()
    )
    known = mart(warehouse, "workloads", provider="ec2").set_index("workload")
    assert known.flops_per_sample["tiny"] == 1e6 and known.parameters["tiny"] == 11
    assert counted(loaded("workload,parameters,gradient_bytes\ntiny,11,40\n")) == [0, 0, 1]
    with pytest.raises(ImportRefused, match="did you mean 'flops_per_sample'"):
        loaded("workload,parameters,gradient_bytes,flops\ntiny,10,40,1e6\n")


def test_an_import_is_forgotten_whole_and_comes_back_when_it_is_imported_again(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    rows, facts = (
        written(tmp_path, LEAST),
        written(tmp_path, FACTS + "tiny,10,40,1000\n", "facts.csv"),
    )
    loaded = load(warehouse, rows, facts)
    for text in ("nonsense", loaded.import_id[:3], ""):
        with pytest.raises(SettingsError, match=r"unknown import .*srift forget --list"):
            forget(warehouse, text)
    forgotten = forget(warehouse, loaded.import_id[:6])
    assert (forgotten.rows, forgotten.facts, forgotten.import_id) == (3, 1, loaded.import_id)
    assert (
        "rows.csv and facts.csv" in forgotten.sentence
        and "srift refresh --provider ec2" in forgotten.sentence
    )
    assert runs(warehouse).empty and mart(warehouse, "workloads").empty
    twice = forget(warehouse, loaded.import_id)
    assert twice.rows == 0 and "was forgotten before" in twice.sentence
    assert [one["forgotten"] for one in list_imports(warehouse)] == [True]
    again = load(warehouse, rows, facts)
    assert (again.import_id, again.new, counted(again)) == (loaded.import_id, 3, [1, 0, 0])
    assert len(runs(warehouse)) == 3 and runs(warehouse).parameters.tolist() == [10, 10, 10]
    (listed,) = list_imports(warehouse)
    assert (listed["rows"], listed["facts"], listed["forgotten"], listed["file"]) == (
        3,
        1,
        False,
        "rows.csv",
    )


def test_the_facts_before_count_again_when_the_later_ones_are_forgotten(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    def parameters() -> list[float]:
        return mart(warehouse, "workloads", provider="ec2").parameters.tolist()

    paths = [written(tmp_path, FACTS + f"tiny,{n},40,\n", f"{n}.csv") for n in (10, 11)]
    first, second = (load_facts(warehouse, one) for one in paths)
    assert parameters() == [11]
    assert forget(warehouse, second.import_id).facts == 1
    assert parameters() == [10]
    load_facts(warehouse, paths[1])
    load_facts(warehouse, paths[0])
    assert parameters() == [10], "the last one imported"
    forget(warehouse, first.import_id)
    assert parameters() == [11]


def test_facts_that_two_imports_hold_count_until_both_are_forgotten(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    texts = (FACTS + "tiny,10,40,\n", FACTS + "tiny,10,40,\nbig,20,80,\n")
    paths = [written(tmp_path, text, f"{at}.csv") for at, text in enumerate(texts)]
    first, second = (load_facts(warehouse, one) for one in paths)
    assert counted(second) == [1, 0, 1]
    forgotten = forget(warehouse, first.import_id)
    assert forgotten.facts == 0 and set(mart(warehouse, "workloads").workload) == {"tiny", "big"}
    assert forget(warehouse, second.import_id).facts == 2 and mart(warehouse, "workloads").empty


def test_corrected_values_of_a_run_count_once_the_first_are_forgotten(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    wrong = load(warehouse, written(tmp_path, FULL))
    corrected = written(tmp_path, FULL.replace(",0.5,", ",0.6,"), "right.csv")
    right = load(warehouse, corrected, at=NOON + timedelta(hours=1))
    assert right.new == 0 and any("known with another step_s" in one for one in right.sentences)
    assert runs(warehouse, "local").step_s.tolist() == [0.5]
    forget(warehouse, wrong.import_id)
    assert runs(warehouse, "local").step_s.tolist() == [0.6]


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(st.sampled_from(["import", "forget"]), st.integers(0, 2)), min_size=1, max_size=6
    )
)
def test_what_counts_is_what_some_import_holds_that_was_not_forgotten(
    events: list[tuple[str, int]],
) -> None:
    holds = [{1, 2}, {2, 3}, {1, 2, 3, 4}]
    with tempfile.TemporaryDirectory() as name:
        warehouse = fresh(Path(name))
        header = LEAST.splitlines()[0]
        lines = [
            "\n".join([header, *(f"tiny,2xg9.small,{n},0.5" for n in sorted(one))]) for one in holds
        ]
        paths = [written(Path(name), text + "\n", f"{at}.csv") for at, text in enumerate(lines)]
        ids, counting = {}, set[int]()
        for event, at in events:
            if event == "import":
                ids[at] = load(warehouse, paths[at]).import_id
                counting.add(at)
            elif at in ids:
                forget(warehouse, ids[at])
                counting.discard(at)
            expected = set[int]().union(*(holds[one] for one in counting))
            assert {int(one) for one in runs(warehouse).batch_per_device} == expected
            assert len(runs(warehouse)) == len(expected)


def test_a_home_from_before_imports_had_ids_can_forget_what_it_loaded(tmp_path: Path) -> None:
    older = sql_of(tmp_path, "00[6-9]_*", "01*_*", "02[6-8]_*", "marts", "staging")
    warehouse = Warehouse(tmp_path / "warehouse.duckdb", sql_folder=older)
    warehouse.migrate()
    path = written(tmp_path, LEAST)
    with read_measurements(path) as measured:
        frame, digest = measured.frame(), measured.file_digest
    with warehouse.transact() as connection:
        for at, row in enumerate(frame.drop(columns="step_spread").to_dict("records")):
            body = {name: None if pd.isna(value) else value for name, value in row.items()} | {
                "run_id": None
            }
            connection.execute(
                "insert into raw_imports values (?, ?, ?, 'ec2', ?, timestamp '2026-01-01')",
                [row["run_id"], digest, at, json.dumps(body)],
            )
        connection.execute(
            """insert into raw_workload_facts (provider, workload, digest, body, noted_at) values
            ('ec2', 'tiny', '', '{"parameters": 10, "gradient_bytes": 40}', timestamp '2026-01-01'),
            ('ec2', 'alone', '', '{"parameters": 20, "gradient_bytes": 80}', timestamp '2026-02-01'),
            ('ec2', 'defined', 'd1', '{}', timestamp '2026-02-01')"""
        )
    warehouse = Warehouse(warehouse.path)
    assert "013_imports" in warehouse.migrate()
    assert len(runs(warehouse)) == 3 and runs(warehouse).parameters.tolist() == [10, 10, 10]
    first, second = list_imports(warehouse)
    assert (first["import_id"], first["rows"], first["facts"]) == (digest, 3, 1)
    assert (second["rows"], second["facts"], second["workloads"]) == (0, 1, ["alone"])
    assert load(warehouse, path).new == 0
    forget(warehouse, digest)
    forget(warehouse, second["import_id"])
    assert runs(warehouse).empty and mart(warehouse, "workloads").workload.tolist() == ["defined"]
    assert load(warehouse, path).new == 3


@pytest.mark.skipif(not SHARED.exists(), reason="the measured data lie outside the repository")
def test_the_measured_data_of_other_devices_load_whole(warehouse: Warehouse) -> None:
    loaded = load(warehouse, SHARED / "training_runs_gpus.csv", SHARED / "workloads.csv")
    assert (loaded.new, loaded.without_layout, counted(loaded)) == (5543, 0, [4, 0, 0])
    assert any("onprem.8x2080ti" in one and "nobody knows" in one for one in loaded.sentences)
