"""How a step is parallelised and communicated: one function a strategy, one table by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# "ddp": as it comes, with a first bucket of 1 MiB, then 25 MiB, in reverse order. Every rank of the group must call it.
STRATEGIES: dict[str, Callable[[nn.Module, dist.ProcessGroup], nn.Module]] = {
    "ddp": lambda model, group: DistributedDataParallel(model, process_group=group)
}


def strategy(name: str) -> Callable[[nn.Module, dist.ProcessGroup], nn.Module]:
    """The strategy called `name`: what makes the module to call. Raises ValueError listing the known ones."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Leaves a strategy's communication out of a micro-step; a model of one device has none."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def bucket_bytes(module: nn.Module) -> list[int]:
    """Sizes of what is sent, in order, once a few steps have run; empty if unknown, or if nothing is."""
    if not isinstance(module, DistributedDataParallel):
        return []
    sizes = str(module._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""))  # type: ignore[no-untyped-call]
    return [int(size) for size in sizes.split(",") if size.strip().isdigit()]
