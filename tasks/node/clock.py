"""When has enough been measured? Pure functions over seconds; never reads a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

MEDIAN_ERROR = 0.015  # relative standard error of the median at which a measurement is called steady
DRIFT = 0.04  # relative difference between the medians of the two halves above which it is still warming up
_IQR_TO_SIGMA = 1.349  # interquartile range of a normal distribution, in standard deviations
_MEDIAN_TO_MEAN = 1.2533  # standard error of the median over that of the mean, normal distribution: sqrt(pi / 2)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile, interpolated linearly between the order statistics. Raises ValueError on no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median: what a record calls `step_spread`."""
    return (quantile(values, 0.75) - quantile(values, 0.25)) / median(values)


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


def enough(seconds: Sequence[float], *, least: int, most: int, elapsed_s: float, most_s: float) -> bool:
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
