"""`python -m tests.frozen --write [ec2] [local]` stores today's answers as expectation; without --write, compares."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import tests.conftest  # noqa: F401  a state of its own, as tests have
from tests.frozen.answers import ANSWERS, FOLDER, as_text, differences, plain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", choices=[[], *ANSWERS])
    words = parser.parse_args()
    wrong = 0
    for name in words.names or ANSWERS:
        file, began = FOLDER / f"{name}.json", time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            now = plain(ANSWERS[name](Path(folder).resolve()))
        changed = (
            list(differences(json.loads(file.read_text()), now))
            if file.exists()
            else ["nothing was stored"]
        )
        print(
            *changed,
            f"{name}: {len(changed)} differences, in {time.monotonic() - began:.0f} s",
            sep="\n",
        )
        wrong += len(changed)
        if words.write:
            file.write_text(as_text(now))
    return 1 if wrong and not words.write else 0


if __name__ == "__main__":
    raise SystemExit(main())
