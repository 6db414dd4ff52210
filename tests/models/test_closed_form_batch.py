"""The closed form by batch, and where one device's time is doubted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.closed_form import closed_times
from tests.models.test_closed_form import GRADIENT_BYTES, MEMBERS, Z, compute, line, of, parameters


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.integers(1, 3000), st.floats(1.01, 16), st.sampled_from(sorted(GRADIENT_BYTES)))
def test_a_step_grows_with_the_batch(
    cluster: tuple[list[str], list[int]], z: list[float], batch: int, more: float, workload: str
) -> None:
    types, layout = cluster
    values = parameters(z)
    larger = int(np.ceil(batch * more))
    lines = [line(types, layout, batch=one, workload=workload) for one in (batch, larger)]
    # however doubtful: a curve that bends by what was thought of it never falls
    for least in (0.0, 1.0):
        doubted = [replace(one, doubt=np.maximum(one.doubt, least)) for one in lines]
        steps = [of(closed_times(one, values).step_s) for one in doubted]
        assert steps[1] > steps[0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.lists(st.integers(1, 3000), min_size=5, max_size=5), st.integers(0, 4), st.integers(2, 16))
def test_more_samples_for_one_machine_never_make_a_step_quicker(
    cluster: tuple[list[str], list[int]], z: list[float], batches: list[int], which: int, more: int
) -> None:
    types, layout = cluster
    shares = batches[: len(types)]
    larger = [one * (more if at == which % len(types) else 1) for at, one in enumerate(shares)]
    steps = []
    for each in (shares, larger):
        one = line(types, layout, batch="+".join(map(str, each)), workload="tiny")
        steps.append(of(closed_times(replace(one, doubt=np.maximum(one.doubt, 0.6)), parameters(z)).step_s))
    assert steps[1] >= steps[0] * (1 - 1e-12)


def test_a_workload_may_be_off_only_as_far_as_its_compute_is_doubted() -> None:
    level = {"level": 1.0, "tilt": 0.0}
    for name, workload in (("slow", "net"), ("quick", "tiny"), ("slow", "tiny")):
        here = line([name], [1], workload=workload)
        here = replace(here, optimizer_s=0 * here.optimizer_s)
        moved, middle = (of(closed_times(here, one).step_s) for one in (parameters(**level), parameters()))
        assert moved == pytest.approx(middle * np.exp(compute().curve_doubt(workload, name)))
    # what is lost in borrowing from another type is that type's, and not what the workload is off by everywhere
    assert (
        compute().doubt("tiny", "quick") > compute().curve_doubt("tiny", "quick") == compute().doubt("tiny", "slow") > 0
    )
