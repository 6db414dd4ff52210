"""How near the nearest measurement is, in doublings."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from models.columns import read_setups
from models.nearness import Nearness

DEVICES = {"a": 4, "b": 1}


def near(*setups: tuple[str, str, str, int]) -> list[float]:
    """Doublings of (cluster, layout, batch, accumulation) of the workload "net", measured on 2xa at batch 32."""
    measured = pd.DataFrame(
        {"workload": ["net", "net"], "cluster": ["2xa", "1xb"], "layout": ["4", "1"], "batch_per_device": ["32", "8"]}
    )
    asked = pd.DataFrame(setups, columns=["cluster", "layout", "batch_per_device", "accumulation_steps"])
    return list(Nearness(read_setups(measured, DEVICES)).doublings(read_setups(asked.assign(workload="net"), DEVICES)))


def test_what_was_measured_itself_is_no_doubling_away() -> None:
    assert near(("2xa", "", "32", 1), ("1xb", "1", "8", 1)) == [0, 0]


def test_batch_devices_machines_and_accumulation_count_in_doublings() -> None:
    assert near(("2xa", "4", "64", 1)) == pytest.approx([1])
    assert near(("4xa", "4", "32", 1)) == pytest.approx([2])  # twice the machines, twice the devices
    assert near(("2xa", "4", "32", 2)) == pytest.approx([1])
    assert near(("2xa", "2", "32", 1)) == pytest.approx([1])


def test_a_type_that_only_one_of_the_two_has_counts_as_one() -> None:
    assert near(("1xa+1xc", "4", "32", 1)) == pytest.approx([1])
    assert near(("1xc", "1", "8", 1)) == pytest.approx([2])  # b is missing, c is new


def test_a_workload_that_never_ran_has_no_nearest() -> None:
    measured = pd.DataFrame({"workload": ["net"], "cluster": ["1xa"], "batch_per_device": ["8"]})
    asked = measured.assign(workload="other")
    assert np.isnan(Nearness(read_setups(measured, DEVICES)).doublings(read_setups(asked, DEVICES))).all()
