"""Hold each strategy that claims the step of ddp to the losses of ddp.

Both train a few steps from the same weights on the same small batches. Dropout is off, because the
ranks of tensor parallelism draw other masks than those of ddp. The first loss differs if the
strategy computes another model or loss; the last loss also differs if it takes another step.

    |loss - plain| <= max(1e-5 |plain|, 10 |disturbed - plain|)     in the first and the last step

`plain` is the loss of ddp. `disturbed` is its loss after each weight was changed by a rounding
error, in the step up to this step where the two differ most. It shows how much rounding, and
randomness that no seed repeats, change the losses of this model.
"""

import copy
import random
from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .device import free_bytes
from .entrypoint import LoadedWorkload
from .measuring import NotMeasured
from .steps import one_step
from .strategies import strategy
from .strategies.adasum import ADASUM
from .strategies.compression import COMPRESSED
from .strategies.refusals import DDP, shares_out
from .strategies.replicas import of_ranks

_STEPS = 10
_MAX_BATCH = 2  # samples of a rank; batch normalisation needs two
_ROUNDING = 1e-5  # relative difference of losses in float32 that needs no explanation
_AMPLIFIED = 10.0
# memory of a step of ddp in units of the weights: gradients, their buckets, two states of Adam, and
# activations
_MEMORY_OF_DDP = 8


def claims_ddp(name: str) -> bool:
    """Return True if a step of strategy `name` equals a step of ddp up to rounding."""
    return name not in (DDP, *COMPRESSED, *ADASUM)


def compare(
    name: str,
    build: Callable[..., LoadedWorkload],
    group: dist.ProcessGroup,
    *,
    machines: Sequence[int],
    batch: int,
) -> None:
    """Compare the losses of strategy `name` with those of ddp.

    `build(shared=)` builds the workload on this rank. `machines` lists the number of devices of
    each machine. `batch` is the smallest batch of a rank. Every rank must call this function. If
    ddp cannot train the model here, the reason is printed and nothing is compared. Raises
    NotMeasured if the losses differ, ValueError if the strategy cannot train the model, and
    the errors of the workload.
    """
    batch = min(batch, _MAX_BATCH)
    batches: list[Any] = []

    def losses(trained_by: str, *, disturbed: bool = False) -> list[float]:
        """Return the loss of each step as a mean over ranks."""
        built = build(shared=shares_out(trained_by))
        weights = list(built.model.parameters())
        needed = _MEMORY_OF_DDP * sum(weight.nbytes for weight in weights)
        if built.device.type == "cpu":
            needed *= dist.get_world_size(group)  # the ranks may be on the same computer
        if not batches and not all(of_ranks(needed < free_bytes(built.device), group)):
            raise RuntimeError("too little memory")
        batches.extend(built.make_batch(batch) for _ in range(_STEPS - len(batches)))
        built.close()
        for part in built.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        for weight in weights if disturbed else ():
            dtype = weight.dtype if built.arithmetic.precision == "fp32" else torch.bfloat16
            weight.data *= 1 + torch.finfo(dtype).eps * torch.randn_like(weight)
        torch.manual_seed(dist.get_rank(group))
        random.seed(dist.get_rank(group))
        parallel = strategy(trained_by, device=built.device, machines=machines)
        module, left = parallel(built.model, built.optimizer, group), iter(copy.deepcopy(batches))
        built.make_batch = lambda _: next(left)
        mine = [one_step(built, module, [batch], scale=1 / batch) for _ in range(_STEPS)]
        return [fmean(step) for step in zip(*of_ranks(mine, group), strict=True)]

    try:
        plain = losses(DDP)
    except RuntimeError as error:  # such as a weight without a gradient, which fsdp accepts
        print(f"{name} was not compared with {DDP}, which fails here: {error}")
        return
    found = losses(name)
    others = plain if found == plain else losses(DDP, disturbed=True)
    spreads = [abs(other - dense) for other, dense in zip(others, plain, strict=True)]
    for step in (1, _STEPS):
        dense, own = plain[step - 1], found[step - 1]
        allowed = max(_ROUNDING * abs(dense), _AMPLIFIED * max(spreads[:step]))
        if isfinite(dense) and not abs(own - dense) <= allowed:
            raise NotMeasured(
                f"{name} trains something else than {DDP}: in step {step} its loss is {own:.6g},"
                f" and that of {DDP} is {dense:.6g} on the same batch; use {DDP}"
            )
