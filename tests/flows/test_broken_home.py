"""A home on a full or read-only disk, or with a damaged file: exit 1, and the file is named."""

import errno
import json
import shutil
import subprocess
from contextlib import suppress
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
def small_disk(tmp_path, monkeypatch):
    """A file system of 24 MiB with a used project; only root may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        enter(Path(shutil.copytree(furnished(), place / "used")), monkeypatch)
        yield place
    finally:
        monkeypatch.chdir("/")
        subprocess.run(["umount", "--lazy", place], check=True)


def damage(file):
    file.write_bytes(b"\xa5" * 100 + file.read_bytes()[100:])


def findings():
    found = srift("doctor", "--json")
    body = json.loads(found.stdout)
    assert found.exit_code == (0 if body["well"] else 1)
    return {finding["check"]: finding["status"] for finding in body["findings"]}


@pytest.mark.parametrize("name", FILES)
def test_the_doctor_names_the_damaged_file_and_commands_that_need_it_exit_1(used, name):
    """A damaged warehouse is restored."""
    before = printed("workloads")
    Warehouse(used / "state/warehouse.duckdb").back_up()
    damage(used / f"state/{name}")
    assert [check for check, status in findings().items() if status == "wrong"] == [FILES[name]]
    assert any(FILES[name] in line for line in printed("status")["stale"])
    words = ("table",) if name.startswith("published") else ASK
    assert_fails(srift(*words), 1, "damaged")
    if name == "warehouse.duckdb":
        assert_fails(srift(*words), 1, "srift restore")
        assert srift("restore").exit_code == 0
        assert findings()["warehouse"] == "ok" and printed("workloads") == before


def test_a_read_only_home_can_be_read(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert printed("table") and srift("status").exit_code == 0
    assert findings()["home"] == "wrong"
    assert_fails(srift("refresh"), 1, "SRIFT_HOME")


def test_a_full_disk_is_named_and_nothing_is_lost(small_disk):
    Path("rows.csv").write_text(ROWS)
    ballast = small_disk / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert_fails(srift("refresh"), 1, "disk")
    assert_fails(srift("import", "rows.csv"), 1, "full")
    assert printed("table") and findings()["home"] == "wrong"
    ballast.unlink()
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
