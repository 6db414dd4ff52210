"""Predict the peak memory of one rank from profiles, or bound it from facts of the workload.

    peak      = (base + beside + working) (1 + headroom)                 no headroom from facts
    profiled    base and a by peak(b) = base + max(G, a b): G gradient bytes, a b activations
    from facts  base = context + S + G,  a = the least of
                         (memory - 2 G) / batch              for every run that fitted
                         activation bytes per operation x operations per sample

                     beside                                            working
    ddp              G                     buckets, summed in place    max(a b, G)
    ddp-powersgd     2 G                   residuals are kept          max(a b, G)
    ddp-mstopk       2 G + 2 G'            and a bucket's magnitudes   max(a b, G)
    adasum           1.5 G                 at most                     max(a b, G)
    adasum-delta     3.5 G                 weights before, changes     max(a b, G)
    zero1            G - (1 - 1/n) (S - W)                             max(a b, G)
    tensor-...       G                     states as in ddp, at most   max(a b (c + 1) / 2, G)
    fsdp             3 W' + 2 G' - (1 - 1/n) S                         max(a b, G / n)
    zero2            W (1 - 1/n) + W' + 2 G' - (1 - 1/n) S             max(a b, G / n)
    fsdp, offload    3 W' + 2 G' + (W' + G') / n - S                   a b
    zero2, offload   W + W' + 2 G' + (W' + G') / n - S                 a b
    peak      <= memory of any device on which that batch or a larger one has run

S is bytes of weights and optimizer states, W = G bytes of weights, n ranks, c columns of a grid. W'
is a group of weights that is gathered while the next group is gathered. G' are its gradients, which
are copied to be summed. Activations are freed as gradients are made, so only the larger counts. In
all micro-steps after the first, and in bounds from facts, both count, and gradients stay whole
until the last micro-step. Predictions are high rather than low: a batch that is refused can run in
accumulation steps, but a batch that does not fit fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray
from ..domain.workload import MSTOPK_SENT, TABLES, UPDATES_SHARED, Mode, grid_shape
from .compression import beside_gradients
from .dataset import TrainingData, exchanges, facts_of, flops_per_sample, sent_part
from .machine_specs import Machine
from .setup_arrays import SetupArrays, workload_and_mode

Line = tuple[float, float]  # (base bytes, activation bytes of a sample)
# A run without an out-of-memory error: memory of a device in bytes, the largest batch that ran on
# it, and the fewest ranks across which the training state was sharded.
Ran = tuple[float, float, float]

# Two workloads used at most 12 % more than predicted, because the allocator leaves gaps and because
# some groups of weights exceed an eighth of all weights.
_HEADROOM = 0.075
# torch and its communication: 0.35 GB on local hosts, more with CUDA and NCCL.
_CONTEXT = 0.8e9
# Bytes kept for the backward pass per operation: twice those of a ResNet-50 (0.1 GB for 25 GFLOP a
# sample), because narrow layers keep more. The maximum over the provider's profiles replaces it.
_PER_OPERATION = 0.01
_BYTES_PER_GIB = 2.0**30
# Weights and Adam's two moments, per byte of gradients; used if the checkpoint size is unknown.
_STATE_PER_GRADIENT = 3.0
_GROUP = 0.125  # largest share of all weights that is gathered together (node/switches.py)
# Share of the peak that is proportional to the batch, if only one batch was profiled.
_PROPORTIONAL = 0.9


class Held(NamedTuple):
    """The bytes that a workload holds.

    `states` are weights plus optimizer states. `group` is the largest group of weights that a
    sharded mode gathers together.
    """

    gradients: float = 0.0
    states: float = 0.0
    group: float = 0.0

    @classmethod
    def of(cls, gradients: float, states: float = 0.0) -> Held:
        """Derive the bytes from the gradient bytes; if `states` is 0, assume Adam's states."""
        return cls(gradients, states or _STATE_PER_GRADIENT * gradients, _GROUP * gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Predicts the peak memory of a rank.

    Attributes:
        lines: the memory lines fitted to profiles, by workload and instance type.
        facts: the memory lines that bound workloads without a profile, by workload.
        held: bytes of gradients, states and groups, by workload.
        ran: the runs without an out-of-memory error, by workload.
        accumulated: the part of `ran` that ran with several micro-steps in a step.
    """

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    facts: dict[str, Line] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    ran: dict[str, tuple[Ran, ...]] = field(default_factory=dict)
    accumulated: dict[str, tuple[Ran, ...]] = field(default_factory=dict)

    def with_facts(
        self, workload: str, *, gradient_bytes: float, flops_per_sample: float
    ) -> MemoryModel:
        """Return the model with an upper bound for a workload, derived from its facts.

        If the model already has values for the workload, they are kept.
        """
        held = Held.of(gradient_bytes)
        line = (_base(held), _PER_OPERATION * flops_per_sample)
        return replace(self, facts={workload: line} | self.facts, held={workload: held} | self.held)

    def peak_bytes(
        self,
        workload: str,
        instance_type: str,
        batch: float,
        ranks: int = 1,
        *,
        accumulates: bool = False,
    ) -> float:
        """Return the peak bytes of one rank of a setup; NaN if the workload is unknown.

        `batch` is the samples of a device in a micro-step, `ranks` the number of ranks.
        `accumulates` is True if an optimizer step has several micro-steps.
        """
        mode = workload_and_mode(workload)[1]
        line, measured = self._line(workload, instance_type)
        if line is None:
            return float("nan")
        base, sample = line
        held, activations = self.held.get(workload, Held()), sample * batch
        shape = grid_shape(mode.strategy, ranks) if mode.divided else None
        activations *= 1.0 if shape is None else (shape[1] + 1) / 2
        sharing = mode.sharded and ranks > 1
        summed = 0.0 if mode.offloaded else held.gradients / ranks
        gradients = summed if sharing and mode.gathered and not accumulates else held.gradients
        working = (
            max(activations, gradients) if measured and not accumulates else activations + gradients
        )
        beside = (
            _shared(mode, held, ranks)
            if sharing
            else held.gradients * beside_gradients(mode.strategy)
        )
        beside += 2 * held.group * (mode.strategy == MSTOPK_SENT)
        peak = (max(base + beside, 0.0) + working) * (1 + _HEADROOM * measured)
        ran = (
            () if mode.divided else self.ran.get(workload, ())
        )  # earlier runs bound no divided layer, which gathers more on more ranks
        if accumulates:
            # runs of one micro-step: fewer samples would also fit with whole gradients
            least = [
                max(1 - held.gradients / max(memory - 2 * held.gradients, 1.0), 0.0)
                for memory, _, _ in ran
            ]
            fewer = [
                (memory, most * part, few)
                for (memory, most, few), part in zip(ran, least, strict=True)
            ]
            ran = () if mode.divided else (*self.accumulated.get(workload, ()), *fewer)
        return min(
            [peak, *(memory for memory, most, fewest in ran if batch <= most and ranks >= fewest)]
        )

    def _line(self, workload: str, instance_type: str) -> tuple[Line | None, bool]:
        """Return a pair: a workload's memory line on a type, and True if profiles determined it.

        If the workload was not profiled on this type, the largest values of other types are used.
        If it was not profiled at all, the line comes from facts, or is None.
        """
        own = self.lines.get((workload, instance_type))
        others = (
            [line for (owner, _), line in self.lines.items() if owner == workload]
            if own is None
            else [own]
        )
        if others:
            return (max(base for base, _ in others), max(sample for _, sample in others)), True
        return self.facts.get(workload), False


def _shared(mode: Mode, held: Held, ranks: int) -> float:
    """Return how many more bytes a rank of a sharded mode holds than a single device.

    The number is negative if sharding saves more memory than the exchange needs.
    """
    if mode.strategy == UPDATES_SHARED:
        return held.gradients - (1 - 1 / ranks) * max(held.states - held.gradients, 0.0)
    elsewhere = 1.0 if mode.offloaded else 1 - 1 / ranks
    gathered = (
        3 * held.group if mode.strategy == "fsdp" else elsewhere * held.gradients + held.group
    )
    moving = 2 * held.group / ranks if mode.offloaded else 0.0
    return gathered + 2 * held.group + moving - elsewhere * held.states


def _base(held: Held) -> float:
    return _CONTEXT + held.states + held.gradients


def fit_memory(
    profiles: pd.DataFrame,
    ran: SetupArrays,
    machines: Mapping[str, Machine],
    *,
    gradient_bytes: Mapping[str, float],
    flops_per_sample: Mapping[str, float],
    checkpoint_bytes: Mapping[str, float],
) -> MemoryModel:
    """Fit memory lines to profiled peaks, and derive upper bounds for workloads without profiles.

    Args:
        profiles: frame with columns workload, instance_type, batch and peak_bytes.
        ran: the measured setups, which ran without an out-of-memory error.
        machines: the machine of each instance type.
        gradient_bytes, flops_per_sample, checkpoint_bytes: the values of each workload. Unknown
            values are absent or 0.
    """
    sizes = {
        name: Held.of(size, checkpoint_bytes.get(name, 0.0))
        for name, size in gradient_bytes.items()
    }
    lines = _profiled(profiles, sizes)
    shown = [
        sample / flops_per_sample[workload]
        for (workload, _), (_, sample) in lines.items()
        if flops_per_sample.get(workload, 0.0) > 0
    ]
    per_operation = max(shown, default=_PER_OPERATION)
    largest, accumulated = (
        {name: tuple(own) for name, own in _largest_that_ran(rows, machines).items() if own}
        for rows in (ran, ran.take(np.flatnonzero(ran.accumulation > 1)))
    )
    facts: dict[str, Line] = {}
    for workload in sorted(
        {*largest, *gradient_bytes, *flops_per_sample} - {name for name, _ in lines}
    ):
        held = sizes.get(workload, Held())
        # least bytes other than activations: weights and gradients; 0 if they are offloaded
        least = 0.0 if workload_and_mode(workload)[1].offloaded else 2 * held.gradients
        bounds = [
            max(memory - least / ranks, 0.0) / batch
            for memory, batch, ranks in largest.get(workload, ())
        ]
        if flops_per_sample.get(workload, 0.0) > 0:
            bounds.append(per_operation * flops_per_sample[workload])
        if bounds:
            facts[workload] = (_base(held), min(bounds))
    return MemoryModel(lines=lines, facts=facts, held=sizes, ran=largest, accumulated=accumulated)


def memory_of(data: TrainingData, ran: SetupArrays, machines: Mapping[str, Machine]) -> MemoryModel:
    """Fit the memory model. The caller has already applied `by_variant` to `data`.

    `ran` are the measured setups. `machines` has the machine of each instance type.
    """
    return fit_memory(
        data.profiles,
        ran,
        machines,
        gradient_bytes={
            name: one.gradient_bytes / sent_part(name) for name, one in exchanges(data).items()
        },
        flops_per_sample=flops_per_sample(data),
        checkpoint_bytes=facts_of(data, "checkpoint_bytes"),
    )


def one_device(batch: FloatArray, peak: FloatArray, gradients: float) -> Line:
    """Fit base and a of `peak = base + max(gradients, a batch)` by least squares.

    Gradients are the larger term at small batches, and activations at large batches. All batches
    are tried as the boundary. If gradients are the larger term at all batches, activations are
    assumed to equal gradients at the largest batch. If there is a single batch, most of its peak is
    assumed to be activations.
    """
    if len(np.unique(batch)) == 1:
        middle = float(np.median(peak))
        return (1 - _PROPORTIONAL) * middle, _PROPORTIONAL * middle / float(batch[0])
    found: list[tuple[float, Line]] = []
    for few in np.unique(batch):
        flat = batch < few
        design = np.stack([np.ones(len(batch)), np.where(flat, 0.0, batch)], axis=1)
        base, sample = np.maximum(
            np.linalg.lstsq(design, peak - gradients * flat, rcond=None)[0], 0.0
        ).tolist()
        off = base + np.maximum(gradients, sample * batch) - peak
        found.append((float(off @ off), (base, sample)))
    flat_base = max(float(np.median(peak)) - gradients, 0.0)
    off = flat_base + gradients - peak
    found.append((float(off @ off), (flat_base, gradients / float(batch.max()))))
    return min(found)[1]


def _profiled(profiles: pd.DataFrame, sizes: Mapping[str, Held]) -> dict[tuple[str, str], Line]:
    """Return the lines fitted to profiled peaks, by workload and instance type."""
    if "peak_bytes" not in profiles:
        return {}
    peaks = profiles[["workload", "instance_type", "batch", "peak_bytes"]].dropna()
    peaks = peaks[(peaks["batch"] > 0) & (peaks["peak_bytes"] > 0)]
    return {
        (str(workload), str(name)): one_device(
            rows["batch"].to_numpy(float),
            rows["peak_bytes"].to_numpy(float),
            sizes.get(str(workload), Held()).gradients,
        )
        for (workload, name), rows in peaks.groupby(["workload", "instance_type"])
    }


def _largest_that_ran(ran: SetupArrays, machines: Mapping[str, Machine]) -> dict[str, list[Ran]]:
    """Return, for each workload, the largest batch that ran on each amount of device memory.

    Modes that shard the training state have a separate entry for each number of ranks.
    """
    found: dict[str, dict[tuple[float, float], float]] = {}
    for workload, types, batches, ranks in zip(
        ran.workloads, ran.types, ran.batch, ran.ranks, strict=True
    ):
        own = found.setdefault(workload, {})
        mode = workload_and_mode(workload)[1]
        fewest = float(ranks) if mode.sharded or mode.strategy == TABLES else 1.0
        for name, batch in zip(types, batches, strict=False):
            gib = machines[name].device_memory_gib
            if gib is not None:
                own[gib, fewest] = max(own.get((gib, fewest), 0.0), float(batch))
    return {
        workload: [
            (gib * _BYTES_PER_GIB, batch, fewest)
            for (gib, fewest), batch in own.items()
            if batch > 0 and np.isfinite(batch)
        ]
        for workload, own in found.items()
    }
