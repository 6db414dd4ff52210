"""Compare the losses of a strategy with the losses of ddp.

The check is for strategies whose steps should equal ddp's steps up to rounding. Strategy and ddp
train a few steps from the same weights on the same small batches, in fp32. Dropout is off, because
tensor parallelism and ddp draw different dropout masks.

To measure the effect of rounding, ddp trains a second time, from weights that differ by rounding
errors. In the first and in the last step, the losses must satisfy this inequality:

    |loss - plain| <= max(1e-5 |plain|, 10 spread)

loss    the strategy's loss
plain   the loss of the first ddp training
spread  the largest difference between the losses of the two ddp trainings, up to this step

The first step detects a wrong forward pass or loss function. The last step detects a wrong update
of the weights.
"""

import copy
import os
import random
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .entrypoint import LoadedWorkload
from .launch import explain
from .precision import Arithmetic
from .record import Item
from .repetition import NotMeasured
from .steps import learn
from .strategies.refusals import DDP, SHARDED
from .strategies.replicas import Group, of_ranks
from .switches import NONE

_STEPS = 10
_MAX_BATCH = 2  # samples of a rank; batch normalisation needs two
_ROUNDING = 1e-5  # relative difference of losses that float32 rounding explains
_AMPLIFIED = 10.0  # the factor of `spread`
# Memory of a ddp step, as a multiple of the gradients' bytes: weights, gradients, gradient buckets,
# two states of Adam, and activations.
_MEMORY_OF_DDP = 8


def compare(item: Item, build: Callable[..., LoadedWorkload], group: Group) -> str:
    """Compare the losses of ddp and of strategy `item.strategy` in a few training steps.

    Every rank must call this function. First, each rank trains with ddp alone. If memory is too
    small for ddp on any rank, or if ddp raises RuntimeError there, this function returns the reason
    on all ranks, and does not compare the losses. Otherwise, it returns "".

    build: `build(shared=...)` builds the workload on this rank. `shared` is True if the strategy
        shards the model.

    Raises NotMeasured if the losses differ, and ValueError if the strategy cannot train the model.
    Also raises the errors of the workload.
    """
    rank, batch = dist.get_rank(group), min(*item.batches, _MAX_BATCH)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    batches: list[Any] = []

    def losses(name: str, among: Group = group, *, disturbed: bool = False) -> list[float]:
        """Train with strategy `name`, and return the loss of each step as a mean over ranks.

        If the training diverges, the losses of the remaining steps are infinite.

        among: the ranks that train together.
        disturbed: True to change each weight by a rounding error before training.
        """
        # Both trainings draw their weights on the CPU, because a GPU draws other random numbers.
        built = build(shared=item.strategy in SHARDED)
        if name not in SHARDED:
            built.model.to(built.device)
        built.arithmetic = Arithmetic(device=built.device)  # bf16 would hide small mistakes
        # All ranks may be on this machine. On a GPU, torch itself raises an out-of-memory error.
        needed = _MEMORY_OF_DDP * built.sizes["gradient_bytes"] * dist.get_world_size(group)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if built.device.type == "cpu" and needed > memory:
            raise RuntimeError("the comparison needs more memory than this machine has")
        batches.extend(built.make_batch(batch) for _ in range(_STEPS - len(batches)))
        left = iter(copy.deepcopy(batches))
        built.make_batch = lambda _: next(left)
        for module in built.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for field in ("dropout", "attention_dropout"):  # of attention in torch, Hugging Face
                if isinstance(getattr(module, field, None), float):
                    setattr(module, field, 0.0)
        for weight in built.model.parameters() if disturbed else ():
            weight.data *= 1 + torch.finfo(weight.dtype).eps * torch.randn_like(weight)
        torch.manual_seed(rank)
        random.seed(rank)
        short = replace(
            item,
            strategy=name,
            batches=[batch] * len(item.nodes),
            accumulation_steps=1,
            switches=NONE,
            windows=_STEPS,
            most_steps=_STEPS,
            most_s=inf,
        )
        return [*learn(short, built, among)["losses"], *[inf] * _STEPS]

    failure = ""
    try:
        losses(DDP, alone)
    except RuntimeError as error:  # for example, only ddp needs a gradient for each weight
        failure = (
            f"{item.strategy} was not compared with {DDP}, because {DDP} failed: {explain(error)}"
        )
    dist.destroy_process_group(alone)
    # A rank that skipped the comparison by itself would leave the other ranks in a collective.
    skipped: str = max(of_ranks(failure, group))
    if skipped:
        return skipped
    plain, found = losses(DDP), losses(item.strategy)
    others = plain if found == plain else losses(DDP, disturbed=True)
    spreads = [abs(other - dense) for other, dense in zip(others, plain, strict=False)]
    for step in (1, _STEPS):
        dense, loss = plain[step - 1], found[step - 1]
        allowed = max(_ROUNDING * abs(dense), _AMPLIFIED * max(spreads[:step]))
        if isfinite(dense) and not abs(loss - dense) <= allowed:
            raise NotMeasured(
                f"{item.strategy} does not train like ddp. In step {step} on the same batch, the"
                f" loss is {loss:.6g} with {item.strategy}, but {dense:.6g} with ddp. Use ddp"
            )
    return ""
