"""A full disk, a read-only folder, a damaged file: each is named at once, and what is typed then puts it right."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest

from tests.conftest import SmallDisk
from tests.warehouse.builders import fresh, recommendation, sql_of, stamp
from warehouse.database import (
    SQL_FOLDER,
    DiskFull,
    HomeReadOnly,
    Warehouse,
    WarehouseBusy,
    WarehouseDamaged,
    WarehouseError,
)
from warehouse.export import export, read_published
from warehouse.publication import publish
from warehouse.salvage import KEPT_BACKUPS, backups

BLOCK = 262144  # bytes of DuckDB's blocks, after three headers of 4096
KILLED = """
import os, signal, sys
from pathlib import Path
from warehouse.database import Warehouse
with Warehouse(Path(sys.argv[1])).transact() as connection:
    connection.execute("insert into raw_timings values ('killed', 'plan', 1.0)")
    if sys.argv[2] == "within":
        os.kill(os.getpid(), signal.SIGKILL)
    connection.commit()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def add(warehouse: Warehouse, name: str, rows: int = 1) -> None:
    with warehouse.transact() as connection:
        connection.execute(
            "insert into raw_timings select $name || i, 'phase ' || hash(i), i from range($rows) as t(i)",
            {"name": name, "rows": rows},
        )


def count(warehouse: Warehouse) -> int:
    return len(warehouse.select("timings"))


def overwrite(path: Path, start: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * length)


def impatient(warehouse: Warehouse) -> Warehouse:
    """Fails instead of waiting: nothing that is damaged is a lock."""
    return Warehouse(
        warehouse.path, sleep=lambda _: pytest.fail("it waits, as for another process")
    )


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The folder of SQL files of a version with one more migration."""
    folder = sql_of(tmp_path)
    (folder / "migrations" / "900_more.sql").write_text("create table more (a integer);")
    return folder


def test_a_full_disk_is_named_changes_nothing_and_is_forgotten_once_there_is_room(
    small_disk: SmallDisk,
) -> None:
    warehouse = fresh(small_disk.place)
    add(warehouse, "before")
    publish(warehouse, [recommendation()], stamp(1))
    folder = small_disk.place / "published"
    export(warehouse, folder)
    small_disk.fill()
    for attempt in (
        warehouse.migrate,
        lambda: add(warehouse, "small"),
        lambda: export(warehouse, folder),
    ):
        with pytest.raises(DiskFull, match=r"the disk is full: .*free some space at"):
            attempt()
    assert count(warehouse) == 1 and len(read_published(folder)) == 1
    small_disk.free()
    add(warehouse, "after")
    assert count(warehouse) == 2


def test_a_read_only_home_is_named_and_can_still_be_read(small_disk: SmallDisk) -> None:
    warehouse = fresh(small_disk.place)
    add(warehouse, "before")
    small_disk.make_read_only()
    with pytest.raises(HomeReadOnly, match=r"Read-only file system.*SRIFT_HOME"):
        add(warehouse, "no")
    with pytest.raises(HomeReadOnly):
        warehouse.migrate()
    assert count(warehouse) == 1


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("TransactionContext Error: Failed to commit: No space left on device", DiskFull),
        ("IO Error: Could not write file: Disk quota exceeded", DiskFull),
        ("IO Error: Cannot open file: Read-only file system", HomeReadOnly),
        ("IO Error: Cannot open file: Permission denied", HomeReadOnly),
        ("Serialization Error: Failed to deserialize", WarehouseDamaged),
        ("INTERNAL Error: Corrupt block", WarehouseDamaged),
        ("INTERNAL Error: Attempted to access index 3 within vector of size 2", WarehouseError),
        (
            'IO Error: Cannot open file "/data/checksum-runs/warehouse.duckdb": Too many open files',
            WarehouseError,
        ),
        ("IO Error: Cannot open file /data/corrupt/x: Too many open files", WarehouseError),
    ],
)
def test_what_duckdb_says_of_disk_and_file_is_distinguished(
    warehouse: Warehouse, says: str, error: type[Exception]
) -> None:
    kind = getattr(
        duckdb, says.split()[0].removesuffix("Context").title().replace("Io", "IO") + "Exception"
    )
    with pytest.raises(error, match=re.escape(says)) as caught, warehouse.transact():
        raise kind(says)
    assert caught.type is error
    if "index 3" in says:
        assert "`srift doctor` tells whether" in str(caught.value)


def test_a_mistake_in_a_query_and_words_in_a_path_are_no_damage(tmp_path: Path) -> None:
    warehouse = fresh(tmp_path / "a corrupt study")
    with pytest.raises(duckdb.CatalogException):
        warehouse.select("nonsense")
    with pytest.raises(duckdb.ConversionException), warehouse.transact() as connection:
        connection.execute("select 'corrupt, Permission denied, No space left on device'::integer")
    with pytest.raises(WarehouseError) as caught, warehouse.transact() as connection:
        connection.execute(f"copy (select 1) to '{warehouse.path.parent}/none/x.csv'")
    assert caught.type is WarehouseError
    with pytest.raises(WarehouseError) as caught, warehouse.transact():
        raise duckdb.IOException(
            f"IO Error: Cannot open file {warehouse.path}: Too many open files"
        )
    assert caught.type is WarehouseError


@pytest.mark.parametrize("start", [0, 4096, 8192])
def test_damage_at_the_start_is_found_at_once_by_whoever_opens_the_file(
    warehouse: Warehouse, start: int
) -> None:
    add(warehouse, "kept")
    overwrite(warehouse.path, start, 64)
    for attempt in (impatient(warehouse).migrate, lambda: impatient(warehouse).select("timings")):
        with pytest.raises(WarehouseDamaged, match=r"is damaged: .*all measurements are lost"):
            attempt()


def test_damage_in_the_middle_is_never_taken_for_another_process(warehouse: Warehouse) -> None:
    add(warehouse, "many", 50_000)
    sound = warehouse.path.read_bytes()
    assert warehouse.verify() > 50_000
    unread, unverified = set(), set()
    for start in range(3 * 4096 + 100, len(sound), BLOCK):
        warehouse.path.write_bytes(sound)
        overwrite(warehouse.path, start, 5000)
        for attempt, failed in (
            (impatient(warehouse).verify, unverified),
            (lambda: count(impatient(warehouse)), unread),
        ):
            try:
                attempt()
            except WarehouseDamaged as error:
                assert "checksum" in str(error)
                failed.add(start)
    assert unread and unread <= unverified, "a query stumbled over what the check had passed"


@pytest.mark.parametrize("when", ["within", "after"])
def test_a_killed_process_leaves_a_file_that_opens_and_its_last_commit(
    warehouse: Warehouse, when: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(warehouse.path), when], cwd=SQL_FOLDER.parent
    )
    assert ended.returncode == -signal.SIGKILL
    warehouse.verify()
    assert count(impatient(warehouse)) == (0 if when == "within" else 1)
    assert impatient(warehouse).migrate() == []


def test_a_migration_is_preceded_by_a_copy_with_what_a_killed_process_had_committed(
    warehouse: Warehouse, newer: Path
) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLED, str(warehouse.path), "after"], cwd=SQL_FOLDER.parent
    )
    assert warehouse.migrate() == [] and backups(warehouse.path) == [], "nothing was pending"
    subprocess.run(
        [sys.executable, "-c", KILLED.replace("'killed'", "'again'"), str(warehouse.path), "after"],
        cwd=SQL_FOLDER.parent,
    )
    later = Warehouse(warehouse.path, sql_folder=newer)
    assert later.migrate() == ["900_more"]
    (backup,) = backups(later.path)
    last = max(int(file.stem[:3]) for file in SQL_FOLDER.glob("migrations/*.sql"))
    assert backup.name.startswith(f"warehouse-{last:03d}-") and backup.parent.name == "backups"
    assert Warehouse(backup).select("timings")["refresh_id"].tolist() == ["again", "killed"]
    assert later.migrate() == [] and backups(later.path) == [backup]
    new = Warehouse(warehouse.path.parent / "new" / "warehouse.duckdb")
    new.migrate()
    assert not (new.path.parent / "backups").exists(), "a new file has nothing to back up"


def test_the_file_stays_locked_while_it_is_copied_and_migrated(
    warehouse: Warehouse, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intruder = (
        "import sys; from pathlib import Path; from warehouse.database import *\n"
        "try: Warehouse(Path(sys.argv[1]), wait_s=0.0).select('timings')\n"
        "except WarehouseBusy: sys.exit(7)"
    )
    seen: list[int] = []
    copied = Warehouse._back_up

    def back_up(self: Warehouse, *words: Any) -> Path:
        made = copied(self, *words)
        ended = subprocess.run(
            [sys.executable, "-c", intruder, str(self.path)], cwd=SQL_FOLDER.parent
        )
        seen.append(ended.returncode)
        return made

    monkeypatch.setattr(Warehouse, "_back_up", back_up)
    Warehouse(warehouse.path, sql_folder=newer).migrate()
    assert seen == [7], "another process could open the file between the copy and the migration"
    assert WarehouseBusy.__name__ in intruder


def test_a_migration_that_fails_leaves_no_copy_and_the_older_copies(
    warehouse: Warehouse, newer: Path
) -> None:
    Warehouse(warehouse.path, sql_folder=newer).migrate()
    later = Warehouse(warehouse.path, sql_folder=newer)
    before = backups(later.path)
    (newer / "migrations" / "901_bad.sql").write_text("select nonsense;")
    for _ in range(KEPT_BACKUPS + 1):
        with pytest.raises(duckdb.BinderException):
            later.migrate()
    assert (
        backups(later.path) == before
        and list((warehouse.path.parent / "backups").iterdir()) == before
    )


def test_without_room_for_the_copy_nothing_is_migrated(
    warehouse: Warehouse, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    later = Warehouse(warehouse.path, sql_folder=newer)
    with pytest.raises(DiskFull, match=r"the disk has 1 MiB left. Nothing was changed"):
        later.migrate()
    monkeypatch.undo()
    assert backups(later.path) == [] and later.migrate() == ["900_more"]


@pytest.mark.parametrize("backed_up", [True, False])
def test_what_the_message_says_to_type_puts_a_damaged_file_right(
    warehouse: Warehouse, newer: Path, backed_up: bool
) -> None:
    add(warehouse, "early")
    later = Warehouse(warehouse.path, sql_folder=newer if backed_up else SQL_FOLDER)
    later.migrate()
    subprocess.run(
        [sys.executable, "-c", KILLED, str(warehouse.path), "after"], cwd=SQL_FOLDER.parent
    )
    overwrite(warehouse.path, 0, 64)
    with pytest.raises(WarehouseDamaged) as caught:
        later.migrate()
    typed = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert typed.pop() == "srift refresh"
    subprocess.run(["sh", "-e", "-c", "\n".join(typed)], check=True)
    assert ("what was loaded since" in str(caught.value)) == backed_up
    later.migrate()
    assert later.select("timings")["refresh_id"].tolist() == (["early0"] if backed_up else [])
    assert len(list(warehouse.path.parent.glob("damaged-*-warehouse.duckdb"))) == 1


def test_a_failure_inside_duckdb_while_it_only_reads_is_damage(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise duckdb.InternalException(
            "INTERNAL Error: Attempted to access index 3 within vector of size 2"
        )

    monkeypatch.setattr("warehouse.salvage._rows", fail)
    with pytest.raises(WarehouseDamaged, match="index 3"):
        warehouse.verify()


@cache
def large_file() -> bytes:
    """Tables and indexes of several blocks; written once a session."""
    with tempfile.TemporaryDirectory() as folder:
        warehouse = fresh(Path(folder))
        add(warehouse, "many", 50_000)
        with duckdb.connect(str(warehouse.path)) as connection:
            connection.execute("checkpoint")
        return warehouse.path.read_bytes()


@pytest.fixture
def large(tmp_path: Path) -> Warehouse:
    warehouse = fresh(tmp_path / "large")
    warehouse.path.write_bytes(large_file())
    return warehouse


def damaged_block(warehouse: Warehouse, *, of_a_table: bool) -> None:
    """Leaves the file with one byte changed: in a block of rows, or in one of an index, by what `verify` says of it."""
    sound = warehouse.path.read_bytes()
    at = where_damage_shows(sound, of_a_table)
    warehouse.path.write_bytes(damaged_at(sound, at))


def damaged_at(sound: bytes, at: int) -> bytes:
    return sound[:at] + bytes([sound[at] ^ 255]) + sound[at + 1 :]


@cache
def where_damage_shows(sound: bytes, of_a_table: bool) -> int:
    """The first block with that damage; looked for once in each content."""
    with tempfile.TemporaryDirectory() as folder:
        warehouse = Warehouse(Path(folder) / "warehouse.duckdb")
        for at in range(3 * 4096 + BLOCK // 2, len(sound), BLOCK):
            warehouse.path.write_bytes(damaged_at(sound, at))
            try:
                warehouse.verify()
                warehouse.verify_indexes()
            except WarehouseDamaged as error:
                rows = "Some rows of raw_timings are lost" in str(error)
                if rows if of_a_table else "Every row of its tables can be read" in str(error):
                    return at
    pytest.fail("no such block")


def test_a_damaged_index_is_found_and_a_rebuild_keeps_every_row(large: Warehouse) -> None:
    before = large.path.read_bytes()
    large.verify_indexes()
    assert large.path.read_bytes() == before and large.rebuild() is None, (
        "checking changed the file"
    )
    damaged_block(large, of_a_table=False)
    content, rows = large.path.read_bytes(), large.verify()
    with pytest.raises(
        WarehouseDamaged, match=r"nothing is lost.*type\n  srift doctor --rebuild-warehouse"
    ):
        large.verify_indexes()
    assert (
        large.path.read_bytes() == content
        and not large.path.with_name("warehouse.duckdb.wal").exists()
    )
    rebuilt = large.rebuild()
    assert (
        rebuilt is not None
        and rebuilt.lost == {}
        and rebuilt.rows == rows
        and rebuilt.damaged.read_bytes() == content
    )
    large.verify_indexes()
    assert large.verify() == rows and large.migrate() == []
    add(large, "later")
    assert count(large) == 50_001
    with pytest.raises(duckdb.ConstraintException):
        add(large, "later")
    assert {one.name for one in large.path.parent.iterdir()} == {
        "warehouse.duckdb",
        rebuilt.damaged.name,
    }


def test_a_rebuild_keeps_the_rows_around_a_damaged_block(large: Warehouse) -> None:
    add(large, "more", 200_000)  # more than a row group of DuckDB's
    damaged_block(large, of_a_table=True)
    with pytest.raises(
        WarehouseDamaged, match=r"Some rows of raw_timings are lost(.|\n)*srift doctor --rebuild"
    ):
        large.verify()
    rebuilt = large.rebuild()
    assert rebuilt is not None and set(rebuilt.lost) == {"raw_timings"}
    assert 0 < count(large) == 250_000 - rebuilt.lost["raw_timings"]
    large.verify_indexes()


def test_a_rebuild_takes_the_log_of_the_damaged_file_away_with_it(large: Warehouse) -> None:
    damaged_block(large, of_a_table=False)
    subprocess.run([sys.executable, "-c", KILLED, str(large.path), "after"], cwd=SQL_FOLDER.parent)
    log = large.path.with_name("warehouse.duckdb.wal")
    if not log.exists():
        pytest.skip("the index was read by the insert")
    rebuilt = large.rebuild()
    assert rebuilt is not None and not log.exists() and count(large) == 50_001
    assert rebuilt.damaged.with_name(f"{rebuilt.damaged.name}.wal").exists()


def test_without_room_a_rebuild_leaves_the_damaged_file_where_it_is(small_disk: SmallDisk) -> None:
    warehouse = fresh(small_disk.place)
    add(warehouse, "many", 50_000)
    with duckdb.connect(str(warehouse.path)) as connection:
        connection.execute("checkpoint")
    damaged_block(warehouse, of_a_table=True)
    there = sorted(small_disk.place.iterdir())
    small_disk.fill()
    with pytest.raises(DiskFull):
        warehouse.rebuild()
    small_disk.free()
    assert sorted(small_disk.place.iterdir()) == there
    assert warehouse.rebuild() is not None


@pytest.mark.parametrize("of_a_table", [True, False])
def test_a_damaged_file_is_not_migrated_and_makes_no_copy(
    large: Warehouse, newer: Path, of_a_table: bool
) -> None:
    damaged_block(large, of_a_table=of_a_table)
    content = large.path.read_bytes()
    with pytest.raises(WarehouseDamaged):
        Warehouse(large.path, sql_folder=newer).migrate()
    assert large.path.read_bytes() == content
    assert backups(large.path) == [] and list((large.path.parent / "backups").iterdir()) == []


def kept_copies(warehouse: Warehouse, sound: list[bool]) -> list[Path]:
    """Copies of the file, the oldest first; those that are not `sound` with a damaged block."""
    folder = warehouse.path.parent / "backups"
    folder.mkdir()
    original = warehouse.path.read_bytes()
    made = [
        folder / f"warehouse-005-2026110{day}T000000000000.duckdb" for day, _ in enumerate(sound, 1)
    ]
    for path, whole in zip(made, sound, strict=True):
        warehouse.path.write_bytes(original)
        if not whole:
            damaged_block(warehouse, of_a_table=True)
        shutil.copy(warehouse.path, path)
    warehouse.path.write_bytes(original)
    return made


def test_the_newest_copy_that_can_be_read_is_the_one_to_restore(large: Warehouse) -> None:
    older, _ = kept_copies(large, [True, False])
    overwrite(large.path, 0, 64)
    with pytest.raises(WarehouseDamaged) as caught:
        large.verify()
    assert f"cp {older} {large.path}" in str(caught.value)
    assert "what was loaded since 2026-11-01 00:00 UTC is lost" in str(caught.value)
    older.unlink()
    with pytest.raises(
        WarehouseDamaged,
        match="none of its backups can be read whole, so all measurements are lost",
    ):
        large.verify()


def test_the_last_few_copies_are_kept_and_a_sound_one_outlives_damaged_ones(
    large: Warehouse, newer: Path
) -> None:
    made = kept_copies(large, [True] + [False] * KEPT_BACKUPS)
    later = Warehouse(large.path, sql_folder=newer)
    later.migrate()
    assert made[0] in backups(later.path) and len(backups(later.path)) == KEPT_BACKUPS
    for number in range(901, 901 + KEPT_BACKUPS):
        (newer / "migrations" / f"{number}_more.sql").write_text(
            f"create table more_{number} (a integer);"
        )
        later.migrate()
    kept = [path.name.split("-")[1] for path in backups(later.path)]
    assert kept == [str(900 + number) for number in range(KEPT_BACKUPS)], (
        "of sound ones the last few"
    )


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            duckdb.FatalException(
                "FATAL Error: Failed to commit: Could not write: Input/output error"
            ),
            1,
        ),
        (duckdb.TransactionException("Failed to commit: No space left on device"), 1),
        (duckdb.IOException("IO Error: Corrupt database file"), 1),
        (duckdb.BinderException("no such column"), 0),
    ],
)
def test_the_copy_stays_where_a_migration_fails_by_file_or_disk(
    warehouse: Warehouse, newer: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: int
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("warehouse.database.drop_views", fail)
    with pytest.raises((WarehouseError, duckdb.BinderException)):
        Warehouse(warehouse.path, sql_folder=newer).migrate()
    assert len(backups(warehouse.path)) == kept


def test_the_published_table_is_set_aside_before_a_refresh_replaces_it(
    warehouse: Warehouse,
) -> None:
    publish(warehouse, [recommendation()], stamp(1))
    export(warehouse, warehouse.path.parent / "published")
    overwrite(warehouse.path, 0, 64)
    with pytest.raises(
        WarehouseDamaged, match=r"regret ledger, drift and alarms .* once a refresh replaces"
    ) as caught:
        warehouse.verify()
    typed = [line for line in str(caught.value).splitlines() if line.startswith("  ")][:-1]
    subprocess.run(["sh", "-e", "-c", "\n".join(typed)], check=True)
    warehouse.migrate()
    export(warehouse, warehouse.path.parent / "published")
    (kept,) = warehouse.path.parent.glob("published-*")
    assert len(read_published(kept, "recommendation_history")) == 1
