"""Decide when to repeat a measurement on a busy host, and when a measurement is precise enough.

Steps are timed in blocks of consecutive steps. Other virtual machines on the host disturb these
times in two ways:

- The hypervisor makes a virtual CPU wait. /proc/stat counts this time as stolen (see proc(5)).
  Stolen time comes in phases of seconds to minutes, so a block with much stolen time is repeated.
- Other virtual machines fill shared caches and lower the clock rate. Stolen time does not show
  this. Therefore a fixed reference computation (reference.py) is timed before and after each block.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .reference import Reference
from .strategies.replicas import Group, of_ranks

# A block is disturbed at this fraction of stolen time. Undisturbed runs also differ by 10 %.
DISTURBED = 0.1
_MIN_TICKS = 20.0  # with fewer CPU ticks, the stolen fraction is too uncertain
MEDIAN_ERROR = 0.015  # a measurement may end below this relative standard error of the median
DRIFT = 0.04  # a measurement may end below this `drift`; above it, the steps are still warming up
# Standard error of the median of n normal values, as a multiple of (interquartile range / sqrt(n)).
# With standard deviation s, this error is 1.2533 s / sqrt(n), and the range is 1.349 s.
_ERROR_OF_RANGE = 1.2533 / 1.349
_STAT = Path("/proc/stat")
_Result = TypeVar("_Result")


class NotMeasured(Exception):
    """The run has no valid measurement. If a rank raises this error, all ranks of the run do."""


@dataclass
class Patience:
    """Repeats blocks of steps that other virtual machines disturbed, while time is left.

    A block is a group of consecutive steps. A block is disturbed if at least the fraction DISTURBED
    of the CPU time was stolen on any machine. When no time is left, every block is accepted.

    left_s: seconds left for repetitions.
    taken: stolen CPU ticks, summed over accepted blocks. If a block ran on several machines, only
        the machine with the largest stolen fraction counts.
    wanted: used plus stolen CPU ticks of the same machines, summed over the same blocks.
    reference: the fixed computation that is timed before and after each block.
    references: for each accepted block, a list with the seconds of `reference` on each rank. Each
        value is the mean of the times before and after the block.
    """

    left_s: float = 0.0
    taken: float = 0.0
    wanted: float = 0.0
    reference: Reference = field(default_factory=lambda: Reference(torch.device("cpu")))
    references: list[list[float]] = field(default_factory=list)

    @property
    def taken_share(self) -> float:
        """Return the fraction of CPU time that was stolen in the run's accepted blocks.

        Returns 0 if the blocks are too short to measure this fraction.
        """
        return _share(self.taken, self.wanted)

    def reset(self) -> None:
        """Clear the values of the previous run, but keep `left_s`, which all runs share."""
        self.taken = self.wanted = 0.0
        self.references = []

    def reference_values(self, used: Sequence[int]) -> dict[str, Any]:
        """Return the times of the reference computation, for the run's record.

        `used` lists the number of devices of each machine. The result is empty if no block was
        accepted. Otherwise, it has these keys:

        reference_s: for each machine, the seconds on its slowest device (median over blocks).
        reference_blocks: the number of accepted blocks.
        reference_spread: the relative variation between blocks. Each device's standard deviation
            over blocks is divided by its median. The value is the root mean square of these ratios.
        """
        by_rank = list(zip(*self.references, strict=True))
        if not by_rank:
            return {}
        medians = map(median, by_rank)
        blocks = len(self.references)
        spreads = [stdev(rank) / median(rank) if blocks > 1 else 0.0 for rank in by_rank]
        return {
            "reference_s": [max(islice(medians, count)) for count in used],
            "reference_blocks": blocks,
            "reference_spread": math.sqrt(fmean(value * value for value in spreads)),
        }

    def repeat_if_disturbed(self, measure: Callable[[], _Result], group: Group) -> _Result:
        """Call `measure` until no machine is disturbed or no time is left. Return the last result.

        A machine is disturbed if at least the fraction DISTURBED of its CPU time was stolen during
        the call. Every rank of `group` must call this method. All ranks call `measure` the same
        number of times.
        """
        while True:
            reference_s = self.reference.seconds()
            (stolen, wanted), started = processor_ticks(), time.monotonic()
            found = measure()
            (now_stolen, now_wanted), spent_s = processor_ticks(), time.monotonic() - started
            reference_s = (reference_s + self.reference.seconds()) / 2
            mine = [now_stolen - stolen, now_wanted - wanted, spent_s, self.left_s, reference_s]
            taken, wants, spent, left, references = zip(*of_ranks(mine, group), strict=True)
            worst = max(zip(taken, wants, strict=True), key=lambda ticks: _share(*ticks))
            self.left_s = min(left)
            if _share(*worst) < DISTURBED or self.left_s <= 0:
                self.taken += worst[0]
                self.wanted += worst[1]
                self.references.append(list(references))
                return found
            self.left_s -= max(spent)


def processor_ticks() -> tuple[float, float]:
    """Return (stolen, wanted) CPU ticks of this machine since boot.

    stolen: the ticks in which a CPU was ready to run, but the hypervisor did not run it.
    wanted: the used ticks plus the stolen ticks.
    """
    words = _STAT.read_text().split()
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(float, words[1:9])
    return stolen, user + nice + system + interrupts + soft + stolen


def _share(stolen: float, wanted: float) -> float:
    return min(max(stolen / wanted, 0.0), 1.0) if wanted >= _MIN_TICKS else 0.0


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range divided by the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def median_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the median, estimated from the interquartile range."""
    return _ERROR_OF_RANGE * spread(values) / math.sqrt(len(values))


def central(values: Iterable[_Result], key: Callable[[_Result], float]) -> list[_Result]:
    """Return the middle half of `values`, in ascending order of `key`.

    The mean of these values is the interquartile mean.
    """
    # A CPU quota pauses some short computations, so a histogram of durations has two peaks.
    # The median jumps between the peaks, but the interquartile mean varies less.
    ordered = sorted(values, key=key)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def drift(values: Sequence[float]) -> float:
    """Return the relative difference between the medians of the first and second half of `values`.

    The absolute difference is divided by the median of all values. Returns 0 for fewer than four
    values.
    """
    half = len(values) // 2
    if half < 2:
        return 0.0
    return abs(median(values[half:]) - median(values[:half])) / median(values)


def next_block(seconds: Sequence[float], *, least: int, most: int, left_s: float) -> int:
    """Return the number of steps in the next block of a measurement; 0 to end the measurement.

    The measurement ends if `least` steps are timed and the step time is precise. It also ends if
    `most` steps are timed, or if no time is left. The first block is timed even if no time is left.

    The step time is precise if the standard error of the median is below MEDIAN_ERROR, and `drift`
    is below DRIFT.

    seconds: the duration of each timed step so far.
    left_s: seconds left for the measurement.
    """
    count = len(seconds)
    if count and (count >= most or left_s <= 0):
        return 0
    if count >= least and median_error(seconds) < MEDIAN_ERROR and drift(seconds) < DRIFT:
        return 0
    return min(max(2, least // 2), most - count)


def meet(group: Group) -> None:
    """Wait at a barrier for all ranks of `group`, unless `group` is None."""
    if group is not None:
        dist.barrier(group=group)
