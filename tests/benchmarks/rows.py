"""How import, retraining and publication grow with the number of measured rows, embedded and shared.

`python -m tests.benchmarks.rows` makes files of 10 thousand to 10 million rows (4 workloads on clusters of three of
EC2's types, 20 rows of a setup after one another, up to 500,000 setups; step times by a formula with noise, so that
errors of predictions mean nothing here), and with each file, in a home of its own, runs as whole processes

    srift import FILE --workloads FACTS
    srift refresh --provider ec2 --max-usd 0      retrains, and publishes two of the workloads
    srift import FILE                             again: nothing is new

Printed are their seconds (of the refresh those that it prints itself), the largest resident memory of a process, and
the size of the warehouse. `--shared` does the same with DuckLake on a PostgreSQL server of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import duckdb
import pandas as pd
import typer

from tasks.reporting.tables import print_frame
from tests import postgres

ROOT = Path(__file__).parents[2]
_SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")
_TYPES = ["g4dn.12xlarge", "g5.12xlarge", "p4d.24xlarge"]
_WORKLOADS, _MACHINES, _MOST_SETUPS, _PUBLISHED = 4, 8, 500_000, 2
_WORKLOAD = """
[workloads.network-{}]
samples = 10_000_000
global_batch = [256, 1024]
goals = [{{ goal = "cheapest_within_deadline", hours = 24 }}, {{ goal = "fastest_within_budget", usd = 100 }}]
"""


def write_rows(path: Path, rows: int) -> None:
    """A Parquet file of measurement rows."""
    with duckdb.connect() as connection:
        connection.execute("select setseed(0.5)")
        connection.execute(
            f"""
            copy (
                with setups as (
                    select
                        number,
                        number % {_WORKLOADS} as workload,
                        1 + number // {_WORKLOADS} % {_MACHINES} as machines,
                        list_extract($types, 1 + number // {_WORKLOADS * _MACHINES} % len($types)) as type,
                        1 + number // ({_WORKLOADS * _MACHINES} * len($types)) as batch
                    from range($setups) as numbers(number)
                )
                select
                    'network-' || workload as workload,
                    machines || 'x' || type as cluster,
                    batch as batch_per_device,
                    (0.01 * (1 + workload) * batch + 0.02 * machines) * exp(0.1 * (random() - 0.5)) as step_s,
                    timestamp '2026-01-01' + to_seconds(row // 10) as measured_at
                from range($rows) as rows(row)
                join setups on setups.number = row // 20 % $setups
            ) to '{path}' (format parquet)
            """,
            {"types": _TYPES, "setups": min(_MOST_SETUPS, max(1, rows // 20)), "rows": rows},
        )


def write_facts(path: Path) -> None:
    """Of the workloads."""
    rows = [f"network-{number},25000000,100000000,1e9" for number in range(_WORKLOADS)]
    path.write_text("\n".join(["workload,parameters,gradient_bytes,flops_per_sample", *rows, ""]))


class Timed:
    """One `srift` command as a whole process in `folder`."""

    def __init__(self, folder: Path, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SRIFT_HOME": str(folder / "home")}
        with tempfile.TemporaryFile("w+") as said:
            began = time.perf_counter()
            process = subprocess.Popen(
                [*_SRIFT, *words], cwd=folder, env=environment, stdout=said, stderr=said
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.seconds, self.gib = time.perf_counter() - began, used.ru_maxrss / 2**20
            said.seek(0)
            self.said = said.read()
        typer.echo(f"  srift {words[0]}: {self.seconds:.1f} s, {self.gib:.2f} GiB")
        if process.returncode:
            raise RuntimeError(f"srift {' '.join(words)} failed: {self.said[-2000:]}")

    def phase(self, name: str) -> float:
        """Seconds of a refresh's phase, as it printed them."""
        found = re.search(rf"\b{name} ([\d.]+) s", self.said)
        return float(found[1]) if found else float("nan")


def measured(folder: Path, rows: int, shared: str) -> dict[str, float]:
    """What it took in a new home in `folder`."""
    workloads = "".join(_WORKLOAD.format(number) for number in range(_PUBLISHED))
    (folder / "srift.toml").write_text(shared + workloads)
    file, facts = folder / "rows.parquet", folder / "facts.csv"
    write_rows(file, rows)
    write_facts(facts)
    loaded = Timed(folder, "import", str(file), "--workloads", str(facts))
    if f"{rows} rows, {rows} of them new" not in loaded.said:
        raise RuntimeError(f"not all rows were loaded: {loaded.said}")
    refreshed = Timed(folder, "refresh", "--provider", "ec2", "--max-usd", "0")
    again = Timed(folder, "import", str(file))
    if f"{rows} rows, 0 of them new" not in again.said:
        raise RuntimeError(f"rows were loaded twice: {again.said}")
    size = sum(one.stat().st_size for one in (folder / "home").glob("warehouse.duckdb*"))
    size += sum(one.stat().st_size for one in (folder / "data").rglob("*.parquet"))
    return {
        "rows": rows,
        "import s": loaded.seconds,
        "GiB": loaded.gib,
        "retrain s": refreshed.phase("retrain"),
        "publish s": refreshed.phase("publish"),
        "whole refresh s": refreshed.seconds,
        "GiB of it": refreshed.gib,
        "import again s": again.seconds,
        "warehouse MB": size / 1e6,
    }


def main(
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a file; repeat it.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="DuckLake on PostgreSQL.")] = False,
) -> None:
    """Print them."""
    with ExitStack() as opened:
        socket = opened.enter_context(postgres.server()) if shared else ""
        found = []
        for many in rows or [10_000, 100_000, 1_000_000, 10_000_000]:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="srift-rows-")))
            section = ""
            if shared:
                database = f"rows_{many}"
                for name in (database, f"{database}_prefect", f"{database}_mlflow"):
                    postgres.create(socket, name)
                section = f'[shared]\nhost = "{socket}"\ndatabase = "{database}"\ndata = "{folder / "data"}"\n'
                section += f'user = "{postgres.USER}"\n'
            found.append(measured(folder, many, section))
            print_frame(pd.DataFrame(found[-1:]), "shared" if shared else "embedded")
    print_frame(pd.DataFrame(found), "shared" if shared else "embedded")


if __name__ == "__main__":
    typer.run(main)
