"""The closed form of Pollux: it finds its own worlds, borrows what rows cannot tell, and sees no answers."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from models.step_time.setup_arrays import read_setups
from tests.benchmarks.rivals import predict_textbook, step_seconds

DEVICES = {"x.large": 4}
LAYOUTS = ("1", "2", "3", "4", "1+1", "2+2", "4+4", "1+3", "2+2+2", "4+4+4", "4+4+4+4")
# a, k, a_l, b_l, a_n, b_n of 1e8 bytes of gradient, and g
TERMS = np.array([0.04, 0.002, 0.02, 0.004, 0.1, 0.01, 2.5])
SIZES = {"one": 1e8, "two": 3e8, "three": 5e7}


def setups(
    name: str, layouts: tuple[str, ...] = LAYOUTS, steps: tuple[int, ...] = (1, 3)
) -> pd.DataFrame:
    rows = [
        {
            "workload": name,
            "cluster": f"{layout.count('+') + 1}xx.large",
            "layout": layout,
            "batch_per_device": str(batch),
            "accumulation_steps": step,
            "gradient_bytes": SIZES[name],
        }
        for layout, batch, step in itertools.product(layouts, (4, 16, 64, 256), steps)
    ]
    return pd.DataFrame(rows)


def world(frame: pd.DataFrame) -> np.ndarray:
    """Every second of a workload grows with its gradient."""
    read = read_setups(frame, DEVICES)
    size = frame["gradient_bytes"].to_numpy(float) / 1e8
    seconds = step_seconds(
        TERMS,
        batch=read.batch.max(axis=1),
        devices=read.ranks,
        machines=read.instances,
        accumulation=read.accumulation,
    )
    return size * seconds


def measured(*names: str, **kwargs: tuple) -> pd.DataFrame:
    frame = pd.concat([setups(name, **kwargs) for name in names], ignore_index=True)
    return frame.assign(step_s=world(frame), sync_s=0.0)


def test_the_equation_by_hand() -> None:
    def seconds(devices: int, machines: int, steps: int = 1) -> float:
        numbers = {"batch": 10, "devices": devices, "machines": machines, "accumulation": steps}
        terms = np.array([1.0, 0.2, 4.0, 0.5, 3.0, 0.25, 2.0])
        return float(
            step_seconds(terms, **{name: np.array([float(one)]) for name, one in numbers.items()})[
                0
            ]
        )

    assert seconds(1, 1) == pytest.approx(3)
    assert seconds(2, 1) == pytest.approx(5)  # 3, 4, 5
    assert seconds(6, 2) == pytest.approx(5)
    assert seconds(6, 2, steps=4) == pytest.approx(3 * 3 + 5)


def test_it_finds_a_world_of_its_own_form() -> None:
    known = measured("one", "two")
    kept = np.random.default_rng(0).random(len(known)) < 0.6
    found = predict_textbook(known[kept], known[~kept], DEVICES)
    assert found == pytest.approx(world(known[~kept]), rel=1e-3)


def test_an_empty_layout_is_every_device_of_its_machines() -> None:
    known = measured("one")
    asked = setups("one", ("4+4",))
    assert predict_textbook(known, asked.assign(layout=""), DEVICES) == pytest.approx(
        world(asked), rel=1e-3
    )


@pytest.mark.parametrize("layouts", [("1",), ("1", "2", "3", "4"), ("1", "4", "1+1", "4+4")])
def test_what_rows_cannot_tell_comes_from_the_others_by_bytes(layouts: tuple[str, ...]) -> None:
    known = pd.concat(
        [measured("one", "two"), measured("three", layouts=layouts)], ignore_index=True
    )
    asked = setups("three")
    assert predict_textbook(known, asked, DEVICES) == pytest.approx(world(asked), rel=1e-2)


def test_bytes_that_nobody_knows_leave_the_plain_median() -> None:
    known = pd.concat([measured("one"), measured("three", layouts=("1",))], ignore_index=True)
    asked = setups("three", ("4+4+4",), steps=(1,)).drop(columns="gradient_bytes")
    found = predict_textbook(known.drop(columns="gradient_bytes"), asked, DEVICES)
    sync = TERMS[4] + TERMS[5] * 10
    grad = 0.5 * (TERMS[0] + TERMS[1] * np.array([4, 16, 64, 256]))
    assert found == pytest.approx((grad ** TERMS[6] + sync ** TERMS[6]) ** (1 / TERMS[6]), rel=1e-2)


def test_answers_in_the_rows_asked_for_are_not_seen() -> None:
    known, asked = measured("one", "two"), measured("one", "two")
    other = asked.assign(step_s=asked["step_s"].to_numpy()[::-1], sync_s=np.nan)
    bare = asked.drop(columns=["step_s", "sync_s"])
    expected = predict_textbook(known, bare, DEVICES)
    for frame in (asked, other):
        assert np.array_equal(predict_textbook(known, frame, DEVICES), expected)


@pytest.mark.parametrize("batch", ["16", "4"])
def test_few_rows_give_finite_seconds(batch: str) -> None:
    """Nothing known of any other workload; one batch only; not a row of the workload asked for; not a row at all."""
    single = measured("one", layouts=("1",))
    for known in (single, single[single["batch_per_device"] == batch], single.iloc[:1]):
        for name in ("one", "two"):
            found = predict_textbook(known, setups(name), DEVICES)
            assert np.all(np.isfinite(found) & (found > 0))
    assert np.isnan(predict_textbook(single.iloc[:0], setups("one"), DEVICES)).all()
