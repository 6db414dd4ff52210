"""The warehouse that several machines share: the same rows, and several writers at once."""

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest

from tasks.workspace.settings import Shared
from tests import postgres
from tests.warehouse.builders import (
    NOON,
    ROWS,
    body,
    define,
    fresh,
    load,
    recommendation,
    stamp,
    write,
)
from warehouse.append import append, note_import
from warehouse.database import WarehouseBusy, WarehouseError
from warehouse.export import export, read_published
from warehouse.lake import Lake, SharedWarehouse, _ask, _session
from warehouse.publication import PublicationRefused, publish

pytestmark = pytest.mark.slow
pytest.importorskip("duckdb_extension_ducklake")
WRITERS, ROUNDS = 8, 2
ROW = {"import_id": "i", "row_digest": "d"}
CLAIM = {"provider": "ec2", "place": "here", "usd": 2.0, "noted_at": NOON, "may_cost_until": NOON}
CLAIMS = [
    CLAIM | {"event": event, "refresh_id": name}
    for event, name in (("claimed", "a"), ("claimed", "b"), ("settled", "a"))
]
_number = count()


@pytest.fixture(scope="module")
def server():
    with postgres.server() as folder:
        yield folder


@pytest.fixture
def lake(server, tmp_path):
    database = f"lake{next(_number)}"
    postgres.create(server, database)
    data = str(tmp_path / "lake")
    return Lake(url=Shared(host=server, data=data).url(database), data=data)


@pytest.fixture
def shared(lake, tmp_path):
    warehouse = SharedWarehouse(tmp_path / "warehouse.duckdb", lake)
    warehouse.create()
    return warehouse


def fill(warehouse):
    define(warehouse)
    write(warehouse, append, "raw_claims", CLAIMS)
    return load(warehouse, body("r1"), body("r2"), body("r1", status="failed"))


def test_the_same_rows_give_the_same_marts(shared, tmp_path):
    shared.create()
    both = (fresh(tmp_path / "file"), shared)
    for warehouse in both:
        assert [fill(warehouse), fill(warehouse)] == [2, 0]
        assert [publish(warehouse, [recommendation()], stamp(1)) for _ in range(2)] == [1, 0]
        publish(warehouse, [recommendation(usd=0.05, usd_p90=0.06)], stamp(2))
        with pytest.raises(PublicationRefused):
            publish(warehouse, [recommendation(hours=-1.0)], stamp(3))
        export(warehouse, warehouse.path.parent / "published")
    for name in ("runs", "workloads", "claims", "recommendation_history", "recommendation_changes"):
        of_file, of_lake = (
            warehouse.select(f"select * from {name} order by all") for warehouse in both
        )
        assert len(of_file) and of_file.equals(of_lake), name
    published = [read_published(warehouse.path.parent / "published") for warehouse in both]
    assert published[0].equals(published[1]) and shared.verify() == both[0].verify()


def test_a_reader_reads_and_can_change_nothing(shared):
    psycopg2 = pytest.importorskip("psycopg2")
    url = postgres.admit_reader(shared.lake.url, "create table srift_warehouse.later ()")
    fill(shared)
    reader = SharedWarehouse(shared.path, replace(shared.lake, url=url))
    assert len(reader.select("runs")) == 2
    with pytest.raises(WarehouseError), reader.transact() as writing:
        append(writing, "raw_import_rows", [ROW])
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute("select * from srift_warehouse.later")
        for change in (
            "delete from srift_warehouse.ducklake_snapshot",
            "create table srift_warehouse.mine ()",
            "create table public.mine ()",
        ):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                cursor.execute(change)


def test_several_reads_see_one_state_and_write_nothing(shared):
    query = "select count(*) from raw_import_rows"
    with shared.read() as connection:
        before = connection.execute(query).fetchone()
        with shared.transact() as writing:
            append(writing, "raw_import_rows", [ROW])
        assert connection.execute(query).fetchone() == before == (0,)
    with pytest.raises(WarehouseError), shared.read() as connection:
        connection.execute("insert into raw_import_rows values ('i', 'd')")


def test_the_wait_is_bounded_and_the_error_names_the_writer(shared):
    hasty = SharedWarehouse(shared.path, shared.lake, wait_s=0.0)
    with (
        shared.transact(),
        pytest.raises(WarehouseBusy, match=r"srift on \S+, process \d+"),
        hasty.transact(),
    ):
        pass


def test_a_writer_that_lost_its_turn_commits_nothing(shared):
    ends = "select pg_terminate_backend(pid)::text from pg_locks where locktype = 'advisory'"
    with pytest.raises(WarehouseError), shared.transact() as writing:
        append(writing, "raw_import_rows", [ROW])
        with _session(shared.lake).cursor("select 1") as other:
            _ask(other, ends)
    assert shared.select("raw_import_rows").empty


def test_an_empty_lake_and_another_schema_are_errors(lake, tmp_path):
    warehouse = SharedWarehouse(tmp_path / "warehouse.duckdb", lake)
    assert not warehouse.exists()
    assert warehouse.select("runs").empty
    warehouse.create()
    with warehouse.transact() as connection:
        connection.execute("update srift_schema set digest = 'another'")
    _session.cache_clear()  # as in another process
    with pytest.raises(WarehouseError):
        warehouse.create()


def test_a_home_is_carried_over_once(shared, tmp_path):
    file = fresh(tmp_path / "home")
    fill(file)
    for n in (2, 1):  # the runs count where the first definition is put back
        publish(file, [recommendation()], stamp(n))
        define(file, f"w{n}")
    publish(shared, [recommendation(workload="other")], stamp(3, provider="ec2"))
    copied = shared.carry_over(file)
    assert [copied[f"raw_{name}"] for name in ("runs", "publications", "recommendations")] == [
        2
    ] * 3
    assert set(shared.carry_over(file).values()) == {0}
    for columns in (
        "* from runs",
        "* from recommendations",
        "* exclude noted_at from stg_workloads",
    ):
        query = f"select {columns} where provider = 'local' order by all"
        assert len(file.select(query)) and file.select(query).equals(shared.select(query)), query


def test_a_row_of_two_imports_counts_until_both_are_forgotten(shared, tmp_path):
    file = fresh(tmp_path / "home")
    for warehouse, import_id in ((shared, "b"), (file, "a")):
        write(warehouse, note_import, import_id, event="imported", noted_at=NOON)
        stamped = {"import_id": import_id, "loaded_at": NOON}
        write(warehouse, append, "raw_imports", [ROWS["import"]], **stamped)
    assert shared.carry_over(file)["raw_import_rows"] == 1
    for import_id, left in (("b", 1), ("a", 0)):
        write(shared, note_import, import_id, event="forgotten", noted_at=NOON)
        assert len(shared.select("runs")) == left


@pytest.mark.local
def test_the_files_may_lie_in_s3(lake, tmp_path, s3):
    s3.create_bucket(Bucket="team")
    in_s3 = replace(lake, data="s3://team/srift/warehouse")
    shared = SharedWarehouse(tmp_path / "warehouse.duckdb", in_s3)
    shared.create()
    # a few rows stay in the catalogue
    assert load(shared, *(body(f"r{n}") for n in range(50))) == 50
    assert len(shared.select("raw_runs")) == 50
    stored = [entry["Key"] for entry in s3.list_objects_v2(Bucket="team")["Contents"]]
    assert len(stored) == 1 and stored[0].startswith("srift/warehouse/main/raw_runs/")


WRITER = f"""
import sys
from pathlib import Path
from tests.warehouse.builders import DEFINED, NOON, body, recommendation, stamp
from warehouse.append import append_records, note_workloads
from warehouse.lake import Lake, SharedWarehouse
from warehouse.publication import publish

url, data, n = sys.argv[1:]
lake = Lake(url=url, data=data)
warehouse = SharedWarehouse(Path(data) / f"home{{n}}" / "warehouse.duckdb", lake)
sys.stdin.readline()
warehouse.create()
for turn in range({ROUNDS}):
    with warehouse.transact() as connection:
        note_workloads(connection, DEFINED, provider="local", noted_at=NOON)
        bodies = [body(f"own-{{n}}-{{turn}}-{{one}}") for one in range(20)] + [body(f"common-{{turn}}")]
        append_records(connection, bodies, refresh_id=f"refresh-{{n}}", loaded_at=NOON)
    publish(warehouse, [recommendation()], stamp(1000 + {ROUNDS} * int(n) + turn))
    publish(warehouse, [recommendation()], stamp(turn))
"""


def test_eight_writers_at_once_lose_nothing_and_store_nothing_twice(lake, tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, lake.url, lake.data, str(n)],
            stdin=subprocess.PIPE,
            text=True,
        )
        for n in range(WRITERS)
    ]
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=300)
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    shared = SharedWarehouse(tmp_path / "warehouse.duckdb", lake)
    runs = shared.select("select count(*) as n, count(distinct run_id) as d from raw_runs")
    assert runs.values.tolist() == [[WRITERS * ROUNDS * 20 + ROUNDS] * 2]
    publications = shared.select("raw_publications")
    assert (
        len(publications) == len(shared.select("raw_recommendations")) == WRITERS * ROUNDS + ROUNDS
    )
    orders = publications.noted_order.tolist()
    assert len(set(orders)) == len(orders)
    assert len(shared.select("raw_workload_facts")) == 1
