"""How a step is parallelised and communicated: one file a strategy, one table by name."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from . import ddp
from .parallel import Parallel

STRATEGIES: dict[str, Callable[[nn.Module, dist.ProcessGroup], Parallel]] = {"ddp": ddp.parallelise}


def strategy(name: str) -> Callable[[nn.Module, dist.ProcessGroup], Parallel]:
    """The strategy called `name`. Raises ValueError listing the known ones."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]
