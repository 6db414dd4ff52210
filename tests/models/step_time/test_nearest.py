"""How near the nearest measurement is, in doublings."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.setup_table import row_key
from models.step_time.nearest import Nearness
from models.step_time.setup_arrays import SetupArrays, read_setups

DEVICES = {"a": 4, "b": 1}


def near(*setups: tuple[str, str, str, int]) -> list[float]:
    """Doublings of (cluster, layout, batch, accumulation) of the workload "net", measured on 2xa at batch 32."""
    measured = pd.DataFrame(
        {
            "workload": ["net", "net"],
            "cluster": ["2xa", "1xb"],
            "layout": ["4", "1"],
            "batch_per_device": ["32", "8"],
        }
    )
    asked = pd.DataFrame(
        setups, columns=["cluster", "layout", "batch_per_device", "accumulation_steps"]
    )
    return list(
        Nearness(read_setups(measured, DEVICES)).doublings(
            read_setups(asked.assign(workload="net"), DEVICES)
        )
    )


def apart(measured: dict[str, object], asked: dict[str, object]) -> float:
    """Doublings from the one setup that was measured to the one that is asked for."""
    one, other = (
        read_setups(pd.DataFrame([{"workload": "net", **row}]), DEVICES)
        for row in (measured, asked)
    )
    return float(Nearness(one).doublings(other)[0])


def setup(cluster: str, batch: str, layout: str = "", steps: int = 1) -> dict[str, object]:
    return {
        "cluster": cluster,
        "layout": layout,
        "batch_per_device": batch,
        "accumulation_steps": steps,
    }


def test_what_was_measured_itself_is_no_doubling_away() -> None:
    assert near(("2xa", "", "32", 1), ("1xb", "1", "8", 1)) == [0, 0]


def test_batch_devices_machines_and_accumulation_count_in_doublings() -> None:
    assert near(("2xa", "4", "64", 1)) == pytest.approx([1])
    assert near(("4xa", "4", "32", 1)) == pytest.approx(
        [2]
    )  # twice the machines, twice the devices
    assert near(("2xa", "4", "32", 2)) == pytest.approx([1])
    assert near(("2xa", "2", "32", 1)) == pytest.approx([1])


def test_a_type_that_only_one_of_the_two_has_counts_as_one() -> None:
    assert near(("1xa+1xc", "4", "32", 1)) == pytest.approx([1])
    assert near(("1xc", "1", "8", 1)) == pytest.approx([2])  # b is missing, c is new


def test_a_workload_that_never_ran_has_no_nearest() -> None:
    measured = pd.DataFrame({"workload": ["net"], "cluster": ["1xa"], "batch_per_device": ["8"]})
    asked = measured.assign(workload="other")
    assert np.isnan(
        Nearness(read_setups(measured, DEVICES)).doublings(read_setups(asked, DEVICES))
    ).all()


@pytest.mark.parametrize(
    ("measured", "asked", "least"),
    [
        (
            setup("2xa+1xb", "8+8+16", "1+1+1"),
            setup("1xa+2xb", "8+12+12", "1+1+1"),
            0.3,
        ),  # another has more of it
        (setup("2xa+1xb", "8+8+16", "1+1+1"), setup("1xa+2xb", "16+8+8", "1+1+1"), 0.1),
        (
            setup("2xa+1xb", "8+8+16", "1+1+1"),
            setup("2xa+1xb", "16+8+8", "1+1+1"),
            0.1,
        ),  # another is the straggler
        (setup("2xa", "8", "2+2"), setup("2xa", "8", "1+3"), 0.7),
        (setup("2xa", "16"), setup("2xa", "24+8"), 0.7),
        (setup("2xa", "24+8", "1+3"), setup("2xa", "8+24", "1+3"), 0.1),
        (setup("64xb", "8"), setup("63xb+1xa", "8", "+".join(["1"] * 64)), 0.1),
        (setup("1xb", "8"), setup("1xc", "8", "1"), 1.5),
    ],
)
def test_what_is_another_setup_was_not_measured_itself(
    measured: dict[str, object], asked: dict[str, object], least: float
) -> None:
    there, back = apart(measured, asked), apart(asked, measured)
    assert least <= there == pytest.approx(back)


def test_more_uneven_is_further_away() -> None:
    far = [
        apart(setup("2xa", "16"), setup("2xa", one))
        for one in ("16+16", "17+15", "20+12", "24+8", "31+1")
    ]
    assert far == sorted(far) and far[0] == 0 and far[1] >= 0.1


def test_the_order_of_machines_and_how_they_are_counted_mean_nothing() -> None:
    assert apart(setup("2xa+1xb", "8+4+2", "1+3+1"), setup("1xb+2xa", "2+4+8", "1+3+1")) == 0
    single = read_setups(pd.DataFrame([{"workload": "net", **setup("3xa", "8+8+9")}]), DEVICES)
    groups = SetupArrays(
        workloads=single.workloads,
        names=("a", "b"),
        kind=np.array([[0, -1, 0]]),
        count=np.array([[1.0, 0.0, 2.0]]),
        batch=np.array([[9.0, 0.0, 8.0]]),
        layout=np.array([[4.0, 0.0, 4.0]]),
        accumulation=np.ones(1),
    )
    assert (
        Nearness(single).doublings(groups).tolist()
        == Nearness(groups).doublings(single).tolist()
        == [0]
    )


MACHINES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4
)


@given(MACHINES, MACHINES, st.integers(1, 2), st.integers(1, 2))
def test_only_the_same_setup_is_no_doubling_away(
    ours: list[tuple[str, int, int]], theirs: list[tuple[str, int, int]], one: int, other: int
) -> None:
    rows = [
        setup(
            "+".join(f"1x{name}" for name in names),
            "+".join(map(str, batch)),
            "+".join(map(str, used)),
            steps,
        )
        for (names, used, batch), steps in (
            (zip(*ours, strict=True), one),
            (zip(*theirs, strict=True), other),
        )
    ]
    keys = [row_key({"workload": "net", **row}, DEVICES) for row in rows]
    for left, right in itertools.permutations(range(2)):
        assert (apart(rows[left], rows[right]) == 0) == (keys[left] == keys[right])
    assert apart(rows[0], rows[0]) == 0
