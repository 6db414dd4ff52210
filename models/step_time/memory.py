"""Will a batch fit on a device: peak bytes of one rank. Measured where it was profiled, else bounded from facts.

    peak      = (base + beside + working) (1 + headroom)                       no headroom from facts
    profiled    base and a by peak(b) = base + max(G, a b): G gradient bytes, a b activations of a batch
    from facts  base = context + S + G (spare),  a = the least of
                         (memory - 2 G) / batch              over every run that is known to have fitted
                         activation bytes per operation x operations per sample

                     beside                                            working
    ddp              G                     buckets, summed in place    max(a b, G)
    ddp-powersgd     2 G                   what is not sent is kept    max(a b, G)
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

with S bytes of weights and optimizer's states, W = G of weights, n ranks, c columns of a grid, whose samples a divided
layer gathers and tensor-1d keeps. Activations are freed as gradients come to
be, which is why the larger of both counts; of several micro-steps each but the first finds gradients there: then, and
from facts, both count, and gradients are whole on every rank until the last micro-step sums them. A group of weights is
gathered into W', by a buffer of as many bytes, while the next one is; its gradients G' are copied to be summed, while
those of the group before still are. ddp-mstopk looks for the largest among the magnitudes of a bucket, which are
copied and compared: a bucket is a group at most, where tensors are as small. What is offloaded lies in the host's
memory; only the device's is asked for here, which holds a rank's part of one group of weights and of gradients on
their way too. Too cautious rather than not: a batch that is refused is run in accumulation steps, one that does not
fit is not run at all.
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

Line = tuple[float, float]  # base, and bytes of a sample's activations
Ran = tuple[
    float, float, float
]  # bytes of a device, largest batch that ran on it, on so many ranks that share

# What ranks took beyond what is predicted, at most 12 % on two workloads: the allocator's gaps, what lives
# longer than it must, and groups of weights that are larger than an eighth.
_HEADROOM = 0.075
# A process with torch and its communication: 0.35 GB on local hosts, with a CUDA context and NCCL's buffers more.
_CONTEXT = 0.8e9
# Bytes kept for the backward pass per operation of forward and backward: twice the 0.1 GB that a ResNet-50 keeps for
# its 25 GFLOP a sample, since narrow layers keep more. Replaced by what the provider's own profiles show at most.
_PER_OPERATION = 0.01
_BYTES_PER_GIB = 2.0**30
# Weights, and Adam's two moments, per byte of gradients; where a checkpoint was written its bytes are known.
_STATE_PER_GRADIENT = 3.0
_GROUP = 0.125  # of all weights, those gathered together at most (node/switches.py), where modules are as small
# With a single measured batch, the part of its bytes taken to be proportional to batch.
_PROPORTIONAL = 0.9


class Held(NamedTuple):
    """Bytes of a workload: of all gradients, of weights and states, and of the largest group that is gathered."""

    gradients: float = 0.0
    states: float = 0.0
    group: float = 0.0

    @classmethod
    def of(cls, gradients: float, states: float = 0.0) -> Held:
        """Where `states` are 0 those of Adam, the largest that are usual."""
        return cls(gradients, states or _STATE_PER_GRADIENT * gradients, _GROUP * gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """`lines` were measured, by workload and type; `facts` bound those workloads that nobody profiled.

    Of what `ran`, `accumulated` ran in several micro-steps.
    """

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    facts: dict[str, Line] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    ran: dict[str, tuple[Ran, ...]] = field(default_factory=dict)
    accumulated: dict[str, tuple[Ran, ...]] = field(default_factory=dict)

    def with_facts(
        self, workload: str, *, gradient_bytes: float, flops_per_sample: float
    ) -> MemoryModel:
        """With a bound for a workload of which only these facts are known; what was known before stays."""
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
        """Peak memory of one of `ranks` ranks at `batch`; NaN where nothing is known of the workload."""
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
        )  # on more ranks a divided layer gathers more
        if accumulates:
            # samples whose activations, of (memory - 2 G) / batch at most, make room for the gradients
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
        """This type's, else the largest of the other types', else from facts; and whether it was profiled."""
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
    """Bytes beside those of one device where ranks share: less than none where they share more than they gather."""
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
    """Lines from the profiles' peaks, and bounds for the other workloads of `ran` and of the facts.

    `profiles` has workload, instance_type, batch and peak_bytes; `ran` are setups that were measured, so that they
    fitted; `gradient_bytes`, `flops_per_sample` and `checkpoint_bytes` are by workload, unknown ones absent or 0.
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
        # the least that may stand beside the activations: weights and gradients, a share of them, or neither
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
    """`fit_memory` on the profiles and facts of `data`, which is `by_variant`; `ran` are setups that were measured."""
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
    """(base, a) of peak = base + max(gradients, a batch), by least squares over which of the peaks are of gradients.

    Where all are, activations may weigh as much as gradients at the largest batch; of a single batch they are taken to
    be most of its peak.
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
    """By workload, one entry an amount of memory; where ranks share, one a number of them too."""
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
