"""Run random scenarios and print a table by kind of scenario. Exits with 1 if a scenario fails."""

import argparse
import sys
import time

import joblib

import tests.conftest  # noqa: F401  a state of its own, as tests have
from tests.chaos.runner import run
from tests.chaos.scenario import KINDS


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", type=int, help="one scenario by its number, with its story")
    words = parser.parse_args()
    began = time.monotonic()
    numbers = range(words.scenarios) if words.only is None else [words.only]
    parallel = joblib.Parallel(n_jobs=-1 if len(numbers) > 20 else 1)
    results = parallel(joblib.delayed(run)(words.seed, number) for number in numbers)
    if words.only is not None:
        print(*results[0].log, sep="\n")
    print(f"{'kind':44} {'tried':>6} {'passed':>7}")
    for kind in KINDS:
        tried = [result for result in results if kind in result.kinds]
        print(f"{kind:44} {len(tried):6} {sum(not outcome.wrong for outcome in tried):7}")
    failed = [result for result in results if result.wrong]
    for result in failed:
        print(f"scenario {result.number} {result.kinds}", *result.wrong, sep="\n  ")
    passed, seconds = len(results) - len(failed), time.monotonic() - began
    print(f"{passed} of {len(results)} scenarios passed, in {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
