"""Ranks of a test as processes of this machine: each runs the test's own file with its rank, a port and a file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
_LONGEST_S = 120


def answers_of(test: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each of `world` ranks of `tests.local.TEST` saved in its file, in their order; they end with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = [folder / str(rank) for rank in range(world)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                f"tests.local.{test}",
                str(rank),
                str(port),
                str(answer),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank, answer in enumerate(answers)
    ]
    try:
        assert [one.wait(timeout=_LONGEST_S) for one in processes] == [0] * world
    finally:
        for one in processes:
            one.kill()
    return [torch.load(one) for one in answers]
