"""A home on a full or read-only disk, or with a damaged file: each verb says so in a sentence, and what to type."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.doctor import report as doctor
from tests.conftest import SmallDisk
from tests.flows.test_cli import assert_fails, enter, printed, srift, without_a_server
from tests.installed import DescribedMachines, furnished
from warehouse.database import Warehouse

FILES = {"warehouse.duckdb": "warehouse", "published/recommendations.duckdb": "published table"} | {
    "mlflow.db": "model registry",
    "prefect/prefect.db": "Prefect's history",
}
FULL = SimpleNamespace(total=2**30, used=2**30, free=0)
ASK = ("recommend", "conv", "--deadline", "90m")


@pytest.fixture(autouse=True)
def a_shell_of_its_own(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tasks.providers.local.provider.LocalProvider", lambda *_, **__: DescribedMachines()
    )
    monkeypatch.delenv("PREFECT_HOME", raising=False)


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a project with a champion and a published table, to be damaged."""
    return enter(Path(shutil.copytree(furnished(), tmp_path / "used")), monkeypatch)


@pytest.fixture
def on_small_disk(small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    enter(Path(shutil.copytree(furnished(), small_disk.place / "used")), monkeypatch)
    yield small_disk
    monkeypatch.chdir("/")


def damage(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    content = file.read_bytes() if file.exists() else bytes(8192)
    file.write_bytes(b"\xa5" * 100 + content[100:])


def findings() -> dict[str, dict[str, str]]:
    found = srift("doctor", "--json")
    body = json.loads(found.stdout)
    assert found.exit_code == (0 if body["well"] else 1)
    return {one["check"]: one for one in body["findings"]}


def test_a_sound_home_is_well(used: Path) -> None:
    found = findings()
    assert {found[check]["status"] for check in ("home", *FILES.values())} == {"ok"}
    assert not [one for one in printed("status")["stale"] if "damaged" in one]


def test_doctor_leaves_nothing_in_a_home_that_is_not_there(tmp_path: Path) -> None:
    found = {one.check: one.status for one in doctor.examine_home(tmp_path / "none" / "yet")}
    assert found["home"] == "ok" and found["warehouse"] == found["published table"] == "note"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_doctor_and_status_name_the_damaged_file_and_no_other(used: Path, name: str) -> None:
    damage(used / "state" / name)
    found = findings()
    assert [check for check, one in found.items() if one["status"] == "wrong"] == [FILES[name]]
    assert "damaged" in found[FILES[name]]["says"]
    (said,) = [one for one in printed("status")["stale"] if "damaged" in one]
    assert said.startswith(f"{FILES[name]}: ")


@pytest.mark.parametrize(
    ("name", "verbs"),
    [
        ("warehouse.duckdb", [ASK, ("import", "rows.csv"), ("refresh", "--dry-run")]),
        ("published/recommendations.duckdb", [("table",), ("table", "--json")]),
        ("mlflow.db", [ASK, ("refresh", "--dry-run")]),
    ],
)
def test_each_verb_that_needs_the_damaged_file_says_what_is_lost_and_what_to_type(
    used: Path, name: str, verbs: list[tuple[str, ...]]
) -> None:
    (used / "rows.csv").write_text(
        "workload,cluster,batch_per_device,step_s\nconv,2xs.small,16,0.5\n"
    )
    damage(used / "state" / name)
    for words in verbs:
        assert_fails(srift(*words), 1, "damaged")


def test_a_damaged_warehouse_is_restored(used: Path) -> None:
    store, before = Warehouse(used / "state" / "warehouse.duckdb"), printed("workloads")
    store.back_up()
    damage(store.path)
    assert_fails(srift(*ASK), 1, "srift restore")
    assert srift("restore").exit_code == 0
    assert findings()["warehouse"]["status"] == "ok" and printed("workloads") == before


def test_what_the_message_says_to_type_leaves_a_home_that_works(used: Path) -> None:
    name = "mlflow.db"
    damage(used / "state" / name)
    typed = [line.strip() for line in srift(*ASK).stderr.splitlines() if line.startswith("  ")]
    assert typed.pop() == "srift refresh"
    subprocess.run(["sh", "-e", "-c", "\n".join(typed)], check=True)
    assert {one["status"] for check, one in findings().items() if check != "instance types"} <= {
        "ok",
        "note",
    }
    assert (
        len(list((used / "state").glob(f"damaged-*-{name}"))) == 1
        and shlex.quote(str(used)) in typed[0]
    )


def test_a_read_only_home_is_named_and_what_is_in_it_can_be_read(on_small_disk: SmallDisk) -> None:
    on_small_disk.make_read_only()
    assert printed("table") and printed(*ASK) and srift("status").exit_code == 0
    assert findings()["home"]["status"] == "wrong"
    for words in (("refresh",), ("refresh", "--max-usd", "0")):
        assert_fails(srift(*words), 1, "cannot be written (Read-only file system)", "SRIFT_HOME")


def test_a_full_disk_is_named_before_a_refresh_starts_and_by_an_import(
    on_small_disk: SmallDisk,
) -> None:
    Path("rows.csv").write_text("workload,cluster,batch_per_device,step_s\nconv,2xs.small,16,0.5\n")
    on_small_disk.fill()
    assert_fails(srift("refresh"), 1, "is full or nearly so: 0 MiB are left")
    assert_fails(srift("import", "rows.csv"), 1, "the disk is full", "free some space")
    assert printed("table") and "home: the disk of" in srift("status").stdout
    assert "is full" in findings()["home"]["says"]
    on_small_disk.free()
    assert printed("import", "rows.csv")["new"] == 1


class Http500(Exception):
    """As Prefect's client says of a server that cannot write."""


Http500.__module__ = "prefect.exceptions"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), "make it writable"),
        (
            duckdb.IOException('IO Error: Could not write file "x": No space left on device'),
            "the disk is full",
        ),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full"), "free some space"),
        (Http500("Server error '500 Internal Server Error'"), "0 MiB are left"),
    ],
)
def test_a_disk_that_fills_up_in_the_middle_of_a_refresh_is_named_whoever_stumbles(
    used: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    without_a_server(monkeypatch)

    def stumble(*_: object, **__: object) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: FULL)
        if isinstance(error, Http500):
            raise error
        raise ValueError("what a library made of it") from error

    monkeypatch.setattr("flows.refresh.refresh", stumble)
    assert_fails(srift("refresh"), 1, says)


def test_what_nobody_foresaw_keeps_its_traceback(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object, **__: object) -> None:
        raise ValueError("a mistake of ours")

    without_a_server(monkeypatch)
    monkeypatch.setattr("flows.refresh.refresh", stumble)
    assert isinstance(CliRunner().invoke(app, ["refresh"]).exception, ValueError)
