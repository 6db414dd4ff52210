"""Equal first weights, an optimizer's new parameters, and micro-steps without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

Cut = Callable[[Tensor], Tensor]


def broadcast_model(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the weights and buffers of the first."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group=group, group_src=0)


def retarget(optimizer: Optimizer, replaced: Mapping[Tensor, tuple[nn.Parameter, Cut]]) -> None:
    """Have `optimizer` train the new parameters.

    States with the shape of the old parameter, such as Adagrad's sums, are cut as it was.
    """
    for held in optimizer.param_groups:
        held["params"] = [
            replaced[weight][0] if weight in replaced else weight for weight in held["params"]
        ]
    for old in [weight for weight in optimizer.state if weight in replaced]:
        new, cut = replaced[old]
        optimizer.state[new] = {
            key: cut(value) if isinstance(value, Tensor) and value.shape == old.shape else value
            for key, value in optimizer.state.pop(old).items()
        }


def refuse_unlike(label: str, value: object, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks if their values differ."""
    by_rank: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    for rank, theirs in enumerate(by_rank):
        if theirs != by_rank[0]:
            raise ValueError(
                f"{label} of {by_rank[0]} on rank 0, of {theirs} on rank {rank}."
                " Use ddp, or batches padded alike."
            )


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Leave gradients of a micro-step on the rank that computed them."""
    if isinstance(module, FSDPModule):
        return _unsharded_gradients(module)
    skip: Callable[[], AbstractContextManager[None]] = getattr(module, "no_sync", nullcontext)
    return skip()


@contextmanager
def _unsharded_gradients(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
