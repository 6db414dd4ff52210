"""What a prediction must beat: scaling by compute alone, as if communication were free."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..arrays import FloatArray
from ..columns import read_setups
from ..compute import fit_compute
from ..learning import TrainingData, one_device_rows, training_rows
from ..machines import read_machines


def predict_compute_only(data: TrainingData, setups: pd.DataFrame) -> FloatArray:
    """(setups,) step seconds of the slowest rank's compute, from the same profiles that the model learns from.

    Raises ValueError on a workload never measured or a type never described.
    """
    rows = training_rows(data, seed=0)
    machines = read_machines(data.instance_types, rows.types)
    compute = fit_compute(data.profiles, one_device_rows(rows, data.profiles), machines)
    arrays = read_setups(setups, {name: one.devices for name, one in machines.items()})
    forward, backward, optimizer, _ = compute.seconds(arrays)
    each = arrays.accumulation[:, None] * (forward + backward) + optimizer
    return np.asarray(np.where(arrays.present, each, 0).max(axis=1, initial=0.0), dtype=float)
