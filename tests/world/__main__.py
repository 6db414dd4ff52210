"""Run refreshes on an emulated EC2 and check them: `make refresh-emulated`.

moto serves the API of AWS, and local hosts run the processes of the instances.
"""

import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.world import World
from tests.world.proof import TYPES, UNEQUAL, Campaign, prove

# Both markets with clusters of one to four machines and of two types, and a repository.
CAMPAIGNS = [
    Campaign(market=market, machines=size, types=types)
    for market in ("spot", "on-demand")
    for size, types in ((1, TYPES[:1]), (2, TYPES[:1]), (3, TYPES[:1]), (4, TYPES), (2, UNEQUAL))
] + [Campaign(market="spot", machines=2, code="repository")]


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that machines end with this
    if why := World.why_not():
        sys.exit(f"not here: {why}")
    folder = Path(tempfile.mkdtemp(prefix="srift-emulated-"))
    with World(seed=1) as world:
        print(f"EC2 emulated at {world.endpoint}, homes below {folder}", flush=True)
        proof = prove(world, folder, CAMPAIGNS, minutes=1.3)
        proof.wrong += [f"the world itself: {fault}" for fault in world.faults()]
        print("\n".join(proof.lines()), flush=True)
        if proof.wrong:
            sys.exit(f"homes of the operators: {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
