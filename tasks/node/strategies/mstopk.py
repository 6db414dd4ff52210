"""MSTopK: the largest entries of a vector without sorting it [Shi et al. 2021, "Towards scalable
distributed training of deep learning on public cloud clusters"].

Bisection between the mean and the largest magnitude finds a threshold for the k-th magnitude, with
a comparison and a count each pass. Two thresholds bracket it: at most k entries lie above the upper
one, at least k above the lower one. All above the upper one are taken, then the first between them.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

PASSES = 20  # the bracket is then a millionth of its first width
_NARROW = 0.2  # share of the values: if fewer can be among the largest, only these stay


def largest(values: Tensor, count: int) -> Tensor:
    """Return the ascending positions of approximately the `count` largest magnitudes in `values`.

    Values that are not finite count as the largest, so that the receivers learn of them.
    """
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    magnitude = values.abs()
    mean, high = magnitude.mean(dtype=torch.float64).item(), magnitude.max().item()
    if not isfinite(mean + high):
        return _filled(~torch.isfinite(values), torch.isfinite(values), count)
    positions = torch.arange(0)  # of `magnitude` in `values`, once they are fewer
    low, middle = -mean or -1.0, mean  # below all, and in the range of the values
    for _ in range(PASSES):
        above = int(torch.count_nonzero(magnitude > middle))
        if above < count:
            high = middle
        else:
            low = middle
            if above <= len(magnitude) * _NARROW:
                inside = torch.nonzero(magnitude > low).flatten()
                positions = positions[inside] if len(positions) else inside
                magnitude = magnitude[inside]
        if above == count:
            high = low
            break
        middle = (low + high) / 2
    upper = magnitude > high
    picked = _filled(upper, (magnitude > low) & ~upper, count)
    return positions[picked] if len(positions) else picked


def _filled(first: Tensor, then: Tensor, count: int) -> Tensor:
    """Up to `count` positions of `first`, filled up with those of `then`."""
    taken = torch.nonzero(first).flatten()[:count]
    missing = torch.nonzero(then).flatten()[: count - len(taken)]
    return torch.cat([taken, missing]).sort().values
