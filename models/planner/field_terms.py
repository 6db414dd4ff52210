"""Compute tokens per second, utilisation of FLOPs, and memory of a setup."""

import math
from typing import Any

from ..domain.workload import Setup, Workload
from ..step_time.machine_specs import peak_tflops
from ..step_time.model import StepTimeModel

COLUMNS = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "memory_available_gib")
_BYTES_PER_GIB = 2.0**30


def field_terms(
    workload: Workload, model: StepTimeModel, setup: Setup, step_s: float
) -> dict[str, Any]:
    """Return COLUMNS for a setup that takes `step_s` seconds; a value is None if it is unknown.

    `mfu` is the FLOPs of a step without recomputation, divided by what the devices could do at
    the peak rates of their data sheets. Memory is that of the rank with the least free memory.
    """
    devices, samples_per_s = sum(setup.layout), setup.global_batch / step_s
    flops = (workload.flops_per_sample or math.nan) * samples_per_s
    tokens = None if workload.sequence is None else workload.sequence * samples_per_s
    peak, needed, room = 0.0, 0.0, math.inf
    for offer, used, batch in zip(
        setup.cluster.members, setup.layout, setup.batch_per_device, strict=True
    ):
        kind = offer.instance_type
        rate = peak_tflops(kind.device, kind.device_memory_gib, setup.precision)
        peak += used * rate * 1e12
        gib = (
            model.peak_bytes(
                workload.name,
                kind.name,
                batch,
                devices,
                mode=setup.mode,
                accumulates=setup.accumulation_steps > 1,
            )
            / _BYTES_PER_GIB
        )
        if kind.device_memory_gib - gib < room:
            needed, room = gib, kind.device_memory_gib - gib
    known = math.isfinite(room)
    return {
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": None if tokens is None else tokens / devices,
        "mfu": flops / peak if flops / peak > 0 else None,
        "memory_gib": needed if known else None,
        "memory_available_gib": needed + room if known else None,
    }
