"""`python -m tests.chaos --scenarios 200 --seed 2026`: a table by kind; exits 1 where a scenario failed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

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
    one_run = joblib.delayed(_run)
    results = joblib.Parallel(n_jobs=-1 if len(numbers) > 20 else 1)(
        one_run(words.seed, number) for number in numbers
    )
    if words.only is not None:
        print(results[0].scenario, *results[0].log, sep="\n")
    print(table(results))
    for one in results:
        for sentence in one.wrong:
            print(f"scenario {one.scenario.seed} ({', '.join(one.scenario.kinds)}): {sentence}")
    struck = sum((one.struck for one in results), Counter[str]())
    print(
        "came to pass: " + ", ".join(f"{count} x {what}" for what, count in sorted(struck.items()))
    )
    failed = sum(bool(one.wrong) for one in results)
    print(
        f"{len(results) - failed} of {len(results)} scenarios passed, in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def _run(seed: int, number: int) -> Result:
    return run(scenario(seed, number))


def table(results: list[Result]) -> str:
    """A row a kind: how often it was in the mix, how often all held, and the numbers where something did not."""
    lines = [f"{'kind':44} {'tried':>6} {'passed':>7}  failed"]
    for kind in KINDS:
        mine = [one for one in results if kind in one.scenario.kinds]
        failed = [str(one.scenario.seed) for one in mine if one.wrong]
        lines.append(f"{kind:44} {len(mine):6} {len(mine) - len(failed):7}  {' '.join(failed)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
