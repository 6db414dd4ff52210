"""Compute tokens per second, model FLOPs utilisation (MFU) and memory of setups."""

import math

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray
from .machine_specs import peak_tflops
from .memory import MemoryModel
from .rows import SetupFacts
from .setup_arrays import SetupArrays

COLUMNS = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "memory_available_gib")


def field_terms(
    arrays: SetupArrays, step_s: FloatArray, facts: SetupFacts, memory: MemoryModel
) -> pd.DataFrame:
    """Return a frame with COLUMNS for setups whose steps take `step_s` (rows,) seconds.

    An unknown value is NaN. `mfu` is F / (R * step_s). F is the FLOPs of a step without
    recomputation. R is the sum of the peak rates of all used devices, from their data sheets.

    `memory_gib` is the device memory that the rank with the least free memory needs.
    `memory_available_gib` is the total memory of this rank's device.
    """
    machines = [facts.machines[name] for name in arrays.names]
    gib = arrays.by_type([each.device_memory_gib or math.nan for each in machines], math.inf)
    needed, peak = np.full_like(gib, -math.inf), np.zeros(len(gib))
    tokens, flops = np.full((2, len(gib)), math.nan)
    devices = arrays.count * arrays.layout
    for workload, mode, rows in arrays.groups():
        known = facts.of(workload)
        flops[rows] = known.flops or math.nan
        tokens[rows] = known.transformer.sequence if known.transformer else math.nan
        rates = [peak_tflops(each, mode.precision) for each in machines]
        peak[rows] = (devices * arrays.by_type(rates, 0.0))[rows].sum(axis=1) * 1e12
        for row in rows.tolist():
            several, ranks = bool(arrays.accumulation[row] > 1), int(devices[row].sum())
            for at in np.flatnonzero(devices[row]).tolist():
                name = arrays.names[arrays.kind[row, at]]
                needs = memory.needs(workload, mode, name, ranks, accumulates=several)
                needed[row, at] = needs.peak_bytes(arrays.batch[row, at])
    samples_per_s, needed = arrays.samples / step_s, needed / 2**30
    fullest = np.arange(len(gib)), np.argmin(gib - needed, axis=1)
    finite = np.isfinite(gib[fullest] - needed[fullest])
    return pd.DataFrame(
        {
            "tokens_per_s": tokens * samples_per_s,
            "tokens_per_s_per_gpu": tokens * samples_per_s / arrays.ranks,
            "mfu": flops * samples_per_s / peak,
            "memory_gib": np.where(finite, needed[fullest], math.nan),
            "memory_available_gib": np.where(finite, gib[fullest], math.nan),
        }
    )
