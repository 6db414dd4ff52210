"""Ranks as a grid, and the blocks of activations and weights that they exchange.

P ranks are `rows` x `columns` x `depth`. Ranks of one row hold features of the same samples, ranks
of one column the same outputs of a weight, ranks of one depth the same block of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .messages import swap

ONE, TWO, TWO_AND_A_HALF = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")

Peers = tuple[int, ...]


def shape_of(name: str, ranks: int) -> tuple[int, int, int] | None:
    """Return rows, columns and depth of the grid; None if `ranks` do not form one."""
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
        world = dist.get_world_size(group)
        rows, columns, depth = shape_of(name, world) or (1, 1, world)
        ranks = torch.arange(world).view(depth, rows, columns)
        k, i, j = (ranks == dist.get_rank(group)).nonzero()[0].tolist()
        peers = (ranks[k, i], ranks[k, :, j], ranks[:, i, j], ranks[:, :, j])
        return cls(group, *(tuple(chosen.flatten().tolist()) for chosen in peers))

    @property
    def is_flat(self) -> bool:
        """Whether the grid is a single row."""
        return len(self.column) == 1

    def share(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """This rank's chunk of `values` along `dim`."""
        return values.chunk(len(peers), dim)[peers.index(dist.get_rank(self.group))]

    def gathered(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """All peers' values along `dim`."""
        if len(peers) == 1:
            return values
        return torch.cat(swap([values.contiguous()] * len(peers), peers, self.group), dim)

    def scattered(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """This rank's chunk along `dim` of the sum over peers."""
        if len(peers) == 1:
            return values
        return torch.stack(swap(values.chunk(len(peers), dim), peers, self.group)).sum(dim=0)

    def turned(self, values: Tensor, split: int, joined: int) -> Tensor:
        """Give the row's peers their chunks along `split`; join all of its chunks on `joined`."""
        return torch.cat(swap(values.chunk(len(self.row), split), self.row, self.group), joined)

    def turned_back(self, values: Tensor, split: int, joined: int) -> Tensor:
        return self.turned(values, joined, split)

    def summed(self, values: Tensor, peers: Peers) -> Tensor:
        """(n,) the sum of `values` (n,) over `peers`, the same bits on all of them."""
        padded = functional.pad(values, (0, -len(values) % len(peers)))
        return self.gathered(self.scattered(padded, 0, peers), 0, peers)[: len(values)]


def gather(x: Tensor, dim: int, grid: Grid) -> Tensor:
    """Samples of all ranks of the row, along `dim`; gradients are summed and scattered."""
    return _exchanged(x, grid.gathered, grid.scattered, dim, grid.row)


def scatter(x: Tensor, dim: int, grid: Grid) -> Tensor:
    """A rank's own samples, along `dim`, of the sum over the row; gradients are gathered."""
    return _exchanged(x, grid.scattered, grid.gathered, dim, grid.row)


def turn(x: Tensor, split: int, joined: int, grid: Grid) -> Tensor:
    """Swap chunks along `split` for chunks along `joined`; gradients are swapped back."""
    return _exchanged(x, grid.turned, grid.turned_back, split, joined)


def _exchanged(x: Tensor, *exchange: Any) -> Tensor:
    found: Tensor = _Exchange.apply(x, *exchange)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Any, transposed: Any, *where: Any) -> Any:
        ctx.transposed, ctx.where = transposed, where
        return exchange(x, *where)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transposed(gradients[0], *ctx.where), None, None, None, None


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
