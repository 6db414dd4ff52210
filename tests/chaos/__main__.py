"""`python -m tests.chaos --scenarios 200 --seed 2026`: a table by kind; exits 1 on a failure."""

from __future__ import annotations

import argparse
import sys
import time

import joblib

import tests.conftest  # noqa: F401  a state of its own, as tests have
from tests.chaos.runner import Result, run
from tests.chaos.scenario import KINDS, scenario


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", type=int, help="one scenario by its number, with its story")
    words = parser.parse_args()
    began = time.monotonic()
    numbers = range(words.scenarios) if words.only is None else [words.only]
    one_run = joblib.delayed(run)
    results: list[Result] = joblib.Parallel(n_jobs=-1 if len(numbers) > 20 else 1)(
        one_run(scenario(words.seed, number)) for number in numbers
    )
    if words.only is not None:
        print(results[0].scenario, *results[0].log, sep="\n")
    print(f"{'kind':44} {'tried':>6} {'passed':>7}  failed")
    for kind in KINDS:
        mine = [result for result in results if kind in result.scenario.kinds]
        failed = [str(machine.scenario.seed) for machine in mine if machine.wrong]
        print(f"{kind:44} {len(mine):6} {len(mine) - len(failed):7}  {' '.join(failed)}")
    for result in results:
        for sentence in result.wrong:
            print(
                f"scenario {result.scenario.seed} ({', '.join(result.scenario.kinds)}): {sentence}"
            )
    passed, seconds = sum(not result.wrong for result in results), time.monotonic() - began
    print(f"{passed} of {len(results)} scenarios passed, in {seconds:.0f} s")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
