"""What strategies send that send something else than ddp or another way, and what making it costs, before any run.

    mstopk     a device sends (M - 1) 8 p d / n bytes to other machines [Shi et al. 2021], with M machines of n
               devices each, d values of 4 bytes and a density p, and looks for the largest p d / n of d / n values
    dense      2 (M - 1) / M 4 d / n: a device's part of a hierarchical all-reduce
    powersgd   r (rows + columns) of each rows x columns matrix, instead of all [Vogels et al. 2019]
    adasum     2 (P - 1) / P 4 d of P = 2^m ranks, of which a machine sends 2 (M - 1) / M 4 d to others, since ranks of
               one machine are halved among first; and 24 m (m + 1) / 2 bytes a parameter, which are left out [D]
    servers    each of S, at most one on a machine, receives (P - n) / S of 4 d from other machines, then sends as much
               back; no machine sends or receives more in either turn [D]

fp16 sends half of what dense does. Rows of a strategy's own correct all of this as they do any other setup's.
"""

from __future__ import annotations

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

DENSITY = 0.01  # part of the entries that ddp-mstopk sends; tasks/node/strategies/compression.py has the same
_BYTES_PER_VALUE = 4.0
# A rank of 4, of networks that are mostly vectors and narrow matrices (a table of 16 columns). Square layers of 512
# send a sixteenth of that [D]; the built-in workloads 0.01 to 0.10. Too much is said before a workload has own runs.
_POWERSGD_PART = 1 / 4
_POWERSGD_PASSES = (
    3 / 20
)  # over all values: two products and what they miss [D]; ddp-mstopk's are 20
_ADASUM_PASSES = (
    5 / 20
)  # two vectors read for their dots, both and one written to add them [D]; a core takes 2 to 6 ns
# Of looking for the largest among a device's part, with what is added and put back, a value: 20 passes over 4 bytes at
# 300 GB/s, as the slowest GPUs in use read [D]; on a processor core by steps of local hosts at 3.2 Gbit/s
# (tests.benchmarks.strategies; finding alone takes 6 to 10).
SELECTION_S_GPU, SELECTION_S_CORE = 0.3e-9, 12e-9


def sent_everywhere(strategy: str) -> float:
    """Bytes sent inside machines and between them, as a part of those of plain data parallelism."""
    return {FP16_SENT: 0.5, POWERSGD_SENT: _POWERSGD_PART}.get(strategy, 1.0)


def in_turn(strategy: str) -> bool:
    """Whether the backward pass waits while a bucket is exchanged: compressing takes the device that computes it, and a
    divided layer waits for what the one before exchanges.
    """
    return strategy in (POWERSGD_SENT, MSTOPK_SENT, *COMBINED, *TENSOR)


def beside_gradients(strategy: str) -> float:
    """Bytes that a device holds for what is sent, as a part of its gradients': buckets, and beside them what is not
    sent yet, what comes from a peer, or weights before a step and what it changed [D].
    """
    servers = Mode(strategy=strategy).servers
    if servers:  # its part of what a peer sends
        return 1.0 + 1.0 / servers
    return {POWERSGD_SENT: 2.0, MSTOPK_SENT: 2.0, ADASUM: 1.5, ADASUM_DELTA: 3.5}.get(strategy, 1.0)


def seconds_per_value(machine: Machine) -> float:
    """Of looking for the largest among the values of one of its devices."""
    return SELECTION_S_GPU if machine.accelerated else SELECTION_S_CORE / min(machine.cores, 1.0)


def selection_seconds(
    strategy: str, gradient_bytes: FloatArray, devices: FloatArray, per_value: FloatArray
) -> FloatArray:
    """(rows,) seconds of making what is sent; `gradient_bytes` are those of `sent_everywhere`, and the `devices` of a
    machine share the search of ddp-mstopk.
    """
    values = gradient_bytes / sent_everywhere(strategy) / _BYTES_PER_VALUE
    if strategy == POWERSGD_SENT:
        return np.asarray(values * _POWERSGD_PASSES * per_value, dtype=float)
    if strategy in COMBINED:
        return np.asarray(values * _ADASUM_PASSES * per_value, dtype=float)
    return np.asarray(values / devices * per_value * (strategy == MSTOPK_SENT), dtype=float)


def sums_everywhere(strategy: str) -> float:
    """What gloo sends in place of what `dataset.sent_part` counts: it sums at all ranks what one keeps [torch 2.13]."""
    return {"fsdp": 2.0 / 1.5, "zero2": 1.5}.get(strategy, 1.0)


def sent_between(strategy: str, machines: FloatArray, ranks: FloatArray) -> FloatArray:
    """(rows,) bytes that a machine sends to others as a part of 2 (ranks - 1) / ranks of all gradients: formula.py."""
    if strategy in COMBINED:
        return np.asarray((machines - 1) / machines * ranks / np.maximum(ranks - 1, 1), dtype=float)
    servers = Mode(strategy=strategy).servers
    if servers:
        away = ranks - ranks / machines
        return np.asarray(away / servers * ranks / np.maximum(ranks - 1, 1), dtype=float)
    if strategy != MSTOPK_SENT:
        return np.ones_like(ranks)
    return np.asarray((machines - 1) * DENSITY * ranks / np.maximum(ranks - 1, 1), dtype=float)
