"""Ranks as a grid, and what they exchange: rows and columns of blocks of activations and of weights.

P ranks are `rows` x `columns` x `depth`. Ranks of one row have features of the same samples, ranks of one column the
same outputs of a weight, ranks of one depth the same block of it. What a rank sends goes straight to each peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

ONE, TWO, TWO_AND_A_HALF = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")
_NEEDED = {
    ONE: "at least 2",
    TWO: "q x q with q of 2 or more",
    TWO_AND_A_HALF: "q x q x d with q and d of 2 or more",
}


def shape_of(name: str, ranks: int) -> tuple[int, int, int]:
    """Rows, columns and depth of the grid. Raises ValueError where so many ranks are no such grid; says which are."""
    if name == ONE and ranks >= 2:
        return 1, ranks, 1
    if name == TWO and ranks >= 4 and isqrt(ranks) ** 2 == ranks:
        return isqrt(ranks), isqrt(ranks), 1
    if name == TWO_AND_A_HALF:
        for side in range(isqrt(ranks // 2), 1, -1):
            if ranks % side**2 == 0:
                return side, side, ranks // side**2
    devices = f"{ranks} device{'s' * (ranks != 1)}"
    near = sorted(
        (one for one in range(2, ranks + 33) if fits(name, one)),
        key=lambda one: (abs(one - ranks), one),
    )
    fitting = " or ".join(map(str, sorted(near[:2])))
    raise ValueError(
        f"{name} on {devices}: it needs {_NEEDED[name]}; take ddp, or {fitting} devices"
    )


def fits(name: str, ranks: int) -> bool:
    """Whether so many ranks are such a grid."""
    if name == ONE:
        return ranks >= 2
    if name == TWO:
        return ranks >= 4 and isqrt(ranks) ** 2 == ranks
    return any(ranks % side**2 == 0 for side in range(2, isqrt(ranks // 2) + 1))


@dataclass(frozen=True, slots=True)
class Grid:
    """A rank's peers, itself among them: `row` by the features that each has, `column` by a weight's input features,
    `depth` with the same block of weights, and `features` with the same of activations.
    """

    group: dist.ProcessGroup
    row: tuple[int, ...]
    column: tuple[int, ...]
    depth: tuple[int, ...]
    features: tuple[int, ...]

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> Grid:
        """Ranks of one row follow each other: on one machine, where they can."""
        rows, columns, depth = shape_of(name, dist.get_world_size(group))
        layer, place = divmod(dist.get_rank(group), rows * columns)
        i, j = divmod(place, columns)

        def rank(i: int, j: int, k: int) -> int:
            return (k * rows + i) * columns + j

        return cls(
            group=group,
            row=tuple(rank(i, one, layer) for one in range(columns)),
            column=tuple(rank(one, j, layer) for one in range(rows)),
            depth=tuple(rank(i, j, one) for one in range(depth)),
            features=tuple(rank(one, j, k) for k in range(depth) for one in range(rows)),
        )

    @property
    def flat(self) -> bool:
        """Whether it is a single row."""
        return len(self.column) == 1

    def share(self, values: Tensor, dim: int, peers: Sequence[int]) -> Tensor:
        """This rank's part of `values`, as many as there are `peers` along `dim`."""
        return values.chunk(len(peers), dim)[peers.index(dist.get_rank(self.group))]

    def swapped(self, *wanted: tuple[Sequence[Tensor], Sequence[int]]) -> list[list[Tensor]]:
        """For parts and peers, what each peer has for this rank, which has the parts for them: all of one shape.

        Several are under way at once, each in turns in which a rank hears of one other: more overrun its link. No two
        have a peer in common. Raises RuntimeError where one does not come within the group's timeout.
        """
        rank = dist.get_rank(self.group)
        owns = [peers.index(rank) for _, peers in wanted]
        found = [
            [part if at == own else torch.empty_like(part) for at, part in enumerate(parts)]
            for own, (parts, _) in zip(owns, wanted, strict=True)
        ]
        for distance in range(1, max(len(peers) for _, peers in wanted)):
            asked = []
            for own, (parts, peers), received in zip(owns, wanted, found, strict=True):
                if distance < len(peers):
                    to, of = (own + distance) % len(peers), (own - distance) % len(peers)
                    asked.append(
                        dist.P2POp(dist.isend, parts[to], group=self.group, group_peer=peers[to])
                    )
                    asked.append(
                        dist.P2POp(dist.irecv, received[of], group=self.group, group_peer=peers[of])
                    )
            for work in dist.batch_isend_irecv(asked):
                work.wait()
        return found

    def gathered(self, *wanted: tuple[Tensor, int, Sequence[int]]) -> list[Tensor]:
        """For values, dimension and peers: those of all peers one after another along the dimension."""
        found = self.swapped(
            *(([values.contiguous()] * len(peers), peers) for values, _, peers in wanted)
        )
        return [
            values if len(own) == 1 else torch.cat(own, dim)
            for own, (values, dim, _) in zip(found, wanted, strict=True)
        ]

    def scattered(self, *wanted: tuple[Tensor, int, Sequence[int]]) -> list[Tensor]:
        """For values, dimension and peers: this rank's part along the dimension of the sum over peers."""
        found = self.swapped(
            *(
                ([one.contiguous() for one in values.chunk(len(peers), dim)], peers)
                for values, dim, peers in wanted
            )
        )
        return [own[0] if len(own) == 1 else torch.stack(own).sum(dim=0) for own in found]

    def summed(self, values: Tensor, peers: Sequence[int]) -> Tensor:
        """(n,) the sum over `peers` of `values` (n,), the same bits on all of them."""
        many = len(peers)
        padded = functional.pad(values, (0, -len(values) % many))
        own = self.scattered((padded, 0, peers))[0]
        return self.gathered((own, 0, peers))[0][: len(values)]


def summa(x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
    """(..., out / q) of x (..., in / q) and this rank's block (out / q, in / q) of a layer's weight."""
    found: Tensor = _Summa.apply(x, weight, grid)  # type: ignore[no-untyped-call]
    return found


def gather(x: Tensor, dim: int, grid: Grid) -> Tensor:
    """Samples of all ranks of the row, along `dim`; gradients are summed and scattered."""
    found: Tensor = _Gather.apply(x, dim, grid)  # type: ignore[no-untyped-call]
    return found


def scatter(x: Tensor, dim: int, grid: Grid) -> Tensor:
    """A rank's own samples, along `dim`, of the sum over the row; gradients are gathered."""
    found: Tensor = _Scatter.apply(x, dim, grid)  # type: ignore[no-untyped-call]
    return found


def turn(x: Tensor, given: int, kept: int, grid: Grid) -> Tensor:
    """A part along `given` with all that the row has along `kept`, of a part along `kept` with all of `given`."""
    found: Tensor = _Turn.apply(x, given, kept, grid)  # type: ignore[no-untyped-call]
    return found


def standardize(x: Tensor, eps: float, grid: Grid) -> Tensor:
    """x (..., features / q) less its mean over all features, over its standard deviation.

    Ranks of a row tell each other two numbers a sample, forward and backward.
    """
    found: Tensor = _Standardize.apply(x, eps, grid)  # type: ignore[no-untyped-call]
    return found


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return functional.linear(*grid.gathered((x, -1, grid.row), (weight, 1, grid.column)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grid, (gradient,) = ctx.saved_tensors, ctx.grid, gradients
        of_x, of_weight = ctx.needs_input_grad[:2]
        wanted = [(weight, 1, grid.column)] * of_x + [(x, -1, grid.row)] * of_weight
        every = grid.gathered(*wanted)
        sums = []
        if of_x:
            sums.append((gradient @ every[0], -1, grid.row))
        if of_weight:
            sums.append((gradient.flatten(0, -2).T @ every[-1].flatten(0, -2), 1, grid.column))
        found = grid.scattered(*sums)
        return found[0] if of_x else None, found[-1] if of_weight else None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, grid: Grid) -> Tensor:
        ctx.dim, ctx.grid = dim, grid
        return grid.gathered((x, dim, grid.row))[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.grid.scattered((gradients[0], ctx.dim, ctx.grid.row))[0], None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, grid: Grid) -> Tensor:
        ctx.dim, ctx.grid = dim, grid
        return grid.scattered((x, dim, grid.row))[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.grid.gathered((gradients[0], ctx.dim, ctx.grid.row))[0], None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: int, kept: int, grid: Grid) -> Tensor:
        ctx.turned, ctx.grid = (given, kept), grid
        return _turned(x, given, kept, grid)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, kept = ctx.turned
        return _turned(gradients[0], kept, given, ctx.grid), None, None, None


def _turned(x: Tensor, given: int, kept: int, grid: Grid) -> Tensor:
    parts = [one.contiguous() for one in x.chunk(len(grid.row), given)]
    return torch.cat(grid.swapped((parts, grid.row))[0], kept)


class _Standardize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, grid: Grid) -> Tensor:
        own, many = x.shape[-1], len(grid.row)
        mean = x.mean(dim=-1)
        squares = (x - mean[..., None]).square().sum(dim=-1)
        told = torch.stack(grid.swapped(([torch.stack([mean, squares])] * many, grid.row))[0])
        middle = told[:, 0].mean(dim=0)
        variance = (told[:, 1].sum(dim=0) + own * (told[:, 0] - middle).square().sum(dim=0)) / (
            own * many
        )
        scale = (variance + eps).rsqrt()[..., None]
        found = (x - middle[..., None]) * scale
        ctx.save_for_backward(found, scale)
        ctx.grid = grid
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (found, scale), grid, (gradient,) = ctx.saved_tensors, ctx.grid, gradients
        own = torch.stack([gradient.sum(dim=-1), (gradient * found).sum(dim=-1)])
        told = torch.stack(grid.swapped(([own] * len(grid.row), grid.row))[0])
        sums = told.sum(dim=0) / (found.shape[-1] * len(grid.row))
        return scale * (gradient - sums[0][..., None] - found * sums[1][..., None]), None, None
