"""A small real training loop that keeps checkpoints and starts from the last one.

`python -m tasks.killed_trainer FOLDER ...` trains to the end. A step never takes less than `--step-s`, as if its input
came at that rate, and the first begins no sooner than `--ready-s` after the launch, as if a machine had to boot.
It appends what it does, with the machine's monotonic clock, to FOLDER/events.jsonl, so that its end and its parts are
known to the process that started it, which may kill it at any moment.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def train(
    folder: Path, *, pieces: int, steps_a_piece: int, width: int, step_s: float, ready_s: float, launched: float
) -> None:
    """Train `pieces` times `steps_a_piece` steps with a checkpoint between pieces, from the last one that is whole."""
    import torch  # most of the start-up: it belongs to what is measured

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(64, width)
    kept, done = folder / "checkpoint.pt", 0
    if kept.exists():
        state = torch.load(kept)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        done = int(state["done"])
    _wait(launched + ready_s)
    _tell(folder, "ready", 0.0)
    for piece in range(done, pieces):
        begun = time.monotonic()
        for step in range(steps_a_piece):
            optimizer.zero_grad()
            loss = ((network(batch) - batch) ** 2).mean()
            loss.backward()
            optimizer.step()
            _wait(begun + (step + 1) * step_s)
        _tell(folder, "piece", time.monotonic() - begun)
        if piece < pieces - 1:
            begun = time.monotonic()
            beside = folder / "checkpoint.part"
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "done": piece + 1}
            with beside.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, kept)  # a kill leaves the old one or the new one, never a half
            _tell(folder, "checkpoint", time.monotonic() - begun)
    _tell(folder, "done", 0.0)


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


def _tell(folder: Path, what: str, seconds: float) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.monotonic(), "seconds": seconds}) + "\n")


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("folder", type=Path)
    for name in ("pieces", "steps-a-piece", "width"):
        asked.add_argument(f"--{name}", type=int, required=True)
    for name in ("step-s", "ready-s", "launched"):  # `launched` by the monotonic clock of the machine
        asked.add_argument(f"--{name}", type=float, required=True)
    train(**vars(asked.parse_args()))
