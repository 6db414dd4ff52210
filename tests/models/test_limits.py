"""A part that takes less than a fifth of a step does not limit it; the larger of two that do is named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from models.columns import read_setups
from models.compute import ComputeModel
from models.curves import Curve
from models.limits import bottlenecks
from models.overlap import StepTimes


@dataclass
class Part:
    """A step of one second: what of it is compute, on average over the ranks too."""

    compute_s: float
    mean_compute_s: float


def limit(part: Part, cluster: str = "2xm", input_part: float = 0.0) -> str:
    times = StepTimes(
        step_s=np.ones(1),
        compute_s=np.array([part.compute_s]),
        mean_compute_s=np.array([part.mean_compute_s]),
        communication_s=np.zeros(1),
        slowest=np.zeros(1, dtype=np.intp),
    )
    row = {"workload": "w", "cluster": cluster, "batch_per_device": "8", "layout": "1"}
    curve = Curve(
        batches=(8.0,), forward_s=(0.1,), backward_s=(0.1,), optimizer_s=0.0, origin="profile", input_part=input_part
    )
    compute = ComputeModel(curves={("w", "m"): curve}, machines={})
    (found,) = bottlenecks(times, read_setups(pd.DataFrame([row]), {}), compute)
    return found


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part(0.81, 0.81), "compute"),
        (Part(0.79, 0.79), "communication between nodes"),
        (Part(1.0, 0.81), "compute"),
        (Part(1.0, 0.79), "stragglers"),
        (Part(0.75, 0.45), "stragglers"),  # both: the larger
        (Part(0.65, 0.40), "communication between nodes"),
    ],
)
def test_a_fifth_of_the_step_is_what_it_takes_to_limit_it(part: Part, expected: str) -> None:
    assert limit(part) == expected


def test_inside_one_machine_and_making_batches_have_names_of_their_own() -> None:
    assert limit(Part(0.7, 0.7), cluster="1xm") == "communication inside a node"
    assert limit(Part(0.9, 0.9), input_part=0.6) == "input"
    assert limit(Part(0.9, 0.9), input_part=0.4) == "compute"
    assert limit(Part(0.7, 0.7), input_part=0.6) == "communication between nodes"
