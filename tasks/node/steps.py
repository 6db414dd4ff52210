"""One training run on one rank: warm-up, blocks of steady steps, and the part of a step that waits for gradients.

Each rank's mean loss is scaled by W b_i / B, since data-parallel training divides the sum by the world size W, so that
unequal batches b_i train as one batch B would; both W and B are over all devices. Ranks agree on when to stop between
blocks, outside every measured step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from . import measuring
from .device import now, peak_bytes
from .entrypoint import LoadedWorkload
from .measuring import Patience, gather, meet
from .record import Item
from .strategies import Parallel, alone, strategy

_COMPUTE_REPEATS = 2  # steps without communication, from which `sync_s` is told
_COMPUTE_SHARE = 0.25  # of `most_s`: more is not spent on them


def one_step(
    built: LoadedWorkload, parallel: Parallel, *, batch: int, accumulation_steps: int, scale: float, sync: bool
) -> float:
    """One optimizer step; returns the last micro-step's mean loss. Only the last micro-step communicates, if `sync`."""
    built.optimizer.zero_grad(set_to_none=True)
    loss = torch.tensor(math.nan)
    for micro in range(accumulation_steps):
        inputs, target = built.make_batch(batch)
        last = micro == accumulation_steps - 1
        quiet: AbstractContextManager[None] = nullcontext() if sync and last else parallel.no_sync()
        with quiet:
            loss = built.loss(parallel.module(inputs), target)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
    built.optimizer.step()
    return float(loss.detach())


def train(
    item: Item, built: LoadedWorkload, group: dist.ProcessGroup | None, patience: Patience, *, place: int
) -> tuple[dict[str, Any], str]:
    """Values of a train record, or the reason why there are none. `place` is one's own node's in `item.nodes`."""
    clock_s = partial(now, built.device)
    started = clock_s()
    world = sum(item.used)
    micro_batch = sum(used * batch for used, batch in zip(item.used, item.batches, strict=True))
    parallel = alone(built.model) if group is None else strategy(item.strategy)(built.model, group)
    step = partial(
        one_step,
        built,
        parallel,
        batch=item.batches[place],
        accumulation_steps=item.accumulation_steps,
        scale=world * item.batches[place] / micro_batch / item.accumulation_steps,
    )
    weight = item.batches[place] / micro_batch
    build_s = clock_s() - started

    meet(group)
    started = clock_s()
    losses = [step(sync=True) for _ in range(item.warmup_steps)]
    warmup_s = clock_s() - started

    steady = _steady(item, step, group, clock_s, patience)
    seconds, elapsed_s = measuring.slowest(steady.by_rank), steady.elapsed_s
    losses += steady.losses
    peak = peak_bytes(built.device)
    alone_s = _compute_s(item, step, group, clock_s, patience, step_s=median(seconds))
    losses = losses[: item.warmup_steps + item.most_steps]  # however long hosts disturbed it
    told = gather([losses[0] * weight, losses[-1] * weight, peak, build_s, warmup_s], group)
    first_loss, last_loss = (sum(one[i] for one in told) for i in (0, 1))
    values: dict[str, Any] = {
        "step_s": median(seconds),
        "step_spread": measuring.spread(seconds),
        "steps": len(seconds),
        "rank_step_s": [median(one) for one in steady.by_rank],
        "rank_compute_s": alone_s,
        "sync_s": 0.0 if group is None else max(0.0, median(seconds) - max(alone_s)),
        "build_s": max(one[3] for one in told),
        "warmup_s": max(one[4] for one in told),
        "steps_s": elapsed_s,
        "peak_bytes": int(max(one[2] for one in told)),
        "parameters": built.parameters,
        "gradient_bytes": built.gradient_bytes,
        "bucket_bytes": parallel.bucket_bytes(),
        "first_loss": first_loss,
        "last_loss": last_loss,
    }
    if not (math.isfinite(first_loss) and math.isfinite(last_loss)):
        return {}, f"the loss went from {first_loss} to {last_loss} in {len(losses)} steps: not a number to train with"
    return values, ""


@dataclass(slots=True)
class _Steady:
    """Steps after warm-up: seconds of each at every rank, seconds of them with what lies between, and losses."""

    by_rank: list[list[float]]
    elapsed_s: float
    losses: list[float]


def _steady(
    item: Item,
    step: Callable[..., float],
    group: dist.ProcessGroup | None,
    clock_s: Callable[[], float],
    patience: Patience,
) -> _Steady:
    """Blocks of steps until the ranks agree that enough was measured; what they tell each other is outside of them.

    A block that was disturbed trains, and is not measured.
    """
    found = _Steady(by_rank=[[] for _ in range(sum(item.used))], elapsed_s=0.0, losses=[])
    seconds: list[float] = []
    limits = {"least": item.least_steps, "most": item.most_steps}

    def block() -> list[list[float]]:
        mine = []
        started = clock_s()
        meet(group)
        for _ in range(measuring.next_block(seconds, **limits)):
            before = clock_s()
            found.losses.append(step(sync=True))
            mine.append(clock_s() - before)
        return gather([clock_s() - started, *mine], group)

    while not measuring.enough(seconds, **limits, elapsed_s=found.elapsed_s, most_s=item.most_s):
        told = patience.undisturbed(block, group)
        found.elapsed_s += max(one[0] for one in told)
        for rank, one in enumerate(told):
            found.by_rank[rank] += one[1:]
        seconds = measuring.slowest(found.by_rank)
    return found


def _compute_s(
    item: Item,
    step: Callable[..., float],
    group: dist.ProcessGroup | None,
    clock_s: Callable[[], float],
    patience: Patience,
    *,
    step_s: float,
) -> list[float]:
    """Seconds of the same step without communication at each rank, all at work as before; none for one rank alone."""
    if group is None:
        return []
    repeats = max(1, min(_COMPUTE_REPEATS, int(_COMPUTE_SHARE * item.most_s / step_s)))

    def block() -> list[list[float]]:
        mine = []
        meet(group)
        for _ in range(repeats):
            before = clock_s()
            step(sync=False)
            mine.append(clock_s() - before)
        return gather([median(mine)], group)

    return [one[0] for one in patience.undisturbed(block, group)]
