"""How a step is parallelised and communicated: one function a strategy, one table by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The module to call, and how to leave its communication out of a micro-step.

    `bucket_bytes` tells the sizes of what is sent, in order, once a few steps have run; empty if unknown.
    """

    module: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]]
    bucket_bytes: Callable[[], list[int]]


def alone(model: nn.Module) -> Parallel:
    """One device: nothing to communicate."""
    return Parallel(module=model, no_sync=nullcontext, bucket_bytes=list)


def ddp(model: nn.Module, group: dist.ProcessGroup) -> Parallel:
    """PyTorch's DistributedDataParallel as it comes: a first bucket of 1 MiB, then 25 MiB, in reverse order.

    Collective: every rank of the group must call it.
    """
    module = DistributedDataParallel(model, process_group=group)

    def bucket_bytes() -> list[int]:
        logged = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = str(logged.get("rebuilt_bucket_sizes", ""))
        return [int(size) for size in sizes.split(",") if size.strip().isdigit()]

    return Parallel(module=module, no_sync=module.no_sync, bucket_bytes=bucket_bytes)


STRATEGIES: dict[str, Callable[[nn.Module, dist.ProcessGroup], Parallel]] = {"ddp": ddp}


def strategy(name: str) -> Callable[[nn.Module, dist.ProcessGroup], Parallel]:
    """The strategy called `name`. Raises ValueError listing the known ones."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]
