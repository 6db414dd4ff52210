"""Select this rank's device, wait until it is idle, move data to it, and read its peak memory."""

import contextlib
import ctypes
import gc
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .record import ANY, CPU, Devices


def device_of_rank(expected: Devices) -> torch.device:
    """Return the device of this rank. If the device is a GPU, make it torch's current device.

    The CPU is returned if `expected.name` is CPU, or if `expected.name` is ANY and the machine has
    no GPU. Otherwise, the GPU with index LOCAL_RANK is returned. torch raises RuntimeError if this
    GPU is gone.
    """
    if expected.name == CPU or (expected.name == ANY and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def name_of(device: torch.device) -> str:
    """Return torch's name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def backend(device: torch.device) -> str:
    """Return the backend of process groups: gloo for CPU tensors, and NCCL for GPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def now(device: torch.device) -> float:
    """Wait until `device` has finished its queued work, and return `time.perf_counter()`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value`, a nested structure of tensors, with all tensors moved to `device`."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf  # BatchEncoding

    return tree_map(move, value)


def usable(device: torch.device) -> bool:
    """Return True if the device still works. After some CUDA errors, all later CUDA calls fail."""
    try:
        now(device)
    except RuntimeError:
        return False
    return True


def reset_peak(device: torch.device) -> None:
    """Free unused memory, and reset the peak that `peak_bytes` returns.

    On a CPU, the peak is not reset if the kernel does not permit this.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    ctypes.CDLL(None).malloc_trim(0)  # otherwise glibc keeps memory that earlier runs freed
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory use in bytes since the last `reset_peak`.

    CPU: the peak resident memory of the process.
    GPU: the peak memory of tensors, plus the memory that CUDA's context and NCCL's buffers use now.
    """
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        beside = whole - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_allocated(device) + max(0, beside)
    found = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[0])
