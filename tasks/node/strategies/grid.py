"""Arrange ranks in a grid for tensor parallelism, and exchange activations and weights.

P ranks form a grid of `rows` x `columns` x `depth`. The weights of a layer are divided into blocks.

- The ranks of a row hold different features of the same samples.
- The ranks of a column hold blocks for the same output features, but different input features.
- The ranks along the depth hold copies of the same block.

Autograd differentiates the exchanges. The gradient of an all-gather is a reduce-scatter. The
gradient of an all-to-all is the inverse all-to-all.
"""

from dataclasses import dataclass
from math import isqrt

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .messages import swap

FLAT, TWO, TWO_AND_A_HALF = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")

Peers = tuple[int, ...]


def shape_of(name: str, ranks: int) -> tuple[int, int, int] | None:
    """Return (rows, columns, depth) of the grid that `ranks` ranks form in strategy `name`.

    Returns None if the strategy cannot use this number of ranks.
    """
    if name == FLAT:
        return (1, ranks, 1) if ranks >= 2 else None
    for side in range(isqrt(ranks), 1, -1):
        depth, rest = divmod(ranks, side**2)
        if not rest and (depth == 1) == (name == TWO):
            return side, side, depth
    return None


@dataclass(frozen=True)
class Grid:
    """The peers of this rank in the grid. Each tuple of ranks includes this rank.

    row: the ranks that hold different features of the same samples.
    column: the ranks whose blocks of a weight have the same output features, but different input
        features.
    depth: the ranks that hold copies of the same block of a weight.
    features: the ranks that hold the same features of different samples.
    """

    group: dist.ProcessGroup
    row: Peers
    column: Peers
    depth: Peers
    features: Peers

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> "Grid":
        """Return this rank's peers for strategy `name` in `group`."""
        world = dist.get_world_size(group)
        rows, columns, depth = shape_of(name, world) or (1, 1, world)
        # the ranks of a row are consecutive, so that they are on the same machine if possible
        ranks = torch.arange(world).view(depth, rows, columns)
        k, i, j = (ranks == dist.get_rank(group)).nonzero()[0].tolist()
        peers = (ranks[k, i], ranks[k, :, j], ranks[:, i, j], ranks[:, :, j])
        return cls(group, *(tuple(chosen.flatten().tolist()) for chosen in peers))

    @property
    def is_flat(self) -> bool:
        """Return True if the grid is a single row."""
        return len(self.column) == 1

    def share(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """Split `values` along `dim` into one chunk per peer, and return this rank's chunk."""
        return values.chunk(len(peers), dim)[peers.index(dist.get_rank(self.group))]

    def all_gather(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """All-gather: concatenate the `values` of all peers along `dim`."""
        return torch.cat(swap([values] * len(peers), peers, self.group), dim)

    def reduce_scatter(self, values: Tensor, dim: int, peers: Peers) -> Tensor:
        """Reduce-scatter: sum `values` over peers, and return this rank's chunk along `dim`."""
        return torch.stack(swap(values.chunk(len(peers), dim), peers, self.group)).sum(dim=0)

    def all_to_all(self, values: Tensor, split: int, joined: int) -> Tensor:
        """All-to-all: exchange chunks of `values` with the ranks of the row.

        `values` is split along dimension `split` into one chunk for each rank. The received chunks
        are concatenated along dimension `joined`.
        """
        return torch.cat(swap(values.chunk(len(self.row), split), self.row, self.group), joined)

    def all_reduce(self, values: Tensor, peers: Peers) -> Tensor:
        """All-reduce: return the sum of `values` over `peers`, with the same bits on all peers.

        `values` and the sum have shape (n,).
        """
        padded = functional.pad(values, (0, -len(values) % len(peers)))
        return self.all_gather(self.reduce_scatter(padded, 0, peers), 0, peers)[: len(values)]

    def summa(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the output of a linear layer on a q x q grid, computed by the SUMMA algorithm.

        The layer has `in` inputs and `out` outputs.

        x: this rank's block of the input, of shape (..., in / q).
        weight: this rank's block of the weight, of shape (out / q, in / q).

        The result has shape (..., out / q).
        """

        def product() -> Tensor:
            inputs = self.all_gather(x, -1, self.row)
            return functional.linear(inputs, self.all_gather(weight, 1, self.column))

        # to save memory, the backward pass gathers `x` and `weight` again
        found: Tensor = checkpoint(product, use_reentrant=False, preserve_rng_state=False)
        return found
