"""How one thing is measured: ranks start together, stop when enough was measured, and repeat what was disturbed.

A virtual processor that could run and may not counts as stolen in /proc/stat [proc(5)]: a step is then as long as
the host's other guests make it. Hosts take processors away for seconds to minutes, so waiting helps, up to a limit; the
share taken during what is kept goes into the record. Caches and clock rates that neighbours share are not seen there:
fixed work before and after each block (reference.py) is, and its seconds go into the record too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .reference import Reference

DISTURBED = (
    0.1  # of the processor time that was wanted: runs of one setup differ by about as much anyway
)
_LEAST_TICKS = 20.0  # wanted: of fewer, one that was taken says nothing
MEDIAN_ERROR = (
    0.015  # relative standard error of the median at which a measurement is called steady
)
DRIFT = 0.04  # relative difference between the medians of the two halves above which it is still warming up
_IQR_TO_SIGMA = 1.349  # interquartile range of a normal distribution, in standard deviations
_MEDIAN_TO_MEAN = (
    1.2533  # standard error of the median over that of the mean, normal distribution: sqrt(pi / 2)
)
_STAT = Path("/proc/stat")
_T = TypeVar("_T")


@dataclass(slots=True)
class Patience:
    """Seconds that may still go into measuring again; and ticks taken and wanted during what was kept of an item, at
    whichever of its machines had most taken away each time.

    `reference`, where there is one, is done before and after each block; `references` are its mean seconds at every
    rank, a list a block that was kept.
    """

    left_s: float = 0.0
    taken: float = 0.0
    wanted: float = 0.0
    reference: Reference | None = None
    references: list[list[float]] = field(default_factory=list)

    @property
    def taken_share(self) -> float:
        """Part of the processor time wanted that was taken away during what was kept since `forget`."""
        return _share(self.taken, self.wanted)

    def reset(self) -> None:
        """Another item begins."""
        self.taken = self.wanted = 0.0
        self.references = []

    def reference_values(self, used: Sequence[int]) -> dict[str, Any]:
        """Of a record, `used` the devices of each machine: `reference_s`, of each machine the median over the blocks
        kept at the slowest of its devices; how many `reference_blocks`; and `reference_spread`, the standard deviation
        of one block over the median, root mean square over devices, 0 for one block.

        Nothing where no block was kept, or not every rank does the fixed work.
        """
        by_rank = [list(rank) for rank in zip(*self.references, strict=True)]
        if not by_rank or min(min(rank) for rank in by_rank) <= 0:
            return {}
        medians = [median(rank) for rank in by_rank]
        blocks = len(self.references)
        away = [
            stdev(rank) / middle if blocks > 1 else 0.0
            for rank, middle in zip(by_rank, medians, strict=True)
        ]
        left = iter(medians)
        return {
            "reference_s": [max(next(left) for _ in range(count)) for count in used],
            "reference_blocks": blocks,
            "reference_spread": math.sqrt(fmean(one * one for one in away)),
        }

    def undisturbed(self, measure: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
        """What `measure` returns the first time that no machine of `group` has more taken away; all of it repeats.

        Once the patience of any of them is spent, whatever it returns then. Ranks decide alike, by the same numbers.
        """
        while True:
            fixed_s = self._fixed_s()
            before, started = processor_ticks(), time.monotonic()
            found = measure()
            taken, wanted = (
                now - then for now, then in zip(processor_ticks(), before, strict=True)
            )
            spent_s = time.monotonic() - started
            fixed_s = (fixed_s + self._fixed_s()) / 2
            gathered = gather([taken, wanted, spent_s, self.left_s, fixed_s], group)
            worst = max(gathered, key=lambda one: (_share(one[0], one[1]), one[0]))
            spent_s, left_s = max(one[2] for one in gathered), min(one[3] for one in gathered)
            if _share(worst[0], worst[1]) < DISTURBED or left_s <= 0:
                self.taken, self.wanted = self.taken + worst[0], self.wanted + worst[1]
                self.references.append([one[4] for one in gathered])
                return found
            self.left_s = left_s - spent_s

    def _fixed_s(self) -> float:
        return 0.0 if self.reference is None else self.reference.seconds()


def processor_ticks() -> tuple[float, float]:
    """Of this machine since it started: ticks that its host took away, and all that its processors wanted."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, interrupts, soft, taken = (
            float(one) for one in words[1:9]
        )
    except (OSError, ValueError):  # a kernel that does not tell
        return 0.0, 0.0
    return taken, user + nice + system + interrupts + soft + taken


def _share(taken: float, wanted: float) -> float:
    return min(max(taken / wanted, 0.0), 1.0) if wanted >= _LEAST_TICKS else 0.0


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median: what a record calls `step_spread`."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def median_error(values: Sequence[float]) -> float:
    """Relative standard error of the median, from the interquartile range: one slow step does not move it."""
    return _MEDIAN_TO_MEAN * spread(values) / _IQR_TO_SIGMA / math.sqrt(len(values))


def central(values: Sequence[float]) -> list[int]:
    """Indices of the middle half of `values` by size, at least one; their mean is the interquartile mean.

    A CPU quota makes short intervals two-valued (run through, or wait for the next period): their median jumps between
    the two, a mean of the middle does not, and neither is moved by one hiccup.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def drift(values: Sequence[float]) -> float:
    """Relative difference between the medians of the first and the second half; 0 for fewer than four values."""
    half = len(values) // 2
    if half < 2:
        return 0.0
    return abs(median(values[half:]) - median(values[:half])) / median(values)


def enough(
    seconds: Sequence[float], *, least: int, most: int, elapsed_s: float, most_s: float
) -> bool:
    """Whether to stop: the median is well known and does not drift, or `most` steps or `most_s` seconds are spent."""
    if not seconds:
        return False
    if len(seconds) >= most or elapsed_s >= most_s:
        return True
    return len(seconds) >= least and median_error(seconds) < MEDIAN_ERROR and drift(seconds) < DRIFT


def next_block(seconds: Sequence[float], *, least: int, most: int) -> int:
    """Steps of the next block: half of `least`, so that the ranks agree now and then, but never beyond `most`."""
    return max(1, min(max(2, least // 2), most - len(seconds)))


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each step at its slowest rank, from one list a rank."""
    return [max(step) for step in zip(*by_rank, strict=True)]


def gather(mine: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The numbers of every rank of `group`, in rank order; just one's own without a group."""
    if group is None:
        return [list(mine)]
    numbers = torch.tensor(list(mine), dtype=torch.float64)
    everybody = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, numbers, group=group)
    return [one.tolist() for one in everybody]


def meet(group: dist.ProcessGroup | None) -> None:
    """Start together."""
    if group is not None:
        dist.barrier(group=group)
