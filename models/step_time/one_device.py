"""Define the prior of T1, the seconds of a forward and a backward pass on one device.

    log T1 = mean + sum of effects (EFFECTS) x deviations + curves in the batch

Deviations and curves are learned. Their prior mean is 0. The data sheet of the device gives the
bandwidth (memory bandwidth in GB/s) and the rate (peak TFLOP/s at the precision).

For a network with known FLOPs, the mean depends on log(FLOPs / rate) and on the bandwidth. The
prior assumes that all such networks reach the same fraction of the peak rate.

For a transformer, the mean is the log of a roofline:

    seconds = k tokens [1.05 x 6 N / rate + 1.8 x 12 L h s / rate + 450 bytes x L h / bandwidth]
              + 48 bytes x tokens x vocabulary size / bandwidth

    k         4/3 if activations are recomputed in the backward pass, else 1
    tokens    number of tokens in the batch
    N, L, h   number of parameters, number of layers, and width
    s         number of tokens in a sequence

The last term is for reading and writing the logits of the vocabulary. In attention, GPUs with more
TFLOP/s than an A100 reach a smaller fraction of their rate. The constants were chosen on held-out
groups of published rows of MPT transformers on A100 and H100 (mosaicml/llm-foundry).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray


@dataclass(frozen=True, slots=True)
class Parameter:
    """The prior of a hierarchical parameter: the mean, and a standard deviation for each level.

    A parameter is the sum of the mean and of a deviation at each level. The deviation at the level
    `all` is the same for all rows. The other levels have a deviation for each kind of device,
    cell, strategy, neural network, workload in one mode, or communication library. A cell is a
    workload in one mode on one kind of device. The libraries are gloo, NCCL over TCP, and NCCL over
    RDMA.
    """

    mean: float = 0.0
    all: float = 0.0
    kind: float = 0.0
    cell: float = 0.0
    strategy: float = 0.0
    network: float = 0.0
    workload: float = 0.0
    library: float = 0.0


EFFECTS: dict[str, Parameter] = {
    # per octave (factor of two) of batch
    "growth": Parameter(all=0.1, workload=0.1, cell=0.02),
    "bandwidth": Parameter(all=0.25, network=0.1, workload=0.1),
    "rate": Parameter(all=0.25, network=0.1, workload=0.1),
    "device": Parameter(kind=0.12),
    "network on device": Parameter(cell=0.08),
    "no data sheet": Parameter(kind=1.5),
    "unknown operations": Parameter(network=5.0, workload=0.5),
    "efficiency": Parameter(all=1.0, network=0.35, workload=0.25),
    "operations": Parameter(all=0.2),
    "transformer": Parameter(all=0.3, kind=0.15, network=0.08, workload=0.04, cell=0.03),
    "linear layers": Parameter(all=0.2, kind=0.1),
    "attention": Parameter(all=0.3, kind=0.15),
    "activations": Parameter(all=0.3, kind=0.1),
    "intensity": Parameter(all=0.15),
}
# Growth of log seconds per octave of batch; exponents of bandwidth and of rate. Memory limits some
# operations, and arithmetic limits the rest (derived for Srift).
_GROWTH, _BANDWIDTH, _RATE = 0.9 * np.log(2), 0.5, 0.5
# GB/s and TFLOP/s of a usual device. Effects are relative to this device.
USUAL = (500.0, 20.0)
# Fraction of the peak rate that all networks reach; slope of log seconds in the log of a step's
# operations; log seconds of a step with 10^12 operations on the usual device.
_EFFICIENCY, _BY_WORK = 0.4, -0.2
_USUAL_WORK = float(np.log(1e12 / (_EFFICIENCY * USUAL[1] * 1e12)))
_LINEAR, _ATTENTION, _ACTIVATIONS, _LOGITS = 1.05 * 6, 1.8 * 12, 450.0, 48.0
_RECOMPUTED = 4 / 3
_WORDS = 30_000.0, 250_000.0  # minimum and maximum of the estimated size of a vocabulary
# FlashAttention-2 reaches 50 to 73 % of the peak of an A100 and 35 % of the peak of an H100 [Dao
# 2023; Shah et al. 2024]. The exponent, chosen on held-out GPU generations, is smaller than these
# numbers suggest. The second number is the peak TFLOP/s of an A100.
_KERNELS, _AMPERE = 0.35, 312.0
# Large matrix products reach a smaller share of the peak on a device with more operations per byte
# of bandwidth. The numbers are the exponent, and the operations per byte of an A100 80 GB in bf16.
_INTENSITY, _USUAL_INTENSITY = 0.25, 312e12 / 2039e9


class Transformer(NamedTuple):
    """The shape of a transformer.

    `hidden` is the width. `sequence` is the number of tokens of a sample. `vocabulary` is the
    number of different tokens, or 0 if unknown.
    """

    parameters: float
    layers: float
    hidden: float
    sequence: float
    vocabulary: float = 0.0

    @property
    def words(self) -> float:
        """Return `vocabulary`, or estimate it from the number of parameters outside the layers.

        If the output layer does not share the input embeddings, the estimate is twice the true
        size of the vocabulary.
        """
        if self.vocabulary:
            return self.vocabulary
        outside = self.parameters / self.hidden - 12 * self.layers * self.hidden
        return min(max(outside, _WORDS[0]), _WORDS[1])


class Sheet(NamedTuple):
    """The memory bandwidth in GB/s and the peak rate in TFLOP/s of a device at a precision.

    `confidence` is 1 for numbers from a data sheet and for a CPU with a known number of cores. It
    is 0.6 if only the instance type states the rate of an accelerator, and 0 for unknown numbers.
    """

    bandwidth: float
    rate: float
    confidence: float


UNKNOWN = Sheet(*USUAL, 0.0)


def prior(
    batch: FloatArray,
    middle: float,
    sheet: Sheet,
    *,
    flops: float,
    transformer: Transformer | None,
    recomputed: bool,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the prior means of log T1, values of EFFECTS, and shape features.

    T1 is the seconds of a forward and a backward pass on one device. The results have the shapes
    (batches,), (batches, effects) and (batches, 4). The shape features of a transformer are log2 of
    its width, log2 of the tokens in a batch, log2 of the tokens in a sequence, and 1 if activations
    are recomputed. The features of other networks are zeros.

    batch: (batches,) samples.
    middle: log2 of the median batch that was measured for the workload.
    flops: floating-point operations of a sample; 0 if unknown.
    recomputed: True if the backward pass recomputes activations.
    """
    octave = np.log2(batch) - middle
    bandwidth, rate = (np.log(np.array(sheet[:2]) / np.array(USUAL))).tolist()
    lacking = 1 - sheet.confidence
    if transformer is not None:
        size, layers, hidden, sequence = transformer[:4]
        tokens = batch * sequence * (_RECOMPUTED if recomputed else 1.0)
        arithmetic = tokens / (sheet.rate * 1e12)
        faster = max(sheet.rate / _AMPERE, 1.0)
        logits = _LOGITS * transformer.words * batch * sequence
        seconds = np.array(
            [
                _LINEAR * size * arithmetic,
                _ATTENTION * layers * hidden * sequence * arithmetic * faster**_KERNELS,
                (_ACTIVATIONS * layers * hidden * tokens + logits) / (sheet.bandwidth * 1e9),
            ]
        )
        share = seconds / seconds.sum(axis=0)
        shape = np.log2(hidden), np.log2(batch * sequence), np.log2(sequence), float(recomputed)
        intensity = np.log(sheet.rate * 1e3 / sheet.bandwidth / _USUAL_INTENSITY)
        effects = [0.0, 0.0, 0.0, 1.0, 0.0, lacking, 0.0, 0.0, 0.0, 1.0, *share, intensity]
        mean = np.log(seconds.sum(axis=0)) + _INTENSITY * intensity
        return mean, _columns(*effects), _columns(*shape)
    known = float(flops > 0)
    work = float(np.log(flops * 2**middle / (_EFFICIENCY * USUAL[1] * 1e12))) if known else 0.0
    more = known * (work - _USUAL_WORK)
    mean = work + _BY_WORK * more + _GROWTH * octave - _BANDWIDTH * bandwidth - _RATE * rate
    effects = [octave, bandwidth, rate, 1.0, 1.0, lacking, 1 - known, known, more, *[0.0] * 5]
    return mean, _columns(*effects), np.zeros((len(batch), 4))


def _columns(*values: FloatArray | float) -> FloatArray:
    """Return an array with a column for each of `values`, numbers or (rows,) arrays."""
    return np.column_stack(np.broadcast_arrays(*values))
