"""The largest entries of a vector without sorting it: MSTopK of Shi et al. (2021), "Towards scalable distributed
training of deep learning on public cloud clusters".

A threshold for the k-th magnitude is sought by bisection between the mean and the largest magnitude, each pass a
comparison and a count. Two thresholds bracket it: the upper one leaves at most k entries above it, the lower one at
least k. All above the upper one are taken, and the first of those between the two fill what is missing.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

PASSES = 20  # the bracket is then a millionth of its first width
_NARROW = 0.2  # of the values looked at: where fewer can be among the largest, only these are looked at from then on


def largest(values: Tensor, count: int) -> Tensor:
    """(count,) positions of about the `count` largest magnitudes of `values` (n,), ascending; all n where n <= count.

    What is no finite number counts as the largest, so that whoever is sent these learns of it. Raises ValueError where
    `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"{count} of {len(values)} values: at least one is to be taken")
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    magnitude = values.abs()
    mean, high = magnitude.mean(dtype=torch.float64).item(), magnitude.max().item()
    if not isfinite(mean + high):
        return _filled(~torch.isfinite(values), torch.isfinite(values), count)
    positions = torch.arange(0)  # of `magnitude` in `values`, once it is fewer
    low, middle = -mean or -1.0, mean  # below all, and no farther off than the values are large
    for _ in range(PASSES):
        above = int(torch.count_nonzero(magnitude > middle))
        if above < count:
            high = middle
        else:
            low = middle
            if above <= len(magnitude) * _NARROW:  # the others are never asked about again
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
    """Positions of `first`, at most `count`, and of as many of `then` as are missing."""
    taken = torch.nonzero(first).flatten()[:count]
    missing = torch.nonzero(then).flatten()[: count - len(taken)]
    return torch.cat([taken, missing]).sort().values
