"""How long readers wait with a year of publications behind the table, and how long the commands take as processes.

`python -m tests.benchmarks.reading --home .srift` (after `make refresh`) takes a row of that home's published table,
copies it into nightly publications of a new home, so many workloads, goals and ranks each, and exports it. Printed are
the seconds of the export and sizes of the files; medians of `examples/reading/question.sql` in a program that has just
opened the published file and in one that has it open; and of whole processes of `srift` in the home as it was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import duckdb
import pandas as pd
import typer

from models.domain.workload import GOALS
from tasks.reporting.tables import print_frame
from warehouse.database import Warehouse
from warehouse.export import export

ROOT = Path(__file__).parents[2]
QUESTION = ROOT / "examples" / "reading" / "question.sql"
NIGHTS, WORKLOADS, RANKS = 365, 100, 10
_SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")


def fill(warehouse: Warehouse, nights: int, workloads: int, ranks: int) -> int:
    """Put `nights` publications behind the newest one, copies of its cheapest row; returns the rows that were added."""
    with warehouse.transact() as connection:
        connection.execute(
            """
            insert into raw_publications by name
            select
                'night-' || night as publication_id, newest.published_at + to_days(night::integer) as published_at,
                provider, 'night-' || night as refresh_id, model_version
            from (select * from raw_publications order by published_at desc limit 1) as newest
            cross join range(1, $nights + 1) as nights(night)
            """,
            {"nights": nights},
        )
        connection.execute(
            """
            insert into raw_recommendations by name
            select row.* replace (
                'night-' || night as publication_id,
                row.published_at + to_days(night::integer) as published_at,
                case when number = 0 then 'transformer-lm' else 'workload-' || number end as workload,
                goals.goal as goal, place as rank,
                row.usd * (1 + place / 50 + random() / 100) as usd,
                row.hours * (1 + place / 50 + random() / 100) as hours
            )
            from (select * from recommendation_history where usd is not null and rank = 1 limit 1) as row
            cross join range(1, $nights + 1) as nights(night)
            cross join range($workloads) as workloads(number)
            cross join (select unnest($goals) as goal) as goals
            cross join range(1, $ranks + 1) as ranks(place)
            """,
            {"nights": nights, "workloads": workloads, "goals": list(GOALS), "ranks": ranks},
        )
    return nights * workloads * len(GOALS) * ranks


def timed(call: Callable[[], Any], repeats: int) -> float:
    """The median of seconds, after one call to warm up."""
    call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def ask(path: Path) -> list[Any]:
    """The question's answer, by opening the file."""
    with duckdb.connect(str(path), read_only=True) as table:
        return table.execute(QUESTION.read_text()).fetchall()


def main(
    home: Annotated[Path, typer.Option(help="a home in which something was published")] = Path(
        ".srift"
    ),
    nights: Annotated[int, typer.Option(min=1)] = NIGHTS,
    repeats: Annotated[int, typer.Option(min=3, help="of each time")] = 9,
) -> None:
    """Print them."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "warehouse.duckdb"
        shutil.copy(home / "warehouse.duckdb", copy)
        warehouse = Warehouse(copy)
        rows = fill(warehouse, nights, WORKLOADS, RANKS)
        began = time.perf_counter()
        files = export(warehouse, Path(folder) / "published")
        export_s = time.perf_counter() - began
        published = files[0]
        assert len(ask(published)) == 1, "the question has no answer"
        with duckdb.connect(str(published), read_only=True) as table:
            open_s = timed(lambda: table.execute(QUESTION.read_text()).fetchall(), repeats)
        found = [
            ("rows in recommendation_history", rows, ""),
            ("export", export_s, "s"),
            ("published file", published.stat().st_size / 1e6, "MB"),
            ("question.sql, file just opened", 1e3 * timed(lambda: ask(published), repeats), "ms"),
            ("question.sql, file open", 1e3 * open_s, "ms"),
        ]
    environment = {**os.environ, "SRIFT_HOME": str(home.resolve())}
    workload = "transformer-lm"
    for words in (["--help"], ["table"], ["recommend", workload, "--deadline", "1h"]):
        line = [*_SRIFT, *words]

        def call(line: list[str] = line) -> None:
            subprocess.run(line, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

        found.append((f"srift {' '.join(words)}", timed(call, repeats), "s"))
    print_frame(pd.DataFrame(found, columns=["what", "median", "unit"]), "reading")


if __name__ == "__main__":
    typer.run(main)
