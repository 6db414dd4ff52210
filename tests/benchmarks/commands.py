"""How long commands take beside another commit's: whole processes, in turns, on copies of the stored home.

`python -m tests.benchmarks.commands --against COMMIT` checks that commit out into a temporary folder, runs each command
in both trees with this environment, and prints the medians. `--tests` runs the suite of `make test` once in each, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import pandas as pd
import typer

from tasks.reporting.tables import print_frame
from tests.frozen.answers import unpack

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "--help": ["--help"],
    "table": ["table"],
    "recommend": ["recommend", "mine", "--deadline", "12h"],
}
SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")
TESTS = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


def main(
    against: Annotated[str, typer.Option(help="The other commit.")],
    repeats: Annotated[int, typer.Option(help="Runs of each command in each tree.")] = 7,
    tests: Annotated[bool, typer.Option("--tests", help="The test suites, too, once each.")] = False,
) -> None:
    """Median seconds of commands, here and at another commit."""
    with tempfile.TemporaryDirectory(prefix="srift-beside-") as folder:
        other = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(other), against], cwd=ROOT, check=True)
        try:
            (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
            trees = {against: other, "here": ROOT}
            homes = {name: Path(folder) / f"home of {name}" for name in trees}
            for home in homes.values():
                unpack(home)
            _seconds([*SRIFT, "refresh", "--max-usd", "0"], ROOT, homes["here"])  # a model of this version
            seconds: dict[str, dict[str, list[float]]] = {one: {name: [] for name in trees} for one in COMMANDS}
            for one, words in COMMANDS.items():
                for _ in range(repeats + 1):
                    for name, tree in trees.items():
                        seconds[one][name].append(_seconds([*SRIFT, *words], tree, homes[name]))
            rows = [  # without the first of each, which fills caches
                {"command": one} | {name: median(times[1:]) for name, times in by_tree.items()}
                for one, by_tree in seconds.items()
            ]
            if tests:
                rows.append({"command": "tests"} | {name: _seconds_of_tests(tree) for name, tree in trees.items()})
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
    frame = pd.DataFrame(rows)
    print_frame(frame.assign(ratio=frame["here"] / frame[against]), f"seconds, medians of {repeats}")


def _seconds(line: Sequence[str], tree: Path, folder: Path) -> float:
    """Wall seconds of a process in `folder` that imports `tree`. Raises RuntimeError where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "SRIFT_HOME": str(folder / "state")}
    begun = time.perf_counter()
    ended = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(line[2:])} in {tree} failed: {ended.stderr[-500:]}")
    return time.perf_counter() - begun


def _seconds_of_tests(tree: Path) -> float:
    """Wall seconds of the tests of `make test`, with a line of how they ended; one may fail in this environment."""
    line = [*TESTS, "-m", "not emulated"] if "emulated" in (tree / "pyproject.toml").read_text() else TESTS
    begun = time.perf_counter()
    ended = subprocess.run(line, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True)
    typer.echo(f"{tree}: {ended.stdout.splitlines()[-1]}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    typer.run(main)
