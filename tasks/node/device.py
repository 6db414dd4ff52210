"""The device of this rank: a GPU where the machine has one, else its processor. Synchronises before a clock is read."""

from __future__ import annotations

import os
import time
from typing import Any

import torch


class NoSuchDevice(Exception):
    """The plan wants more GPUs than this machine has; the message says how many there are."""


def own_device() -> torch.device:
    """`cuda:<local rank>`, which becomes the current one, where there is CUDA; else the CPU. Raises NoSuchDevice."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise NoSuchDevice(
            f"this machine has {there} GPU{'s' if there > 1 else ''} that torch can use, not {local + 1}"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Process groups of torch: NCCL between GPUs, and gloo for what the ranks tell each other in ordinary memory."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def now(device: torch.device) -> float:
    """Seconds of a clock that only goes on, read when all that the device was given to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def placed(value: Any, device: torch.device) -> Any:
    """A batch, or a part of one, on the device; what is no tensor and holds none stays as it is."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: placed(one, device) for name, one in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(placed(one, device) for one in value)
    return value


def usable(device: torch.device) -> bool:
    """Whether the device still computes: after some faults CUDA refuses everything until the process ends."""
    try:
        now(device)
    except RuntimeError:
        return False
    return True
