"""A home on a full or read-only disk, or with a damaged file: exit 1, and the file is named."""

import errno
import json
import shutil
from pathlib import Path

import duckdb
import pytest

from tests.flows.test_cli import ASK, ROWS, assert_fails, enter, printed, srift, without_a_server
from tests.installed import furnished
from warehouse.database import Warehouse

pytestmark = pytest.mark.usefixtures("described_machines")
FILES = {
    "warehouse.duckdb": "warehouse",
    "published/recommendations.duckdb": "published table",
    "mlflow.db": "model registry",
}


@pytest.fixture
def used(tmp_path, monkeypatch):
    """A copy of a project with a champion and a published table."""
    return enter(Path(shutil.copytree(furnished(), tmp_path / "used")), monkeypatch)


@pytest.fixture
def on_small_disk(small_disk, monkeypatch):
    enter(Path(shutil.copytree(furnished(), small_disk.place / "used")), monkeypatch)
    yield small_disk
    monkeypatch.chdir("/")


def damage(file):
    file.write_bytes(b"\xa5" * 100 + file.read_bytes()[100:])


def findings():
    found = srift("doctor", "--json")
    body = json.loads(found.stdout)
    assert found.exit_code == (0 if body["well"] else 1)
    return {one["check"]: one["status"] for one in body["findings"]}


@pytest.mark.parametrize("name", FILES)
def test_the_doctor_names_the_damaged_file_and_commands_that_need_it_exit_1(used, name):
    damage(used / "state" / name)
    assert [check for check, status in findings().items() if status == "wrong"] == [FILES[name]]
    assert any(FILES[name] in one for one in printed("status")["stale"])
    words = ("table",) if name.startswith("published") else ASK
    assert_fails(srift(*words), 1, "damaged")


def test_a_damaged_warehouse_is_restored(used):
    store, before = Warehouse(used / "state" / "warehouse.duckdb"), printed("workloads")
    store.back_up()
    damage(store.path)
    assert_fails(srift(*ASK), 1, "srift restore")
    assert srift("restore").exit_code == 0
    assert findings()["warehouse"] == "ok" and printed("workloads") == before


def test_a_read_only_home_can_be_read(on_small_disk):
    on_small_disk.make_read_only()
    assert printed("table") and srift("status").exit_code == 0
    assert findings()["home"] == "wrong"
    assert_fails(srift("refresh"), 1, "SRIFT_HOME")


def test_a_full_disk_is_named_and_nothing_is_lost(on_small_disk):
    Path("rows.csv").write_text(ROWS)
    on_small_disk.fill()
    assert_fails(srift("refresh"), 1, "disk")
    assert_fails(srift("import", "rows.csv"), 1, "full")
    assert printed("table") and findings()["home"] == "wrong"
    on_small_disk.free()
    assert printed("import", "rows.csv")["new"] == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        duckdb.IOException('Could not write file "x": No space left on device'),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ],
)
def test_a_disk_that_fills_up_during_a_refresh_exits_1(used, monkeypatch, error):
    without_a_server(monkeypatch)

    def stumble(*_, **__):
        raise ValueError from error

    monkeypatch.setattr("flows.refresh.refresh", stumble)
    assert_fails(srift("refresh"), 1)
