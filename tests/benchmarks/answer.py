"""How long an answer takes: `srift recommend` about EC2 as a whole command, with many rows imported.

`python -m tests.benchmarks.answer FILE --workloads FACTS` imports the rows into a home of its own as often as it takes
to have 30,000, learns from them without spending anything, and prints the seconds of that and the median by workload.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import pandas as pd
import typer

from flows.cli import explained
from tasks.data_files.measurements import read_measurements
from tasks.reporting.tables import print_frame
from warehouse.database import Warehouse
from warehouse.reads import mart

_SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")
# Other days than those of the file, so that a copy of a row is another measurement of its setup.
_FIRST_DAY = pd.Timestamp("2020-01-01")


def fill_home(home: Path, rows: Path, facts: Path | None, *, many: int) -> int:
    """Import `rows` as often as it takes to have `many`, each time of another day, and learn from them for nothing.

    Returns how many there are. Raises CalledProcessError where a command fails.
    """
    measured = pd.read_csv(rows) if rows.suffix == ".csv" else pd.read_parquet(rows)
    copies = -(-many // len(measured))
    repeated = [
        measured.assign(measured_at=str(_FIRST_DAY + pd.Timedelta(days=day)))
        for day in range(copies)
    ]
    file = home / "rows.csv"
    home.mkdir(parents=True, exist_ok=True)
    pd.concat(repeated).to_csv(file, index=False)
    _run(home, ["import", str(file), *(["--workloads", str(facts.resolve())] if facts else [])])
    _run(home, ["refresh", "--provider", "ec2", "--max-usd", "0"])
    return copies * len(measured)


def refresh_times(home: Path) -> pd.DataFrame:
    """Columns phase, seconds of the refresh that learned from the rows."""
    warehouse = Warehouse(home / "warehouse.duckdb")
    return mart(warehouse, "timings")[["phase", "seconds"]]


def answer_times(home: Path, workloads: Sequence[str], *, repeats: int) -> list[dict[str, Any]]:
    """A row a workload: median seconds and processor seconds of the whole command, after one run to warm up."""
    asked = (
        "--provider",
        "ec2",
        "--deadline",
        "12h",
        "--samples",
        "10000000",
        "--batch",
        "512",
        "--json",
    )
    found = []
    for workload in workloads:
        spent = [_run(home, ["recommend", workload, *asked]) for _ in range(repeats + 1)][1:]
        wall_s, cpu_s = (median(one) for one in zip(*spent, strict=True))
        found.append({"workload": workload, "seconds": wall_s, "cpu_seconds": cpu_s})
    return found


def _run(home: Path, words: Sequence[str]) -> tuple[float, float]:
    """Seconds and processor seconds of `srift` with these words."""
    environment: Mapping[str, str] = {**os.environ, "SRIFT_HOME": str(home)}
    started, before = time.perf_counter(), _cpu_s()
    subprocess.run(
        [*_SRIFT, *words],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    return time.perf_counter() - started, _cpu_s() - before


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bench_answer(
    file: Annotated[Path, typer.Argument(help="Measurement rows, CSV or Parquet.")],
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes.")
    ] = None,
    many: Annotated[int, typer.Option(min=1, help="Rows to have at least.")] = 30_000,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs after one to warm up; the median counts.")
    ] = 5,
) -> None:
    """Nothing is asked of AWS beyond what a refresh asks."""
    with read_measurements(file) as measured:
        names = sorted(measured.frame()["workload"].unique())
    with tempfile.TemporaryDirectory() as folder:
        rows = fill_home(Path(folder), file, workloads, many=many)
        print_frame(
            refresh_times(Path(folder)),
            f"phases of `srift refresh --max-usd 0` that learned from {rows} rows",
        )
        print_frame(
            pd.DataFrame(answer_times(Path(folder), names, repeats=repeats)),
            f"`srift recommend` about EC2, {rows} rows imported, the median of {repeats}",
        )


if __name__ == "__main__":
    with explained():
        typer.run(bench_answer)
