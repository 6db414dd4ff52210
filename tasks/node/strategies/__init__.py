"""Apply a parallelisation strategy, such as DDP or FSDP, to a model.

ddp     each device holds the whole model; gradients are averaged in buckets during the backward
        pass
fsdp    weights, gradients and optimizer states are sharded; weights are gathered block by block
zero2   fsdp, but gathered weights stay on the device from the forward to the backward pass
zero1   ddp, but each rank's optimizer updates a share of the weights and sends this share to all
        ranks
ddp-fp16, ddp-powersgd, ddp-mstopk
        ddp with compressed gradients (compression.py)
ps-1, ps-2, ps-4
        ddp with gradients averaged by 1, 2 or 4 parameter servers (servers.py)
tables  ddp with each embedding table on one rank (tables.py)
adasum, adasum-delta
        ddp with gradients, or weight changes, combined by Adasum instead of averaged (adasum.py)
tensor-1d, tensor-2d, tensor-2.5d
        linear and transformer layers are divided; ranks exchange activations (tensor.py)
"""

from collections.abc import Callable
from functools import partial, partialmethod
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..record import Item
from ..switches import OFFLOAD, blocks, on
from .adasum import GRADIENTS, Changes, combine_gradients
from .compression import (
    DENSE_STEPS,
    FP16,
    MSTOPK,
    POWERSGD,
    POWERSGD_RANK,
    SparseExchange,
    powersgd_hook,
)
from .grid import TENSOR
from .refusals import DDP, FSDP, SHARDED, ZERO1, refuse, refuse_model, refuse_optimizer
from .replicas import broadcast_model, retarget
from .servers import SERVED, Servers
from .tables import TABLES, distribute
from .tensor import divide

_CPU = torch.device("cpu")


def apply_strategy(
    item: Item,
    model: nn.Module,
    optimizer: Optimizer,
    group: dist.ProcessGroup,
    device: torch.device = _CPU,
) -> nn.Module:
    """Apply the strategy of the run `item` to `model`, and return the module to call.

    Afterwards, `optimizer` trains the parameters of the returned module. Every rank of `group` must
    call this function. Raises ValueError if the strategy does not support the run, the device, the
    model or the optimizer.
    """
    name = item.strategy
    refuse(item, device)
    refuse_model(name, model, item.used)
    refuse_optimizer(name, optimizer)
    if name == TABLES:
        return distribute(model, optimizer, group, item.batch_by_rank)
    if name in TENSOR:
        return divide(name, model, optimizer, group)
    if name in SHARDED:
        broadcast_model(model, group)
        shard(
            model,
            optimizer,
            mesh=DeviceMesh.from_group(group, device.type),
            reshard_after_forward=name == FSDP,
            offload_policy=CPUOffloadPolicy() if OFFLOAD in on(item.switches) else OffloadPolicy(),
        )
        return model
    module = DistributedDataParallel(model, process_group=group)
    if name == ZERO1:
        share_update(optimizer, group)
    elif name != DDP:
        module.register_comm_hook(*_hook(item, module, optimizer, group))
    return module


def _hook(
    item: Item, module: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup
) -> tuple[Any, Callable[..., Any]]:
    """Return (state, DDP communication hook) for the strategy of the run `item`.

    For adasum-delta, also register step hooks on the optimizer.
    """
    name, machines = item.strategy, item.used
    if name == FP16:
        return group, fp16_compress_hook
    if name == POWERSGD:
        state = PowerSGDState(group, POWERSGD_RANK, start_powerSGD_iter=DENSE_STEPS)
        return state, powersgd_hook
    if name == MSTOPK:
        return SparseExchange(group, tuple(machines)), SparseExchange.average
    if name in SERVED:
        return Servers(name, machines, group), Servers.average
    if name == GRADIENTS:
        return group, combine_gradients
    changes = Changes(group, [weight for weight in module.parameters() if weight.requires_grad])
    optimizer.register_step_pre_hook(changes.remember)
    combine = optimizer.register_step_post_hook(changes.combine)
    hooks: Any = optimizer._optimizer_step_post_hooks
    # run first, because a step hook of the user may average the weights over steps
    hooks.move_to_end(combine.id, last=False)
    return changes, Changes.leave_gradients


def share_update(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Replace `optimizer.step` by a step that divides the update among ranks (strategy zero1).

    Each parameter is updated as a whole, by one rank. Therefore the weights equal DDP's weights bit
    for bit.

    Raises TypeError if the optimizer's class cannot be constructed from its parameter groups and
    defaults.
    """
    kind = type(optimizer)
    known = signature(kind).parameters
    weights = [weight for held in optimizer.param_groups for weight in held["params"]]
    layouts = {(weight.dtype, weight.is_contiguous()) for weight in weights}
    shared = ZeroRedundancyOptimizer(
        [dict(held) for held in optimizer.param_groups],
        optimizer_class=kind,
        process_group=group,
        parameters_as_bucket_view=len(layouts) == 1,
        **{name: value for name, value in optimizer.defaults.items() if name in known},
    )
    optimizer.state = shared.optim.state
    optimizer.param_groups = shared.param_groups  # learning-rate schedulers write here
    shared._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    shared._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
    optimizer.step = shared.step  # type: ignore[method-assign]
    # this `state_dict` raises an error until `consolidate_state_dict` has gathered the states
    optimizer.state_dict = shared.state_dict  # type: ignore[method-assign]


def shard(model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
    """Shard a model block by block, so that the whole model never has to fit on one device.

    `model` must be in host memory. Afterwards, `optimizer` trains the shards. `options` are
    passed to torch's `fully_shard`.
    """
    whole = dict(model.named_parameters())
    # torch delays the sum of a norm over ranks, so `DTensor.item` would return this rank's part.
    for name in ("item", "__float__", "__int__", "__bool__"):
        setattr(DTensor, name, partialmethod(_of_whole, getattr(Tensor, name)))
    for module in [*blocks(model), model]:
        fully_shard(module, **options)
    shards = dict(model.named_parameters())
    retarget(
        optimizer,
        {whole[path]: (new, partial(_cut_as, new)) for path, new in shards.items()},
    )


def _of_whole(value: DTensor, number: Callable[[Tensor], Any]) -> Any:
    """Gather the whole tensor from all ranks, and convert it to a number.

    Every rank must call this function.

    value: this rank's part of the tensor.
    number: the function that converts the whole tensor, such as `Tensor.item`.
    """
    return number(value.full_tensor())


def _cut_as(shard: Any, values: Tensor) -> Tensor:
    """Shard `values` in the same way as the parameter `shard`, and return the result.

    `values` must be equal on all ranks.
    """
    values = values.to(shard.to_local().device)
    return distribute_tensor(values, shard.device_mesh, shard.placements, src_data_rank=None)
