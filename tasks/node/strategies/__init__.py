"""How a step is parallelised and communicated: one function a strategy, one table by name.

ddp     every device holds everything; gradients are summed in buckets while the backward pass goes on
fsdp    weights, gradients and the optimizer's state are shared out; weights are gathered a group at a time, and let go
zero2   the same, but that weights gathered in the forward pass stay until the backward pass is over
zero1   ddp, but that each device's optimizer updates a share of the weights, and sends these to all
ddp-fp16, ddp-powersgd, ddp-mstopk
        ddp, with gradients sent in fewer bytes (compression.py)
ps-1, ps-2, ps-4
        ddp, with gradients averaged by so many parameter servers (servers.py)
tables  ddp, but that each embedding table lies on one rank alone (tables.py)
adasum, adasum-delta
        as ddp, with gradients, or the changes of weights, combined by their directions instead of averaged (adasum.py)
tensor-1d, tensor-2d, tensor-2.5d
        linear and transformer layers are divided, and activations exchanged in place of gradients (tensor.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ..switches import NONE, OFFLOAD, blocks, on
from . import adasum, compression, servers, tables, tensor
from .adasum import ADASUM
from .compression import COMPRESSED
from .grid import TENSOR
from .servers import SERVED
from .tables import TABLES, Elsewhere
from .tensor import Divided, divided

Strategy = Callable[[nn.Module, torch.optim.Optimizer, dist.ProcessGroup, torch.device], nn.Module]

DDP = "ddp"
# what makes ddp send something else, or another way; each refuses machines and wraps a model
_SENDS_OTHERWISE = {
    **dict.fromkeys(COMPRESSED, compression),
    **dict.fromkeys(SERVED, servers),
    **dict.fromkeys(ADASUM, adasum),
    TABLES: tables,
}
ZERO1 = "zero1"
_GATHERED = ("fsdp", "zero2")
_CPU = torch.device("cpu")
_STAYS = OffloadPolicy()


def strategy(
    name: str,
    switches: str = NONE,
    device: torch.device = _CPU,
    *,
    machines: Sequence[int] = (1, 1),
) -> Strategy:
    """The strategy called `name`: what makes the module to call, and has the optimizer train its parameters.

    `machines` are the devices of each machine, in rank order. Every rank of the group must call it. Raises ValueError
    listing the known ones, where one cannot train on such machines, and where it cannot offload: no states are shared
    out, or the `device` to be offloaded from is the host's processor.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    if name in _SENDS_OTHERWISE:
        _SENDS_OTHERWISE[name].refuse(name, machines)
    if name in TENSOR:
        tensor.refuse(name, machines, switches)
    if name == TABLES and switches != NONE:
        raise ValueError(
            f"{name} with {switches}: what takes a table's place is neither recomputed nor compiled"
        )
    if OFFLOAD not in on(switches):
        return (
            partial(STRATEGIES[name], machines=machines)
            if name in _SENDS_OTHERWISE
            else STRATEGIES[name]
        )
    if not shares_out(name):
        raise ValueError(
            f"{OFFLOAD} with {name}: no states are shared out; take fsdp or zero2 with it"
        )
    if device.type == "cpu":
        raise ValueError(
            f"{OFFLOAD}: this device is the host's processor, whose memory holds the states already"
        )
    return partial(STRATEGIES[name], offload_policy=CPUOffloadPolicy())


def refuse_model(name: str, model: nn.Module, machines: Sequence[int]) -> None:
    """Raises ValueError where the strategy called `name` cannot train such a model on `machines`; says what can."""
    if name in TENSOR:
        tensor.refuse_model(name, model, machines)
    if name == TABLES:
        tables.refuse_model(name, model)


def shares_out(name: str) -> bool:
    """Whether each rank holds but a part of the weights, or of their gradients."""
    return name in _GATHERED


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Leaves what a strategy does with gradients out of a micro-step; a model of one device does nothing."""
    if isinstance(module, FSDPModule):
        return _unsummed(module)
    return (
        module.no_sync()
        if isinstance(module, (DistributedDataParallel, Divided, Elsewhere))
        else nullcontext()
    )


def communicates_always(module: nn.Module) -> bool:
    """Whether a step without `no_sync`'s part communicates all the same: for weights that a rank lacks or has to send,
    or for activations.
    """
    return isinstance(module, (FSDPModule, _SharedUpdate, Divided, Elsewhere))


def bucket_bytes(module: nn.Module) -> list[int]:
    """Sizes of what is sent, in order, once a few steps have run; empty if unknown, or if nothing is."""
    if not isinstance(module, DistributedDataParallel):
        return []
    sizes = str(module._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""))  # type: ignore[no-untyped-call]
    return [int(size) for size in sizes.split(",") if size.strip().isdigit()]


@contextmanager
def _unsummed(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _replicated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
) -> nn.Module:
    """As it comes, with a first bucket of 1 MiB, then 25 MiB, in reverse order."""
    return DistributedDataParallel(model, process_group=group)


class _SharedUpdate(DistributedDataParallel):
    """A model whose optimizer's steps send weights."""


def _updated_in_shares(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
) -> nn.Module:
    """As `_replicated`; `optimizer`'s steps become those of torch's ZeroRedundancyOptimizer of the same kind.

    Whole parameters are divided among ranks, so that each is updated as without. Raises ValueError where an optimizer
    of the same kind cannot be made from its groups and defaults.
    """
    kind = type(optimizer)
    known = signature(kind).parameters
    weights = [one for held in optimizer.param_groups for one in held["params"]]
    try:
        shared = ZeroRedundancyOptimizer(
            [dict(one) for one in optimizer.param_groups],
            optimizer_class=kind,
            process_group=group,
            parameters_as_bucket_view=len({(one.dtype, one.is_contiguous()) for one in weights})
            == 1,
            **{name: value for name, value in optimizer.defaults.items() if name in known},
        )
    except TypeError as error:
        raise ValueError(
            f"{ZERO1}: no {kind.__name__} can be made of this one's groups and defaults ({error}); take ddp, or give"
            " it a constructor as torch's optimizers have"
        ) from None
    own = [one for held in shared.optim.param_groups for one in held["params"]]
    shared.optim.state.update(
        {one: optimizer.state[one] for one in own if one in optimizer.state}
    )  # as of Adagrad
    optimizer.state.clear()
    optimizer.param_groups = shared.param_groups  # where schedulers change rates
    shared._optimizer_step_pre_hooks = (
        optimizer._optimizer_step_pre_hooks
    )  # such as one that clips gradients
    shared._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
    optimizer.step = shared.step  # type: ignore[method-assign]
    return _SharedUpdate(model, process_group=group)


def _sending_otherwise(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    name: str,
    machines: Sequence[int],
) -> nn.Module:
    """As `_replicated`, with gradients sent as `name` does."""
    module: nn.Module = _SENDS_OTHERWISE[name].wrapped(name, model, optimizer, group, machines)
    return module


def _divided(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    name: str,
) -> nn.Module:
    """The model with its layers divided, and the rest of it as `_replicated`."""
    return divided(name, model, optimizer, group, device)


def _sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    reshard_after_forward: bool,
    offload_policy: OffloadPolicy = _STAYS,
) -> nn.Module:
    """The model itself, its parameters replaced by this rank's part of them, in the optimizer too.

    It comes in the host's memory, and a group of weights at a time is moved to `device`. Ranks begin with
    the weights of the first.
    """
    names = {id(one): name for name, one in model.named_parameters()}
    for one in [*model.parameters(), *model.buffers()]:
        dist.broadcast(one.data, group=group, group_src=0)
    mesh = DeviceMesh.from_group(group, device.type)
    for module in [*blocks(model), model]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy,
        )
    parts = dict(model.named_parameters())
    for held in optimizer.param_groups:
        held["params"] = [
            parts[names[id(one)]] if id(one) in names else one for one in held["params"]
        ]
    for one in [
        one for one in optimizer.state if id(one) in names
    ]:  # Adagrad's are made with it, of whole weights
        optimizer.state[parts[names[id(one)]]] = _shares(
            optimizer.state.pop(one), parts[names[id(one)]]
        )
    return model


def _shares(state: dict[str, object], part: nn.Parameter) -> dict[str, object]:
    """A parameter's state with each of its tensors shared out as the parameter is, alike on all ranks as they are."""
    if not isinstance(part, DTensor):
        return state
    kept = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == part.shape:
            there = value.to(part.to_local().device)
            kept[name] = distribute_tensor(
                there, part.device_mesh, part.placements, src_data_rank=None
            )
    return kept


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    DDP: _replicated,
    ZERO1: _updated_in_shares,
    "fsdp": partial(_sharded, reshard_after_forward=True),
    "zero2": partial(_sharded, reshard_after_forward=False),
    **{name: partial(_sending_otherwise, name=name) for name in _SENDS_OTHERWISE},
    **{name: partial(_divided, name=name) for name in TENSOR},
}
