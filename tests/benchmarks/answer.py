"""How long users wait: `srift` as whole processes, and a year of publications read by DuckDB.

Imports the public rows into a new home as often as it takes to have `--rows`, learns from them
without spending, and times the commands. Then makes up a year of nightly publications.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import pandas as pd
import typer

from models.domain.workload import GOALS
from tasks.data_files.public import FACTS, MEASUREMENTS
from tests.benchmarks.claims import ROOT, Claim, Write, report
from warehouse.database import Warehouse
from warehouse.export import export

QUESTION = ROOT / "examples" / "reading" / "question.sql"
NIGHTS, WORKLOADS, RANKS = 365, 100, 10
WORKLOAD = "resnet50-imagenet"
ABOUT_EC2 = ("--provider", "ec2", "--deadline", "12h", "--samples", "10000000", "--batch", "512")
_FIRST_DAY = pd.Timestamp("2020-01-01")


def srift(home: Path, *words: str, tree: Path = ROOT) -> None:
    """Run `srift` of the checkout `tree` and its .venv. Raises CalledProcessError."""
    tree = tree.resolve()
    python = f"{tree}/.venv/bin/python"
    command = [python, "-c", "from flows.cli import main; main()", *words]
    environment = {**os.environ, "SRIFT_HOME": str(home), "PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds, after one call to warm up."""
    call()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return median(found)


def ratio(words: Sequence[str], homes: Mapping[Path, Path], repeats: int) -> float:
    """Median over `repeats` turns of the seconds in the first checkout over those in the second.

    homes: {checkout: its home} of the two checkouts.
    """
    (tree, home), (other, place) = homes.items()
    found = []
    for _ in range(repeats):
        here = seconds(lambda: srift(home, *words, tree=tree), 1)
        found.append(here / seconds(lambda: srift(place, *words, tree=other), 1))
    return median(found)


def fill_home(home: Path, rows: int, tree: Path = ROOT) -> int:
    """Import `rows` public rows or more, each copy of another day, and publish."""
    measured = pd.read_parquet(MEASUREMENTS)
    copies = -(-rows // len(measured))
    days = [str(_FIRST_DAY + pd.Timedelta(days=day)) for day in range(copies)]
    home.mkdir(parents=True)
    file = home / "rows.csv"
    pd.concat([measured.assign(measured_at=day) for day in days]).to_csv(file, index=False)
    srift(home, "import", str(file), "--workloads", str(FACTS), tree=tree)
    srift(home, "refresh", "--provider", "ec2", "--max-usd", "0", tree=tree)
    return copies * len(measured)


def add_nights(warehouse: Warehouse) -> None:
    """Put a year of made-up publications behind the newest."""
    with warehouse.transact() as connection:
        connection.execute(
            """
            insert into raw_publications by name
            select
                'night-' || night as publication_id,
                newest.published_at + to_days(night::integer) as published_at,
                'local' as provider, 'night-' || night as refresh_id, model_version,
                newest.noted_order + night as noted_order
            from (select * from raw_publications order by noted_order desc limit 1) as newest
            cross join range(1, $nights + 1) as nights(night)
            """,
            {"nights": NIGHTS},
        )
        connection.execute(
            """
            insert into raw_recommendations by name
            select row.* replace (
                'night-' || night as publication_id, 'local' as provider,
                row.published_at + to_days(night::integer) as published_at,
                case when number = 0 then 'transformer-lm' else 'workload-' || number end
                    as workload,
                goals.goal as goal, place as rank, place || 'xt' as cluster, random() as p_best,
                place + random() as usd, place + 1 as usd_p90,
                10 / (place + random()) as hours, 10 / place as hours_p90
            )
            from (select * from recommendation_history limit 1) as row
            cross join range(1, $nights + 1) as nights(night)
            cross join range($workloads) as workloads(number)
            cross join (select unnest($goals) as goal) as goals
            cross join range(1, $ranks + 1) as ranks(place)
            """,
            {"nights": NIGHTS, "workloads": WORKLOADS, "goals": list(GOALS), "ranks": RANKS},
        )


def ask(path: Path) -> None:
    """Answer the README's question from a published file."""
    with duckdb.connect(str(path), read_only=True) as table:
        table.execute(QUESTION.read_text()).fetchall()


def main(
    rows: int = 30_000, repeats: int = 5, against: Path | None = None, write: Write = False
) -> None:
    """Print seconds of the commands and of the question.

    `--against` is another checkout, with whose commands ours are compared in turns.
    """
    claims = []

    def add(claim: str, limit_s: float | None, call: Callable[[], Any], times: int) -> None:
        spent = seconds(call, times)
        target = "" if limit_s is None else f"{limit_s:g} s"
        met = None if limit_s is None else spent <= limit_s
        claims.append(Claim(claim, target, f"{spent:.3g} s", met))

    with tempfile.TemporaryDirectory(prefix="srift-answer-") as folder:
        home = Path(folder) / "home"
        count = fill_home(home, rows)
        question = f"`srift recommend` about EC2, {count:,} rows"
        add(question, 2.0, lambda: srift(home, "recommend", WORKLOAD, *ABOUT_EC2), repeats)
        add("`srift --help`", 0.3, lambda: srift(home, "--help"), repeats)
        add("`srift table`", 1.0, lambda: srift(home, "table"), repeats)
        if against is not None:
            homes = {ROOT: home, against: Path(folder) / "other"}
            fill_home(homes[against], rows, against)
            for name, words in (("recommend", (WORKLOAD, *ABOUT_EC2)), ("table", ())):
                share = ratio([name, *words], homes, repeats)
                claim = f"`srift {name}`, seconds over those of {against.name}"
                claims.append(Claim(claim, "0.6", f"{share:.2f}", share <= 0.6))
        warehouse = Warehouse(home / "warehouse.duckdb")
        add_nights(warehouse)
        published = export(warehouse, Path(folder) / "published")[-1]
        nightly = f"question.sql, {NIGHTS * WORKLOADS * len(GOALS) * RANKS:,} rows"
        add(nightly, 0.05, lambda: ask(published), repeats)
    report("answer", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
