"""The distance to the nearest measurement, in doublings."""

import numpy as np
import pandas as pd
import pytest

from models.step_time.nearest import doublings
from models.step_time.setup_arrays import read_setups

DEVICES = {"a": 4, "b": 1}


def read(*rows, workload="net"):
    columns = ["cluster", "layout", "batch_per_device", "accumulation_steps"]
    return read_setups(pd.DataFrame(rows, columns=columns).assign(workload=workload), DEVICES)


@pytest.mark.parametrize(
    ("setups", "distance"),
    [
        (("2xa", "", "32", 1), 0),
        (("1xb", "1", "8", 1), 0),
        (("2xa", "4", "64", 1), 1),
        (("4xa", "4", "32", 1), 2),  # twice the machines, twice the devices
        (("2xa", "4", "32", 2), 1),
        (("2xa", "2", "32", 1), 1),
        (("1xa+1xc", "4", "32", 1), 1),
        (("1xc", "1", "8", 1), 2),  # b is missing, c is new
    ],
)
def test_differences_count_in_doublings(setups, distance):
    measured = read(("2xa", "4", "32", 1), ("1xb", "1", "8", 1))
    assert doublings(measured, read(setups)) == pytest.approx([distance])
    assert np.isnan(doublings(measured, read(setups, workload="other"))).all()
