"""Check the disk of SRIFT_HOME (the folder of all state), and read its MLflow database."""

import errno
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from ..providers.base import ProviderError

_LEAST_FREE_MIB = 100  # the first refresh writes about 20 MiB
# An operator sets these environment variables to replace the stores in SRIFT_HOME.
OPERATORS_STORE = "MLFLOW_TRACKING_URI"
OPERATORS_ARTIFACTS = "MLFLOW_DEFAULT_ARTIFACT_ROOT"
MLFLOW_PAGES = "MLFLOW_PAGES_URI"  # address of MLflow's pages, which `make up` sets
HISTORY = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
_CHAMPION = """
    select version, storage_location
    from registered_model_aliases natural join model_versions
    where name = ? and alias = ?
"""
# SQLite, DuckDB and `shutil` report these errors without an error number.
_FULL = ("disk is full", "No space left on device", "Disk quota exceeded", "ut of disk")
_READ_ONLY = ("readonly database", "Read-only file system")


class Wrong(ProviderError):
    """A check of the installation failed. The message names the problem and the fix."""


def in_force(store: Path, name: str, alias: str) -> tuple[int, Path] | None:
    """Return the number and the folder of the model version with `alias`.

    This function does not import MLflow, because the import takes seconds. Returns None if `store`
    cannot be read, has no such version, or names a missing folder. Callers must then use MLflow.

    store: MLflow's SQLite file.
    name: name of the registered model.
    alias: an alias of a version, such as "champion".
    """
    try:
        with closing(_open(store)) as connection:
            ((version, place),) = connection.execute(_CHAMPION, (name, alias)).fetchall()
    except (sqlite3.Error, ValueError):
        return None
    folder = Path(unquote(str(place).removeprefix("file://")))
    return (int(version), folder) if folder.is_dir() else None


def _open(store: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True)


def check_home(home: Path) -> str:
    """Return a sentence that states the free disk space of `home`, which need not exist yet.

    Raises Wrong if `home` is not writable or its disk is nearly full.
    """
    folder = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        free_mib = shutil.disk_usage(folder).free // 2**20
    except OSError as error:
        raise Wrong(disk_trouble(error) or f"cannot write to {home}: {error.strerror}") from None
    if free_mib < _LEAST_FREE_MIB:
        raise Wrong(
            f"the disk of {home} has only {free_mib} MiB left, but a refresh needs"
            f" {_LEAST_FREE_MIB} MiB: free some space, or set SRIFT_HOME to another disk"
        )
    return f"{home} is writable, and {free_mib / 1024:.1f} GiB are free"


def check_registry(home: Path) -> str:
    """Return a sentence that says that MLflow's database in `home` can be read.

    A missing or locked file counts as intact.

    Raises Wrong if the database is damaged.
    """
    store = home / "mlflow.db"
    try:
        with closing(_open(store)) as connection:
            (status,) = connection.execute("pragma quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # missing, or locked by another process
        status = "ok"
    except sqlite3.DatabaseError as error:
        status = error
    if status != "ok":
        raise Wrong(
            f"the model registry {store} is damaged: {status}. Move the file away and run"
            " `srift refresh`, which fits a new model"
        )
    return "can be read"


def disk_trouble(error: BaseException | None) -> str | None:
    """Return a message if a full or read-only disk caused `error`, else None."""
    while error is not None:  # a library's exception may have the system's error as its cause
        number, text = getattr(error, "errno", None), str(error).partition("\n")[0]
        if number in (errno.ENOSPC, errno.EDQUOT) or any(phrase in text for phrase in _FULL):
            return f"the disk is full: {text}. Stored data are kept; free some space and try again"
        if number == errno.EROFS or any(phrase in text for phrase in _READ_ONLY):
            return f"{text}: make the folder writable, or set SRIFT_HOME to another folder"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
