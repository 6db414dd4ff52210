"""Estimate the bytes that each strategy sends, and the bytes that a device holds for the exchange.

Measured runs correct the estimates. There are M machines with n devices each, and P ranks in total.
The gradients have d values of 4 bytes.

    mstopk     A machine divides its d summed gradients among its n devices. A device sends the
               fraction p of its values to other machines: (M-1) * 8 p d/n bytes [Shi et al. 2021].
    dense      A hierarchical all-reduce, for comparison: a device sends 2 (M-1)/M * 4 d/n bytes.
    powersgd   A rank sends r (rows + columns) values of each rows x columns matrix [Vogels et al.
               2019]. r is the rank of the factors.
    adasum     P is a power of two. A rank sends 2 (P-1)/P * 4 d bytes. It exchanges with ranks of
               its own machine first. Therefore, a machine sends only 2 (M-1)/M * 4 d bytes to other
               machines. The bytes of dot products are neglected [D].
    servers    There are S parameter servers, at most one per machine. In a first phase, a server
               receives (P-n)/S * 4 d bytes from other machines. In a second phase, it sends as many
               bytes back. Other machines send and receive at most this many bytes [D].

Tensor parallelism exchanges activations and weights. A linear layer maps K features to N features.
In a step, all ranks together process B rows, such as tokens. The inputs of the layer have |X| = B K
elements, its outputs |Y| = B N, and its weights |W| = K N. For the layer, a rank sends these
numbers of elements:

    tensor-2d, tensor-2.5d, on a grid of q x q x z ranks [D]:
        forward pass                   (q-1)/q^2 * (|X|/z + |W|)
        gradients of X                 (q-1)/q^2 * (|X|/z + |W|)
        gradients of W                 (q-1)/q^2 * (|X|/z + |W|)
        sum of the gradients of W      2 (z-1)/z * |W|/q^2
    tensor-1d, for the forward and the backward pass together [Shoeybi et al. 2019]:
        first layer of a pair          2 (P-1)/P * |X|
        second layer of a pair         2 (P-1)/P * |Y|

The terms (q-1)/q^2 * |W| count once per micro-step. Ranks are numbered along the rows of the grid,
one row after another. Only exchanges with ranks on other machines use the network. Exchanges for
biases and LayerNorms are neglected. Exchanges at the start and at the end of a group of consecutive
split layers are also neglected [D].

[D] marks numbers that were derived for Srift and are in no paper.
"""

from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray
from ..domain.workload import (
    ADASUM,
    ADASUM_DELTA,
    COMBINED,
    FP16_SENT,
    MSTOPK_SENT,
    POWERSGD_SENT,
    SERVED,
    STRATEGIES,
    TENSOR,
    TENSOR_1D,
    UPDATES_SHARED,
    Mode,
    grid_shape,
)
from .machine_specs import Machine

# Fraction of entries that ddp-mstopk sends, as in tasks/node/strategies/compression.py.
DENSITY = 0.01
_BYTES_PER_VALUE = 4.0
# Seconds per gradient value to select the values to send. GPU: about 20 passes over 4 bytes at
# 300 GB/s, the rate of slow GPUs [D]. CPU core: measured on local hosts.
_SELECTION_S_GPU, _SELECTION_S_CORE = 0.3e-9, 12e-9


class Communication(NamedTuple):
    """How the communication of a strategy differs from the communication of DDP.

    Attributes:
        sent: bytes sent on all links, divided by the bytes that DDP sends. DDP sends each gradient
            twice.
        on_gloo: a factor on the bytes sent, for the backend gloo only. Gloo has no reduce-scatter,
            so every rank receives the sum of all gradients [torch 2.13].
        held: bytes that a device holds for the exchange, divided by its gradient bytes. All
            strategies hold buckets. Some also hold residuals, values received from another rank, or
            the weights before the step [D].
        waits: True if the backward pass waits while a bucket is exchanged. Compression needs the
            device for the exchange. In tensor parallelism, the next layer needs the result.
        passes: how often compression or Adasum reads all gradient values, relative to ddp-mstopk.
            ddp-mstopk reads them about 20 times [D].
    """

    sent: float = 1.0
    on_gloo: float = 1.0
    held: float = 1.0
    waits: bool = False
    passes: float = 0.0


COMMUNICATION = {
    **dict.fromkeys(STRATEGIES, Communication()),
    # A rank gathers weights twice and sums gradients.
    "fsdp": Communication(sent=1.5, on_gloo=2.0 / 1.5),
    # A rank gathers weights once and sums gradients.
    "zero2": Communication(on_gloo=1.5),
    # A rank gathers weights after an all-reduce.
    UPDATES_SHARED: Communication(sent=1.5),
    FP16_SENT: Communication(sent=0.5),
    # `sent` is an upper bound, for factors of rank 4 and a network of vectors and narrow matrices.
    # The built-in workloads send 0.01 to 0.10. Square layers of width 512 send 1/16 [D].
    POWERSGD_SENT: Communication(sent=1 / 4, held=2.0, waits=True, passes=3 / 20),
    MSTOPK_SENT: Communication(held=2.0, waits=True, passes=1.0),
    ADASUM: Communication(held=1.5, waits=True, passes=5 / 20),
    ADASUM_DELTA: Communication(held=3.5, waits=True, passes=5 / 20),
    **dict.fromkeys(TENSOR, Communication(waits=True)),
    # A server also holds its share of the gradients of a peer.
    **{name: Communication(held=1.0 + 1.0 / Mode(strategy=name).servers) for name in SERVED},
}


class Volumes(NamedTuple):
    """The numbers of elements in the layers that tensor parallelism splits.

    - `weights`: the weights of all these layers
    - `inputs`: the inputs of all these layers for one sample
    - `pairs`: the inputs of the first layer plus the outputs of the second layer, summed over all
      pairs of layers, for one sample. Only tensor-1d splits layers in pairs.
    """

    weights: float = 0.0
    inputs: float = 0.0
    pairs: float = 0.0

    @property
    def known(self) -> bool:
        return self.weights > 0 and self.inputs > 0


def seconds_per_value(machine: Machine) -> float:
    """Return the seconds per gradient value that ddp-mstopk needs to select the values to send."""
    return (
        _SELECTION_S_GPU if machine.has_accelerator else _SELECTION_S_CORE / min(machine.cores, 1.0)
    )


def selection_seconds(
    strategy: str, sent_bytes: FloatArray, devices: FloatArray, per_value: FloatArray
) -> FloatArray:
    """Return a (rows,) array: the seconds that compression or Adasum adds to each step.

    Args:
        strategy: the strategy of all rows.
        sent_bytes: (rows,) bytes that the strategy sends: all gradient bytes, multiplied by the
            factor `Communication.sent`.
        devices: (rows,) number of devices of the largest machine. In ddp-mstopk, the devices of a
            machine share the work.
        per_value: (rows,) seconds per gradient value (see `seconds_per_value`).
    """
    known = COMMUNICATION[strategy]
    values = sent_bytes / known.sent / _BYTES_PER_VALUE * known.passes
    return (values / devices if strategy == MSTOPK_SENT else values) * per_value


def sent_between(strategy: str, machines: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return a (rows,) array: bytes that leave a machine, relative to a ring all-reduce.

    In a ring all-reduce of G bytes over n ranks, a machine sends 2 (n - 1) / n x G bytes to other
    machines.
    """
    if strategy in COMBINED:
        sent = (machines - 1) / machines
    elif strategy in SERVED:
        sent = (ranks - ranks / machines) / Mode(strategy=strategy).servers
    elif strategy == MSTOPK_SENT:
        sent = (machines - 1) * DENSITY
    else:
        return np.ones_like(ranks)
    return sent * ranks / np.maximum(ranks - 1, 1)


def tensor_bytes(
    strategy: str,
    volumes: Volumes,
    gradient_bytes: float,
    *,
    ranks: FloatArray,
    most: FloatArray,
    samples: FloatArray,
    micro_steps: FloatArray,
) -> FloatArray:
    """Return a (rows,) array: the bytes that a machine sends in a step of tensor parallelism.

    Gradients of layers that are not split are sent as in DDP. The strategies tensor-2d and
    tensor-2.5d multiply matrices with the algorithm SUMMA. The result is NaN if the ranks cannot
    form the grid that the strategy needs.

    Args:
        strategy: a tensor-parallel strategy.
        volumes: numbers of elements of the split layers.
        gradient_bytes: bytes of all gradients of the workload.
        ranks: (rows,) number of ranks of the setup.
        most: (rows,) number of ranks on the machine with the most ranks.
        samples: (rows,) samples of a device in a step, summed over the micro-steps.
        micro_steps: (rows,) number of micro-steps in a step.
    """
    counts, which = np.unique(ranks, return_inverse=True)
    shapes = [grid_shape(strategy, int(count)) or (np.nan,) * 3 for count in counts]
    _, columns, depth = np.array(shapes)[which].T
    if strategy == TENSOR_1D:
        of_rank = 2 * (columns - 1) * volumes.pairs * samples * _outside(columns, 1, most)
    else:
        square = columns**2
        inputs = volumes.inputs * samples * _outside(columns, 1, most)
        weights = micro_steps / square * volumes.weights * _outside(columns, columns, most)
        depths = 2 * (depth - 1) / depth * volumes.weights / square * _outside(depth, square, most)
        of_rank = 3 * (columns - 1) * (inputs + weights) + depths
    rest = max(gradient_bytes / _BYTES_PER_VALUE - volumes.weights, 0.0)
    # a ring over all ranks: one rank of each machine sends to another machine
    ring = 2 * (ranks - 1) / ranks * rest * (ranks > most)
    found: FloatArray = _BYTES_PER_VALUE * (most * of_rank + ring)
    return found


def _outside(peers: FloatArray, apart: FloatArray | float, devices: FloatArray) -> FloatArray:
    """Return the fraction of a rank's peers that are on other machines.

    The peers of a rank are the remaining ranks of the group with which it exchanges data.

    peers: number of ranks in the group, including the rank itself.
    apart: spacing of the group's rank numbers: 2 for the group of ranks 0, 2 and 4.
    devices: number of ranks on a machine, which have consecutive rank numbers.
    """
    beside = np.minimum(np.maximum(devices // apart, 1), peers)
    return (peers - beside) / np.maximum(peers - 1, 1)
