"""The distance to the nearest measurement, in doublings."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.setup_table import row_key
from models.step_time.nearest import Nearness
from models.step_time.setup_arrays import SetupArrays, read_setups

DEVICES = {"a": 4, "b": 1}
Row = tuple[str, str, str, int]  # cluster, layout, batch, accumulation steps


def read(*rows: Row, workload: str = "net") -> SetupArrays:
    columns = ["cluster", "layout", "batch_per_device", "accumulation_steps"]
    return read_setups(pd.DataFrame(rows, columns=columns).assign(workload=workload), DEVICES)


def apart(measured: Row, asked: Row) -> float:
    return float(Nearness(read(measured)).doublings(read(asked))[0])


@pytest.mark.parametrize(
    ("asked", "doublings"),
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
def test_differences_count_in_doublings(asked: Row, doublings: float) -> None:
    measured = Nearness(read(("2xa", "4", "32", 1), ("1xb", "1", "8", 1)))
    assert measured.doublings(read(asked)) == pytest.approx([doublings])
    assert np.isnan(measured.doublings(read(asked, workload="other"))).all()


MACHINES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4
)


@given(MACHINES, MACHINES, st.integers(1, 2), st.integers(1, 2))
def test_only_the_same_setup_is_at_no_distance(
    ours: list[tuple[str, int, int]], theirs: list[tuple[str, int, int]], one: int, other: int
) -> None:
    rows: list[Row] = []
    for machines, steps in ((ours, one), (theirs, other)):
        names, used, batch = zip(*machines, strict=True)
        layout, batches = ("+".join(map(str, numbers)) for numbers in (used, batch))
        rows.append(("+".join(f"1x{name}" for name in names), layout, batches, steps))
    columns = ["cluster", "layout", "batch_per_device", "accumulation_steps"]
    keys = [
        row_key({"workload": "net"} | dict(zip(columns, row, strict=True)), DEVICES) for row in rows
    ]
    assert (apart(*rows) == 0) == (keys[0] == keys[1]) == (apart(*rows[::-1]) == 0)
