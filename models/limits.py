"""What limits a step: the name of its largest avoidable part. Never changes a prediction."""

from __future__ import annotations

import numpy as np

from .compute import ComputeModel
from .keys import numbered
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
    pairs, which = numbered(zip(setups.workloads.codes.tolist(), kind.tolist(), strict=True))
    curves = [compute.curve(setups.workloads.names[one], setups.names[at]) for one, at in pairs]
    made = (np.array([curve.input_part for curve in curves]) > _MOSTLY)[which]
    labels = np.where(uneven > _LIMITED, "stragglers", np.where(made, "input", "compute"))
    across = np.where(setups.instances > 1, "communication between nodes", "communication inside a node")
    return [str(one) for one in np.where((exposed > _LIMITED) & (exposed >= uneven), across, labels)]
