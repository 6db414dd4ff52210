"""Takes the guards out one by one and says which no test holds: `python -m tests.mutants [--only NAME] [--jobs 2]`.

Every mutant is run on a copy of the tree in a temporary folder, with the tests that are to fail. Exits with 1 where one
survives, where its text no longer occurs once, or where the tests could not be run. `make test` is to pass before.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.guards import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".srift", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
_LONGEST_S = 900
_hosts = threading.Lock()  # hosts of two tests at once would not fit this machine's cores


class Gone(Exception):
    """The text of a guard does not occur exactly once."""


def place_of(mutant: Mutant, root: Path) -> Path:
    """The file below `root` in which `mutant.old` occurs exactly once. Raises Gone."""
    said = []
    for place in (root / mutant.file, *(root / mutant.file).parents):
        if place == root:
            break
        files = [place] if place.is_file() else sorted(place.rglob(f"*{Path(mutant.file).suffix}"))
        times = {file: len(re.findall(mutant.old, file.read_text())) for file in files}
        holding = [file for file in files if times[file]]
        if len(holding) == 1 and times[holding[0]] == 1:
            return holding[0]
        said += [f"{times[file]} times in {file.relative_to(root)}" for file in holding]
        if said:
            break
    raise Gone(", ".join(said) or "nowhere")


def tests_of(mutant: Mutant, root: Path) -> list[str]:
    """Paths of its tests below `root`; the folder of one that is gone."""
    found = []
    for test in mutant.tests:
        path = root / test
        while not path.exists():
            path = path.parent
        found.append(str(path.relative_to(root)))
    return list(dict.fromkeys(found))


def judge(mutant: Mutant, copy: Path) -> tuple[str, str]:
    """("caught" | "SURVIVED" | "NO VERDICT", what was seen), with the guard taken out of `copy` meanwhile."""
    try:
        path = place_of(mutant, copy)
    except Gone as gone:
        return "NO VERDICT", f"its text occurs {gone}"
    before = path.read_text()
    path.write_text(re.sub(mutant.old, mutant.new, before))
    try:
        tests = tests_of(mutant, copy)
        marker = "not cloud" if mutant.local else "not local and not cloud"
        asked = (
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-m",
            marker,
            *tests,
        )
        environment = os.environ | {"PYTHONPATH": str(copy)}
        ended = subprocess.run(
            asked,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "NO VERDICT", f"not ended after {_LONGEST_S} s"
    finally:
        path.write_text(before)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode == 1 and any(line.startswith("FAILED") for line in lines):
        return "caught", lines[0].split(" - ")[0].removeprefix("FAILED ")
    if ended.returncode == 0:
        return "SURVIVED", " ".join(tests)
    return (
        "NO VERDICT",
        f"pytest exited with {ended.returncode}: {(lines or ended.stderr.splitlines() or [''])[-1]}",
    )


def main() -> int:
    """Prints a line for each mutant and their sums; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Does a test fail without each guard?"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="those of this name, or pattern of names"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument(
        "--no-hosts", action="store_true", help="leave out what only tests that start hosts hold"
    )
    parser.add_argument(
        "--find", action="store_true", help="only look whether each text still occurs"
    )
    arguments = parser.parse_args()
    wanted = [
        mutant
        for mutant in MUTANTS
        if (not arguments.only or any(fnmatch(mutant.name, name) for name in arguments.only))
        and not (arguments.no_hosts and mutant.local)
    ]
    if not wanted:
        parser.error(f"no such mutant; there are {', '.join(mutant.name for mutant in MUTANTS)}")
    if arguments.find:
        return _find(wanted)
    sums: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="srift-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(arguments.jobs):
            copies.put(
                Path(shutil.copytree(ROOT, Path(folder) / f"copy-{job}", ignore=_NOT_COPIED))
            )

        def run(mutant: Mutant) -> None:
            copy, started = copies.get(), time.monotonic()
            try:
                if mutant.local:
                    with _hosts:
                        verdict, seen = judge(mutant, copy)
                else:
                    verdict, seen = judge(mutant, copy)
            finally:
                copies.put(copy)
            sums[verdict] = sums.get(verdict, 0) + 1
            print(
                f"{verdict:10} {mutant.name:20} {time.monotonic() - started:4.0f} s  {seen}",
                flush=True,
            )

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(run, wanted))
    print(
        f"{len(wanted)} mutants: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(sums.items()))
    )
    return 0 if set(sums) == {"caught"} else 1


def _find(wanted: list[Mutant]) -> int:
    gone = 0
    for mutant in wanted:
        try:
            place_of(mutant, ROOT)
        except Gone as problem:
            gone += 1
            print(f"{mutant.name}: its text occurs {problem}")
    return min(gone, 1)


if __name__ == "__main__":
    sys.exit(main())
