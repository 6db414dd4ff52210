"""A Dask cluster on loopback, by the programs that an operator starts: a scheduler and workers of one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def _started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Dask, in a process of its own until the end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        [sys.executable, "-m", "dask", *words], env=env, stderr=subprocess.DEVNULL
    )
    try:
        yield program
    finally:
        program.terminate()
        program.wait(60)


@contextmanager
def cluster(folder: Path, workers: int = 2) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a scheduler with so many workers on loopback, and its process."""
    folder.mkdir(exist_ok=True)
    at = folder / "scheduler.json"
    with ExitStack() as stack:
        words = [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(at),
        ]
        scheduler = stack.enter_context(_started("scheduler", *words))
        until = time.monotonic() + 60
        while not at.exists() and time.monotonic() < until:
            time.sleep(0.1)
        words = [
            "--scheduler-file",
            str(at),
            "--no-dashboard",
            "--nthreads",
            "1",
            "--local-directory",
            str(folder),
        ]
        if workers:
            stack.enter_context(_started("worker", *words, "--nworkers", str(workers)))
        from distributed import Client

        with Client(scheduler_file=str(at), set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=60)
            address = str(client.scheduler.address)
        yield address, scheduler
