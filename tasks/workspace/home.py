"""Whether SRIFT_HOME can be written and its SQLite files read; which model is in force, since MLflow takes seconds."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from ..providers.base import ProviderError

# A first refresh writes about 20 MiB: the server's database, the model with its plots, the warehouse and its copies.
_LEAST_FREE_MIB = 100
OPERATORS_STORE = (
    "MLFLOW_TRACKING_URI"  # the variable by which an operator chooses another registry
)
OPERATORS_ARTIFACTS = (
    "MLFLOW_DEFAULT_ARTIFACT_ROOT"  # and where that one keeps files, if it is a database
)
HISTORY = "PREFECT_SERVER_DATABASE_CONNECTION_URL"  # where Prefect's server keeps runs, if not in a file of the home
# Joined by whatever columns both tables name a version with: MLflow adds to them.
_QUERY = """
    select version, storage_location
    from registered_model_aliases natural join model_versions
    where name = ? and alias = ?
"""
_DAMAGED = re.compile("not a database|malformed|corrupt")


def damage(store: Path, *, thorough: bool = True) -> str:
    """What is wrong with the SQLite file `store`, of which only the first pages are read unless `thorough`.

    Empty where nothing is, where there is no such file, and where another process does not let it be read.
    """
    if not store.exists():
        return ""
    query = "pragma quick_check(1)" if thorough else "select count(*) from sqlite_master"
    try:
        with closing(
            sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            (said,) = connection.execute(query).fetchone()
    except sqlite3.Error as error:
        return is_damage(str(error))
    return "" if said == "ok" or not thorough else str(said)


def is_damage(said: str) -> str:
    """The words of SQLite where they tell of a damaged file; empty where they tell of something else."""
    return said if _DAMAGED.search(said) else ""


def in_force(store: Path, name: str, alias: str) -> tuple[int, Path] | None:
    """Version of the registered model `name` under `alias` in the SQLite file `store`, and the folder of its files.

    None where the tables or the disk do not say it in so many words: then MLflow is to be asked, which says why.
    """
    with suppress(sqlite3.Error, ValueError, OSError):
        with closing(
            sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            rows = connection.execute(_QUERY, (name, alias)).fetchall()
        folders = [
            (int(number), Path(unquote(str(place).removeprefix("file://"))))
            for number, place in rows
        ]
        if len(folders) == 1 and folders[0][1].is_dir():
            return folders[0]
    return None


class Wrong(ProviderError):
    """What is wrong, and the fix."""


def check_home(home: Path) -> str:
    """That `home` can be written, and its free space. Raises Wrong where not, or all but full. Creates nothing."""
    there = next(one for one in (home, *home.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
        free_mib = shutil.disk_usage(there).free // 2**20
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise Wrong(
                f"{home} cannot be written ({error.strerror}): make it writable, or set SRIFT_HOME to a folder that is"
            ) from None
        free_mib = 0
    if free_mib < _LEAST_FREE_MIB:
        raise Wrong(
            f"the disk of {home} is full or nearly so: {free_mib} MiB are left, and a refresh may write"
            f" {_LEAST_FREE_MIB}. Free some space, or set SRIFT_HOME to a folder on another disk"
        )
    return f"{home} can be written, and {free_mib / 1024:.1f} GiB are free"


def registry_damage(home: Path) -> str:
    """What is wrong with our own store of models, and the fix; empty where nothing is, or an operator chose another."""
    said = "" if OPERATORS_STORE in os.environ else damage(home / "mlflow.db")
    return damaged_registry(home, said) if said else ""


def damaged_registry(home: Path, said: str) -> str:
    """That the SQLite store of MLflow in `home` is damaged, what that costs, and the commands that mend it."""
    store = home / "mlflow.db"
    away = store.with_name(f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}-{store.name}")
    return (
        f"the model registry {store} is damaged: {said}. What is lost are the records of older models; what was"
        " measured lies in the warehouse, from which a refresh fits the model anew. To put it right, type\n"
        f"  mv {shlex.quote(str(store))} {shlex.quote(str(away))}\n"
        "  srift refresh"
    )
