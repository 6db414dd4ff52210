"""Which model is in force by the tables of our own MLflow store, since MLflow takes seconds to say the same."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote

# Joined by whatever columns both tables name a version with: MLflow adds to them.
_QUERY = """
    select version, storage_location
    from registered_model_aliases natural join model_versions
    where name = ? and alias = ?
"""


def in_force(store: Path, name: str, alias: str) -> tuple[int, Path] | None:
    """Version of the registered model `name` under `alias` in the SQLite file `store`, and the folder of its files.

    None where the tables or the disk do not say it in so many words: then MLflow is to be asked, which says why.
    """
    with suppress(sqlite3.Error, ValueError, OSError):
        with closing(sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(_QUERY, (name, alias)).fetchall()
        folders = [(int(number), Path(unquote(str(place).removeprefix("file://")))) for number, place in rows]
        if len(folders) == 1 and folders[0][1].is_dir():
            return folders[0]
    return None
