"""Adasum in place of averaging [Maleki et al. 2020, "Scaling distributed training with adaptive
summation"].

    Adasum(a, b) = (1 - a.b / 2 |a|^2) a + (1 - a.b / 2 |b|^2) b      for each parameter

It adds orthogonal vectors, averages parallel ones, and leaves the other of a zero vector. Dot
products are summed in float64.

adasum        combines gradients in a hook of DistributedDataParallel, before the optimizer's step
adasum-delta  each rank takes its optimizer's step; then the changes of the weights are combined

The algorithm is recursive halving and doubling over 2^m ranks. At level k ranks r and r xor 2^k
hold the same part of two vectors. Each keeps half of the part and sends the other half; three
float64 values a parameter are summed over the 2^(k+1) ranks that share the two vectors; each
combines its half. After the last level halves travel back. A rank sends 2 (P - 1) / P of the
values, as a ring does, and 24 m (m + 1) / 2 bytes a parameter. One rank combines an entry and sends
it on, so that all ranks have the same bits, and a NaN of one rank reaches all.
"""

# DistributedDataParallel compares a hook's annotations with types: no `annotations` import.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .messages import exchange

GRADIENTS, DELTAS = ADASUM = ("adasum", "adasum-delta")
_BLOCK = 2**18  # values that are float64 at a time: they stay in a processor's cache


def combine_gradients(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Combine a bucket's gradients; a parameter is never divided among buckets.

    Buckets are combined one at a time: ranks might send several in different orders.
    """
    values = bucket.buffer()
    if values.is_sparse:
        raise RuntimeError(
            f"{GRADIENTS} cannot combine sparse gradients. Create embeddings with sparse=False."
        )
    wide = _at_least_float32(values)
    combine(wide, [gradient.numel() for gradient in bucket.gradients()], group)
    return _done(values if wide is values else values.copy_(wide))


@dataclass(slots=True)
class Changes:
    """A rank's weights; `is_due` once its gradients are those of a whole step.

    A step without communication, which measures `sync_s`, stays on the rank.
    """

    group: dist.ProcessGroup
    weights: list[Tensor]
    is_due: bool = False
    before: Tensor | None = None

    def remember(self, *_: Any) -> None:
        if self.is_due:
            self.before = self._flat()

    @torch.no_grad()
    def combine(self, *_: Any) -> None:
        if not self.is_due or self.before is None:
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
        return _at_least_float32(torch.cat([weight.detach().flatten() for weight in self.weights]))


def leave_gradients(
    changes: Changes,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    changes.is_due |= bucket.is_last()
    return _done(bucket.buffer())


def combine(values: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Put the Adasum over the 2^m ranks of `group` into `values` (n,), parameters of `sizes`.

    Every rank must call it. Raises RuntimeError if a rank does not answer within the group's
    timeout.
    """
    rank, begin, end = dist.get_rank(group), 0, len(values)
    halvings = []
    for distance in _powers_of_two(dist.get_world_size(group)):
        peer, middle = rank ^ distance, (begin + end) // 2
        lower, upper = slice(begin, middle), slice(middle, end)
        is_first = not rank & distance
        kept, given = (lower, upper) if is_first else (upper, lower)
        own, theirs = values[kept], torch.empty_like(values[kept])
        exchange([(values[given], peer)], [(theirs, peer)], group)
        begin, end = kept.start, kept.stop
        parts = _parts(sizes, begin, end)
        dots = _dots(own, theirs, parts) if is_first else _dots(theirs, own, parts)
        for near in _powers_of_two(2 * distance):
            others = torch.empty_like(dots)
            exchange([(dots, rank ^ near)], [(others, rank ^ near)], group)
            dots += others
        factors = _factors(dots)
        _blend(own, theirs, factors if is_first else factors.flip(1), parts)
        halvings.append((peer, kept, given))
    for peer, kept, given in reversed(halvings):
        exchange([(values[kept], peer)], [(values[given], peer)], group)


def _parts(sizes: Sequence[int], begin: int, end: int) -> list[slice]:
    """The values of each parameter among those from `begin` to `end`, counted from `begin`."""
    found, at = [], 0
    for size in sizes:
        low, high = (min(max(bound, begin), end) - begin for bound in (at, at + size))
        found.append(slice(low, high))
        at += size
    return found


def _dots(first: Tensor, second: Tensor, parts: Sequence[slice]) -> Tensor:
    """(parameters, 3) first.second, |first|^2 and |second|^2 of each, in float64."""
    found = torch.zeros(len(parts), 3, dtype=torch.float64, device=first.device)
    for row, part in zip(found, parts, strict=True):
        blocks = zip(
            *(torch.split(vector[part], _BLOCK) for vector in (first, second)), strict=True
        )
        for block, other in blocks:
            a, b = block.double(), other.double()
            row += torch.stack([a @ b, a @ a, b @ b])
    return found


def _factors(dots: Tensor) -> Tensor:
    """(parameters, 2) the factors of the first and the second vector."""
    product, squares = dots[:, :1], dots[:, 1:]
    return torch.where(squares == 0, 1.0, 1 - product / (2 * squares))


def _blend(own: Tensor, theirs: Tensor, factors: Tensor, parts: Sequence[slice]) -> None:
    """Put the weighted sum of each parameter into `own`."""
    for (mine, other), part in zip(factors, parts, strict=True):
        own[part].mul_(mine).add_(theirs[part] * other)


def _powers_of_two(below: int) -> Iterator[int]:
    """1, 2, 4 ... `below` / 2."""
    return (1 << level for level in range(below.bit_length() - 1))


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _done(values: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future
