"""Instance types as the step time sees them, where their descriptions have holes."""

from __future__ import annotations

import pandas as pd

from models.machines import Machine, read_machines


def test_a_figure_that_nobody_knows_is_the_middle_of_those_known() -> None:
    types = pd.DataFrame(
        [
            {"name": "a", "device": "cpu", "cores": 2.0, "bandwidth_gbps": 4.0},
            {"name": "b", "device": "cpu", "cores": 8.0, "bandwidth_gbps": None},
            {"name": "c", "device": "cpu", "cores": None, "bandwidth_gbps": 25.0},
        ]
    )
    assert read_machines(types, ["d", "a"]) == {
        "a": Machine(cores=2.0, bandwidth_gbps=4.0, devices=1, prior_speed=2.0),
        "b": Machine(cores=8.0, bandwidth_gbps=14.5, devices=1, prior_speed=8.0),
        "c": Machine(cores=5.0, bandwidth_gbps=25.0, devices=1, prior_speed=5.0, speed_told=False),
        "d": Machine(cores=5.0, bandwidth_gbps=14.5, devices=1, prior_speed=5.0, speed_told=False),
    }


def test_where_nobody_knows_anything_types_are_equal_on_usual_ethernet() -> None:
    plain = Machine(cores=1.0, bandwidth_gbps=10.0, devices=1, prior_speed=1.0, speed_told=False)
    assert read_machines(pd.DataFrame([{"name": "a", "cores": None}]), ["b"]) == {"a": plain, "b": plain}
    assert read_machines(pd.DataFrame(), ["b"]) == {"b": plain}


def test_a_device_is_as_fast_as_its_tflops_where_somebody_knows_them() -> None:
    types = pd.DataFrame([{"name": "a", "device": "t9", "device_tflops": 8.0, "cores": 4.0, "devices": 4.0}])
    (found,) = read_machines(types, []).values()
    assert (found.prior_speed, found.devices) == (8.0, 4)
