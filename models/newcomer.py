"""Workloads of which nothing was measured, made known to a model by their facts alone: for a first guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .overlap import default_buckets
from .step_time import StepTimeModel
from .workload import Workload


def introduced(model: StepTimeModel, workload: Workload) -> StepTimeModel | None:
    """The model, able to guess at `workload` on types whose device's peak rate is known.

    It predicts every other workload as before. None where the workload's FLOPs are unknown, where something of that
    name was measured (as it is defined now or was once), or where the model was fitted before there were guesses.
    """
    name, flops = workload.name, workload.flops_per_sample
    if flops is None:
        return None
    found = all_introduced(model, {name: flops}, {name: float(workload.gradient_bytes or 0)})
    return found if name in found.physics.compute.flops else None


def all_introduced(
    model: StepTimeModel, flops_per_sample: Mapping[str, float], gradient_bytes: Mapping[str, float]
) -> StepTimeModel:
    """The same for every workload in `flops_per_sample` that can be; `gradient_bytes` are absent or 0 where unknown."""
    compute, buckets, memory = model.physics.compute, dict(model.physics.buckets), model.memory
    measured = {owner for owner, _ in compute.curves}
    new = {name: flops for name, flops in flops_per_sample.items() if name not in measured}
    if compute.guess is None or not new:
        return model
    for name, flops in new.items():
        size = gradient_bytes.get(name, 0.0)
        buckets[name] = default_buckets(size)
        memory = memory.told(name, gradient_bytes=size, flops_per_sample=flops)
    compute = replace(compute, flops=compute.flops | new, _filled={})
    return replace(model, physics=replace(model.physics, compute=compute, buckets=buckets), memory=memory)
