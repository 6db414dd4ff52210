"""Define the prior of T1, the seconds of a forward and a backward pass on one device.

    log T1 = mean + sum over EFFECTS of (effect x deviation) + curves in the batch

The mean and the effects are computed from facts. Deviations and curves are learned, and have the
prior mean 0. The data sheet of the device gives the bandwidth (memory bandwidth in GB/s) and the
rate (peak TFLOP/s at the precision).

For a transformer, the mean is the log of these seconds, with FLOP/s and bytes/s as units:

    seconds = i (k tokens [1.05 x 6 N / rate + 1.8 x 12 L h s g / rate
                           + 450 bytes x L h / bandwidth]
                 + 48 bytes x tokens x vocabulary size / bandwidth)

    k         4/3 if activations are recomputed in the backward pass, else 1
    tokens    number of tokens in the batch
    N, L, h   number of parameters, number of layers, and width
    s         number of tokens in a sequence
    g         max(rate / rate of an A100, 1)^0.35, because faster GPUs reach a smaller fraction of
              their rate in attention
    i         (x / x_A100)^0.25, where x = rate / bandwidth, and x_A100 is the ratio of an A100

The last term is for reading and writing the logits of the vocabulary. The constants were chosen on
held-out published measurements of MPT transformers on A100 and H100 (mosaicml/llm-foundry).

For any other network, the mean is the log of these seconds, with TFLOP/s and GB/s as units:

    seconds = 0.125 F^0.8 (b / b0)^0.9 (500 / bandwidth)^0.5 (20 / rate)^0.5

    b, b0     the batch and the middle batch (the median of the measured batches)
    F         operations of a forward and a backward pass with b0 samples, divided by 10^12. If F
              is unknown, the factor 0.125 F^0.8 is left out
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray


@dataclass(frozen=True)
class Parameter:
    """The prior of a hierarchical parameter: the mean, and a standard deviation for each level.

    The value for a row is the mean plus a deviation at each level. Each level groups the rows, and
    rows of the same group have the same deviation:

    - `all`: a single group of all rows
    - `kind`: by kind of device
    - `cell`: by workload, mode and kind of device
    - `strategy`: by strategy
    - `network`: by neural network
    - `workload`: by workload and mode
    - `library`: by communication library: gloo, NCCL over TCP, or NCCL over RDMA
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
        """Return the number of different tokens: `vocabulary`, or an estimate if it is unknown.

        The estimate follows from the parameters outside the layers, which are assumed to be a
        single embedding table. If the output layer does not share this table, the estimate is twice
        the true vocabulary size. Estimates are limited to the range from 30,000 to 250,000 tokens.
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
    """Return the prior means of log T1, the values of EFFECTS, and shape features, for each batch.

    T1 is the seconds of a forward and a backward pass on one device. The results have the shapes
    (batches,), (batches, effects) and (batches, 4). The shape features of a transformer are:

    1. log2 of its width
    2. log2 of the tokens in a batch
    3. log2 of the tokens in a sequence
    4. 1 if activations are recomputed, else 0

    The features of other networks are zeros.

    batch: (batches,) samples.
    middle: log2 of the median batch that was measured for the workload.
    sheet: the memory bandwidth and the peak rate of the device.
    flops: floating-point operations of a sample; 0 if unknown.
    transformer: the shape of the network; None if it is no transformer.
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
    """Return an array with a column for each value, which is a number or a (rows,) array."""
    return np.column_stack(np.broadcast_arrays(*values))
