"""Models that are fitted once and shared."""

from dataclasses import replace

import pytest

from models.step_time.model import fit
from tests.models.step_time.cases import gpu_runs
from tests.models.synthetic import World


@pytest.fixture(scope="session")
def known():
    """Data of local hosts with profiles and probes, runs that were not measured, the model."""
    world = World(1)
    data = world.data(70)
    workloads = data.workloads.assign(digest="d-" + data.workloads["workload"])
    types = data.instance_types.assign(digest="t")
    data = replace(data, workloads=workloads, instance_types=types)
    return data, world.runs(150, first=1000), fit(data, seed=0)


@pytest.fixture(scope="session")
def gpus():
    """Runs of the GPU world."""
    return gpu_runs()
