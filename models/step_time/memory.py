"""Predict the peak memory of one rank from profiles, or else from facts and completed runs.

    peak = (base + beside + working) (1 + headroom)

    base        bytes on one device that do not depend on the batch
    beside      bytes that the strategy adds, minus the bytes that sharding saves
    working     bytes of activations and gradients
    headroom    fraction for gaps in the allocated memory; 0 if the workload was not profiled
    context     bytes that torch and its communication need
    a           activation bytes per sample
    b           number of samples that a device processes in a micro-step
    S           bytes of weights and optimizer states
    W = G       bytes of all weights, which equal the bytes of all gradients
    W', G'      bytes of the weights and of the gradients of a group of layers. FSDP and ZeRO-2
                gather one group after another
    n           number of ranks
    c           number of columns in a grid of tensor parallelism

If the workload was profiled, base and a are fitted to the profiled peaks base + max(G, a b).
Otherwise, base = context + S, and a is the minimum of these estimates:

    (device memory - 2 G / n) / batch                        for each run that had enough memory
    activation bytes of the layers, and of the logits        if the workload is a transformer
    activation bytes per operation x operations per sample   for other networks of known operations

In the first estimate, n is 1 without sharding, and G is 0 with offload.

                     beside                contents of beside              working
    ddp              G                     buckets, summed in place        max(a b, G)
    ddp-powersgd     2 G                   buckets, residuals              max(a b, G)
    ddp-mstopk       2 G + 2 G'            buckets, residuals, magnitudes  max(a b, G)
    adasum           1.5 G                 (upper bound)                   max(a b, G)
    adasum-delta     3.5 G                 old weights, changes            max(a b, G)
    ps-N             (1 + 1/N) G           buckets, a server's share       max(a b, G)
    zero1            G - (1 - 1/n) (S - W)                                 max(a b, G)
    tensor-...       G                     buckets (upper bound)           max(a b (c + 1) / 2, G)
    fsdp             3 W' + 2 G' - (1 - 1/n) S                             max(a b, G / n)
    zero2            W (1 - 1/n) + W' + 2 G' - (1 - 1/n) S                 max(a b, G / n)
    fsdp, offload    3 W' + 2 G' + (W' + G') / n - S                       a b
    zero2, offload   W + W' + 2 G' + (W' + G') / n - S                     a b

If a run with this batch or a larger batch fitted into a device, the peak is at most the memory of
that device. This bound does not apply to tensor parallelism.

The weights of a group (W') stay in memory while the next group is gathered. The gradients of a
group (G') are copied before they are summed. The backward pass frees activations while it makes
gradients, so `working` in the table is the maximum of activations and gradients. In two cases, it
is their sum instead: if a step has several micro-steps, because gradients then stay in memory, and
if the workload was not profiled.

Predictions err on the high side. If a prediction is too low, a run fails. If it is too high, the
batch can still run with gradient accumulation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray
from ..domain.setup_table import modes_of
from ..domain.workload import MSTOPK_SENT, TABLES, UPDATES_SHARED, Mode, grid_shape
from .bytes_sent import COMMUNICATION
from .machine_specs import Machine
from .rows import WorkloadFacts
from .setup_arrays import SetupArrays
from .single_device import Transformer

Line = tuple[float, float]  # (base bytes, activation bytes of a sample)


class Run(NamedTuple):
    """A run with the largest batch that fitted into the memory of a device.

    memory: bytes of memory of the device.
    ranks: number of ranks that sharded the training state; 1 without sharding.
    accumulates: True if an optimizer step had several micro-steps.
    batch: number of samples in a micro-step.
    """

    memory: float
    ranks: float
    accumulates: bool
    batch: float

    def with_accumulation(self, gradients: float) -> "Run":
        """Return the run, with its batch reduced to make room for gradient accumulation.

        With accumulation, gradients and activations are in memory at the same time. A run that
        already accumulates gradients is returned unchanged.

        gradients: the bytes of all gradients.
        """
        if self.accumulates:
            return self
        activations = max(self.memory - 2 * gradients, 1.0)
        return self._replace(batch=self.batch * max(1 - gradients / activations, 0.0))


class Needs(NamedTuple):
    """The peak memory of one rank as a function of the batch.

    The peak is `fixed + max(sample * batch, least)` bytes, where `batch` is the number of samples
    of a device in a micro-step. `sample` is NaN if the workload is unknown. `ran` has runs that
    fitted into memory. If the batch of a run is at least `batch`, the peak is at most the memory of
    that run's device.
    """

    fixed: float
    least: float
    sample: float
    ran: list[Run]

    def peak_bytes(self, batch: float) -> float:
        """Return the peak bytes of a rank; NaN if the workload is unknown."""
        peak = self.fixed + max(self.sample * batch, self.least)
        return min([peak, *(run.memory for run in self.ran if batch <= run.batch)])

    def largest_batch(self, capacity: float) -> float:
        """Return the largest batch that fits into `capacity` bytes of device memory.

        The result is infinity if the workload is unknown.
        """
        fitted = [run.batch for run in self.ran if run.memory <= capacity]
        if capacity >= self.fixed + self.least:
            fitted.append((capacity - self.fixed) / self.sample if self.sample else math.inf)
        largest = max(fitted, default=0.0)
        return math.inf if math.isnan(self.sample) else largest


# The allocator leaves gaps, and some groups of weights exceed an eighth of all weights. Two
# workloads used at most 12 % more than predicted.
_HEADROOM = 0.075
# Bytes of torch and its communication: 0.35 GB on local hosts, more with CUDA and NCCL.
_CONTEXT = 0.8e9
# Activation bytes per floating-point operation, if no peak was profiled. A ResNet-50 keeps 0.1 GB
# for 25 GFLOP per sample. The value is twice that, because narrow layers keep more.
_PER_OPERATION = 0.01
# Share of the peak that is proportional to the batch, if only one batch was profiled.
_PROPORTIONAL = 0.9


# Activation bytes of a layer in bf16, per token and unit of width. The second number is for layers
# whose activations are recomputed. A fused attention kernel is assumed [Korthikanti et al. 2022].
_LAYER_BYTES, _KEPT_BYTES = 34.0, 2.0
# Bytes of a logit, chosen with published runs of MPT, whose loss is fused: 98 % of the runs fit
# with 5 bytes, 95 % with 6, 72 % with 8. A loss that is not fused needs 12 (counted for GPT-2).
_LOGIT_BYTES = 5.0


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Predicts the peak memory of a rank.

    A one-device mode (`Mode.alone`) has neither a multi-device strategy nor offload.

    Attributes:
        workloads: {workload: its facts, such as parameters and FLOPs}.
        lines: {(workload, one-device mode, instance type): (base bytes, activation bytes per
            sample)}, fitted to profiles.
        ran: {(workload, mode): the largest batches that fitted into memory}.
        per_operation: activation bytes per floating-point operation, for estimates from facts.
    """

    workloads: Mapping[str, WorkloadFacts]
    lines: dict[tuple[str, Mode, str], Line]
    ran: dict[tuple[str, Mode], list[Run]]
    per_operation: float = _PER_OPERATION

    def needs(
        self,
        workload: str,
        mode: Mode,
        instance_type: str,
        ranks: int = 1,
        *,
        accumulates: bool = False,
    ) -> Needs:
        """Return the memory that one rank of a setup needs.

        ranks: number of ranks of the setup.
        accumulates: True if an optimizer step has several micro-steps.
        """
        facts = self.workloads.get(workload, WorkloadFacts())
        sharing, gradients = mode.sharded and ranks > 1, facts.gradient_bytes
        profiled = self._profile_line(workload, mode.alone, instance_type)
        base, sample = profiled or self._bound(workload, mode, facts)
        shape = grid_shape(mode.strategy, ranks) if mode.divided else None
        if shape is not None:
            sample *= (shape[1] + 1) / 2
        beside = gradients * COMMUNICATION[mode.strategy].held
        if sharing:
            beside = _sharding_bytes(mode, facts, ranks)
        if mode.strategy == MSTOPK_SENT:
            beside += 2 * gradients / facts.blocks
        if sharing and mode.gathered:
            gradients = 0.0 if mode.offloaded else gradients / ranks
        together = accumulates or not profiled
        wider = 1 + _HEADROOM * bool(profiled)
        return Needs(
            fixed=wider * (max(base + beside, 0.0) + gradients * together),
            least=wider * gradients * (not together),
            sample=wider * sample,
            ran=[
                run.with_accumulation(facts.gradient_bytes) if accumulates else run
                for run in self.ran.get((workload, mode), [])
                # Runs with tensor parallelism are no bound: its memory grows with the ranks.
                if ranks >= run.ranks and not mode.divided
            ],
        )

    def _profile_line(self, workload: str, mode: Mode, instance_type: str) -> Line | None:
        """Return (base bytes, activation bytes of a sample) from profiles.

        For an instance type without profiles, both numbers are the maximum over the profiled types.
        Returns None if the workload was not profiled in this mode.
        """
        if (workload, mode, instance_type) in self.lines:
            return self.lines[workload, mode, instance_type]
        others = [line for key, line in self.lines.items() if key[:2] == (workload, mode)]
        if not others:
            return None
        bases, samples = zip(*others, strict=True)
        return max(bases), max(samples)

    def _bound(self, workload: str, mode: Mode, facts: WorkloadFacts) -> Line:
        """Estimate (base bytes, activation bytes of a sample) of a workload that was not profiled.

        The activation bytes are the lowest of several estimates: one from the facts of the
        workload, and one from each run. They are NaN if there are neither facts nor runs.
        """
        # A device holds at least weights and gradients beside activations, unless offloaded.
        least = 0.0 if mode.offloaded else 2 * facts.gradient_bytes
        samples = [
            max(run.memory - least / run.ranks, 0.0) / run.batch
            for run in self.ran.get((workload, mode), [])
        ]
        if facts.transformer is not None:
            samples.append(_transformer_bytes(facts.transformer, mode))
        elif facts.flops > 0:
            samples.append(self.per_operation * facts.flops)
        return _CONTEXT + facts.state_bytes, min(samples, default=math.nan)


def _transformer_bytes(shape: Transformer, mode: Mode) -> float:
    """Return the activation bytes of one sample of a transformer."""
    wide = 1.0 if mode.precision in ("bf16", "fp16") else 2.0
    layers_bytes = _LAYER_BYTES * shape.layers
    if "checkpointing" in mode.switches:  # the backward pass recomputes one layer at a time
        layers_bytes = _LAYER_BYTES + _KEPT_BYTES * shape.layers
    layers_bytes = wide * layers_bytes * shape.hidden
    return (layers_bytes + _LOGIT_BYTES * shape.words) * shape.sequence


def _sharding_bytes(mode: Mode, facts: WorkloadFacts, ranks: int) -> float:
    """Return the memory of a rank in a sharded mode minus the memory of a single device, in bytes.

    The difference is the term `beside` in the docstring of the module. It is often negative,
    because sharding saves memory.
    """
    gradients, states = facts.gradient_bytes, facts.state_bytes
    if mode.strategy == UPDATES_SHARED:
        return gradients - (1 - 1 / ranks) * max(states - gradients, 0.0)
    group = gradients / facts.blocks
    elsewhere = 1.0 if mode.offloaded else 1 - 1 / ranks
    gathered = 3 * group if mode.strategy == "fsdp" else elsewhere * gradients + group
    moving = 2 * group / ranks if mode.offloaded else 0.0
    return gathered + 2 * group + moving - elsewhere * states


def fit_memory(
    profiles: pd.DataFrame,
    ran: SetupArrays,
    machines: Mapping[str, Machine],
    workloads: Mapping[str, WorkloadFacts],
) -> MemoryModel:
    """Fit a MemoryModel to profiled peaks and to completed runs.

    Args:
        profiles: frame with the columns workload, precision, strategy, switches, instance_type,
            batch and peak_bytes.
        ran: the setups of completed runs, which fitted into memory.
        machines: the machine of each instance type.
        workloads: the facts of each workload.
    """
    lines = _lines(profiles, workloads)
    shown = [
        sample / workloads[workload].flops
        for (workload, _, _), (_, sample) in lines.items()
        if workload in workloads and workloads[workload].flops > 0
    ]
    return MemoryModel(
        workloads=workloads,
        lines=lines,
        ran=_largest_that_ran(ran, machines),
        per_operation=max(shown, default=_PER_OPERATION),
    )


def fit_line(batch: FloatArray, peak: FloatArray, gradients: float) -> Line:
    """Fit (base, a) by least squares, so that `peak = base + max(gradients, a * batch)`.

    If there is only one batch size, 90 % of the peak is assumed to be proportional to the batch.

    batch, peak: (profiles,) batch sizes, and peak bytes.
    gradients: bytes of all gradients.
    """
    sizes = np.unique(batch)
    if len(sizes) == 1:
        middle = float(np.median(peak))
        return (1 - _PROPORTIONAL) * middle, _PROPORTIONAL * middle / float(batch[0])
    lines = [(max(float(np.median(peak)) - gradients, 0.0), gradients / float(sizes[-1]))]
    for few in sizes:
        flat = batch < few
        design = np.column_stack([np.ones(len(batch)), np.where(flat, 0.0, batch)])
        base, sample = np.linalg.lstsq(design, peak - gradients * flat, rcond=None)[0].tolist()
        lines.append((max(base, 0.0), max(sample, 0.0)))

    def error(line: Line) -> tuple[float, Line]:
        off = line[0] + np.maximum(gradients, line[1] * batch) - peak
        return float(off @ off), line

    return min(lines, key=error)


def _lines(
    profiles: pd.DataFrame, workloads: Mapping[str, WorkloadFacts]
) -> dict[tuple[str, Mode, str], Line]:
    """Fit {(workload, mode, instance type): (base bytes, activation bytes of a sample)}."""
    if "peak_bytes" not in profiles:
        return {}
    modes = pd.Series(modes_of(profiles), profiles.index)
    known = profiles.assign(mode=modes).dropna(subset="peak_bytes")
    found: dict[Any, Line] = {}
    for cell, rows in known.groupby(["workload", "mode", "instance_type"]):
        gradients = workloads.get(str(cell[0]), WorkloadFacts()).gradient_bytes
        batch, peak = (rows[each].to_numpy(float) for each in ("batch", "peak_bytes"))
        found[cell] = fit_line(batch, peak, gradients)
    return found


def _largest_that_ran(
    ran: SetupArrays, machines: Mapping[str, Machine]
) -> dict[tuple[str, Mode], list[Run]]:
    """Return {(workload, mode): runs}. For each size of device memory, keep the largest batch.

    Runs with and without gradient accumulation are kept separately. If the mode shards, runs with
    different numbers of ranks are also kept separately.
    """
    found: dict[tuple[str, Mode], list[Run]] = {}
    gib = [machines[name].device_memory_gib for name in ran.names]
    memory = ran.by_type(gib, 0.0) * 2**30
    for workload, mode, rows in ran.groups():
        sharded = mode.sharded or mode.strategy == TABLES
        ranks = ran.ranks[rows] if sharded else np.ones(len(rows))
        runs = pd.DataFrame(
            {
                "memory": memory[rows].ravel(),
                "ranks": np.repeat(ranks, memory.shape[1]),
                "accumulates": np.repeat(ran.accumulation[rows] > 1, memory.shape[1]),
                "batch": ran.batch[rows].ravel(),
            }
        )
        keys = ["memory", "ranks", "accumulates"]
        largest = runs[runs["memory"] > 0].groupby(keys, as_index=False).max()
        found[workload, mode] = [*map(Run._make, largest.itertuples(index=False))]
    return found
