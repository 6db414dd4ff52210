"""How long commands take beside another commit's: whole processes, in turns, on copies of the stored home.

`python -m tests.benchmarks.commands --against COMMIT` checks that commit out into a temporary folder, runs each command
in both trees with this environment, and prints the medians. The answers about EC2 are those of a fresh clone: the
first, in an empty home, fits a model on public step times. Python keeps what it compiled, as it does for whoever
installs Srift. `--tests` runs the suite of `make test` once in each, too.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
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
ABOUT_EC2 = ["recommend", "resnet50-imagenet", "--provider", "ec2", "--deadline", "12h"]
SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")
TESTS = [
    sys.executable,
    "-m",
    "pytest",
    "--numprocesses",
    "2",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
]

Spent = tuple[float, float]  # seconds: of the wall clock, of processors


def main(
    against: Annotated[str, typer.Option(help="The other commit.")],
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each command in each tree.")] = 7,
    firsts: Annotated[
        int, typer.Option(min=0, help="First answers about EC2 in each tree; each takes a minute.")
    ] = 5,
    tests: Annotated[
        bool, typer.Option("--tests", help="The test suites, too, once each.")
    ] = False,
) -> None:
    """Median seconds of commands, here and at another commit."""
    with tempfile.TemporaryDirectory(prefix="srift-beside-") as folder:
        other = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", str(other), against],
            cwd=ROOT,
            check=True,
        )
        try:
            (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
            trees = {against: other, "here": ROOT}
            places = {name: Path(folder) / f"home of {name}" for name in trees}
            for name, place in places.items():
                unpack(place)
                with (
                    nullcontext() if name == "here" else suppress(RuntimeError)
                ):  # one of that day needs no other model
                    _spent([*SRIFT, "refresh", "--max-usd", "0"], trees[name], place, "state")
            rows = []
            for command, words in COMMANDS.items():
                runs: dict[str, list[Spent]] = {name: [] for name in trees}
                for _ in range(repeats + 1):
                    for name, tree in trees.items():
                        runs[name].append(_spent([*SRIFT, *words], tree, places[name], "state"))
                # without the first of each, which fills caches
                rows.append(_row(command, {name: spent[1:] for name, spent in runs.items()}))
            rows += _about_ec2(trees, Path(folder), firsts=firsts, repeats=repeats)
            if tests:
                rows.append(
                    {"command": "tests"}
                    | {name: _seconds_of_tests(tree) for name, tree in trees.items()}
                )
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True
            )
    frame = pd.DataFrame(rows)
    frame.insert(3, "ratio", frame["here"] / frame[against])
    print_frame(
        frame, f"seconds, medians of {repeats} ({firsts} of first answers); cpu: of processors"
    )


def _about_ec2(
    trees: Mapping[str, Path], folder: Path, *, firsts: int, repeats: int
) -> list[dict[str, object]]:
    """A row of first answers, each in a home of its own, and one of those that follow in the last of these."""
    if not firsts:
        return []
    line = [*SRIFT, *ABOUT_EC2]
    first: dict[str, list[Spent]] = {name: [] for name in trees}
    following: dict[str, list[Spent]] = {name: [] for name in trees}
    for at in range(firsts):
        for name, tree in trees.items():
            first[name].append(_spent(line, tree, tree, str(folder / f"ec2 {at} of {name}")))
    for _ in range(repeats):
        for name, tree in trees.items():
            following[name].append(
                _spent(line, tree, tree, str(folder / f"ec2 {firsts - 1} of {name}"))
            )
    return [_row("recommend, EC2, first", first), _row("recommend, EC2", following)]


def _row(command: str, runs: Mapping[str, Sequence[Spent]]) -> dict[str, object]:
    """Medians by tree."""
    wall, cpu = (
        {name: median(one[at] for one in spent) for name, spent in runs.items()} for at in (0, 1)
    )
    return {
        "command": command,
        **wall,
        **{f"cpu, {name}": seconds for name, seconds in cpu.items()},
    }


def _spent(line: Sequence[str], tree: Path, place: Path, home: str) -> Spent:
    """Of a process at `place` that imports `tree`, with its state in `home`. Raises RuntimeError where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "SRIFT_HOME": str(place / home)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun, before = time.perf_counter(), _cpu_s()
    ended = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True)
    spent = time.perf_counter() - begun, _cpu_s() - before
    if ended.returncode:
        raise RuntimeError(f"{' '.join(line[2:])} in {tree} failed: {ended.stderr[-500:]}")
    return spent


def _cpu_s() -> float:
    """Processor seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds_of_tests(tree: Path) -> float:
    """Wall seconds of the tests of `make test`, with a line of how they ended; one may fail in this environment."""
    line = (
        [*TESTS, "-m", "not emulated"]
        if "emulated" in (tree / "pyproject.toml").read_text()
        else TESTS
    )
    begun = time.perf_counter()
    ended = subprocess.run(
        line, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True
    )
    typer.echo(f"{tree}: {ended.stdout.splitlines()[-1]}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    typer.run(main)
