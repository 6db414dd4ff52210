"""The authors' own fit: it finds a world of its form, follows their rules for few rows, and sees no answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from models.columns import read_setups
from models.judging.textbook import step_seconds
from tasks.adaptdl_fit import predict_adaptdl

goodput = pytest.importorskip("adaptdl.goodput")

DEVICES = {"x.large": 4}
LAYOUTS = ("1", "2", "3", "4", "1+1", "2+2", "4+4", "2+2+2", "4+4+4")
# The slopes are small: the authors' fit pulls them to nothing.
TERMS = np.array([0.04, 0.002, 0.05, 0.0005, 0.15, 0.001, 1.5])


def measured(name: str = "one", layouts: tuple[str, ...] = LAYOUTS) -> pd.DataFrame:
    rows = [
        {
            "workload": name,
            "cluster": f"{layout.count('+') + 1}xx.large",
            "layout": layout,
            "batch_per_device": str(batch),
            "accumulation_steps": steps,
        }
        for layout, batch, steps in itertools.product(layouts, (4, 16, 64, 256), (1, 2))
    ]
    frame = pd.DataFrame(rows)
    read = read_setups(frame, DEVICES)
    batch = read.batch.max(axis=1)
    step = step_seconds(TERMS, batch=batch, devices=read.ranks, machines=read.instances, accumulation=read.accumulation)
    return frame.assign(step_s=step, sync_s=step - read.accumulation * (TERMS[0] + TERMS[1] * batch))


def test_it_finds_a_world_of_its_own_form() -> None:
    frame = measured()
    asked = np.random.default_rng(0).random(len(frame)) < 0.3
    found = predict_adaptdl(frame[~asked], frame[asked], DEVICES)
    assert found == pytest.approx(frame["step_s"][asked].to_numpy(), rel=0.03)


def test_waits_nobody_recorded_follow_from_the_single_device() -> None:
    frame = measured()
    known = frame.assign(sync_s=np.nan)
    assert predict_adaptdl(known, frame, DEVICES) == pytest.approx(frame["step_s"].to_numpy(), rel=0.03)
    several = known[known["layout"] != "1"]
    assert np.isnan(predict_adaptdl(several, frame, DEVICES)).all()


def test_answers_in_the_rows_asked_for_are_not_seen() -> None:
    known = measured()
    expected = predict_adaptdl(known, known.drop(columns=["step_s", "sync_s"]), DEVICES)
    other = known.assign(step_s=known["step_s"].to_numpy()[::-1], sync_s=np.nan)
    for asked in (known, other):
        assert np.array_equal(predict_adaptdl(known, asked, DEVICES), expected)


@pytest.mark.parametrize("rows", [1, None])
def test_single_device_rows_give_finite_seconds_and_no_row_none(rows: int | None) -> None:
    known = measured("one", ("1",)).iloc[:rows]
    asked = pd.concat([measured("one"), measured("two")], ignore_index=True)
    found = predict_adaptdl(known, asked, DEVICES)
    mine = (asked["workload"] == "one").to_numpy()
    assert np.all(np.isfinite(found[mine]) & (found[mine] > 0))
    assert np.isnan(found[~mine]).all()


def test_a_fit_that_fails_predicts_nothing_and_leaves_the_package_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FloatingPointError("no")

    with monkeypatch.context() as patched:
        patched.setattr(goodput.scipy.optimize, "minimize", fail)
        assert np.isnan(predict_adaptdl(measured(), measured(), DEVICES)).all()
    assert goodput.np is np
    assert np.isfinite(predict_adaptdl(measured(), measured(), DEVICES)).all()
