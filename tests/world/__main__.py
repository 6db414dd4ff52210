"""`make refresh-emulated`: EC2 without AWS. Real processes on real hosts behind moto's API, from launch to table."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.world import World
from tests.world.proof import Operator, refreshed


def main() -> int:
    """0 where all was as it should be."""
    parser = argparse.ArgumentParser(prog="make refresh-emulated", description=__doc__)
    parser.add_argument("--max-usd", type=float, default=5.0, help="of each refresh (default 5)")
    parser.add_argument("--minutes", type=float, default=4.0, help="that each refresh may measure (default 4)")
    parser.add_argument("--machines", type=int, default=4, help="of the largest cluster (default 4)")
    parser.add_argument("--keep", action="store_true", help="leave the home and the consoles for a look")
    words = parser.parse_args()
    if why := World.why_not():
        print(f"not here: {why}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="srift-emulated-"))
    with World(seed=1) as world:
        operator = Operator(folder=folder, world=world)
        operator.settle_in(most=words.machines, minutes=words.minutes)
        print(f"EC2 emulated at {world.endpoint}, home {operator.home}", flush=True)
        proof = refreshed(operator, max_usd=words.max_usd, say=lambda text: print(text, flush=True))
        sizes = {machines for _, machines in proof.launched}
        if words.machines not in sizes:
            proof.wrong.append(f"no cluster of {words.machines} machines")
        print("\n".join(proof.lines()), flush=True)
        if proof.wrong or words.keep:
            shutil.copytree(world.folder, folder / "machines", ignore=shutil.ignore_patterns("private"))
    if proof.wrong or words.keep:
        print(f"left for a look: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if proof.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
