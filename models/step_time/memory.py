"""Will a batch fit on a device: peak bytes of one rank. Measured where it was profiled, else bounded from facts.

    peak = (fixed + per_sample x batch + 2 G) (1 + headroom)                    profiled; G gradient bytes
    peak =  context + 7 G + per_sample x batch                                  from facts
    per_sample = the least of    (memory - 2 G) / batch              over every run that is known to have fitted
                                 activation bytes per operation x operations per sample
    peak <= memory of any device on which that batch or a larger one has run
    peak = as if nothing were shared - 2 G - (1 - 1 / ranks) (S + G) + gathered      S bytes of weights and states

In fp32, G bytes each: weights, gradients, Adam's two moments (PyTorch keeps them as the weights are), DDP's buckets and
the collective's copy of them (the 2 G that one device alone does not have), and a spare. Too cautious rather than not:
a batch that is refused is run in accumulation steps, one that does not fit is not run at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray
from ..domain.setup_table import SetupArrays
from ..domain.workload import Mode, workload_and_mode
from .machine_specs import Machine

Line = tuple[float, float]  # (first, second): bytes = first + second * batch

_COPIES, _EXCHANGED = 7.0, 2.0
# Runs took up to 15 % more than their profile's line on local hosts, 3 % in the middle (BENCHMARKS.md).
_HEADROOM = 0.1
# A process with torch and its communication: 0.35 GB on local hosts, with a CUDA context and NCCL's buffers more.
_CONTEXT = 0.8e9
# Bytes kept for the backward pass per operation of forward and backward: twice the 0.1 GB that a ResNet-50 keeps for
# its 25 GFLOP a sample, since narrow layers keep more. Replaced by what the provider's own profiles show at most.
_PER_OPERATION = 0.01
_BYTES_PER_GIB = 2.0**30
# Weights, and Adam's two moments, per byte of gradients; where a checkpoint was written its bytes are known.
_STATE_PER_GRADIENT = 3.0
# Of all weights, those gathered at a time: a group of at most an eighth, and the next one (node/strategies.py).
_GATHERED = 0.25
# With a single measured batch, the part of its bytes taken to be proportional to batch.
_PROPORTIONAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """`lines` were measured, by workload and type; `facts` bound those workloads that nobody profiled."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    facts: dict[str, Line] = field(default_factory=dict)
    ran: dict[str, tuple[Line, ...]] = field(default_factory=dict)  # (bytes of a device, largest batch that ran on it)
    shared: dict[str, Line] = field(default_factory=dict)  # of a sharded mode: bytes shared, and not needed among ranks

    def line(self, workload: str, instance_type: str) -> Line | None:
        """Bytes of a rank as a line in batch: this type's, else the largest of the other types', else from facts.

        None where nothing is known of the workload.
        """
        own = self.lines.get((workload, instance_type))
        if own is not None:
            return own
        others = [line for (owner, _), line in self.lines.items() if owner == workload]
        if others:
            return max(first for first, _ in others), max(second for _, second in others)
        return self.facts.get(workload)

    def with_facts(self, workload: str, *, gradient_bytes: float, flops_per_sample: float) -> MemoryModel:
        """With a bound for a workload of which only these facts are known; what was known before stays."""
        line = (_CONTEXT + _COPIES * gradient_bytes, _PER_OPERATION * flops_per_sample)
        return replace(self, facts={workload: line} | self.facts)

    def peak_bytes(self, workload: str, instance_type: str, batch: float, ranks: int = 1) -> float:
        """Peak memory of one of `ranks` ranks at `batch`; NaN where nothing is known of the workload."""
        line = self.line(workload, instance_type)
        if line is None:
            return float("nan")
        if workload in self.shared and ranks > 1:
            shared, spared = self.shared[workload]
            return max(line[0] - spared - shared * (1 - 1 / ranks), shared / ranks) + line[1] * batch
        shown = [memory for memory, most in self.ran.get(workload, ()) if batch <= most]
        return min([line[0] + line[1] * batch, *shown])


def fit_memory(
    profiles: pd.DataFrame,
    ran: SetupArrays,
    machines: Mapping[str, Machine],
    *,
    gradient_bytes: Mapping[str, float],
    flops_per_sample: Mapping[str, float],
    checkpoint_bytes: Mapping[str, float],
) -> MemoryModel:
    """Lines from the profiles' peaks, and bounds for the other workloads of `ran` and of the facts.

    `profiles` has workload, instance_type, batch and peak_bytes; `ran` are setups that were measured, so that they
    fitted; `gradient_bytes`, `flops_per_sample` and `checkpoint_bytes` are by workload, unknown ones absent or 0.
    """
    measured = _profiled(profiles)
    lines = {
        pair: ((first + _EXCHANGED * gradient_bytes.get(pair[0], 0.0)) * (1 + _HEADROOM), second * (1 + _HEADROOM))
        for pair, (first, second) in measured.items()
    }
    shown = [
        second / flops_per_sample[workload]
        for (workload, _), (_, second) in measured.items()
        if flops_per_sample.get(workload, 0.0) > 0
    ]
    per_operation = max(shown, default=_PER_OPERATION)
    seen = _largest_that_ran(ran, machines)
    largest = {name: own for name, own in seen.items() if not workload_and_mode(name)[1].sharded}
    facts: dict[str, Line] = {}
    for workload in sorted({*largest, *gradient_bytes, *flops_per_sample} - {name for name, _ in lines}):
        size = gradient_bytes.get(workload, 0.0)
        # the least that may stand beside the activations: weights and gradients
        bounds = [max(memory - 2 * size, 0.0) / batch for memory, batch in largest.get(workload, ())]
        if flops_per_sample.get(workload, 0.0) > 0:
            bounds.append(per_operation * flops_per_sample[workload])
        if bounds:
            facts[workload] = (_CONTEXT + _COPIES * size, min(bounds))
    shared = {
        name: _shared(mode, size, checkpoint_bytes.get(name, 0.0) or _STATE_PER_GRADIENT * size)
        for name, size in gradient_bytes.items()
        if (mode := workload_and_mode(name)[1]).sharded
    }
    ran_by = {name: tuple(own) for name, own in largest.items() if own}
    return MemoryModel(lines=lines, facts=facts, ran=ran_by, shared=shared)


def _shared(mode: Mode, gradient_bytes: float, state_bytes: float) -> Line:
    """Bytes that ranks share, and those that they do not need beside: DDP's buckets less what is gathered."""
    gathered = gradient_bytes * (_GATHERED if mode.strategy == "fsdp" else 1.0)
    return state_bytes + gradient_bytes, _EXCHANGED * gradient_bytes * (1 + _HEADROOM) - gathered


def straight(x: FloatArray, y: FloatArray) -> Line:
    """Intercept and slope by least squares, neither negative; through the origin's side where only one x is known."""
    if len(np.unique(x)) == 1:
        middle = float(np.median(y))
        return (1 - _PROPORTIONAL) * middle, _PROPORTIONAL * middle / float(x[0])
    slope, intercept = (float(one) for one in np.polyfit(x, y, 1))
    if slope < 0:
        return float(np.mean(y)), 0.0
    return (intercept, slope) if intercept >= 0 else (0.0, float(x @ y / (x @ x)))


def _profiled(profiles: pd.DataFrame) -> dict[tuple[str, str], Line]:
    if "peak_bytes" not in profiles:
        return {}
    peaks = profiles[["workload", "instance_type", "batch", "peak_bytes"]].dropna()
    peaks = peaks[(peaks["batch"] > 0) & (peaks["peak_bytes"] > 0)]
    return {
        (str(workload), str(name)): straight(rows["batch"].to_numpy(float), rows["peak_bytes"].to_numpy(float))
        for (workload, name), rows in peaks.groupby(["workload", "instance_type"])
    }


def _largest_that_ran(ran: SetupArrays, machines: Mapping[str, Machine]) -> dict[str, list[tuple[float, float]]]:
    """(bytes of the device, largest batch that ran on it) by workload, one entry an amount of memory."""
    found: dict[str, dict[float, float]] = {}
    for workload, types, batches in zip(ran.workloads, ran.types, ran.batch, strict=True):
        own = found.setdefault(workload, {})
        for name, batch in zip(types, batches, strict=False):
            gib = machines[name].device_memory_gib
            if gib is not None:
                own[gib] = max(own.get(gib, 0.0), float(batch))
    return {
        workload: [(gib * _BYTES_PER_GIB, batch) for gib, batch in own.items() if batch > 0 and np.isfinite(batch)]
        for workload, own in found.items()
    }
