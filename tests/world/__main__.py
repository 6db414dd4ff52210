"""`make refresh-emulated`: EC2 without AWS. Real processes on real hosts behind moto's API, from
launch to table.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.world import World
from tests.world.proof import TYPES, UNEQUAL, Campaign, prove


def campaigns(sizes):
    """Both markets with clusters of these sizes and of two types; a repository, and the example."""
    markets = ("spot", "on-demand")
    return [
        *(
            Campaign(market=market, machines=size, types=TYPES if size > 3 else TYPES[:1])
            for market in markets
            for size in sizes
        ),
        *(Campaign(market=market, machines=2, types=UNEQUAL) for market in markets),
        Campaign(market="spot", machines=2, code="repository"),
        Campaign(market="spot", machines=2, code="example"),
    ]


def main():
    parser = argparse.ArgumentParser(prog="make refresh-emulated", description=__doc__)
    parser.add_argument("--max-usd", type=float, default=5.0, help="of each refresh")
    parser.add_argument("--minutes", type=float, default=1.3, help="of measuring in each refresh")
    parser.add_argument("--machines", type=int, nargs="+", default=[1, 2, 3, 4], help="sizes")
    parser.add_argument("--example", action="store_true", help="only examples/own-repository")
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that machines end with this
    if why := World.why_not():
        print(f"not here: {why}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="srift-emulated-"))
    chosen = campaigns(words.machines)[-1 if words.example else 0 :]
    with World(seed=1) as world:
        print(f"EC2 emulated at {world.endpoint}, homes below {folder}", flush=True)
        proof = prove(world, folder, chosen, minutes=words.minutes, max_usd=words.max_usd)
        proof.wrong += [f"the world itself: {fault}" for fault in world.faults()]
        print("\n".join(proof.lines()), flush=True)
        if proof.wrong:
            ignored = shutil.ignore_patterns("private", "bin")
            shutil.copytree(world.folder, folder / "machines", ignore=ignored)
            print(f"homes and consoles of the machines: {folder}")
            return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
