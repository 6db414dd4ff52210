"""The published copies: the contract's columns with their units, replaced whole, never locked."""

import duckdb
import pandas as pd
import pytest

from tests.warehouse.builders import (
    CONTRACT,
    INFEASIBLE,
    judgement,
    recommendation,
    stamp,
    write,
)
from warehouse.append import append
from warehouse.export import FILES, TABLES, VIEWS, export, published_rows, read_published
from warehouse.publication import publish

UNITS = {"_s": "second", "hours": "hours", "usd": "US dollars", "_at": "UTC"}


@pytest.fixture
def folder(warehouse, tmp_path):
    nothing = INFEASIBLE | {"reason": "nothing on offer", "global_batch": None}
    nothing["measured_runs"] = None
    publish(warehouse, [recommendation(), recommendation(goal="fastest", **nothing)], stamp(1))
    judged_at = stamp(2).published_at
    write(warehouse, append, "raw_ledger", [judgement()], refresh_id="r", judged_at=judged_at)
    export(warehouse, tmp_path / "published")
    return tmp_path / "published"


def test_every_published_column_is_commented_with_its_unit(folder):
    query = "select table_name, column_name, comment from duckdb_columns() where not internal"
    with duckdb.connect(folder / "recommendations.duckdb", read_only=True) as connection:
        columns = connection.execute(query).fetchall()
        tables = connection.execute("select table_name, comment from duckdb_tables()").fetchall()
    assert {name for name, _ in tables} == set(TABLES) and all(text for _, text in tables)
    assert {table for table, _, _ in columns} == {*TABLES, *VIEWS}
    for table, column, comment in columns:
        assert comment, (table, column)
        for suffix, unit in UNITS.items():
            assert unit in comment or not column.endswith(suffix), (table, column)


def test_the_copies_agree_and_nothing_is_left_beside(folder):
    kinds = [f"{name}.{kind}" for name in FILES for kind in ("csv", "parquet")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["recommendations.duckdb", *kinds]
    )
    csv = pd.read_csv(folder / "recommendations.csv")
    for frame in (read_published(folder), pd.read_parquet(folder / "recommendations.parquet"), csv):
        assert list(frame.columns) == CONTRACT
        assert frame.goal.tolist() == ["cheapest", "fastest"]
    assert '"usd_per_hour":0.01' in csv.cluster_offers[0]
    assert pd.read_csv(folder / "regret_ledger.csv").regret.tolist() == [0.1]


def test_whole_numbers_stay_whole_beside_a_goal_that_nothing_meets(folder):
    best, none = published_rows(folder)
    assert best["published_at"] == stamp(1).published_at and best["p_meets_constraint"] is None
    times = ("published_at", "price_as_of", "newest_measurement_at")
    assert {str(best[name].tzinfo) for name in times} == {"UTC"}
    whole = ("global_batch", "accumulation_steps", "measured_runs", "samples", "rank")
    assert [str(best[name]) for name in whole] == ["16", "1", "2", "1000", "1"]
    assert [none[name] for name in whole] == [None, None, None, 1000, 1]


def test_a_reader_keeps_the_old_file_and_needs_no_lock(folder, warehouse):
    publish(warehouse, [recommendation()], stamp(2))
    with (folder / "recommendations.duckdb").open("rb") as held:
        before = held.read()
        export(warehouse, folder)
        held.seek(0)
        assert held.read() == before
    with warehouse.transact():
        assert read_published(folder).publication_id.tolist() == ["local-2"]


def test_an_export_that_fails_leaves_the_old_copies(folder, warehouse, monkeypatch):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    monkeypatch.setattr("warehouse.export.VIEWS", frozenset({"runs"}))
    with pytest.raises(duckdb.Error):
        export(warehouse, folder)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
