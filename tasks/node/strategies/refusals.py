"""What the strategies refuse: each function raises ValueError that names what fits instead."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import gcd

import torch
from torch import nn

from ..precision import SCALED
from ..switches import NONE, OFFLOAD, on
from .adasum import ADASUM, DELTAS, GRADIENTS
from .compression import COMPRESSED, FP16, MSTOPK, POWERSGD
from .grid import TENSOR, fits, shape_of
from .servers import SERVED, servers_of
from .tables import TABLES, tables_of
from .tensor import divisible_layers

DDP, ZERO1, FSDP, ZERO2 = "ddp", "zero1", "fsdp", "zero2"
STRATEGIES = sorted((DDP, ZERO1, FSDP, ZERO2, *COMPRESSED, *SERVED, TABLES, *ADASUM, *TENSOR))
# torch's optimizers that update each entry of a weight by itself
_BY_ENTRY = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Rprop, torch.optim.ASGD),
)
_MAX_NAMED = 256  # devices, of counts that would fit


def shares_out(name: str) -> bool:
    """Whether each rank holds a share of the weights, or of their gradients."""
    return name in (FSDP, ZERO2)


def refuse(name: str, switches: str, device: torch.device, machines: Sequence[int]) -> None:
    """Refuse unknown strategies, switches beside them, and `machines`, the devices of each."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    _refuse_machines(name, machines)
    if switches != NONE and name in TENSOR:
        raise ValueError(
            f"{name} with {switches}: divided layers are neither recomputed nor compiled"
        )
    if switches != NONE and name == TABLES:
        raise ValueError(f"{name} with {switches}: tables are neither recomputed nor compiled")
    if OFFLOAD in on(switches):
        if not shares_out(name):
            raise ValueError(f"{OFFLOAD} with {name}: take {FSDP} or {ZERO2}, which share states")
        if device.type == "cpu":
            raise ValueError(f"{OFFLOAD}: the states of this device are in host memory already")


def _refuse_machines(name: str, machines: Sequence[int]) -> None:
    ranks, layout = sum(machines), "+".join(map(str, machines))
    devices = f"{ranks} device{'s' * (ranks != 1)}"
    if name in TENSOR:
        shape_of(name, ranks)
    elif name == TABLES and ranks < 2:
        raise ValueError(f"{name} on {devices}: there is nothing to share out; take ddp")
    elif name == MSTOPK and (len(machines) < 2 or len(set(machines)) > 1):
        raise ValueError(
            f"{name} on {layout} devices: it needs at least 2 machines with equally many devices;"
            f" take ddp, {FP16} or {POWERSGD}"
        )
    elif name == POWERSGD and find_spec("numpy") is None:
        raise ValueError(f"{name} needs numpy, which this machine's Python lacks")
    elif name in SERVED and len(machines) < max(servers_of(name), 2):
        fitting = [other for other in SERVED if servers_of(other) <= len(machines) > 1]
        raise ValueError(
            f"{name} on {layout} devices: each server needs a machine, and there must be 2;"
            f" take {' or '.join([DDP, *fitting])}"
        )
    elif name in ADASUM and (ranks < 2 or ranks & (ranks - 1)):
        below = 1 << (ranks.bit_length() - 1)
        counts = "2" if ranks < 2 else f"{below} or {2 * below}"
        raise ValueError(
            f"{name} on {devices}: vectors are combined in pairs; take ddp, or {counts} devices"
        )


def refuse_training(name: str, precision: str, batches: Sequence[int]) -> None:
    """Refuse scaled gradients, and unequal `batches` of machines."""
    if precision == SCALED and name not in (DDP, *SERVED):
        raise ValueError(
            f"{name} in {SCALED}: this strategy does not support gradient scaling; use bf16"
        )
    if name in (*TENSOR, DELTAS) and len(set(batches)) > 1:
        instead = GRADIENTS if name == DELTAS else DDP
        unequal = " and ".join(map(str, batches))
        raise ValueError(
            f"{name} with batches of {unequal}: it needs equal batches; take them, or {instead}"
        )


def refuse_model(name: str, model: nn.Module, machines: Sequence[int]) -> None:
    """Refuse models with nothing to divide or share out, or with a layer that cannot be."""
    if name in TENSOR:
        _refuse_layers(name, model, sum(machines))
    if name == TABLES:
        _refuse_tables(name, model)


def _refuse_layers(name: str, model: nn.Module, ranks: int) -> None:
    paths = {module: path or "the model" for path, module in model.named_modules()}
    sizes = {layer: _sizes(layer) for layer in divisible_layers(model)}
    common = gcd(*(size for own in sizes.values() for size in own))
    if not common:
        raise ValueError(
            f"{name}: this model has nothing to divide, no run of linear layers in an nn.Sequential"
            " and no nn.TransformerEncoderLayer; take ddp"
        )
    columns = shape_of(name, ranks)[1]
    for layer, own in sizes.items():
        if any(size % columns for size in own):
            counts = [count for count in range(2, _MAX_NAMED) if fits(name, count)]
            fitting = [str(count) for count in counts if common % shape_of(name, count)[1] == 0]
            instead = f", or {' or '.join(fitting[:4])} devices" if fitting else ""
            raise ValueError(
                f"{name} on {ranks} devices: {paths[layer]} ({type(layer).__name__} of"
                f" {' to '.join(map(str, own))}) does not divide by {columns}; take ddp{instead}"
            )


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    """Features, or heads, that are divided."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.LayerNorm):
        return layer.normalized_shape
    return (layer.num_heads,) if isinstance(layer, nn.MultiheadAttention) else ()


def _refuse_tables(name: str, model: nn.Module) -> None:
    tables = tables_of(model)
    if not tables:
        raise ValueError(f"{name}: this model has no nn.Embedding and no nn.EmbeddingBag; take ddp")
    modules = [id(child) for parent in model.modules() for child in parent.children()]
    weights = [
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    ]
    for path, table in tables.items():
        if table.sparse or table.max_norm is not None or table.scale_grad_by_freq:
            raise ValueError(
                f"{name}: {path} has sparse gradients, max_norm or scale_grad_by_freq; take ddp"
            )
        if modules.count(id(table)) > 1 or weights.count(id(table.weight)) > 1:
            raise ValueError(f"{name}: {path} is in two places of the model; take ddp")


def refuse_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that would treat a share of the weights otherwise than the whole."""
    kind = type(optimizer)
    if name in TENSOR and kind not in _BY_ENTRY:
        raise ValueError(
            f"{name}: {kind.__name__} may need whole weights, and a rank has a block of each; take"
            f" ddp, or torch's {', '.join(known.__name__ for known in _BY_ENTRY)}"
        )
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if name in (*TENSOR, TABLES) and hooks:
        raise ValueError(
            f"{name}: a hook of the optimizer's steps, such as clipping, would see a share of the"
            " weights; take ddp or fsdp"
        )
    if name == DELTAS and not getattr(kind.step, "hooked", False):
        raise ValueError(
            f"{name}: {kind.__name__} calls no step hooks; call torch.optim.Optimizer.__init__"
            f" in it, or take {GRADIENTS}"
        )
