"""Takes the guards out one by one and names those that no test holds.

`python -m tests.mutants [--only NAME]` runs every mutant on a copy of the tree, with the tests that
must fail. It exits with 1 if a mutant survives, its text does not occur once, or its tests do not
run. `make test` must pass before.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from tests.mutants.guards import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
_IGNORED = shutil.ignore_patterns(
    ".git", ".venv", ".srift", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
_MAX_S = 900
_PYTEST = (sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider")


def occurrences(mutant, root):
    path = root / mutant.file
    return len(re.findall(mutant.old, path.read_text())) if path.is_file() else 0


def judge(mutant, copy):
    """("caught" | "SURVIVED" | "NO VERDICT", reason), with the guard taken out of `copy`."""
    count = occurrences(mutant, copy)
    if count != 1:
        return "NO VERDICT", f"its text occurs {count} times"
    path = copy / mutant.file
    before = path.read_text()
    try:
        path.write_text(re.sub(mutant.old, mutant.new, before))
        environment = os.environ | {"PYTHONPATH": str(copy)}
        ended = subprocess.run(
            (*_PYTEST, *mutant.tests),
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_MAX_S,
        )
    except subprocess.TimeoutExpired:
        return "NO VERDICT", f"not ended after {_MAX_S} s"
    finally:
        path.write_text(before)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if ended.returncode == 1 and failed:
        return "caught", failed[0]
    if ended.returncode == 0:
        return "SURVIVED", " ".join(mutant.tests)
    return "NO VERDICT", f"pytest exited with {ended.returncode}"


def main():
    """Print a line for each mutant; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", default="*", help="a name, or a pattern of names")
    parser.add_argument("--find", action="store_true", help="only look for each text")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if fnmatch(mutant.name, arguments.only)]
    if arguments.find:
        gone = [
            mutant.name
            for mutant in mutants
            if occurrences(mutant, ROOT) != 1
            or not all((ROOT / test).exists() for test in mutant.tests)
        ]
        print(*gone, sep="\n")
        return bool(gone)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="srift-mutants-") as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=_IGNORED))
        for mutant in mutants:
            started = time.monotonic()
            verdict, reason = judge(mutant, copy)
            missed += verdict != "caught"
            spent_s = time.monotonic() - started
            print(f"{verdict:10} {mutant.name:20} {spent_s:4.0f} s  {reason}", flush=True)
    print(f"{len(mutants)} mutants, {missed} not caught")
    return bool(missed or not mutants)


if __name__ == "__main__":
    sys.exit(main())
