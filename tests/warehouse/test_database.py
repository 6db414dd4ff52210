"""Opening, migrating and waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pytest

from tests.warehouse.builders import NOON, offered, recommendation, sql_of, stamp
from warehouse.append import append_offers
from warehouse.database import (
    SQL_FOLDER,
    MigrationChanged,
    Warehouse,
    WarehouseBusy,
    WarehouseError,
    WarehouseMissing,
)
from warehouse.export import export, read_published
from warehouse.publication import append_publication, publish

HOLD = """
import duckdb, sys
with duckdb.connect(sys.argv[1]) as connection:
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(warehouse: Warehouse):
    """Another process that holds the working file for writing until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(warehouse.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        if process.poll() is None:
            process.communicate("\n")


def test_migrations_are_applied_once_in_order_and_never_changed(tmp_path: Path) -> None:
    folder, path = sql_of(tmp_path), tmp_path / "home" / "warehouse.duckdb"
    warehouse = Warehouse(path, sql_folder=folder)
    assert warehouse.migrate()[0] == "001_raw"
    assert warehouse.migrate() == []
    (folder / "migrations" / "900_more.sql").write_text("create table more (a integer);")
    assert warehouse.migrate() == ["900_more"]
    with pytest.raises(MigrationChanged, match="900_more"):
        Warehouse(path).migrate()  # of an older version
    first = folder / "migrations" / "001_raw.sql"
    first.write_text(first.read_text() + "\n-- a thought\n")
    with pytest.raises(MigrationChanged, match=r"001_raw\.sql was changed"):
        warehouse.migrate()


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path / "warehouse.duckdb", sql_folder=sql_of(tmp_path))
    bad = tmp_path / "sql" / "migrations" / "900_bad.sql"
    bad.write_text("create table half (a integer); select nonsense;")
    with pytest.raises(duckdb.Error):
        warehouse.migrate()
    with warehouse.read() as connection:
        assert connection.execute("select count(*) from duckdb_tables()").fetchall() == [(0,)]


def test_a_view_is_of_its_files_name_and_goes_with_its_file(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path / "warehouse.duckdb", sql_folder=sql_of(tmp_path))
    warehouse.migrate()
    marts = tmp_path / "sql" / "marts"
    (marts / "timings.sql").unlink()
    warehouse.migrate()
    with pytest.raises(duckdb.CatalogException):
        warehouse.select("timings")
    (marts / "other.sql").write_text("create or replace view another as select 1;")
    with pytest.raises(WarehouseError, match="must create the view other"):
        warehouse.migrate()


def test_a_transaction_that_raises_changes_nothing(warehouse: Warehouse) -> None:
    with pytest.raises(KeyboardInterrupt), warehouse.transact() as connection:
        connection.execute("insert into raw_timings values ('r', 'plan', 1.0)")
        raise KeyboardInterrupt
    assert warehouse.select("timings").empty


def test_reading_what_is_not_there_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(WarehouseMissing, match="srift refresh"):
        Warehouse(tmp_path / "none.duckdb").select("runs")


def test_a_writer_waits_until_another_process_is_done(
    warehouse: Warehouse, holder: subprocess.Popen[str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        holder.communicate("\n")

    patient = Warehouse(warehouse.path, sleep=wait)
    with patient.transact() as connection:
        connection.execute("insert into raw_timings values ('r', 'plan', 1.0)")
    assert len(waits) == 1
    assert len(patient.select("timings")) == 1


@pytest.mark.parametrize("reading", [True, False])
def test_the_wait_is_bounded_and_the_error_names_the_holder(
    warehouse: Warehouse, holder: subprocess.Popen[str], reading: bool
) -> None:
    hasty = Warehouse(warehouse.path, wait_s=0.0)
    with pytest.raises(
        WarehouseBusy, match=rf"process {holder.pid} .*Nothing was changed; wait until"
    ):
        if reading:
            hasty.select("runs")
        else:
            hasty.migrate()


def test_a_reader_thread_waits_for_a_writer_thread(warehouse: Warehouse) -> None:
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(len(warehouse.select("timings"))))
    with warehouse.transact() as connection:
        reader.start()
        connection.execute("insert into raw_timings values ('r', 'plan', 1.0)")
    reader.join()
    assert seen == [1]


def test_every_sql_file_says_its_grain_or_its_rule() -> None:
    for file in [*SQL_FOLDER.glob("staging/*.sql"), *SQL_FOLDER.glob("marts/*.sql")]:
        assert file.read_text().startswith("-- Grain: one row "), file.name
    for file in SQL_FOLDER.glob("checks/*.sql"):
        assert "Must return no row." in file.read_text().splitlines()[0], file.name


VERSIONS = sorted(file.stem for file in SQL_FOLDER.glob("migrations/*.sql"))


@pytest.mark.parametrize("last", VERSIONS[:-1])
def test_a_file_of_each_older_version_with_rows_in_it_is_brought_up_to_date_at_once(
    tmp_path: Path, last: str
) -> None:
    later = VERSIONS[VERSIONS.index(last) + 1 :]
    path = tmp_path / "home" / "warehouse.duckdb"
    folder = sql_of(tmp_path, *(f"{name}.sql" for name in later), "marts", "staging")
    Warehouse(path, sql_folder=folder).migrate()
    with duckdb.connect(str(path)) as connection:  # what every version has
        connection.execute(
            "insert into raw_recommendations (publication_id, published_at, provider, workload, goal, rank, status,"
            " cluster, cluster_offers) values ('r-1', ?, 'local', 'tiny', 'cheapest', 1, 'recommended', '2xsmall', ?)",
            [NOON, [offered("small", 2, 0.01)]],
        )
    assert Warehouse(path).migrate() == later
    (row,) = Warehouse(path).select("recommendation_history").to_dict("records")
    assert (row["cluster"], row["market"]) == ("2xsmall", "spot")
    assert row["switches"] == ("none" if "018_switches" in later else None), (
        "filled in by that migration"
    )


def test_rows_that_were_published_before_the_whole_bill_was_are_read_with_their_market(
    tmp_path: Path,
) -> None:
    folder = sql_of(tmp_path, "011_*", "027_*", "marts", "staging")  # views were others then
    path = tmp_path / "home" / "warehouse.duckdb"
    Warehouse(path, sql_folder=folder).migrate()
    new = (
        "market",
        "usd_machines",
        "usd_storage",
        "usd_other",
        "interruption_risk",
        "expected_interruptions",
    )
    new += (
        "interruption_source",
        "placement_score",
        "compute_s",
        "communication_s",
        "exposed_communication_s",
        "input_s",
    )
    spot, safe = offered("small", 2, 0.01), offered("small", 1, 0.02) | {"market": "on-demand"}
    rows = [recommendation(), recommendation(rank=2, cluster_offers=[safe]),
            recommendation(rank=3, cluster_offers=[safe, spot]),
            recommendation(rank=4, cluster=None, cluster_offers=None, status="infeasible")]  # fmt: skip
    with Warehouse(path).transact() as connection:
        append_publication(
            connection, [{k: v for k, v in row.items() if k not in new} for row in rows], stamp(1)
        )
        price = {
            "provider": "local",
            "instance_type": "small",
            "market": "spot",
            "zone": "here",
            "region": "here",
        }
        price |= {"usd_per_hour": 0.01, "interruptions_per_hour": 0.1, "price_as_of": NOON}
        append_offers(connection, [price], snapshot_id="old", as_of=NOON)
        for table in (
            "raw_recommendations",
            "raw_offers",
        ):  # as the marts of that time stood over them
            connection.execute(f"create view of_{table} as select * from {table}")
    assert "011_bill_and_risk" in Warehouse(path).migrate()
    publish(Warehouse(path), [recommendation(usd=0.05, usd_p90=0.06)], stamp(2))
    for relation in (
        "recommendation_history",
        "recommendations",
        "recommendation_changes",
        "pareto",
        "offers",
    ):
        assert len(Warehouse(path).select(relation))
    old = (
        Warehouse(path)
        .select("recommendation_history", {"publication_id": "local-1"})
        .sort_values("rank")
    )
    assert old["market"].fillna("").tolist() == ["spot", "on-demand", "mixed", ""]
    assert old["usd"].notna().all() and old[[*new[1:]]].isna().all(axis=None)
    assert Warehouse(path).select("recommendation_changes")["change"].tolist() == ["price"]
    export(Warehouse(path), tmp_path / "published")
    assert (
        read_published(tmp_path / "published", "recommendation_history")["market"].notna().sum()
        == 4
    )
