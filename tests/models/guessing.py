"""Four networks on made-up GPUs, and one of which only facts are known."""

from dataclasses import asdict, replace
from functools import cache

import pandas as pd

from models.step_time.model import fit
from tests.benchmarks import synthetic_market as synthetic
from tests.frames import data_of
from tests.models.planning import workload

KNOWN = ("a", "b", "c", "d")
FLOPS = {"a": 2e9, "b": 8e9, "c": 3e10, "d": 1e11}
TYPES = [kind for kind in synthetic.types() if kind.devices == 1]


def seconds(flops, batch, tflops):
    return 0.002 + flops * batch / (0.4 * tflops * 1e12)


@cache
def data():
    """Four networks on each type with one device, at an efficiency of four tenths."""
    rows = [
        (
            name,
            f"1x{kind.name}",
            str(batch),
            seconds(FLOPS[name], batch, float(kind.device_tflops or 0)),
        )
        for name in KNOWN
        for kind in TYPES
        for batch in (8, 16, 32, 64, 128)
    ]
    runs = pd.DataFrame(rows, columns=["workload", "cluster", "batch_per_device", "step_s"]).assign(
        provider="ec2"
    )
    facts = [(name, FLOPS[name], 1e8) for name in KNOWN]
    return data_of(
        runs=runs,
        workloads=pd.DataFrame(facts, columns=["workload", "flops_per_sample", "gradient_bytes"]),
        instance_types=pd.DataFrame(map(asdict, TYPES)),
    )


@cache
def model():
    return fit(data(), seed=1)


def setup_row(name, cluster, batch):
    return pd.DataFrame(
        [{"workload": name, "cluster": cluster, "batch_per_device": str(batch), "provider": "ec2"}]
    )


NEW = replace(workload("new", 64), flops_per_sample=1.5e10, gradient_bytes=200_000_000)
