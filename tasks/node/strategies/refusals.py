"""Refuse models, optimizers and machines that a strategy does not support.

Each function `refuse...` raises ValueError with the reason.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim

from ..precision import SCALED
from ..record import Item
from ..switches import OFFLOAD, on, uses_of
from .adasum import ADASUM, DELTAS
from .compression import COMPRESSED, MSTOPK
from .grid import TENSOR, shape_of
from .servers import SERVED, servers_of
from .tables import TABLES, tables_of
from .tensor import divisible_runs

DDP, ZERO1, FSDP, ZERO2 = "ddp", "zero1", "fsdp", "zero2"
STRATEGIES = sorted((DDP, ZERO1, FSDP, ZERO2, *COMPRESSED, *SERVED, TABLES, *ADASUM, *TENSOR))
SHARDED = (FSDP, ZERO2)  # weights, gradients and optimizer states are sharded across ranks
# strategies that send more than gradients, and therefore communicate even inside `no_sync`
ALWAYS_COMMUNICATE = (*SHARDED, ZERO1, TABLES, *TENSOR)
# strategies whose steps equal ddp's steps up to rounding
EQUAL_TO_DDP = {ZERO1, FSDP, ZERO2, TABLES, *SERVED, *TENSOR}
# torch's optimizers that update each entry of a weight independently of the other entries
_BY_ENTRY = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta,
             optim.Adamax, optim.NAdam, optim.RAdam, optim.Rprop, optim.ASGD)  # fmt: skip


def refuse(item: Item, device: torch.device) -> None:
    """Raise ValueError if the strategy is unknown, or does not support this run on this device."""
    name, switches = item.strategy, on(item.switches)
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    if not fits(name, item.used):
        layout = "+".join(map(str, item.used))
        raise ValueError(
            f"strategy {name} does not support this cluster (devices per machine: {layout});"
            " use ddp"
        )
    if switches and name in (*TENSOR, TABLES):
        raise ValueError(
            f"strategy {name}: the switches {item.switches} are not supported; use ddp"
        )
    if OFFLOAD in switches and name not in SHARDED:
        raise ValueError(
            f"strategy {name}: switch offload is not supported; use strategy fsdp or zero2"
        )
    if OFFLOAD in switches and device.type == "cpu":
        raise ValueError(
            "switch offload has no effect on a CPU, where the model is already in host memory"
        )
    if item.precision == SCALED and name not in (DDP, *SERVED):
        raise ValueError(
            f"strategy {name}: fp16 is not supported, because fp16 scales gradients; use bf16"
        )
    if name in (*TENSOR, DELTAS) and len(set(item.batches)) > 1:
        raise ValueError(
            f"strategy {name}: the batch sizes {item.batches} of the devices differ; use ddp"
        )


def fits(name: str, machines: Sequence[int]) -> bool:
    """Return True if strategy `name` can run on a cluster of these machines.

    machines: the number of devices of each machine, such as [8, 8].
    """
    ranks = sum(machines)
    if name in TENSOR:
        return shape_of(name, ranks) is not None
    if name in ADASUM:
        return ranks > 1 and ranks.bit_count() == 1
    if name in SERVED:
        return len(machines) >= max(servers_of(name), 2)
    if name == MSTOPK:
        return len(machines) > 1 and len(set(machines)) == 1
    return name != TABLES or ranks > 1


def refuse_model(name: str, model: nn.Module, machines: Sequence[int]) -> None:
    """Raise ValueError if strategy `name` does not support the model on these machines.

    `machines` lists the number of devices of each machine.
    """
    tables = tables_of(model)
    replaced: Any = model.named_parameters() if name in (*SHARDED, *TENSOR) else ()
    if name == TABLES:
        replaced = ((f"{path}.weight", table.weight) for path, table in tables.items())
    for path, weight in replaced:
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise ValueError(
                f"strategy {name}: the hook on the gradient of {path} would be lost; use ddp"
            )
    if name in TENSOR:
        rows, columns, _ = shape_of(name, sum(machines)) or (1, 1, 1)
        runs = divisible_runs(model, columns)
        if not runs:
            raise ValueError(f"strategy {name}: this model has no layers to divide; use ddp")
        parts = {layer for run in runs for layer in run.parts}
        # With one grid row, the first layer of a pair takes all features, and the second layer
        # returns all features. These sizes need not be multiples of `columns`.
        whole = {
            layer: {"in_features", "nx"} if opens else {"out_features", "nf"}
            for run in runs
            if rows == 1
            for layer, opens in run.opens.items()
        }
        for path, layer in model.named_modules():
            sizes = {"in_features", "nx", "out_features", "nf", "num_heads"} & vars(layer).keys()
            if layer in parts and any(
                getattr(layer, size) % columns for size in sizes - whole.get(layer, set())
            ):
                raise ValueError(
                    f"strategy {name}: sizes of the layer {path} ({layer}) are not multiples of"
                    f" {columns}, the number of ranks in a grid row; use ddp"
                )
    if name == TABLES:
        uses = uses_of(model)
        if not tables:
            raise ValueError(
                f"strategy {name}: the model has no nn.Embedding or nn.EmbeddingBag; use ddp"
            )
        for path, table in tables.items():
            shared = uses[table.weight] > 1
            if shared or table.sparse or table.max_norm is not None or table.scale_grad_by_freq:
                raise ValueError(
                    f"strategy {name}: the embedding table {path} has an unsupported feature"
                    " (shared weight, sparse gradients, max_norm or scale_grad_by_freq); use ddp"
                )


def refuse_optimizer(name: str, optimizer: optim.Optimizer) -> None:
    """Raise ValueError if the strategy does not support the optimizer or its step hooks."""
    kind = type(optimizer)
    step = vars(optimizer).get("step")
    if name in (ZERO1, TABLES, *TENSOR) and step and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"strategy {name}: the optimizer's `step` was replaced, which is not supported; use ddp"
        )
    if name in (ZERO1, TABLES) and not kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"strategy {name}: a rank updates only some of the weights, but {kind.__name__} may"
            " need all weights; use ddp, or an optimizer of torch"
        )
    if name in TENSOR and kind not in _BY_ENTRY:
        known = ", ".join(each.__name__ for each in _BY_ENTRY)
        raise ValueError(
            f"strategy {name}: the optimizer {kind.__name__} may need whole weights, but each rank"
            f" has only blocks of weights; use ddp, or one of torch's optimizers {known}"
        )
    if name in (*TENSOR, TABLES) and (
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    ):
        raise ValueError(
            f"strategy {name}: a step hook of the optimizer, such as clipping, would see only some"
            " of the weights; use ddp or fsdp"
        )
    if name == DELTAS and not getattr(kind.step, "hooked", False):
        raise ValueError(
            f"strategy {name}: the optimizer {kind.__name__} does not call step hooks; use ddp"
        )
