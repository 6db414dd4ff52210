"""What an exchange between machines answers to, against differences and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from models.step_time.physics.step_formula import NAMES, STEP, closed_slopes, closed_times
from tests.models.step_time.physics.test_step_formula import MEMBERS, NEUTRAL, Z, exchange, line, parameters, wires


@settings(max_examples=80, deadline=None, derandomize=True)
@given(MEMBERS, Z)
def test_slopes_are_what_a_moved_parameter_does(cluster: tuple[list[str], list[int]], z: list[float]) -> None:
    types, layout = cluster
    for workload in ("net", "tiny", "unknown"):
        here, values = line(types, layout, workload=workload, accumulation=3), parameters(z)
        found = closed_slopes(here, values)[0]
        for at, name in enumerate(NAMES):
            moved = STEP * np.eye(len(NAMES))[at]
            down, middle, up = (np.log(closed_times(here, values + by).step_s[0]) for by in (-moved, 0 * moved, moved))
            # from the left and from the right, which differ where a bound begins to hold or a bucket is just full
            sides = sorted([(middle - down) / STEP, (up - middle) / STEP])
            rounding = 1e-4 + 1e-3 * abs(sides[1])
            assert sides[0] - rounding <= found[at] <= sides[1] + rounding, name


def test_few_devices_do_not_fill_a_link_that_many_do() -> None:
    known = {**NEUTRAL, "bytes": 0.0, "log_gamma": 0.0, "log_alpha": -60.0, "log_scale": 0.0}
    driven, any_link = parameters(**(known | {"log_driven": np.log(25.0)})), parameters(**known)
    # 1e8 bytes by (0.8, 25) or (0.8, 100) Gbit/s, a ring of 2 or 16
    one, eight = (line(["wide"] * 2, [devices] * 2) for devices in (1, 8))
    assert exchange(one, any_link) == pytest.approx(0.8 / 100)
    assert exchange(one, driven) == pytest.approx(0.8 / 25, rel=2e-3)
    assert exchange(eight, driven) == pytest.approx(0.8 * 15 / 8 / 100, rel=2e-2)
    # 4.5 devices each on average would drive 112.5: 88.6 is the smooth minimum
    assert exchange(line(["wide"] * 2, [1, 8]), driven) == pytest.approx(0.8 * 16 / 9 / 88.6, rel=1e-3)
    slow = line(["slow"] * 2, [1, 1])
    assert exchange(slow, driven) == pytest.approx(0.8 / 10, rel=1e-2)


def test_inside_a_machine_nothing_drives_a_link() -> None:
    here = line(["quick"], [8])
    assert exchange(here, parameters(log_driven=0.0)) == exchange(here, parameters(log_driven=60.0)) > 0


def test_one_bucket_is_the_whole_exchange_and_answers_to_its_bytes() -> None:
    tiny, large = (wires(line(["slow"] * 2, [1, 1], workload=name), parameters()) for name in ("tiny", "net"))
    assert tiny.whole.seconds == tiny.last.seconds and large.last.seconds < 0.5 * large.whole.seconds
    assert tiny.slopes()["log_last"][1] == 0 and large.slopes()["log_last"][1] > 0
