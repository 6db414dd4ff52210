"""Estimate bytes and seconds of strategies whose communication differs from DDP.

The symbols: M machines have n devices each, P ranks in total. The gradients have d values of 4
bytes.

    mstopk     a device sends (M - 1) 8 p d / n bytes to other machines [Shi et al. 2021]; p is the
               density: it selects p d / n of d / n values
    dense      2 (M - 1) / M 4 d / n: a device's share of a hierarchical all-reduce
    powersgd   r (rows + columns) values of each rows x columns matrix [Vogels et al. 2019]; r is
               the rank of the factors
    adasum     each of P = 2^m ranks sends 2 (P - 1) / P 4 d; a machine sends 2 (M - 1) / M 4 d of
               this to other machines, because vectors are halved between the ranks of one machine
               first. Dot products are neglected [D]
    servers    each of S servers, at most one per machine, receives (P - n) / S times 4 d from other
               machines, then sends as much back; no machine sends or receives more in either
               phase [D]

fp16 sends half as much as dense. All these numbers are priors; measured runs of a strategy correct
them.
"""

import numpy as np

from ..domain.numeric import FloatArray
from ..domain.workload import (
    ADASUM,
    ADASUM_DELTA,
    COMBINED,
    FP16_SENT,
    MSTOPK_SENT,
    POWERSGD_SENT,
    TENSOR,
    Mode,
)
from .machine_specs import Machine

# Fraction of entries that ddp-mstopk sends, as in tasks/node/strategies/compression.py.
DENSITY = 0.01
_BYTES_PER_VALUE = 4.0
# An upper bound until the workload has PowerSGD runs: rank 4 on networks of vectors and narrow
# matrices. The built-in workloads send 0.01 to 0.10, square layers of 512 a sixteenth [D].
_POWERSGD_PART = 1 / 4
# Passes over all values, relative to the 20 of ddp-mstopk [D].
_POWERSGD_PASSES = 3 / 20
_ADASUM_PASSES = 5 / 20
# Seconds to select among the entries, per value. GPU: 20 passes over 4 bytes at the 300 GB/s of
# slow GPUs [D]. Core: measured on local hosts.
SELECTION_S_GPU, SELECTION_S_CORE = 0.3e-9, 12e-9


def sent_everywhere(strategy: str) -> float:
    """Return the bytes that a strategy sends, divided by the bytes that DDP sends.

    The fraction is the same for links inside a machine and for links between machines.
    """
    return {FP16_SENT: 0.5, POWERSGD_SENT: _POWERSGD_PART}.get(strategy, 1.0)


def in_turn(strategy: str) -> bool:
    """Return True if the backward pass waits while a bucket is exchanged.

    Compression runs on the device that computes the backward pass. A layer of tensor parallelism
    needs the result of the exchange before it.
    """
    return strategy in (POWERSGD_SENT, MSTOPK_SENT, *COMBINED, *TENSOR)


def beside_gradients(strategy: str) -> float:
    """Return the bytes that a device holds for the exchange, divided by its gradient bytes [D].

    The bytes are those of the buckets, plus what the strategy stores in addition: residuals, the
    values of a peer, or the weights before the step.
    """
    servers = Mode(strategy=strategy).servers
    if servers:  # a server holds its share of a peer's gradients
        return 1.0 + 1.0 / servers
    return {POWERSGD_SENT: 2.0, MSTOPK_SENT: 2.0, ADASUM: 1.5, ADASUM_DELTA: 3.5}.get(strategy, 1.0)


def seconds_per_value(machine: Machine) -> float:
    """Return the seconds that one device needs to select among the gradients, per value."""
    return SELECTION_S_GPU if machine.accelerated else SELECTION_S_CORE / min(machine.cores, 1.0)


def selection_seconds(
    strategy: str, gradient_bytes: FloatArray, devices: FloatArray, per_value: FloatArray
) -> FloatArray:
    """Return a (rows,) array: the seconds that compression or Adasum adds to each step.

    Args:
        strategy: the strategy of all rows.
        gradient_bytes: (rows,) bytes that were already multiplied by `sent_everywhere`.
        devices: (rows,) devices of a machine. They share the selection of ddp-mstopk.
        per_value: (rows,) results of `seconds_per_value`.
    """
    values = gradient_bytes / sent_everywhere(strategy) / _BYTES_PER_VALUE
    if strategy == POWERSGD_SENT:
        return np.asarray(values * _POWERSGD_PASSES * per_value, dtype=float)
    if strategy in COMBINED:
        return np.asarray(values * _ADASUM_PASSES * per_value, dtype=float)
    return np.asarray(values / devices * per_value * (strategy == MSTOPK_SENT), dtype=float)


def sums_everywhere(strategy: str) -> float:
    """Return the bytes that gloo sends, divided by the bytes that `dataset.sent_part` assumes.

    Gloo has no reduce-scatter: it sums all gradients at every rank, so it sends more [torch 2.13].
    """
    return {"fsdp": 2.0 / 1.5, "zero2": 1.5}.get(strategy, 1.0)


def sent_between(strategy: str, machines: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return a (rows,) array: the bytes that a machine sends to other machines, as a ratio.

    The ratio is to the bytes of a ring all-reduce, which are 2 (ranks - 1) / ranks times the
    gradient bytes.
    """
    if strategy in COMBINED:
        return np.asarray((machines - 1) / machines * ranks / np.maximum(ranks - 1, 1), dtype=float)
    servers = Mode(strategy=strategy).servers
    if servers:
        away = ranks - ranks / machines
        return np.asarray(away / servers * ranks / np.maximum(ranks - 1, 1), dtype=float)
    if strategy != MSTOPK_SENT:
        return np.ones_like(ranks)
    return np.asarray((machines - 1) * DENSITY * ranks / np.maximum(ranks - 1, 1), dtype=float)
