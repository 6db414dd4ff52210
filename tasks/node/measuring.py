"""How a measurement is taken: ranks start together, stop when it is precise, and repeat what the
host disturbed.

/proc/stat counts a virtual processor as stolen while it could run and may not [proc(5)]; a step
then takes as long as the host's other guests make it. Hosts steal for seconds to minutes, so
waiting helps; the stolen share of what is kept goes into the record. Caches and clock rates that
neighbours share do not show there: fixed work beside each block (reference.py) shows them.
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

DISTURBED = 0.1  # stolen share of processor time: repeated runs of a setup differ by as much
_MIN_TICKS = 20.0  # below it one stolen tick says nothing
MEDIAN_ERROR = 0.015  # relative standard error of the median of a steady measurement
DRIFT = 0.04  # relative difference of the medians of both halves while it warms up
_IQR_TO_SIGMA = 1.349  # interquartile range of a normal distribution, in standard deviations
_MEDIAN_TO_MEAN = 1.2533  # standard error of the median over the mean's: sqrt(pi / 2)
_STAT = Path("/proc/stat")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Patience:
    """Seconds left for repeating measurements; ticks stolen and wanted in the kept ones.

    Ticks are of the machine with the largest stolen share of each block. `references` are mean
    seconds of the fixed work beside each kept block, by rank.
    """

    left_s: float = 0.0
    taken: float = 0.0
    wanted: float = 0.0
    reference: Reference | None = None
    references: list[list[float]] = field(default_factory=list)

    @property
    def taken_share(self) -> float:
        """Stolen share of the processor time of the item's kept blocks."""
        return _share(self.taken, self.wanted)

    def reset(self) -> None:
        """Begin another item."""
        self.taken = self.wanted = 0.0
        self.references = []

    def reference_values(self, used: Sequence[int]) -> dict[str, Any]:
        """Values of a record about the fixed work; empty if a rank does none.

        `used` are the devices of each machine. `reference_s` is the median over blocks of each
        machine's slowest device, `reference_spread` the root mean square over devices of the
        relative standard deviation of a block.
        """
        by_rank = list(zip(*self.references, strict=True))
        if not by_rank or min(map(min, by_rank)) <= 0:
            return {}
        medians = iter([median(rank) for rank in by_rank])
        blocks = len(self.references)
        spreads = [stdev(rank) / median(rank) if blocks > 1 else 0.0 for rank in by_rank]
        return {
            "reference_s": [max(next(medians) for _ in range(count)) for count in used],
            "reference_blocks": blocks,
            "reference_spread": math.sqrt(fmean(value * value for value in spreads)),
        }

    def undisturbed(
        self, measure: Callable[[], _Result], group: dist.ProcessGroup | None
    ) -> _Result:
        """Repeat `measure` until no machine of `group` is disturbed or a patience is spent.

        Ranks decide alike, by the same numbers.
        """
        while True:
            reference_s = self._reference_s()
            (stolen, wanted), started = processor_ticks(), time.monotonic()
            found = measure()
            (now_stolen, now_wanted), spent_s = processor_ticks(), time.monotonic() - started
            reference_s = (reference_s + self._reference_s()) / 2
            mine = [now_stolen - stolen, now_wanted - wanted, spent_s, self.left_s, reference_s]
            taken, wants, spent, left, references = zip(*gather(mine, group), strict=True)
            share, worst_taken, worst_wanted = max(
                (_share(*ticks), *ticks) for ticks in zip(taken, wants, strict=True)
            )
            self.left_s = min(left)
            if share < DISTURBED or self.left_s <= 0:
                self.taken += worst_taken
                self.wanted += worst_wanted
                self.references.append(list(references))
                return found
            self.left_s -= max(spent)

    def _reference_s(self) -> float:
        return 0.0 if self.reference is None else self.reference.seconds()


def processor_ticks() -> tuple[float, float]:
    """Ticks since this machine started: stolen by its host, and wanted by its processors."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(float, words[1:9])
    except (OSError, ValueError):  # a kernel that does not count them
        return 0.0, 0.0
    return stolen, user + nice + system + interrupts + soft + stolen


def _share(stolen: float, wanted: float) -> float:
    return min(max(stolen / wanted, 0.0), 1.0) if wanted >= _MIN_TICKS else 0.0


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def median_error(values: Sequence[float]) -> float:
    """Relative standard error of the median, from the interquartile range."""
    return _MEDIAN_TO_MEAN * spread(values) / _IQR_TO_SIGMA / math.sqrt(len(values))


def central(values: Sequence[float]) -> list[int]:
    """Indices of the middle half of `values` by size; their mean is the interquartile mean.

    A CPU quota makes short intervals two-valued (run through, or wait for the next period). The
    median jumps between the two values; a mean of the middle does not.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def drift(values: Sequence[float]) -> float:
    """Relative difference of the medians of both halves; 0 for fewer than four values."""
    half = len(values) // 2
    if half < 2:
        return 0.0
    return abs(median(values[half:]) - median(values[:half])) / median(values)


def enough(
    seconds: Sequence[float], *, least: int, most: int, elapsed_s: float, most_s: float
) -> bool:
    """Whether the median is precise and does not drift, or `most` steps or `most_s` are spent."""
    if not seconds or len(seconds) >= most or elapsed_s >= most_s:
        return bool(seconds)
    return len(seconds) >= least and median_error(seconds) < MEDIAN_ERROR and drift(seconds) < DRIFT


def next_block(seconds: Sequence[float], *, least: int, most: int) -> int:
    """Steps of the next block: half of `least`, but never beyond `most`."""
    return max(1, min(max(2, least // 2), most - len(seconds)))


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each step at its slowest rank."""
    return [max(step) for step in zip(*by_rank, strict=True)]


def gather(mine: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The numbers of every rank of `group`, or this process's alone."""
    if group is None:
        return [list(mine)]
    numbers = torch.tensor(list(mine), dtype=torch.float64)
    by_rank = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, numbers, group=group)
    return [numbers.tolist() for numbers in by_rank]


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait for all ranks of `group`."""
    if group is not None:
        dist.barrier(group=group)
