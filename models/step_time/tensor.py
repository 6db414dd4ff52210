"""Estimate the bytes that tensor parallelism sends, before any run in such a mode was measured.

A linear layer maps K features to N features. Counting the samples of all ranks, its inputs have
|X| = rows K elements, its outputs |Y| = rows N, and its weights |W| = K N. In a step, each of P
ranks sends these numbers of elements for the layer:

    tensor-2d, tensor-2.5d   on q x q x d ranks (q - 1) / q^2 (|X| / d + |W|) forward; as much again
                             for the gradients of X and of W; 2 (d - 1) / d |W| / q^2 to sum the
                             gradients of W over the depth [D]
    tensor-1d                2 (P - 1) / P |X| of the first layer of a pair and 2 (P - 1) / P |Y| of
                             the second, forward and backward [Shoeybi et al. 2019]

Ranks are numbered row by row of the grid. Only exchanges with ranks on other machines use the
network. Biases, LayerNorms and the ends of a sequence are neglected [D].
"""

from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray
from ..domain.workload import TENSOR_1D, grid_shape

_BYTES_PER_VALUE = 4.0


class Volumes(NamedTuple):
    """The numbers of elements in the layers that tensor parallelism splits.

    `weights` counts the weights of all these layers. `inputs` counts the inputs of all these layers
    for one sample. `pairs` counts, for one sample, the inputs of the first layer and the outputs of
    the second layer of each pair.
    """

    weights: float = 0.0
    inputs: float = 0.0
    pairs: float = 0.0

    @property
    def known(self) -> bool:
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
    """Return a (rows,) array: the bytes that a machine sends in a step.

    Gradients of layers that are not split are sent as in DDP. Weights are counted for one
    micro-step; `weight_bytes` has the bytes of each further micro-step. The number is NaN if the
    ranks of a setup form no grid.

    Args:
        strategy: a tensor-parallel strategy.
        volumes: numbers of elements of the split layers.
        gradient_bytes: bytes of all gradients of the workload.
        ranks: (rows,) number of ranks of the setup.
        most: (rows,) number of ranks on the fullest machine.
        samples: (rows,) samples of a device in a step, summed for all its micro-steps.
    """
    found = np.full(len(ranks), np.nan)
    for many, each in sorted({(int(a), int(b)) for a, b in zip(ranks, most, strict=True)}):
        shape = grid_shape(strategy, many)
        if shape is None:
            continue
        at = np.flatnonzero((ranks == many) & (most == each))
        _, columns, depth = shape
        rest = max(gradient_bytes / _BYTES_PER_VALUE - volumes.weights, 0.0)
        # a ring over all ranks: one rank of each machine sends to another machine
        ring = 2 * (many - 1) / many * rest * (many > each)
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
    """Return a (rows,) array: bytes that a machine sends for weights in one further micro-step.

    SUMMA gathers weights in the forward and in the backward pass, and scatters their gradients. The
    number is NaN if the ranks of a setup form no grid. Arguments are as in `machine_bytes`.
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
    """Return the fraction of a rank's peers that are on other machines.

    A group has `peers` ranks, whose numbers are `apart` from each other. A machine has `devices`
    ranks with consecutive numbers.
    """
    beside = min(max(devices // apart, 1), peers)
    return (peers - beside) / max(peers - 1, 1)
