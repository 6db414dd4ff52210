"""What the ranks of one item tell each other, and starting together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def gather(mine: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The numbers of every rank of `group`, in rank order; just one's own without a group."""
    if group is None:
        return [list(mine)]
    numbers = torch.tensor(list(mine), dtype=torch.float64)
    everybody = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, numbers, group=group)
    return [one.tolist() for one in everybody]


def meet(group: dist.ProcessGroup | None) -> None:
    """Start together."""
    if group is not None:
        dist.barrier(group=group)
