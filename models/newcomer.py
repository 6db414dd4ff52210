"""A workload of which nothing was measured, made known to a model by its facts alone: for a first guess."""

from __future__ import annotations

from dataclasses import replace

from .overlap import default_buckets
from .step_time import StepTimeModel
from .workload import Workload


def introduced(model: StepTimeModel, workload: Workload) -> StepTimeModel | None:
    """The model, able to guess at `workload` on types whose device's peak rate is known.

    It predicts every other workload as before. None where the workload's FLOPs are unknown, where something of that
    name was measured (as it is defined now or was once), or where the model was fitted before there were guesses.
    """
    compute, flops, name = model.physics.compute, workload.flops_per_sample, workload.name
    if compute.guess is None or flops is None or any(owner == name for owner, _ in compute.curves):
        return None
    gradient_bytes = float(workload.gradient_bytes or 0)
    return replace(
        model,
        physics=replace(
            model.physics,
            compute=replace(compute, flops={name: flops}, _filled={}),
            buckets=model.physics.buckets | {name: default_buckets(gradient_bytes)},
        ),
        memory=model.memory.told(name, gradient_bytes=gradient_bytes, flops_per_sample=flops),
    )
