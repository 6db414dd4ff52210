"""Copy a model to all ranks, replace an optimizer's parameters, and provide `no_sync`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Cut = Callable[[Tensor], Tensor]
Group = dist.ProcessGroup | None  # None for a run on one device


class Replaced(nn.Parameter):
    """The class of an old parameter that `retarget` has replaced. Any use raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RuntimeError(
            "the strategy replaced this parameter. Do not keep parameters between steps, for"
            " example to clip gradients. Call model.parameters() in each step, or use ddp"
        )


def broadcast_model(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the weights and buffers of the group's first rank to every rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group=group, group_src=0)


def retarget(optimizer: Optimizer, replaced: Mapping[Tensor, tuple[nn.Parameter, Cut]]) -> None:
    """Make `optimizer` train new parameters, which are parts of the old parameters.

    Any later use of an old parameter raises RuntimeError, because a change of the old parameter
    would not affect the model.

    replaced: {old parameter: (new parameter, cut)}. `cut` returns the new parameter's part of an
        optimizer state, such as Adagrad's sums.
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
    for old in replaced:
        old.data = old.data.new_empty(0)
        old.__class__ = Replaced


def of_ranks(value: Any, group: Group) -> list[Any]:
    """Gather `value` from all ranks of `group`, and return the values in rank order.

    Every rank of the group must call this function. Returns `[value]` if `group` is None.
    """
    if group is None:
        return [value]
    by_rank = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    return by_rank


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Return a context manager in which backward passes do not communicate gradients.

    Only FSDP and DDP modules are affected.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
    elif isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    else:
        yield
