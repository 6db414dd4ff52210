"""How a step is parallelised and communicated: one function a strategy, one table by name.

ddp     every device holds everything; gradients are summed in buckets while the backward pass goes on
fsdp    weights, gradients and the optimizer's state are shared out; weights are gathered a group at a time, and let go
zero2   the same, but that weights gathered in the forward pass stay until the backward pass is over
ddp-fp16, ddp-powersgd, ddp-mstopk
        ddp, with gradients sent in fewer bytes (compression.py)
adasum, adasum-delta
        as ddp, with gradients, or the changes of weights, combined by their directions instead of averaged (adasum.py)
tensor-1d, tensor-2d, tensor-2.5d
        linear and transformer layers are divided, and activations exchanged in place of gradients (tensor.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ..switches import NONE, OFFLOAD, blocks, on
from . import adasum, compression, tensor
from .adasum import ADASUM, combining
from .compression import COMPRESSED, compressed
from .grid import TENSOR
from .tensor import Divided, divided

Strategy = Callable[[nn.Module, torch.optim.Optimizer, dist.ProcessGroup, torch.device], nn.Module]

DDP = "ddp"
_CPU = torch.device("cpu")
_STAYS = OffloadPolicy()


def strategy(
    name: str, switches: str = NONE, device: torch.device = _CPU, *, machines: Sequence[int] = (1, 1)
) -> Strategy:
    """The strategy called `name`: what makes the module to call, and has the optimizer train its parameters.

    `machines` are the devices of each machine, in rank order. Every rank of the group must call it. Raises ValueError
    listing the known ones, where one cannot train on such machines, and where it cannot offload: no states are shared
    out, or the `device` to be offloaded from is the host's processor.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    if name in COMPRESSED:
        compression.refuse(name, machines)
    if name in ADASUM:
        adasum.refuse(name, machines)
    if name in TENSOR:
        tensor.refuse(name, machines, switches)
    if OFFLOAD not in on(switches):
        return partial(STRATEGIES[name], machines=machines) if name in (*COMPRESSED, *ADASUM) else STRATEGIES[name]
    if not shares_out(name):
        raise ValueError(f"{OFFLOAD} with {name}: no states are shared out; take fsdp or zero2 with it")
    if device.type == "cpu":
        raise ValueError(f"{OFFLOAD}: this device is the host's processor, whose memory holds the states already")
    return partial(STRATEGIES[name], offload_policy=CPUOffloadPolicy())


def refuse_model(name: str, model: nn.Module, machines: Sequence[int]) -> None:
    """Raises ValueError where the strategy called `name` cannot train such a model on `machines`; says what can."""
    if name in TENSOR:
        tensor.refuse_model(name, model, machines)


def shares_out(name: str) -> bool:
    """Whether each rank holds but a part of the state of a training."""
    return name not in (DDP, *COMPRESSED, *ADASUM)


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Leaves what a strategy does with gradients out of a micro-step; a model of one device does nothing."""
    if isinstance(module, FSDPModule):
        return _unsummed(module)
    return module.no_sync() if isinstance(module, (DistributedDataParallel, Divided)) else nullcontext()


def communicates_always(module: nn.Module) -> bool:
    """Whether a step without `no_sync`'s part communicates all the same: weights that are shared out are gathered, or
    activations of layers that are divided.
    """
    return isinstance(module, (FSDPModule, Divided))


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
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, device: torch.device
) -> nn.Module:
    """As it comes, with a first bucket of 1 MiB, then 25 MiB, in reverse order."""
    return DistributedDataParallel(model, process_group=group)


def _compressed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    name: str,
    machines: Sequence[int],
) -> nn.Module:
    """As `_replicated`, with its gradients sent in fewer bytes."""
    return compressed(name, model, group, machines)


def _combined(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    name: str,
    machines: Sequence[int],
) -> nn.Module:
    """As `_replicated`, with Adasum in place of averages."""
    return combining(name, model, optimizer, group, machines)


def _divided(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, device: torch.device, *, name: str
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
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=offload_policy)
    parts = dict(model.named_parameters())
    for held in optimizer.param_groups:
        held["params"] = [parts[names[id(one)]] if id(one) in names else one for one in held["params"]]
    for one in [one for one in optimizer.state if id(one) in names]:  # Adagrad's are made with it, of whole weights
        optimizer.state[parts[names[id(one)]]] = _shares(optimizer.state.pop(one), parts[names[id(one)]])
    return model


def _shares(state: dict[str, object], part: nn.Parameter) -> dict[str, object]:
    """A parameter's state with each of its tensors shared out as the parameter is, alike on all ranks as they are."""
    if not isinstance(part, DTensor):
        return state
    kept = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == part.shape:
            there = value.to(part.to_local().device)
            kept[name] = distribute_tensor(there, part.device_mesh, part.placements, src_data_rank=None)
    return kept


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    DDP: _replicated,
    "fsdp": partial(_sharded, reshard_after_forward=True),
    "zero2": partial(_sharded, reshard_after_forward=False),
    **{name: partial(_compressed, name=name) for name in COMPRESSED},
    **{name: partial(_combined, name=name) for name in ADASUM},
    **{name: partial(_divided, name=name) for name in TENSOR},
}
