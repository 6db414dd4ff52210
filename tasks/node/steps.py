"""One training run on one rank: warm-up, blocks of steady steps, and the part of a step that waits for gradients; or,
untimed, the losses of a given number of steps.

Each rank's mean loss is scaled by W b_i / B, since data-parallel training divides the sum by the world size W, so that
unequal batches b_i train as one batch B would; both W and B are over all devices. Ranks agree on when to stop between
blocks, outside every measured step.

Workers of a loader finish batches together, a burst of waits and then none: their steps are the median without the wait
and the mean of the wait, over whole turns of the workers. They begin with nothing in stock at the warm-up, and stand
still between blocks, so that what is measured is what they can do for as long as a training lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import measuring
from .device import now, peak_bytes, reset_peak
from .entrypoint import LoadedWorkload, Waits
from .loader import Loader, running
from .measuring import Patience, gather, meet
from .record import Item
from .strategies import bucket_bytes, communicates_always, no_sync, strategy

_LEAST_SCALE = 0.1  # of the loss in fp16, from 65,536
_COMPUTE_REPEATS = 2  # steps without communication, from which `sync_s` is computed
_COMPUTE_SHARE = 0.25  # of `most_s`: more is not spent on them


def one_step(
    built: LoadedWorkload,
    module: nn.Module,
    *,
    batch: int,
    accumulation_steps: int,
    scale: float,
    sync: bool,
) -> float:
    """One optimizer step; returns the last micro-step's mean loss. Only the last micro-step communicates, if `sync`."""
    built.optimizer.zero_grad(set_to_none=True)
    loss = torch.tensor(math.nan)
    for micro in range(accumulation_steps):
        with nullcontext() if sync and micro == accumulation_steps - 1 else no_sync(module):
            loss = built.loss_of(module, batch)
            built.arithmetic.backward(loss * scale)
    built.arithmetic.update(built.optimizer)
    return float(loss.detach())


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds at one rank: of all steps with what lies between them, of each, and of each the wait for its batches."""

    elapsed_s: float
    step_s: list[float]
    input_s: list[float]

    @property
    def own_s(self) -> list[float]:
        """Of each step without its wait."""
        return [max(0.0, step - wait) for step, wait in zip(self.step_s, self.input_s, strict=True)]


@dataclass(slots=True, kw_only=True)
class TimedSteps:
    """Steps in blocks that all of `group` begin together; a block that was disturbed trains, and is not measured."""

    step: Callable[..., float]
    group: dist.ProcessGroup | None
    clock_s: Callable[[], float]
    patience: Patience
    losses: list[float] = field(default_factory=list)  # of every step that communicated
    waits: Waits = field(default_factory=Waits)
    loader: Loader | None = None

    @property
    def steps_per_round(self) -> int:
        """Steps in which each worker of the loader gives a batch at least; 1 without any."""
        return 1 if self.loader is None else max(1, self.loader.workers)

    def block(self, count: int, *, sync: bool = True) -> list[Timed]:
        """Every rank's seconds of `count` steps."""

        def measure() -> list[list[float]]:
            seconds, waits = [], []
            started = self.clock_s()
            meet(self.group)
            with running(self.loader):
                for _ in range(count):
                    before, waited = self.clock_s(), self.waits.seconds
                    loss = self.step(sync=sync)
                    seconds.append(self.clock_s() - before)
                    waits.append(self.waits.seconds - waited)
                    if sync:
                        self.losses.append(loss)
            return gather([self.clock_s() - started, *seconds, *waits], self.group)

        samples = self.patience.undisturbed(measure, self.group)
        return [Timed(one[0], one[1 : count + 1], one[count + 1 :]) for one in samples]

    def until_steady(self, item: Item) -> list[Timed]:
        """Every rank's seconds of as many steps as the ranks agree are enough.

        What the ranks tell each other is outside of them.
        """
        by_rank = [Timed(0.0, [], [])] * sum(item.used)
        seconds: list[float] = []
        each, elapsed_s = self.steps_per_round, 0.0
        limits = {
            "least": -(-item.least_steps // each) * each,
            "most": -(-item.most_steps // each) * each,
        }
        while not measuring.enough(seconds, **limits, elapsed_s=elapsed_s, most_s=item.most_s):
            blocks = self.block(-(-measuring.next_block(seconds, **limits) // each) * each)
            elapsed_s += max(one.elapsed_s for one in blocks)
            by_rank = [
                Timed(elapsed_s, before.step_s + one.step_s, before.input_s + one.input_s)
                for before, one in zip(by_rank, blocks, strict=True)
            ]
            seconds = measuring.slowest([one.step_s for one in by_rank])
        return by_rank


def _ready(
    item: Item, built: LoadedWorkload, group: dist.ProcessGroup | None, place: int
) -> tuple[nn.Module, Callable[..., float], float]:
    """The module in the item's strategy, a step of it, and the weight of this rank's mean loss in that of all ranks."""
    micro_batch = sum(used * batch for used, batch in zip(item.used, item.batches, strict=True))
    parallel = strategy(item.strategy, item.switches, built.device, machines=item.used)
    module = (
        built.model
        if group is None
        else parallel(built.model, built.optimizer, group, built.device)
    )
    if communicates_always(module):
        reset_peak(
            built.device
        )  # the whole model lay in the host's memory, until each rank had its share
    weight = item.batches[place] / micro_batch
    step = partial(
        one_step,
        built,
        module,
        batch=item.batches[place],
        accumulation_steps=item.accumulation_steps,
        scale=sum(item.used) * weight / item.accumulation_steps,
    )
    return module, step, weight


def learn(
    item: Item, built: LoadedWorkload, group: dist.ProcessGroup | None, *, place: int
) -> tuple[dict[str, Any], str]:
    """Values of a learn record, or the reason why there are none. `place` is one's own node's in `item.nodes`.

    Ranks train from the item's seed and exchange their losses after each window. Training ends after `item.windows`,
    after the window in which `item.most_s` seconds are over, or after one with a loss that is no number (`diverged`;
    that window is not recorded).
    """
    if not 1 <= item.windows <= item.most_steps:
        return (
            {},
            f"{item.most_steps} steps cannot be shared among {item.windows} windows: from 1 to as many as steps",
        )
    clock_s = partial(now, built.device)
    _, step, weight = _ready(item, built, group, place)
    steps = item.most_steps // item.windows
    losses: list[float] = []
    diverged, spent_s = False, 0.0
    built.close()
    meet(group)
    started = clock_s()
    with running(built.loader):
        while len(losses) < item.windows and spent_s < item.most_s and not diverged:
            mine = fmean(step(sync=True) for _ in range(steps)) * weight
            told = gather([mine, clock_s() - started], group)
            loss, spent_s = sum(one[0] for one in told), max(one[1] for one in told)
            diverged = not math.isfinite(loss)
            if not diverged:
                losses.append(loss)
    return {"losses": losses, "steps_a_window": steps, "diverged": diverged, "steps_s": spent_s}, ""


def train(
    item: Item,
    built: LoadedWorkload,
    group: dist.ProcessGroup | None,
    patience: Patience,
    *,
    place: int,
) -> tuple[dict[str, Any], str]:
    """Values of a train record, or the reason why there are none. `place` is one's own node's in `item.nodes`."""
    clock_s = partial(now, built.device)
    started = clock_s()
    parameters, gradient_bytes = built.parameters, built.gradient_bytes  # of the whole model
    module, step, weight = _ready(item, built, group, place)
    build_s = clock_s() - started

    built.close()
    if built.loader is not None:
        built.loader.as_in_later_epochs()
    meet(group)
    started = clock_s()
    with running(built.loader):
        losses = [step(sync=True) for _ in range(item.warmup_steps)]
        scaled, before = built.arithmetic, math.inf
        while (
            scaled.scaled and scaled.scale < before
        ):  # until updates are made, as in a long training
            if scaled.scale < _LEAST_SCALE:
                return (
                    {},
                    f"gradients in fp16 overflow at every scale to {scaled.scale:g}: train in bf16 or fp32",
                )
            before = scaled.scale
            losses.append(step(sync=True))
        for _ in range(
            0 if built.loader is None else built.loader.workers
        ):  # what they made before the first step
            if max(gather([clock_s() - started], group))[0] > item.most_s:
                break
            losses.append(step(sync=True))
    warmup_s = clock_s() - started

    warmed = len(losses)
    timed = TimedSteps(
        step=step,
        group=group,
        clock_s=clock_s,
        patience=patience,
        losses=losses,
        waits=built.waits,
        loader=built.loader,
    )
    by_rank = timed.until_steady(item)
    seconds = measuring.slowest([one.step_s for one in by_rank])
    waits = measuring.slowest([one.input_s for one in by_rank])
    step_s, input_s = median(seconds), median(waits)
    if built.loader is not None:
        input_s = fmean(waits)
        step_s = median(Timed(0.0, seconds, waits).own_s) + input_s
    peak = peak_bytes(built.device)
    alone_s: list[
        float
    ] = []  # seconds of the same step without communication at each rank, all at work as before
    waited_s = 0.0  # of `step_s`, for a loader
    if group is not None and not communicates_always(module):
        repeats = max(1, min(_COMPUTE_REPEATS, int(_COMPUTE_SHARE * item.most_s / step_s)))
        alone = timed.block(repeats, sync=False)
        alone_s = [median(one.step_s if built.loader is None else one.own_s) for one in alone]
        waited_s = 0.0 if built.loader is None else input_s
    losses = losses[
        : warmed + max(item.most_steps, len(seconds))
    ]  # however long hosts disturbed it
    gathered = gather([losses[0] * weight, losses[-1] * weight, peak, build_s, warmup_s], group)
    first_losses, last_losses, peaks, builds_s, warmups_s = zip(*gathered, strict=True)
    first_loss, last_loss = sum(first_losses), sum(last_losses)
    if not (math.isfinite(first_loss) and math.isfinite(last_loss)):
        return (
            {},
            f"the loss went from {first_loss} to {last_loss} in {len(losses)} steps: not a number to train with",
        )
    values: dict[str, Any] = {
        "step_s": step_s,
        "step_spread": measuring.spread(seconds),
        "steps": len(seconds),
        "input_s": input_s,
        "rank_step_s": [median(one.step_s) for one in by_rank],
        "rank_compute_s": alone_s,
        "sync_s": None
        if communicates_always(module)
        else max(0.0, step_s - waited_s - max(alone_s, default=step_s)),
        "build_s": max(builds_s),
        "warmup_s": max(warmups_s),
        "steps_s": by_rank[0].elapsed_s,
        "peak_bytes": int(max(peaks)),
        "parameters": parameters,
        "gradient_bytes": gradient_bytes,
        "bucket_bytes": bucket_bytes(module),
        "first_loss": first_loss,
        "last_loss": last_loss,
    }
    if built.loader is not None:
        values["loader_workers"] = built.loader.workers
    return values, ""
