"""`make refresh-emulated`: EC2 without AWS. Real processes on real hosts behind moto's API, from
launch to table.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.world import World
from tests.world.proof import TYPES, UNEQUAL, Campaign, prove

MARKETS = ("spot", "on-demand")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make refresh-emulated", description=__doc__)
    parser.add_argument("--max-usd", type=float, default=5.0, help="of each refresh (default 5)")
    parser.add_argument(
        "--minutes", type=float, default=1.3, help="that each refresh may measure (default 1.3)"
    )
    parser.add_argument(
        "--machines", type=int, nargs="+", default=[1, 2, 3, 4], help="sizes (default 1 2 3 4)"
    )
    parser.add_argument(
        "--example", action="store_true", help="only examples/own-repository, on two spot machines"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the homes and the machines' consoles for a look"
    )
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that machines end with this
    if why := World.why_not():
        print(f"not here: {why}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="srift-emulated-"))
    campaigns = [
        Campaign(market=market, machines=count, types=TYPES if count > 3 else TYPES[:1])
        for market in MARKETS
        for count in words.machines
    ]
    campaigns += [Campaign(market=market, machines=2, types=UNEQUAL) for market in MARKETS]
    campaigns += [
        Campaign(market="spot", machines=2, code=code) for code in ("repository", "example")
    ]
    if words.example:
        campaigns = campaigns[-1:]
    with World(seed=1) as world:
        print(f"EC2 emulated at {world.endpoint}, homes below {folder}", flush=True)
        proof = prove(
            world, folder, campaigns, minutes=words.minutes, max_usd=words.max_usd, say=say
        )
        proof.wrong += [f"the world itself: {fault}" for fault in world.faults()]
        print("\n".join(proof.lines()), flush=True)
        if proof.wrong or words.keep:
            shutil.copytree(
                world.folder, folder / "machines", ignore=shutil.ignore_patterns("private", "bin")
            )
    if proof.wrong or words.keep:
        print(f"left for a look: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if proof.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
