"""Create, wait, roll back, back up and restore."""

import os
import subprocess
import sys
import threading

import duckdb
import pytest

from tests.warehouse.builders import recommendation, stamp
from warehouse.database import (
    Warehouse,
    WarehouseBusy,
    WarehouseDamaged,
    WarehouseError,
    WarehouseMissing,
)
from warehouse.publication import publish

HOLD = """
import duckdb, sys
with duckdb.connect(sys.argv[1]) as connection:
    print("held", flush=True)
    sys.stdin.readline()
"""
ROW = "insert into raw_import_rows values ('i', 'd')"


@pytest.fixture
def holder(warehouse):
    """Another process that holds the working file until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, warehouse.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        if process.poll() is None:
            process.communicate("\n")


def test_creating_again_keeps_the_rows_and_another_schema_is_refused(tmp_path):
    warehouse = Warehouse(tmp_path / "home" / "warehouse.duckdb")
    warehouse.create()
    with warehouse.transact() as connection:
        connection.execute(ROW)
    warehouse.create()
    assert len(warehouse.select("raw_import_rows")) == 1
    with warehouse.transact() as connection:
        connection.execute("update srift_schema set digest = 'another'")
    with pytest.raises(WarehouseError):
        warehouse.create()


def test_a_transaction_that_raises_changes_nothing(warehouse):
    with pytest.raises(KeyboardInterrupt), warehouse.transact() as connection:
        connection.execute(ROW)
        raise KeyboardInterrupt
    assert warehouse.select("raw_import_rows").empty


def test_a_missing_warehouse_reads_as_empty_and_a_file_of_another_kind_is_damaged(tmp_path):
    warehouse = Warehouse(tmp_path / "none.duckdb")
    assert warehouse.select("runs").empty and not warehouse.exists()
    warehouse.path.write_text("no database" * 100)
    with pytest.raises(WarehouseDamaged):
        warehouse.select("runs")


def test_a_writer_waits_until_another_process_is_done(warehouse, holder, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        holder.communicate("\n")

    monkeypatch.setattr("time.sleep", wait)
    with warehouse.transact() as connection:
        connection.execute(ROW)
    assert len(waits) == 1


def test_the_wait_is_bounded_and_the_error_names_the_holder(warehouse, holder):
    hasty = Warehouse(warehouse.path, wait_s=0.0)
    with pytest.raises(WarehouseBusy, match=str(holder.pid)):
        hasty.select("runs")
    with pytest.raises(WarehouseBusy):
        hasty.create()


def test_a_reader_thread_waits_for_a_writer_thread(warehouse):
    seen = []
    reader = threading.Thread(target=lambda: seen.append(len(warehouse.select("raw_import_rows"))))
    with warehouse.transact() as connection:
        reader.start()
        connection.execute(ROW)
    reader.join()
    assert seen == [1]


def damage(path):
    """Overwrite the blocks behind the headers."""
    whole = path.read_bytes()
    path.write_bytes(whole[:12288] + bytes(len(whole) - 12288))


def test_a_damaged_warehouse_is_restored_from_its_verified_copy(warehouse, monkeypatch):
    publish(warehouse, [recommendation()], stamp(1))
    warehouse.back_up()
    assert warehouse.backup.exists() and warehouse.verify() == 2
    damage(warehouse.path)
    with pytest.raises(WarehouseDamaged, match="srift restore"):
        warehouse.verify()
    with pytest.raises(WarehouseDamaged):
        warehouse.back_up()
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: paths[1] == warehouse.path or replace(*paths))
    warehouse.restore()  # is killed before the copy is in place
    monkeypatch.undo()
    with pytest.raises(WarehouseDamaged):
        warehouse.create()
    kept = warehouse.restore()
    assert len(warehouse.select("recommendations")) == 1
    assert kept.exists() and warehouse.verify() == 2


def test_without_a_backup_nothing_is_moved(warehouse):
    damage(warehouse.path)
    with pytest.raises(WarehouseMissing):
        warehouse.restore()
    assert warehouse.path.exists()


def test_a_mistake_in_a_query_is_no_damage(warehouse):
    with pytest.raises(duckdb.CatalogException) as raised:
        warehouse.select("nonsense")
    assert raised.value.__cause__ is not raised.value  # the search for a cause would not end
