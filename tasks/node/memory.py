"""Peak memory of this rank, item by item: the kernel's own high-water mark, or torch's where the device is a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Give freed memory back and start a new high-water mark; where the kernel refuses, the old mark stays."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else one item's freed memory counts against the next (glibc only)
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
