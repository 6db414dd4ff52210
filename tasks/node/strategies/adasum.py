"""Combine gradients or weight changes by Adasum instead of averaging them.

[Maleki et al. 2020, "Scaling distributed training with adaptive summation"]

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b      for each parameter

`a.b` is a dot product, which is computed in float64. Adasum adds orthogonal vectors and averages
parallel vectors. If one vector is zero, the result is the other vector.

adasum        combines gradients in a hook of DistributedDataParallel, before the optimizer's step
adasum-delta  each rank takes its optimizer's step; then the weight changes are combined

The algorithm is recursive halving and doubling over P = 2^m ranks. At level k, ranks r and r xor
2^k are partners. The two partners hold the same segment of two different vectors:
  1. Each rank keeps half of its segment and sends the other half to its partner.
  2. Each rank computes three dot products per parameter for its half. They are summed over the
     2^(k+1) ranks that together hold the two vectors.
  3. Each rank combines its half.
After the last level, the halves are sent back. A rank sends 2 (P - 1) / P of the values, as in a
ring all-reduce. A rank also sends 24 m (m + 1) / 2 bytes of dot products per parameter tensor.

Each entry is combined by one rank and then distributed. Therefore all ranks end with the same bits,
and a NaN of one rank reaches all ranks.
"""

# DistributedDataParallel compares a hook's annotations with types: no `annotations` import.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .messages import completed_future, exchange

GRADIENTS, DELTAS = ADASUM = ("adasum", "adasum-delta")
_BLOCK = 2**18  # values converted to float64 at a time, so that they fit in the CPU's cache


def combine_gradients(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Replace a bucket's gradients by their Adasum over ranks (adasum's DDP hook)."""
    # DDP never divides a parameter among buckets, so each dot product covers a whole parameter.
    # This hook blocks until the messages are exchanged, so all ranks use the same order of buckets.
    combine(bucket.buffer(), [gradient.numel() for gradient in bucket.gradients()], group)
    return completed_future(bucket.buffer())


@dataclass
class Changes:
    """The state of strategy adasum-delta on a rank.

    weights: the trained weights.
    before: the values of `weights` before the optimizer's step, in one flat tensor; None outside a
        step.
    is_due: True if the weight changes of the next optimizer step must be combined. DDP's hook sets
        this field. Inside `no_sync`, DDP does not call the hook.
    """

    group: dist.ProcessGroup
    weights: list[Tensor]
    is_due: bool = False
    before: Tensor | None = None

    def remember(self, *_: Any) -> None:
        """Copy the weights before the optimizer's step (a step pre-hook)."""
        if self.is_due:
            self.before = self._flat()

    @torch.no_grad()
    def combine(self, *_: Any) -> None:
        """Replace the step's weight changes by their Adasum over ranks (a step post-hook)."""
        if self.before is None:
            return
        sizes = [weight.numel() for weight in self.weights]
        change = self._flat().sub_(self.before)
        combine(change, sizes, self.group)
        for weight, value in zip(
            self.weights, torch.split(self.before.add_(change), sizes), strict=True
        ):
            weight.copy_(value.view(weight.shape))
        self.is_due, self.before = False, None

    def _flat(self) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights])

    def leave_gradients(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> Future[Tensor]:
        """Leave each rank's gradients as they are (adasum-delta's DDP hook)."""
        self.is_due |= bucket.is_last()
        return completed_future(bucket.buffer())


def combine(
    values: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, distance: int = 1
) -> None:
    """Replace the tensor `values` in place by its Adasum over the ranks of `group`.

    The number of ranks must be a power of 2. Every rank must call this function.

    values: a one-dimensional tensor with the values of several parameters, one after another.
    sizes: the number of elements of each parameter in `values`.
    distance: only recursive calls pass this argument. Rank r exchanges halves of `values` with rank
        r xor `distance`.

    Raises RuntimeError if a rank does not respond within the group's timeout.
    """
    rank = dist.get_rank(group)
    if distance == dist.get_world_size(group):
        return
    peer, is_first, middle = rank ^ distance, not rank & distance, len(values) // 2
    halves = values[:middle], values[middle:]
    first, given = halves if is_first else halves[::-1]
    ends = [min(max(end - (not is_first) * middle, 0), len(first)) for end in accumulate(sizes)]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    theirs = torch.empty_like(first)
    exchange((given, peer), (theirs, peer), group)
    dots = _dots(first, theirs, sizes) if is_first else _dots(theirs, first, sizes)
    near = 1
    while near <= distance:
        others = torch.empty_like(dots)
        exchange((dots, rank ^ near), (others, rank ^ near), group)
        dots += others
        near *= 2
    product, squares = dots[:, :1], dots[:, 1:]
    factors = torch.where(squares == 0, 1.0, 1 - product / (2 * squares))
    factors = factors if is_first else factors.flip(1)
    for (factor, other), mine, yours in zip(
        factors, torch.split(first, sizes), torch.split(theirs, sizes), strict=True
    ):
        mine.mul_(factor).add_(yours * other)
    combine(first, sizes, group, 2 * distance)
    exchange((first, peer), (given, peer), group)


def _dots(first: Tensor, second: Tensor, sizes: list[int]) -> Tensor:
    """Return the dot products (first.second, first.first, second.second) of each parameter.

    The result is a float64 tensor of shape (parameters, 3). `sizes` has the number of elements of
    each parameter.
    """
    found = torch.zeros(len(sizes), 3, dtype=torch.float64, device=first.device)
    for row, mine, theirs in zip(
        found, torch.split(first, sizes), torch.split(second, sizes), strict=True
    ):
        for block, other in zip(
            torch.split(mine, _BLOCK), torch.split(theirs, _BLOCK), strict=True
        ):
            a, b = block.double(), other.double()
            row += torch.stack([a @ b, a @ a, b @ b])
    return found
