"""Equal first weights, an optimizer's new parameters, and micro-steps without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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


def of_ranks(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks."""
    by_rank = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    return by_rank


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
