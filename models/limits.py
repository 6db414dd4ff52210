"""What limits a step: the name of its largest avoidable part. Never changes a prediction."""

from __future__ import annotations

import numpy as np

from .compute import ComputeModel
from .overlap import StepTimes
from .setups import SetupArrays

LIMITS = ("compute", "communication inside a node", "communication between nodes", "stragglers", "input")

# Floor of an exposed part above which communication, and of an imbalance above which stragglers, limit a step.
_LIMITED = 0.2
# Part of the slowest rank's compute above which making batches, and not the network, is what takes it.
_MOSTLY = 0.5


def bottlenecks(physics: StepTimes, setups: SetupArrays, compute: ComputeModel) -> list[str]:
    """One of LIMITS a setup. Input is named only where a profile told how long batches take to make."""
    exposed = 1 - physics.compute_s / physics.step_s
    uneven = (physics.compute_s - physics.mean_compute_s) / physics.step_s
    kind = np.take_along_axis(setups.kind, physics.slowest[:, None], axis=1)[:, 0]
    pairs = [(workload, setups.names[at]) for workload, at in zip(setups.workloads, kind.tolist(), strict=True)]
    parts = {pair: compute.curve(*pair).input_part for pair in set(pairs)}
    made = np.array([parts[pair] for pair in pairs]) > _MOSTLY
    labels = np.where(uneven > _LIMITED, "stragglers", np.where(made, "input", "compute"))
    across = np.where(setups.instances > 1, "communication between nodes", "communication inside a node")
    return [str(one) for one in np.where((exposed > _LIMITED) & (exposed >= uneven), across, labels)]
