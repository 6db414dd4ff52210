"""Setups, a GPU world with a plain truth, and the soundness check that the model's tests share."""

import numpy as np
import pandas as pd

from models.step_time.model import fit
from tests.frames import data_of

NUMBERS = ["step_s", "step_low_s", "step_high_s", "samples_per_s", "compute_s"]
NUMBERS += ["communication_s", "exposed_communication_s"]
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
    values = predicted[NUMBERS].to_numpy(float)
    low, step, high = (predicted[name] for name in ("step_low_s", "step_s", "step_high_s"))
    finite = np.isfinite(values).all() and (values >= 0).all()
    return bool(finite and ((low > 0) & (low < step) & (step < high)).all())


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


def gpu_runs(noise=0.02):
    """Every workload and kind, layouts of up to four machines, seven batches."""
    random, rows = np.random.default_rng(0), []
    layouts = ([1], [2], [4], [1, 1], [2, 2], [4, 4], [1] * 4, [4] * 4)
    for workload in GRADIENTS:
        for kind in SPEED:
            for layout in layouts:
                for batch in (8, 12, 16, 24, 32, 48, 64):
                    step = seconds(workload, kind, layout, batch)
                    step *= np.exp(noise * random.standard_normal())
                    text = "+".join(map(str, layout))
                    rows.append((workload, f"{len(layout)}x{kind}", text, str(batch), step))
    columns = ["workload", "cluster", "layout", "batch_per_device", "step_s"]
    return pd.DataFrame(rows, columns=columns).assign(provider="ec2")


def fitted(rows, facts=("workload", "gradient_bytes"), types=TYPES):
    """The model of runs of the GPU world, and of these facts about its workloads."""
    workloads = pd.DataFrame(GRADIENTS.items(), columns=["workload", "gradient_bytes"])
    data = data_of(runs=rows, workloads=workloads[list(facts)], instance_types=types)
    return fit(data, seed=0)
