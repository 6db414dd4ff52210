"""Find the largest entries of a vector without sorting it (MSTopK).

[Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters"]

Bisection finds two thresholds that enclose the k-th largest magnitude. Each iteration only counts
the entries above a threshold. At most k entries are above the upper threshold. The result has all
these entries. The rest of the k entries is taken at equal intervals from the entries between the
thresholds.
"""

from math import isfinite

import torch
from torch import Tensor

PASSES = 30  # maximum number of iterations, which reduce the bracket to 1e-9 of its first width
# If at most this fraction of the entries is above the lower threshold, later iterations skip the
# other entries.
_NARROW = 0.2


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest magnitudes in `values`, in ascending order.

    The result is approximate: near the `count`-th largest magnitude, a slightly smaller value may
    replace a larger value. Values that are not finite are chosen first, so that all ranks receive
    them.
    """
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    magnitude = values.abs()
    mean, high = magnitude.mean(dtype=torch.float64).item(), magnitude.max().item()
    if not isfinite(mean + high):
        return _pick(~torch.isfinite(values), torch.isfinite(values), count)
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
    picked = _pick(upper, (magnitude > low) & ~upper, count)
    return positions[picked] if len(positions) else picked


def _pick(first: Tensor, then: Tensor, count: int) -> Tensor:
    """Pick `count` positions from two boolean masks, and return them in ascending order.

    first: the mask whose True positions are picked first.
    then: if `first` has too few True positions, True positions of this mask are added at equal
        intervals. Both masks together must have at least `count` True positions.
    """
    taken = torch.nonzero(first).flatten()[:count]
    left, others = count - len(taken), torch.nonzero(then).flatten()
    missing = others[torch.arange(left, device=then.device) * len(others) // max(1, left)]
    return torch.cat([taken, missing]).sort().values
