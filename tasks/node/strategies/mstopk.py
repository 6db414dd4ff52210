"""Find the largest entries of a vector without sorting it (MSTopK).

[Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters"]

Bisection finds two thresholds that enclose the k-th largest magnitude. Each iteration costs a
comparison and a count. At most k entries lie above the upper threshold, and at least k above the
lower threshold. The result starts with all entries above the upper threshold. If these are fewer
than k, entries between the thresholds are added at equal intervals, until there are k.
"""

from math import isfinite

import torch
from torch import Tensor

PASSES = 30  # maximum number of iterations; the bracket then has 1e-9 of its first width
_NARROW = 0.2  # below this fraction of candidates, later iterations look only at the candidates


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest magnitudes in `values`, in ascending order.

    The result is approximate: near the `count`-th largest magnitude, a slightly smaller value may
    replace a larger value. If some values are not finite, they are chosen first, so that all ranks
    receive them. The other chosen values are then arbitrary. If `count` exceeds the number of
    values, all positions are returned.
    """
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    magnitude = values.abs()
    mean, high = magnitude.mean(dtype=torch.float64).item(), magnitude.max().item()
    if not isfinite(mean + high):
        return _filled(~torch.isfinite(values), torch.isfinite(values), count)
    positions = torch.arange(0)  # positions of the candidates in `values`; empty means all values
    low, middle = -mean or -1.0, mean  # `low` starts below all magnitudes
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
    """Return `count` positions, in ascending order, at which one of two boolean masks is True.

    The function takes the lowest positions at which `first` is True. If these are fewer than
    `count`, it adds positions at which `then` is True, at equal intervals among all such positions.
    Both masks have the same length.
    """
    taken = torch.nonzero(first).flatten()[:count]
    left, others = count - len(taken), torch.nonzero(then).flatten()
    missing = others[:: max(1, len(others) // max(1, left))][:left]
    return torch.cat([taken, missing]).sort().values
