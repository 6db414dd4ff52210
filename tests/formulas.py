"""Bytes and elements that strategies send, by their papers: references for tests and benchmarks."""

from collections.abc import Sequence

import numpy as np

from models.domain.workload import TENSOR_1D, grid_shape
from models.step_time.bytes_sent import DENSITY

Layer = tuple[float, float]  # features of inputs and of outputs


def dense_bytes(gradient_bytes: float, machines: int, devices: int) -> float:
    """Bytes that one of a machine's `devices` sends to other machines in a DDP step."""
    return 2 * (machines - 1) / machines * gradient_bytes / devices


def sparse_bytes(
    gradient_bytes: float, machines: int, devices: int, density: float = DENSITY
) -> float:
    """The same of ddp-mstopk: position and value, 8 bytes, of each entry that is sent."""
    return (machines - 1) * 8 * density * gradient_bytes / 4 / devices


def adasum_bytes(gradient_bytes: float, parameters: int, ranks: int) -> float:
    """Bytes of one rank in a step of Adasum: halves at each level, and three doubles a parameter."""
    levels = int(np.log2(ranks))
    return 2 * (ranks - 1) / ranks * gradient_bytes + 12 * parameters * levels * (levels + 1)


def sent_elements(
    strategy: str,
    ranks: int,
    layers: Sequence[Layer],
    rows: float,
    *,
    needs_input_gradient: bool = True,
) -> float:
    """Elements sent per rank by tensor parallelism over `layers`, with `rows` of all ranks."""
    shape = grid_shape(strategy, ranks)
    assert shape is not None, f"{ranks} ranks are no grid of {strategy}"
    side, columns, depth = shape
    turned = (columns - 1) / columns * rows / ranks
    first, last = layers[0][0], layers[-1][1]
    ways = 1 + needs_input_gradient
    if strategy == TENSOR_1D:
        moved = sum(
            rows * (after if at % 2 else before * (ways if at == 0 else 2) / 2)
            for at, (before, after) in enumerate(layers)
        )
        return 2 * (ranks - 1) / ranks * moved + 2 * turned * last * (len(layers) % 2)
    fraction = (side - 1) / side**2
    found = turned * (ways * first + 2 * last)
    for at, (before, after) in enumerate(layers):
        passes = 3.0 if at else 1.0 + ways
        found += fraction * passes * rows * before / depth
        found += (fraction * passes + 2 * (depth - 1) / depth / side**2) * before * after
    return found
