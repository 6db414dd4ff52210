"""One device's seconds by batch: measured points kept, lines outside, other types by the ratio of speeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.step_time.machine_specs import Machine
from models.step_time.physics.compute import Curve, fit_compute, straight

NO_RUNS = pd.DataFrame({"workload": [], "instance_type": [], "batch": [], "seconds": []})
MACHINES = {
    name: Machine(cores=cores, bandwidth_gbps=1.0, devices=1, prior_speed=cores)
    for name, cores in (("small", 0.25), ("large", 1.0), ("middle", 0.5))
}


def profile(workload: str, name: str, per_sample_s: float, batches: tuple[int, ...] = (4, 8, 16)) -> pd.DataFrame:
    rows = [
        {
            "workload": workload,
            "instance_type": name,
            "batch": batch,
            "forward_s": 0.01 + per_sample_s * batch / 3,
            "backward_s": 0.02 + per_sample_s * batch * 2 / 3,
            "optimizer_s": 0.005,
            "peak_bytes": 1e8 + 1e6 * batch,
        }
        for batch in batches
    ]
    return pd.DataFrame(rows)


POINTS = st.lists(
    st.tuples(st.integers(1, 4096), st.floats(1e-4, 10)), min_size=1, max_size=6, unique_by=lambda point: point[0]
)


@given(POINTS, st.lists(st.integers(1, 10_000), min_size=2, max_size=2))
def test_times_are_positive_keep_the_points_and_never_fall_outside_them(
    points: list[tuple[int, float]], asked: list[int]
) -> None:
    ordered = sorted(points)
    batches, seconds = tuple(float(one) for one, _ in ordered), tuple(one for _, one in ordered)
    curve = Curve(batches=batches, forward_s=seconds, backward_s=seconds, optimizer_s=0.0, origin="profile")
    assert curve.at(np.array(batches))[0] == pytest.approx(seconds)
    low, high = (float(curve.at(np.array([float(one)]))[0][0]) for one in sorted(asked))
    assert low >= 0 and np.isfinite(high)
    if min(asked) >= batches[-1] or max(asked) <= batches[0]:
        assert high >= low * (1 - 1e-9)


def test_between_and_beyond_measured_batches() -> None:
    model = fit_compute(profile("net", "large", 0.01), NO_RUNS, MACHINES)
    forward, backward = model.curve("net", "large").at(np.array([12.0, 32.0, 2.0]))
    assert forward + backward == pytest.approx([0.03 + 0.12, 0.03 + 0.32, 0.03 + 0.02])


def test_a_type_without_profile_takes_the_ratio_that_other_workloads_show() -> None:
    # "small" has a quarter of the cores, yet two other workloads run there at a third of the speed
    slow = [profile(name, "small", 0.03) for name in ("other", "third")]
    for frame in slow:
        frame[["forward_s", "backward_s"]] += [0.02, 0.04]
    fast = [profile(name, "large", 0.01) for name in ("other", "third", "net")]
    model = fit_compute(pd.concat([*slow, *fast]), NO_RUNS, MACHINES)
    ratio = model.curve("net", "small").forward_s[1] / model.curve("net", "large").forward_s[1]
    assert 3.0 < ratio < 3.6  # between what was seen (3) and the cores (4), nearer to what was seen
    assert model.doubt("net", "small") > model.doubt("net", "large") == 0


def test_a_type_that_nobody_profiled_takes_the_ratio_of_cores_and_is_doubted_more() -> None:
    model = fit_compute(profile("net", "large", 0.01), NO_RUNS, MACHINES)
    assert model.curve("net", "middle").forward_s[0] == pytest.approx(2 * model.curve("net", "large").forward_s[0])
    assert model.doubt("net", "middle") > 0.15


def test_without_profile_one_device_runs_give_the_line_and_without_those_it_says_what_is_missing() -> None:
    alone = pd.DataFrame(
        {"workload": "net", "instance_type": "small", "batch": [4, 8, 16], "seconds": [0.14, 0.18, 0.26], "sd": 0.03}
    )
    model = fit_compute(pd.DataFrame(), alone, MACHINES)
    forward, backward = model.curve("net", "small").at(np.array([32.0]))
    assert forward + backward == pytest.approx([0.42])
    with pytest.raises(ValueError, match="never measured"):
        model.curve("absent", "small")


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-3, 1e3)), min_size=1, max_size=8))
def test_lines_never_have_negative_parts(points: list[tuple[int, float]]) -> None:
    intercept, slope = straight(np.array([float(x) for x, _ in points]), np.array([y for _, y in points]))
    assert intercept >= 0 and slope >= 0 and intercept + slope > 0
