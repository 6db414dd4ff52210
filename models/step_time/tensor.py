"""What tensor parallelism sends, as known before any run: elements that one of P ranks sends in a step.

A linear layer of K to N features, whose inputs |X| = rows K and outputs |Y| = rows N are of the samples of all ranks:

    tensor-2d, tensor-2.5d   on q x q x d ranks (q - 1) / q^2 (|X| / d + |W|), |W| = K N, forward; as much again for the
                             gradient of X, where it is needed, and for that of W; and 2 (d - 1) / d |W| / q^2 to sum
                             W's over the depth [physics.md; D]. A sequence of layers begins and ends with (q - 1) / q
                             of a rank's own samples, forward and backward
    tensor-1d                2 (P - 1) / P |X| of the first layer of a pair and 2 (P - 1) / P |Y| of the second, each
                             both ways [Shoeybi et al. 2019]; a pair without a second ends as above
    ddp                      2 (P - 1) / P |W|

Between machines goes what is exchanged with ranks on others: ranks of a row follow each other, then those of a column.
Biases and LayerNorms are left out. With as many rows for each rank, tensor-2.5d sends less than tensor-2d where rows
weigh more than weights; ddp sends least where they weigh more still.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray
from ..domain.workload import TENSOR_1D, grid_shape

_BYTES_PER_VALUE = 4.0


class Volumes(NamedTuple):
    """Elements of a workload's divided layers, as profiles count them: of weights, and for one sample of inputs, and of
    inputs of the first and outputs of the second layer of each pair.
    """

    weights: float = 0.0
    inputs: float = 0.0
    pairs: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there is anything to divide that was counted."""
        return self.weights > 0 and self.inputs > 0


NOTHING = Volumes()


def machine_bytes(
    strategy: str,
    volumes: Volumes,
    gradient_bytes: float,
    *,
    ranks: FloatArray,
    most: FloatArray,
    samples: FloatArray,
) -> FloatArray:
    """(rows,) bytes that a machine of `most` devices sends to others in a step of `samples` a device, over all
    accumulation steps, of which each exchanges activations; with what layers that stay whole send, as in ddp. Weights
    of one micro-step: `weight_bytes` has those of each further one.

    The begin and the end of a sequence are left out [D]. NaN where so many ranks are no grid.
    """
    found = np.full(len(ranks), np.nan)
    for many, each in sorted({(int(a), int(b)) for a, b in zip(ranks, most, strict=True)}):
        shape = grid_shape(strategy, many)
        if shape is None:
            continue
        at = np.flatnonzero((ranks == many) & (most == each))
        _, columns, depth = shape
        rest = max(gradient_bytes / _BYTES_PER_VALUE - volumes.weights, 0.0)
        ring = (
            2 * (many - 1) / many * rest * (many > each)
        )  # of which one rank a machine sends to another
        if strategy == TENSOR_1D:
            of_rank = 2 * (many - 1) * volumes.pairs * samples[at] * _outside(many, 1, each)
        else:
            square = columns**2
            of_rank = 3 * (columns - 1) * volumes.inputs * samples[at] * _outside(columns, 1, each)
            of_rank += (
                3 * (columns - 1) / square * volumes.weights * _outside(columns, columns, each)
            )
            of_rank += (
                2 * (depth - 1) / depth * volumes.weights / square * _outside(depth, square, each)
            )
        found[at] = _BYTES_PER_VALUE * (each * of_rank + ring)
    return found


def weight_bytes(
    strategy: str, weights: float, *, ranks: FloatArray, most: FloatArray
) -> FloatArray:
    """(rows,) bytes of `weights` numbers that a machine of `most` devices sends to others in each micro-step: SUMMA
    gathers them in the forward pass and in the backward pass, and scatters their gradients. NaN as `machine_bytes`.
    """
    found = np.full(len(ranks), np.nan)
    for many, each in sorted({(int(a), int(b)) for a, b in zip(ranks, most, strict=True)}):
        shape = grid_shape(strategy, many)
        if shape is not None:
            columns = shape[1]
            part = (
                0.0
                if strategy == TENSOR_1D
                else 3 * (columns - 1) / columns**2 * _outside(columns, columns, each)
            )
            found[(ranks == many) & (most == each)] = _BYTES_PER_VALUE * each * part * weights
    return found


def _outside(peers: int, apart: int, devices: int) -> float:
    """Part of a rank's `peers`, whose numbers are so far `apart`, that are on other machines than its own."""
    beside = min(max(devices // apart, 1), peers)
    return (peers - beside) / max(peers - 1, 1)
