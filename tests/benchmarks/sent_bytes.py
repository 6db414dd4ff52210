"""Bytes that a strategy really sends: two ranks train in a network namespace, whose loopback counts what passes it.

`python -m tests.benchmarks.sent_bytes STRATEGY STEPS` prints them, with those of joining; it is started in a namespace
of its own by `sent_a_step`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tasks.node.record import Item, WorkloadFile
from tasks.providers.local.network import detect, without_network
from tests.benchmarks.ranks import ROOT, WORKLOADS, served

RANKS = 2
_FEW, _MANY = 10, 30  # steps: what joining and the first, dense ones send is in both


def sent_a_step(file: Path, strategy: str) -> float:
    """Bytes that one of two ranks, each a machine, sends in a step once it compresses. Raises OSError without one."""

    def sent(steps: int) -> int:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.sent_bytes",
            file.name,
            strategy,
            str(steps),
        ]
        done = subprocess.run(
            without_network(detect(), command), cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"no bytes counted: {done.stderr.strip().splitlines()[-1:]}")
        return int(done.stdout.split()[-1])

    return (sent(_MANY) - sent(_FEW)) / (_MANY - _FEW) / RANKS


def on_loopback() -> int:
    """Bytes sent on this namespace's loopback."""
    line = next(
        one
        for one in Path("/proc/net/dev").read_text().splitlines()
        if one.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[8])


def main(name: str, strategy: str, steps: int) -> None:
    """Train and print what was sent."""
    before = on_loopback()
    file = WORKLOADS / name
    workload = WorkloadFile(name=file.stem, digest=file.stem, file=file.name, function="build")
    item = Item(
        run_id="", kind="train", nodes=[0, 1], workload=file.stem, batches=[2, 2], strategy=strategy
    )
    served(workload, [item], world=RANKS, losses=steps)
    print(on_loopback() - before)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
