"""Ranks as a grid, and the blocks of activations and weights that they exchange.

P ranks are `rows` x `columns` x `depth`. Ranks of one row hold features of the same samples, ranks
of one column the same outputs of a weight, ranks of one depth the same block of a weight. Messages
go straight from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .messages import exchange

ONE, TWO, TWO_AND_A_HALF = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")
_NEEDED = {
    ONE: "at least 2",
    TWO: "q x q with q of 2 or more",
    TWO_AND_A_HALF: "q x q x d with q and d of 2 or more",
}

Peers = tuple[int, ...]
Shape = tuple[int, int, int]


def shape_of(name: str, ranks: int) -> Shape:
    """Rows, columns and depth of the grid.

    Raises ValueError if `ranks` do not form one; the message names the nearest counts that do.
    """
    shape = _shape(name, ranks)
    if shape is None:
        counts = [count for count in range(2, ranks + 33) if fits(name, count)]
        nearest = sorted(counts, key=lambda count: (abs(count - ranks), count))[:2]
        devices = f"{ranks} device{'s' * (ranks != 1)}"
        fitting = " or ".join(str(count) for count in sorted(nearest))
        raise ValueError(
            f"{name} on {devices}: it needs {_NEEDED[name]}; take ddp, or {fitting} devices"
        )
    return shape


def fits(name: str, ranks: int) -> bool:
    return _shape(name, ranks) is not None


def _shape(name: str, ranks: int) -> Shape | None:
    if name == ONE:
        return (1, ranks, 1) if ranks >= 2 else None
    for side in range(isqrt(ranks), 1, -1):
        depth, rest = divmod(ranks, side**2)
        if not rest and (depth == 1) == (name == TWO):
            return side, side, depth
    return None


@dataclass(frozen=True, slots=True)
class Grid:
    """A rank's peers, itself included.

    `row` have the other features of its samples, `column` the other inputs of its weights, `depth`
    the same block of weights, `features` the same features of activations.
    """

    group: dist.ProcessGroup
    row: Peers
    column: Peers
    depth: Peers
    features: Peers

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> Grid:
        """Ranks of a row are consecutive, so that they share a machine where possible."""
        rows, columns, depth = shape_of(name, dist.get_world_size(group))
        ranks = torch.arange(rows * columns * depth).view(depth, rows, columns)
        k, i, j = (ranks == dist.get_rank(group)).nonzero()[0].tolist()

        def peers(chosen: Tensor) -> Peers:
            return tuple(chosen.flatten().tolist())

        return cls(
            group,
            row=peers(ranks[k, i]),
            column=peers(ranks[k, :, j]),
            depth=peers(ranks[:, i, j]),
            features=peers(ranks[:, :, j]),
        )

    @property
    def is_flat(self) -> bool:
        """Whether the grid is a single row."""
        return len(self.column) == 1

    def share(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """This rank's chunk of `values` along `dim`."""
        return values.chunk(len(peers), dim)[peers.index(dist.get_rank(self.group))]

    def swapped(self, parts: Sequence[Tensor], peers: Peers) -> list[Tensor]:
        """The parts that `peers` have for this rank, which has `parts` for them.

        They come in turns, since several peers at once overrun a rank's link.

        Raises RuntimeError if a peer does not answer within the group's timeout.
        """
        own = peers.index(dist.get_rank(self.group))
        received = list(parts)
        for distance in range(1, len(peers)):
            to, source = (own + distance) % len(peers), (own - distance) % len(peers)
            received[source] = torch.empty_like(parts[source])
            exchange([(parts[to], peers[to])], [(received[source], peers[source])], self.group)
        return received

    def gathered(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """All peers' values along `dim`."""
        if len(peers) == 1:
            return values
        return torch.cat(self.swapped([values.contiguous()] * len(peers), peers), dim)

    def scattered(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """This rank's chunk along `dim` of the sum over peers."""
        if len(peers) == 1:
            return values
        chunks = [chunk.contiguous() for chunk in values.chunk(len(peers), dim)]
        return torch.stack(self.swapped(chunks, peers)).sum(dim=0)

    def summed(self, values: Tensor, peers: Peers) -> Tensor:
        """(n,) the sum of `values` (n,) over `peers`, the same bits on all of them."""
        padded = functional.pad(values, (0, -len(values) % len(peers)))
        return self.gathered(self.scattered(padded, 0, peers), 0, peers)[: len(values)]


def gather(x: Tensor, dim: int, grid: Grid) -> Tensor:
    """Samples of all ranks of the row, along `dim`; gradients are summed and scattered."""
    there, back = (partial(act, dim=dim, peers=grid.row) for act in (grid.gathered, grid.scattered))
    return _exchanged(x, there, back)


def scatter(x: Tensor, dim: int, grid: Grid) -> Tensor:
    """A rank's own samples, along `dim`, of the sum over the row; gradients are gathered."""
    there, back = (partial(act, dim=dim, peers=grid.row) for act in (grid.scattered, grid.gathered))
    return _exchanged(x, there, back)


def turn(x: Tensor, split: int, joined: int, grid: Grid) -> Tensor:
    """Give the row's peers their chunks along `split`; return all of its chunks along `joined`."""

    def turned(x: Tensor, split: int, joined: int) -> Tensor:
        parts = [chunk.contiguous() for chunk in x.chunk(len(grid.row), split)]
        return torch.cat(grid.swapped(parts, grid.row), joined)

    return _exchanged(
        x,
        partial(turned, split=split, joined=joined),
        partial(turned, split=joined, joined=split),
    )


def _exchanged(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    found: Tensor = _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.transposed = backward
        found: Tensor = forward(x)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transposed(gradients[0]), None, None


class Summa(torch.autograd.Function):
    """(..., out / q) of x (..., in / q) and this rank's block (out / q, in / q) of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return functional.linear(
            grid.gathered(x, -1, grid.row), grid.gathered(weight, 1, grid.column)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grid, gradient = ctx.saved_tensors, ctx.grid, gradients[0]
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = grid.scattered(gradient @ grid.gathered(weight, 1, grid.column), -1, grid.row)
        if ctx.needs_input_grad[1]:
            inputs = grid.gathered(x, -1, grid.row).flatten(0, -2)
            of_weight = grid.scattered(gradient.flatten(0, -2).T @ inputs, 1, grid.column)
        return of_x, of_weight, None


class Standardize(torch.autograd.Function):
    """x (..., features / q) less its mean over all features, divided by its standard deviation.

    Ranks of a row exchange two numbers a sample, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, grid: Grid) -> Tensor:
        features, mean = x.shape[-1], x.mean(dim=-1)
        squares = (x - mean[..., None]).square().sum(dim=-1)
        means, deviations = _of_row(grid, mean, squares)
        overall = means.mean(dim=0)
        between = features * (means - overall).square().sum(dim=0)
        variance = (deviations.sum(dim=0) + between) / (features * len(grid.row))
        scale = (variance + eps).rsqrt()[..., None]
        found = (x - overall[..., None]) * scale
        ctx.save_for_backward(found, scale)
        ctx.grid = grid
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (found, scale), grid, gradient = ctx.saved_tensors, ctx.grid, gradients[0]
        first, second = _of_row(grid, gradient.sum(dim=-1), (gradient * found).sum(dim=-1))
        features = found.shape[-1] * len(grid.row)
        mean, slope = (sums.sum(dim=0)[..., None] / features for sums in (first, second))
        return scale * (gradient - mean - found * slope), None, None


def _of_row(grid: Grid, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """(row, ...) both numbers of each sample, by rank of the row."""
    pair = torch.stack([first, second])
    found = torch.stack(grid.swapped([pair] * len(grid.row), grid.row))
    return found[:, 0], found[:, 1]
