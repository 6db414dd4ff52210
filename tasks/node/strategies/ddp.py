"""PyTorch's DistributedDataParallel as it comes: a first bucket of 1 MiB, then 25 MiB, in reverse order."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .parallel import Parallel


def parallelise(model: nn.Module, group: dist.ProcessGroup) -> Parallel:
    """Wrap `model` over `group`; collective, so every rank of the group must call it."""
    module = DistributedDataParallel(model, process_group=group)

    def bucket_bytes() -> list[int]:
        logged = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = str(logged.get("rebuilt_bucket_sizes", ""))
        return [int(size) for size in sizes.split(",") if size.strip().isdigit()]

    return Parallel(module=module, no_sync=module.no_sync, bucket_bytes=bucket_bytes)
