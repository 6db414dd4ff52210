"""Run the training steps of this rank. Time steps with and without communication, or record losses.

Data parallelism averages gradients over W ranks. Rank i has a batch of b_i samples, and the global
batch has B samples. The mean loss of rank i is multiplied by W b_i / B, so that unequal batches
train like one global batch.

Steps are timed in blocks. Between two blocks, ranks exchange their times to agree whether to stop.
This exchange is not timed.

The worker processes of a DataLoader finish batches at about the same time, so waits for batches
come in bursts. A median would ignore rare long waits. The step time of a workload with a loader is
therefore a sum: the median of (duration - wait), plus the mean wait. In a block, all workers make
equally many batches, because the number of steps is a multiple of the number of workers. Workers
are paused between blocks. Otherwise, they would load batches in advance, and the waits in the next
block would be too short.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .device import now, peak_bytes, reset_peak
from .entrypoint import LoadedWorkload
from .loader import running_workers
from .record import Item
from .repetition import NotMeasured, Patience, meet, next_block, spread
from .strategies import apply_strategy
from .strategies.refusals import ALWAYS_COMMUNICATE
from .strategies.replicas import Group, no_sync, of_ranks

_MIN_SCALE = 0.1  # fp16 training fails below this loss scale, which starts at 65,536
_COMPUTE_REPEATS = 2  # number of timed steps without communication


def take_step(
    built: LoadedWorkload,
    module: nn.Module,
    sizes: Sequence[int],
    *,
    scale: float,
    sync: bool = True,
) -> float:
    """Take one optimizer step, and return the mean loss of this rank's samples.

    module: the model, or the module into which a strategy wrapped it.
    sizes: the sizes of the micro-batches. Micro-batches of size 0 are skipped.
    scale: the number of ranks divided by the global batch. Each sample's loss is multiplied by this
        number.
    sync: True to communicate gradients in the last micro-step (FSDP: in every micro-step). False to
        communicate no gradients.
    """
    built.optimizer.zero_grad()
    losses = []
    for micro, size in enumerate(sizes):
        if not size:
            continue
        # FSDP communicates in every micro-step, because whole gradients may not fit on a device
        exchanges = sync and (micro == len(sizes) - 1 or isinstance(module, FSDPModule))
        with nullcontext() if exchanges else no_sync(module):
            loss = built.loss_of(module, size)
            built.arithmetic.backward(loss * (scale * size))
        losses.append(loss.detach().float() * size)
    built.arithmetic.update(built.optimizer)
    return float(sum(losses)) / sum(sizes)


@dataclass(kw_only=True)
class TimedSteps:
    """Times blocks of steps that all ranks of `group` begin together.

    step: takes one optimizer step and returns the mean loss of this rank's samples.
    losses: the result of each call of `step`, including untimed steps.
    elapsed_s: seconds of all blocks, including barriers and the start of loader workers. Blocks
        that were discarded and repeated do not count.
    """

    step: Callable[..., float]
    built: LoadedWorkload
    group: Group
    patience: Patience
    losses: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def workers(self) -> int:
        """Return the number of loader workers; 0 if the workload has no loader."""
        return 0 if self.built.loader is None else self.built.loader.workers

    def train(self, steps: int = 1) -> None:
        """Take `steps` steps without timing them."""
        self.losses += [self.step() for _ in range(steps)]

    def warm_up(self, item: Item) -> None:
        """Take steps before the measurement, without timing them.

        1. Take `item.warmup_steps` steps.
        2. In fp16, take steps until the loss scale stops falling.
        3. Take as many steps as the loader has workers. Stop earlier if `item.most_s` seconds have
           passed since the start of the warm-up.

        Raises NotMeasured if gradients in fp16 overflow at every loss scale.
        """
        scaler, started = self.built.arithmetic.scaler, now(self.built.device)
        self.train(item.warmup_steps)
        before = math.inf
        while scaler.is_enabled() and scaler.get_scale() < before:
            before = scaler.get_scale()
            if before < _MIN_SCALE:
                raise NotMeasured(
                    "gradients in fp16 overflow at every loss scale: train in bf16 or fp32"
                )
            self.train()
        for _ in range(self.workers):
            if max(of_ranks(now(self.built.device) - started, self.group)) > item.most_s:
                break
            self.train()

    def block(self, count: int, *, sync: bool = True) -> Tensor:
        """Time a block of `count` steps. Repeat the block while it is disturbed (see Patience).

        Returns a tensor of shape (ranks, count, 2) in seconds. The last dimension has the duration
        of a step, and the part of the duration in which the step waited for batches.

        sync: False for steps that do not communicate gradients.
        """
        clock_s = partial(now, self.built.device)

        def measure() -> list[list[list[float]]]:
            times, started = [], clock_s()
            meet(self.group)
            with running_workers(self.built.loader):
                for _ in range(count):
                    before, waited = clock_s(), self.built.waited_s
                    self.losses.append(self.step(sync=sync))
                    times.append([clock_s() - before, self.built.waited_s - waited])
            return of_ranks([[clock_s() - started, 0.0], *times], self.group)

        found = torch.tensor(
            self.patience.repeat_if_disturbed(measure, self.group), dtype=torch.float64
        )
        self.elapsed_s += float(found[:, 0, 0].max())
        return found[:, 1:]

    def until_steady(self, item: Item) -> tuple[list[float], list[float]]:
        """Run and time steps, block by block, until the step time is precise.

        `repetition.next_block` decides when to stop. Returns (durations, waits) in seconds, with an
        entry per step. The wait is the part of the duration in which the step waited for batches.
        Each entry is the maximum over ranks.
        """
        seconds: list[float] = []
        waits: list[float] = []
        least, most, each = item.least_steps, item.most_steps, max(1, self.workers)
        while count := next_block(
            seconds, least=least, most=most, left_s=item.most_s - self.elapsed_s
        ):
            slowest = self.block(math.ceil(count / each) * each).amax(dim=0)
            seconds += slowest[:, 0].tolist()
            waits += slowest[:, 1].tolist()
        return seconds, waits

    def compute_s(self) -> list[float]:
        """Time steps without communication, and return the median seconds of a step on each rank.

        Waits for batches of the loader are subtracted.
        """
        times = self.block(_COMPUTE_REPEATS, sync=False)
        if self.built.loader is not None:
            times[..., 0] -= times[..., 1]
        return [max(0.0, median(rank.tolist())) for rank in times[..., 0]]


def _prepare(item: Item, built: LoadedWorkload, group: Group) -> tuple[Callable[..., float], float]:
    """Apply the strategy of the run `item` to the model.

    Returns (step, weight). `step()` takes an optimizer step, and returns the mean loss of this
    rank's samples. `weight` is this rank's fraction of the global batch.
    """
    module = built.model
    if group is not None:
        module = apply_strategy(item, built.model, built.optimizer, group, built.device)
        if item.strategy in ALWAYS_COMMUNICATE:
            reset_peak(built.device)  # before sharding, each rank held the whole model
    batches, steps = item.batch_by_rank, item.accumulation_steps
    batch, whole = batches[0 if group is None else dist.get_rank(group)], sum(batches)
    step = partial(
        take_step, built, module, [batch] * steps, scale=sum(item.used) / (whole * steps)
    )
    return step, batch / whole


def learn(item: Item, built: LoadedWorkload, group: Group) -> dict[str, Any]:
    """Train, and return the training losses for the run's record.

    The steps are divided into `item.windows` equal windows. Training ends early after a window if
    `item.most_s` seconds have passed, or if the window's loss is not finite. The result has these
    keys:

    losses: the mean loss of each window, over all steps and ranks. If the last window's loss is not
        finite, it is left out.
    steps_a_window: the number of steps in a window.
    diverged: True if the loss of the last window was not finite.
    """
    step, weight = _prepare(item, built, group)
    steps = item.most_steps // item.windows
    losses: list[float] = []
    diverged, spent_s = False, 0.0
    built.close()
    meet(group)
    started = now(built.device)
    with running_workers(built.loader):
        while len(losses) < item.windows and spent_s < item.most_s and not diverged:
            mine = fmean(step() for _ in range(steps)) * weight
            by_rank = of_ranks([mine, now(built.device) - started], group)
            parts, times = zip(*by_rank, strict=True)
            loss, spent_s = sum(parts), max(times)
            diverged = not math.isfinite(loss)
            if not diverged:
                losses.append(loss)
    return {"losses": losses, "steps_a_window": steps, "diverged": diverged}


def train(item: Item, built: LoadedWorkload, group: Group, patience: Patience) -> dict[str, Any]:
    """Time training steps, and return the values for the run's record.

    The nodes of `item` must be in the order of the ranks in `group`. Raises NotMeasured if the
    first or the last loss is not finite, or if gradients in fp16 overflow at every loss scale.
    """
    loader, clock_s = built.loader, partial(now, built.device)
    started = clock_s()
    sizes = built.sizes  # before a strategy shards the model
    step, weight = _prepare(item, built, group)
    build_s = clock_s() - started

    built.close()
    if loader is not None:
        loader.as_in_later_epochs()
    timed = TimedSteps(step=step, built=built, group=group, patience=patience)
    meet(group)
    started = clock_s()
    with running_workers(loader):
        timed.warm_up(item)
    warmup_s, warmed = clock_s() - started, len(timed.losses)

    seconds, waits = timed.until_steady(item)
    step_s, input_s, waited_s = median(seconds), median(waits), 0.0
    if loader is not None:
        input_s = waited_s = fmean(waits)
        without = [max(0.0, step - wait) for step, wait in zip(seconds, waits, strict=True)]
        step_s = median(without) + input_s
    peak = peak_bytes(built.device)
    always = group is not None and item.strategy in ALWAYS_COMMUNICATE
    compute_s = [] if group is None or always else timed.compute_s()
    sync_s = max(0.0, step_s - waited_s - max(compute_s)) if compute_s else 0.0
    # Repeated blocks train extra steps. Use the loss of the same step as a run without repetitions.
    first, last = timed.losses[0], timed.losses[warmed + len(seconds) - 1]
    by_rank = of_ranks([first * weight, last * weight, peak], group)
    first_losses, last_losses, peaks = zip(*by_rank, strict=True)
    losses = {"first_loss": sum(first_losses), "last_loss": sum(last_losses)}
    if not all(map(math.isfinite, losses.values())):
        raise NotMeasured(
            f"training diverged: the first loss is {losses['first_loss']}, and the last loss is"
            f" {losses['last_loss']}"
        )
    return {
        "step_s": step_s,
        "step_spread": spread(seconds),
        "steps": len(seconds),
        "input_s": input_s,
        "rank_compute_s": compute_s,
        "sync_s": None if always else sync_s,
        "build_s": build_s,
        "warmup_s": warmup_s,
        "peak_bytes": max(peaks),
        "loader_workers": None if loader is None else loader.workers,
        **sizes,
        **losses,
    }
