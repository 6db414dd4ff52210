"""The warehouse that several machines share: the same rows, the same refusals, and several writers at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import boto3
import duckdb
import pytest
from moto.server import ThreadedMotoServer

from tasks.execution.claims import claim, of_others, settle
from tasks.workspace.workspace import Workspace
from tests import postgres
from tests.installed import DescribedMachines, install
from tests.warehouse.builders import (
    DEFINED,
    NOON,
    TYPES,
    body,
    fresh,
    recommendation,
    sql_of,
    stamp,
)
from warehouse.append import (
    append,
    append_records,
    note_import,
    note_instance_types,
    note_workloads,
)
from warehouse.database import (
    MigrationChanged,
    Warehouse,
    WarehouseBusy,
    WarehouseError,
    WarehouseMissing,
)
from warehouse.export import export, read_published
from warehouse.lake import Lake, SharedWarehouse
from warehouse.publication import PublicationRefused, publish
from warehouse.reads import snapshot

pytest.importorskip("duckdb_extension_ducklake")
WRITERS, ROUNDS = 8, 2
_number = count()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres.server() as folder:
        yield folder


@pytest.fixture
def lake(server: str, tmp_path: Path) -> Lake:
    """A new and empty one."""
    database = f"lake{next(_number)}"
    postgres.create(server, database)
    return Lake(
        host=server, port=5432, user=postgres.USER, database=database, data=str(tmp_path / "lake")
    )


@pytest.fixture
def shared(lake: Lake, tmp_path: Path) -> SharedWarehouse:
    warehouse = SharedWarehouse(tmp_path / "warehouse.duckdb", lake)
    warehouse.migrate()
    return warehouse


def load(warehouse: Warehouse) -> int:
    """Returns how many records were new."""
    with warehouse.transact() as connection:
        note_workloads(connection, DEFINED, provider="local", noted_at=NOON)
        note_instance_types(connection, TYPES, noted_at=NOON)
        bodies = [body("r1"), body("r2"), body("r1", status="failed")]
        return append_records(connection, bodies, refresh_id="r", loaded_at=NOON)


def test_it_has_the_tables_columns_and_types_of_the_file(
    shared: SharedWarehouse, tmp_path: Path
) -> None:
    query = "select table_name, column_name, data_type from duckdb_columns() where table_name {} order by all"
    of_tables = "like 'raw\\_%' escape '\\' or table_name = 'schema_migrations'"
    assert len(shared.select(query.format(of_tables))) > 200
    of_file = fresh(tmp_path / "file").select(query.format(of_tables))
    assert shared.select(query.format(of_tables)).equals(of_file)
    assert shared.migrate() == []


def comments_of(warehouse: Warehouse) -> list[tuple[str, ...]]:
    """What the published copy says of its columns."""
    with duckdb.connect(
        str(warehouse.path.parent / "published" / "recommendations.duckdb")
    ) as connection:
        asked = "select table_name, column_name, comment from duckdb_columns() where comment is not null order by all"
        return connection.execute(asked).fetchall()


def test_the_same_rows_give_the_same_marts(shared: SharedWarehouse, tmp_path: Path) -> None:
    both = (fresh(tmp_path / "file"), shared)
    for warehouse in both:
        assert [load(warehouse), load(warehouse)] == [2, 0]
        assert [publish(warehouse, [recommendation()], stamp(1)) for _ in range(2)] == [1, 0]
        publish(warehouse, [recommendation(usd=0.05, usd_p90=0.06)], stamp(2))
        with pytest.raises(PublicationRefused, match="times_are_positive"):
            publish(warehouse, [recommendation(hours=-1.0)], stamp(3))
        export(warehouse, warehouse.path.parent / "published")
    for name in ("runs", "workloads", "recommendation_history", "recommendation_changes"):
        of_file, of_lake = (
            warehouse.select(f"select * from {name} order by all") for warehouse in both
        )
        assert len(of_file) and of_file.equals(of_lake), name
    published = [read_published(warehouse.path.parent / "published") for warehouse in both]
    assert published[0].equals(published[1])
    assert comments_of(both[0]) == comments_of(both[1]) != []
    assert shared.verify() > 5


@pytest.mark.parametrize(
    ("table", "row"),
    [
        (
            "raw_records",
            {"run_id": "r", "kind": "dance", "status": "failed", "provider": "p", "lease_id": "l"},
        ),
        ("raw_timings", {"refresh_id": "r", "phase": "plan"}),  # no seconds
    ],
)
def test_what_the_file_refuses_is_refused(
    shared: SharedWarehouse, table: str, row: dict[str, str]
) -> None:
    stamps = {"refresh_id": "r", "body": {}, "loaded_at": NOON} if table == "raw_records" else {}
    with pytest.raises(duckdb.ConstraintException), shared.transact() as connection:
        append(connection, table, [row], **stamps)
    assert shared.select(table).empty


def test_a_transaction_that_raises_changes_nothing_and_lets_the_next_one_write(
    shared: SharedWarehouse,
) -> None:
    with pytest.raises(KeyboardInterrupt), shared.transact() as connection:
        append(connection, "raw_timings", [{"refresh_id": "r", "phase": "plan", "seconds": 1.0}])
        raise KeyboardInterrupt
    assert shared.select("timings").empty
    assert load(SharedWarehouse(shared.path, shared.lake, wait_s=0.5)) == 2


def test_several_reads_see_one_state_and_write_nothing(shared: SharedWarehouse) -> None:
    load(shared)
    with shared.read() as connection:
        asked = "select count(*) from raw_timings"
        before = connection.execute(asked).fetchone()
        with shared.transact() as writing:
            append(writing, "raw_timings", [{"refresh_id": "r", "phase": "plan", "seconds": 1.0}])
        assert connection.execute(asked).fetchone() == before == (0,)
    assert len(snapshot(shared, "local", "tiny").select("timings")) == 1
    with pytest.raises(WarehouseError, match="read-only"), shared.read() as connection:
        connection.execute("insert into raw_timings values ('r', 'fit', 1.0)")


def test_the_wait_is_bounded_and_the_error_names_who_writes(shared: SharedWarehouse) -> None:
    hasty = SharedWarehouse(shared.path, shared.lake, wait_s=0.0)
    with (
        shared.transact(),
        pytest.raises(
            WarehouseBusy,
            match=r"others have .*, now srift on \S+, process \d+\. Nothing was changed",
        ),
        hasty.transact(),
    ):
        pass


def test_an_empty_an_older_and_a_newer_lake_say_what_to_do(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "warehouse.duckdb"
    today = SharedWarehouse(path, lake)
    assert not today.exists()
    with pytest.raises(WarehouseMissing, match="srift refresh"):
        today.select("runs")
    older = SharedWarehouse(
        path, lake, sql_folder=sql_of(tmp_path, "025_*", "stg_elastic.sql", "elastic_runs.sql")
    )
    older.migrate()
    with pytest.raises(WarehouseError, match="older version of Srift: `srift refresh`"):
        today.select("runs")
    assert today.migrate() == ["025_elastic"]
    with pytest.raises(MigrationChanged, match="newer version"):
        older.select("runs")


def test_a_home_is_carried_over_once_in_the_order_in_which_things_were_noted(
    shared: SharedWarehouse, tmp_path: Path
) -> None:
    file = fresh(tmp_path / "home")
    load(file)
    for n in (2, 1):  # the runs count where the first definition is put back
        publish(file, [recommendation()], stamp(n))
        with file.transact() as connection:
            note_workloads(
                connection, [DEFINED[0] | {"digest": f"w{n}"}], provider="local", noted_at=NOON
            )
    publish(shared, [recommendation(workload="other")], stamp(3, provider="ec2"))
    copied = shared.carry_over(file.path)
    assert (copied["raw_records"], copied["raw_publications"], copied["raw_recommendations"]) == (
        2,
        2,
        2,
    )
    assert set(shared.carry_over(file.path).values()) == {0}
    for name in ("runs", "recommendations", "stg_workloads"):
        query = f"select * from {name} where provider = 'local' order by all"
        assert len(file.select(query)) and file.select(query).equals(shared.select(query)), name
    assert len(shared.select("recommendations")) == 2


def test_what_two_imports_hold_counts_after_a_home_was_carried_over_until_both_are_forgotten(
    shared: SharedWarehouse, tmp_path: Path
) -> None:
    columns = {
        "workload": "tiny",
        "cluster": "1xsmall",
        "batch_per_device": "8",
        "accumulation_steps": 1,
    }
    columns |= {
        "strategy": "ddp",
        "precision": "fp32",
        "switches": "none",
        "step_s": 0.5,
        "provider": "ec2",
    }
    file = fresh(tmp_path / "home")
    for warehouse, import_id in ((shared, "b"), (file, "a")):
        row = columns | {"row_digest": "d", "row_number": 1, "file_digest": import_id}
        with warehouse.transact() as connection:
            note_import(connection, import_id, event="imported", noted_at=NOON)
            append(connection, "raw_imports", [row], import_id=import_id, loaded_at=NOON)
    assert shared.carry_over(file.path)["raw_import_rows"] == 1
    for import_id, left in (("b", 1), ("a", 0)):
        with shared.transact() as connection:
            note_import(connection, import_id, event="forgotten", noted_at=NOON)
        assert len(shared.select("runs")) == left


def test_what_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lake: Lake
) -> None:
    nobody = Lake(host=str(tmp_path), port=5432, user="srift", database="none", data=str(tmp_path))
    with pytest.raises(WarehouseError, match="see that PostgreSQL"):
        SharedWarehouse(tmp_path / "w.duckdb", nobody).exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    elsewhere = Lake(
        host=lake.host, port=5432, user="other", database=lake.database, data=lake.data
    )
    with pytest.raises(WarehouseError, match=r"pip install 'srift\[shared\]'"):
        SharedWarehouse(tmp_path / "w.duckdb", elsewhere).exists()


@pytest.mark.local
def test_the_files_may_lie_in_s3(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        address, port = s3.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL_S3": f"http://{address}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        bucket = boto3.client("s3", region_name="us-east-1")
        bucket.create_bucket(Bucket="team")
        postgres.create(server, "in_s3")
        lake = Lake(
            host=server,
            port=5432,
            user=postgres.USER,
            database="in_s3",
            data="s3://team/srift/warehouse",
        )
        shared = SharedWarehouse(tmp_path / "warehouse.duckdb", lake)
        shared.migrate()
        with shared.transact() as connection:
            bodies = [body(f"r{n}") for n in range(50)]  # a few rows stay in the catalogue
            assert append_records(connection, bodies, refresh_id="r", loaded_at=NOON) == 50
        assert len(shared.select("raw_records")) == 50
        stored = [one["Key"] for one in bucket.list_objects_v2(Bucket="team")["Contents"]]
        assert len(stored) == 1 and stored[0].startswith("srift/warehouse/main/raw_records/")
    finally:
        s3.stop()


WRITER = f"""
import sys
from pathlib import Path
from tests.warehouse.builders import DEFINED, NOON, TYPES, body, recommendation, stamp
from warehouse.append import append_records, note_workloads
from warehouse.lake import Lake, SharedWarehouse
from warehouse.publication import publish

host, database, data, n = sys.argv[1:]
lake = Lake(host=host, port=5432, user="{postgres.USER}", database=database, data=data)
warehouse = SharedWarehouse(Path(data) / f"home{{n}}" / "warehouse.duckdb", lake)
sys.stdin.readline()
warehouse.migrate()
for turn in range({ROUNDS}):
    with warehouse.transact() as connection:
        note_workloads(connection, DEFINED, provider="local", noted_at=NOON)
        bodies = [body(f"own-{{n}}-{{turn}}-{{one}}") for one in range(20)] + [body(f"common-{{turn}}")]
        append_records(connection, bodies, refresh_id=f"refresh-{{n}}", loaded_at=NOON)
    publish(warehouse, [recommendation()], stamp(1000 + {ROUNDS} * int(n) + turn))
    publish(warehouse, [recommendation()], stamp(turn))
"""


def test_eight_writers_at_once_lose_nothing_and_store_nothing_twice(
    lake: Lake, tmp_path: Path
) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, lake.host, lake.database, lake.data, str(n)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(WRITERS)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [(writer.communicate(timeout=300)[1], writer.returncode) for writer in writers] == [
        ("", 0)
    ] * WRITERS
    shared = SharedWarehouse(tmp_path / "warehouse.duckdb", lake)
    own, common = WRITERS * ROUNDS * 20, ROUNDS  # of records
    publications = WRITERS * ROUNDS + ROUNDS
    for table, key, rows in (
        ("raw_records", "run_id", own + common),
        ("raw_publications", "publication_id", publications),
        ("raw_publications", "noted_order", publications),
        ("raw_recommendations", "publication_id", publications),
        ("raw_workload_facts", "noted_order", 1),
        ("schema_migrations", "number", len(shared.select("schema_migrations")["number"].unique())),
    ):
        assert (len(shared.select(table)), shared.select(table)[key].nunique()) == (rows, rows), (
            table
        )


def test_what_a_machine_claims_of_the_months_dollars_the_others_see_until_it_settles_it(
    lake: Lake, shared: SharedWarehouse, tmp_path: Path
) -> None:
    homes = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        here = install(tmp_path / name, provider=DescribedMachines(name="ec2"))
        stated = here.settings.shared.model_copy(update={"host": lake.host, "data": lake.data})
        settings = here.settings.model_copy(update={"shared": stated})
        warehouse = SharedWarehouse(settings.home / "warehouse.duckdb", lake)
        homes.append(Workspace(settings=settings, warehouse=warehouse, provider=here.provider))
    one, other = homes
    for number, here in enumerate((one, other, one)):
        claim(here, f"r-{number}", 2.0 + number, NOON)

    def seen(here: Workspace, before: str) -> list[tuple[str, float]]:
        return [
            (row["refresh_id"], row["left_usd"]) for row in of_others(here, NOON, before=before)
        ]

    assert seen(other, "") == [("r-0", 2.0), ("r-2", 4.0)] and seen(other, "r-1") == [("r-0", 2.0)]
    assert seen(one, "") == [("r-1", 3.0)] and seen(one, "r-0") == []
    claim(one, "r-2", 9.0, NOON)
    settle(one, NOON, over="r-0")
    assert seen(other, "") == [("r-2", 4.0)], "a claim is made once"
    settle(one, NOON)
    assert seen(other, "") == []


def test_a_lake_of_an_older_version_with_publications_in_it_is_brought_up_to_date(
    lake: Lake, tmp_path: Path
) -> None:
    folder = sql_of(tmp_path, "027_*", "028_*", "marts", "staging")
    older = SharedWarehouse(tmp_path / "older.duckdb", lake, sql_folder=folder)
    older.migrate()
    with older.transact() as connection:  # past `append`, which knows the newest columns
        connection.execute(
            "insert into shared.main.raw_recommendations by name select 'r-1' as publication_id, $at as published_at,"
            " 'local' as provider, 'tiny' as workload, 'cheapest' as goal, 1 as rank, 'recommended' as status,"
            " '2xsmall' as cluster",
            {"at": NOON},
        )
    newer = SharedWarehouse(tmp_path / "newer.duckdb", lake)
    assert newer.migrate() == ["027_parts_of_a_step", "028_claims"]
    assert publish(newer, [recommendation(goal="fastest")], stamp(2)) == 1
    found = newer.select("recommendation_history").sort_values("published_at")
    assert found["cluster"].tolist() == ["2xsmall", "2xsmall"]
    assert found["compute_s"].isna().tolist() == [True, False]
