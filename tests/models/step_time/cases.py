"""Setups, a GPU world with a plain truth, and the soundness check that the model's tests share."""

from itertools import product

import numpy as np
import pandas as pd

from models.step_time.model import fit
from tests.frames import data_of

GRADIENTS = {"small": 2e7, "middle": 1e8, "large": 4e8}
SPEED = {"fast": 1.0, "slow": 0.5}
TYPES = pd.DataFrame(
    {
        "name": ["fast", "slow"],
        "devices": 4,
        "device": ["a", "b"],
        "cores": 32.0,
        "bandwidth_gbps": 50.0,
        "device_tflops": [10.0, 5.0],
    }
)
NONE = pd.DataFrame()


def setup(workload="lm", cluster="2xs.large", batch="8", accumulation=1):
    """One setup as measurement columns."""
    values = [workload, cluster, str(batch), accumulation]
    columns = ["workload", "cluster", "batch_per_device", "accumulation_steps"]
    return pd.DataFrame([values], columns=columns)


def sound(predicted):
    """Whether predictions are finite, positive and inside their intervals."""
    values = predicted.select_dtypes(float).drop(columns="nearest_doublings").to_numpy()
    ordered = predicted[["step_low_s", "step_s", "step_high_s"]].diff(axis=1).iloc[:, 1:] > 0
    return bool(np.isfinite(values).all() and (values >= 0).all() and ordered.all(axis=None))


def width(predicted):
    """Width of the intervals in logs."""
    return np.log(predicted["step_high_s"] / predicted["step_low_s"])


def inside(predicted, truth):
    """Fraction of the truth inside the intervals."""
    return float(((predicted["step_low_s"] <= truth) & (truth <= predicted["step_high_s"])).mean())


def error(predicted, truth):
    """Relative errors."""
    return (predicted["step_s"] / truth - 1).abs()


def seconds(workload, kind, layout, batch):
    """Half of compute hides an exchange that grows with bytes, and a little with machines."""
    alone = (0.02 + 0.004 * batch * (GRADIENTS[workload] / 1e8) ** 0.3) / SPEED[kind]
    ranks, machines = sum(layout), len(layout)
    if ranks == 1:
        return float(alone)
    gbps = 25.0 if machines > 1 else 80.0
    exchange = 2.0 * (ranks - 1) / ranks * GRADIENTS[workload] * 8e-9 / gbps * machines**0.1
    return float(0.5 * alone + ((0.5 * alone) ** 3 + exchange**3) ** (1 / 3))


def gpu_runs():
    """Every workload and kind, layouts of up to four machines, seven batches."""
    rows = pd.DataFrame(
        product(
            GRADIENTS,
            SPEED,
            ([1], [2], [4], [1, 1], [2, 2], [4, 4], [1] * 4, [4] * 4),
            (8, 12, 16, 24, 32, 48, 64),
        ),
        columns=["workload", "kind", "devices", "batch_per_device"],
    )
    factor = np.exp(0.02 * np.random.default_rng(0).standard_normal(len(rows)))
    return rows.assign(
        cluster=rows["devices"].map(len).astype(str) + "x" + rows["kind"],
        layout=["+".join(map(str, layout)) for layout in rows["devices"]],
        step_s=factor * [seconds(*row) for row in rows.to_numpy()],
        provider="ec2",
    )


def fitted(rows, facts=("workload", "gradient_bytes"), types=TYPES):
    """The model of runs of the GPU world, and of these facts about its workloads."""
    workloads = pd.DataFrame(GRADIENTS.items(), columns=["workload", "gradient_bytes"])
    data = data_of(runs=rows, workloads=workloads[list(facts)], instance_types=types)
    return fit(data, seed=0)
