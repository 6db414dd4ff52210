"""Control measurements: start ranks together, repeat disturbed blocks, stop at precise results.

A block is a group of consecutive steps. /proc/stat counts time as stolen while a virtual CPU is
ready to run but the hypervisor does not run it [proc(5)]. Stolen time makes steps slower.
Hypervisors steal for seconds to minutes, so repeating helps. The record has the stolen fraction of
the accepted blocks. Stolen time does not show that neighbours use shared caches or lower the clock
rate. The reference computation before and after each block shows both effects (reference.py).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any, TypeVar

import torch.distributed as dist

from .reference import Reference
from .strategies.replicas import of_ranks

DISTURBED = 0.1  # stolen share of CPU time: repeated runs of a setup differ by as much
_MIN_TICKS = 20.0  # with fewer ticks the stolen share is too uncertain
MEDIAN_ERROR = 0.015  # relative standard error of the median of a steady measurement
DRIFT = 0.04  # relative difference of the medians of both halves: above it, steps still warm up
_IQR_TO_SIGMA = 1.349  # interquartile range of a normal distribution, in standard deviations
_MEDIAN_TO_MEAN = 1.2533  # standard error of the median divided by that of the mean: sqrt(pi / 2)
_STAT = Path("/proc/stat")
_Result = TypeVar("_Result")


class NotMeasured(Exception):
    """The measurement of a run has no result. All ranks of the run raise this error together."""


@dataclass
class Patience:
    """Repeats disturbed measurements while time is left, and adds up figures of accepted blocks.

    A block is a group of consecutive steps. It is disturbed if the hypervisor took CPU time away.

    left_s: seconds left for repeated measurements.
    taken, wanted: stolen and wanted CPU ticks (processor_ticks) of the accepted blocks. For each
        block, only the machine with the largest stolen fraction counts.
    reference: the reference computation to time before and after each block; None for none.
    references: for each accepted block, a list of the mean seconds of the reference computation
        around it on each rank.
    """

    left_s: float = 0.0
    taken: float = 0.0
    wanted: float = 0.0
    reference: Reference | None = None
    references: list[list[float]] = field(default_factory=list)

    @property
    def taken_share(self) -> float:
        """Return the fraction of CPU time that was stolen during the run's accepted blocks."""
        return _share(self.taken, self.wanted)

    def reset(self) -> None:
        """Forget the figures of the previous run, but keep `left_s`."""
        self.taken = self.wanted = 0.0
        self.references = []

    def reference_values(self, used: Sequence[int]) -> dict[str, Any]:
        """Return a record's values on the reference computation; {} if a rank did not run it.

        `used` lists the number of devices of each machine. `reference_s` lists, for each machine,
        the median seconds over blocks on its slowest device. `reference_spread` is the relative
        standard deviation over blocks, as a root mean square over devices. `reference_blocks` is
        the number of blocks.
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
        """Repeat `measure` until no machine is disturbed or no time is left.

        A machine is disturbed if too much of its CPU time was stolen. Returns the result of the
        last repetition. All ranks of `group` decide from the same gathered numbers, so they repeat
        equally often.
        """
        while True:
            reference_s = self._reference_s()
            (stolen, wanted), started = processor_ticks(), time.monotonic()
            found = measure()
            (now_stolen, now_wanted), spent_s = processor_ticks(), time.monotonic() - started
            reference_s = (reference_s + self._reference_s()) / 2
            mine = [now_stolen - stolen, now_wanted - wanted, spent_s, self.left_s, reference_s]
            taken, wants, spent, left, references = zip(*of_ranks(mine, group), strict=True)
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
    """Return this machine's stolen and wanted CPU ticks since boot.

    The hypervisor took the stolen ticks. Wanted ticks are used plus stolen ticks. Both counts are 0
    if the kernel does not count stolen ticks.
    """
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(float, words[1:9])
    except (OSError, ValueError):  # this kernel does not count stolen time
        return 0.0, 0.0
    return stolen, user + nice + system + interrupts + soft + stolen


def _share(stolen: float, wanted: float) -> float:
    return min(max(stolen / wanted, 0.0), 1.0) if wanted >= _MIN_TICKS else 0.0


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range divided by the median; 0 for fewer than 2 values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def median_error(values: Sequence[float]) -> float:
    """Estimate the relative standard error of the median from the interquartile range."""
    return _MEDIAN_TO_MEAN * spread(values) / _IQR_TO_SIGMA / math.sqrt(len(values))


def central(values: Sequence[float]) -> list[int]:
    """Return the indices of the middle half of the sorted `values`.

    The mean of these values is the interquartile mean. Under a CPU quota, a short interval takes
    one of two durations: it runs without a pause, or it waits for the next quota period. The median
    jumps between the two durations; the interquartile mean does not.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def drift(values: Sequence[float]) -> float:
    """Return the relative difference between the medians of the first and the second half.

    Returns 0 for fewer than 4 values.
    """
    half = len(values) // 2
    if half < 2:
        return 0.0
    return abs(median(values[half:]) - median(values[:half])) / median(values)


def enough(
    seconds: Sequence[float], *, least: int, most: int, elapsed_s: float, most_s: float
) -> bool:
    """Return True if the measurement can stop.

    It stops after `most` steps or `most_s` seconds. It also stops after at least `least` steps if
    the median is precise and does not drift. `seconds` lists the seconds of each step so far.
    """
    if not seconds or len(seconds) >= most or elapsed_s >= most_s:
        return bool(seconds)
    return len(seconds) >= least and median_error(seconds) < MEDIAN_ERROR and drift(seconds) < DRIFT


def next_block(seconds: Sequence[float], *, least: int, most: int) -> int:
    """Return the number of steps to time next: half of `least`, or fewer to stay within `most`.

    `seconds` lists the seconds of each step so far. `most` is the limit of all steps.
    """
    return max(1, min(max(2, least // 2), most - len(seconds)))


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait at a barrier for all ranks of `group`."""
    if group is not None:
        dist.barrier(group=group)
