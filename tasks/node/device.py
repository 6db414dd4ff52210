"""The device of this rank: the kind that its machine was bought for, or none; its clock and its peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from .device_check import missing_devices
from .record import ANY, CPU, Devices


class NoSuchDevice(Exception):
    """The machine lacks the devices that it was bought for; the message says what is there."""


def own_device(expected: Devices) -> torch.device:
    """`cuda:<local rank>`, which becomes the current one; the processor where that, or ANY, was bought.

    Raises NoSuchDevice where the machine lacks what was expected: a GPU's work is never done by the processor.
    """
    found = torch.cuda.is_available() and expected.name != CPU
    if not found and expected.name in (CPU, ANY):
        return torch.device("cpu")
    names = (
        [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
        if found
        else []
    )
    problem = missing_devices(expected, names)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if problem or local >= len(names):
        more = f"this machine has {len(names)} GPU{'s' if len(names) > 1 else ''} that torch can use, not {local + 1}"
        raise NoSuchDevice(problem or more)
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def name_of(device: torch.device) -> str:
    """What torch calls it: the model of a GPU, `cpu` for a processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def backend(device: torch.device) -> str:
    """Process groups of torch: NCCL between GPUs, and gloo for what the ranks tell each other in ordinary memory."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def now(device: torch.device) -> float:
    """Seconds of a clock that only goes on, read when all that the device was given to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def to_device(value: Any, device: torch.device) -> Any:
    """A batch, or a part of one, on the device; what is no tensor and holds none stays as it is."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(
        getattr(value, "to", None)
    ):  # moves itself, as what transformers' tokenizers make of texts
        return value.to(device)
    if isinstance(value, dict):
        return {name: to_device(one, device) for name, one in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(to_device(one, device) for one in value)
    return value


def usable(device: torch.device) -> bool:
    """Whether the device still computes: after some faults CUDA refuses everything until the process ends."""
    try:
        now(device)
    except RuntimeError:
        return False
    return True


def reset_peak(device: torch.device) -> None:
    """Give freed memory back and start a new high-water mark; where the kernel refuses, the old mark stays."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(
            0
        )  # else one item's freed memory counts against the next (glibc only)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Most resident bytes of the whole process since `reset_peak`; on a GPU most of what tensors held there.

    What lies on the GPU beside tensors (the context of CUDA, NCCL's buffers) is added to it.
    """
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        beside = whole - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_allocated(device) + max(0, beside)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
