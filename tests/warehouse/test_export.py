"""The published copies: the contract's columns with their units, replaced whole, readable while others write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from tests.conftest import SmallDisk
from tests.warehouse.builders import CONTRACT, fresh, recommendation, stamp
from warehouse.database import DiskFull, Warehouse, WarehouseMissing
from warehouse.export import export, read_published
from warehouse.publication import publish

TABLES = {"recommendations", "recommendation_history", "regret_ledger", "drift", "alarms"}
PUBLISHED = TABLES | {"recommendation_changes", "pareto"}
READ = """
import duckdb, sys
with duckdb.connect(sys.argv[1], read_only=True) as connection:
    print(connection.execute("select publication_id from recommendations").fetchone()[0], flush=True)
    sys.stdin.readline()
    print(connection.execute("select any_value(publication_id) from recommendation_history").fetchone()[0])
"""


def test_every_published_column_is_commented_with_its_unit(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    publish(warehouse, [recommendation()], stamp(1))
    export(warehouse, tmp_path / "published")
    query = "select table_name, column_name, comment from duckdb_columns() where table_name in ? order by column_index"
    with duckdb.connect(
        str(tmp_path / "published" / "recommendations.duckdb"), read_only=True
    ) as connection:
        outside = connection.execute(query, [list(PUBLISHED)]).fetchall()
        tables = {
            name
            for (name,) in connection.execute("select table_name from duckdb_tables()").fetchall()
        }
        whole = connection.execute("select comment from duckdb_tables()").fetchall()
    with warehouse.read() as connection:
        inside = connection.execute(query, [list(PUBLISHED)]).fetchall()
    assert tables == TABLES
    assert all(comment for (comment,) in whole)
    for name in ("recommendations", "recommendation_history"):
        assert [column for table, column, _ in outside if table == name] == CONTRACT
    assert {table for table, _, _ in outside} == PUBLISHED
    assert [row for row in outside if not row[2]] == []
    assert sorted(outside) == sorted(inside)
    for table, column, comment in outside:
        unit = {"_s": "second", "hours": "hours", "usd": "US dollars", "_at": "UTC", "p_": "0 to 1"}
        for part, word in unit.items():
            if (
                column.startswith(part) if part == "p_" else column.endswith(part)
            ) and "changed" not in comment:
                assert word in comment, (table, column)
    twins = {(table, column): comment for table, column, comment in outside}
    said = set(re.findall(r"\w+", twins["recommendations", "status"]))
    assert {
        "recommended",
        "alternative",
        "misses_constraint",
        "infeasible",
    } <= said and "feasible" not in said
    assert all(
        twins["recommendations", column] == twins["recommendation_history", column]
        for column in CONTRACT
    )


def test_the_copies_agree_and_parquet_and_csv_have_the_contracts_columns(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    publish(
        warehouse, [recommendation(), recommendation(goal="fastest", bottleneck=None)], stamp(1)
    )
    folder = tmp_path / "published"
    paths = export(warehouse, folder)
    assert [path.name for path in paths] == [
        *(f"recommendations.{kind}" for kind in ("duckdb", "parquet", "csv")),
        *(f"regret_ledger.{kind}" for kind in ("parquet", "csv")),
    ]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in paths
    )  # nothing left beside
    frames = [read_published(folder), pd.read_parquet(paths[1]), pd.read_csv(paths[2])]
    for frame in frames:
        assert list(frame.columns) == CONTRACT
        assert frame.goal.tolist() == ["cheapest", "fastest"]
        assert frame.usd.tolist() == [0.02, 0.02]
    assert '"usd_per_hour":0.01' in frames[2].cluster_offers[0]


def test_every_copy_is_on_the_disk_before_any_takes_its_name(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(warehouse, [recommendation()], stamp(1))
    folder, synced = tmp_path / "published", []
    monkeypatch.setattr(
        "os.fsync", lambda handle: synced.append((os.fstat(handle).st_ino, paths_in(folder)))
    )
    paths = export(warehouse, folder)
    assert [one for one, _ in synced] == [path.stat().st_ino for path in paths]
    assert all(there == [] for _, there in synced)


def test_a_disk_that_fills_up_while_the_copy_is_written_is_named_and_the_old_one_stays(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    warehouse = fresh(tmp_path / "home")
    publish(warehouse, [recommendation()], stamp(1))
    folder = small_disk.place / "published"
    export(warehouse, folder)
    before = sorted(folder.iterdir())
    refused = 0
    for free_kib in range(1000, 0, -50):
        room = os.statvfs(small_disk.place).f_bavail * 4096
        (small_disk.place / "ballast").write_bytes(bytes(room - free_kib * 1024))
        try:
            export(warehouse, folder)
        except (DiskFull, OSError) as error:
            refused += isinstance(error, DiskFull) and "recommendations.duckdb" in str(error)
        small_disk.free()
        assert sorted(folder.iterdir()) == before and len(read_published(folder)) == 1
    assert refused, "DuckDB never ran out of room"


def paths_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def test_a_reader_needs_no_lock_and_keeps_the_old_file_while_the_next_one_replaces_it(
    warehouse: Warehouse, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    with pytest.raises(WarehouseMissing, match="srift refresh"):
        read_published(folder)
    publish(warehouse, [recommendation()], stamp(1))
    export(warehouse, folder)
    command = [sys.executable, "-c", READ, str(folder / "recommendations.duckdb")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        with warehouse.transact():  # this process holds the working file
            assert reader.stdout is not None and reader.stdout.readline() == "local-1\n"
        publish(warehouse, [recommendation()], stamp(2))
        old = (folder / "recommendations.duckdb").read_bytes()
        with (folder / "recommendations.duckdb").open("rb") as held:
            export(warehouse, folder)
            assert (
                held.read() == old
            )  # a page that the reader has not read yet is still the old one's
        assert reader.communicate("\n")[0] == "local-1\n"
    assert read_published(folder).publication_id.tolist() == ["local-2"]


def test_an_export_that_fails_leaves_the_old_copy_and_no_litter(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(warehouse, [recommendation()], stamp(1))
    export(warehouse, tmp_path / "published")
    before = sorted(
        (path.name, path.stat().st_mtime_ns) for path in (tmp_path / "published").iterdir()
    )
    monkeypatch.setattr(
        "warehouse.export.VIEWS", frozenset({"runs"})
    )  # a view that cannot exist there
    with pytest.raises(duckdb.Error):
        export(warehouse, tmp_path / "published")
    assert (
        sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "published").iterdir())
        == before
    )
