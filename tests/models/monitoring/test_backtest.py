"""What may enter a prediction, what is guessed, and the arithmetic of the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.monitoring.backtest import COLUMNS, PREDICTED, backtest, notes, summary
from models.step_time.dataset import TrainingData
from models.step_time.model import StepTimeModel, introduced
from tests.models.guessing import NEW, asked, model
from tests.models.guessing import TYPES as GPU_TYPES
from tests.models.guessing import data as guess_data
from tests.models.guessing import seconds as guess_seconds

TYPES = pd.DataFrame(
    {"name": ["b.big", "b.blank"], "devices": [4, None], "device": ["t9", None], "cores": 32.0}
)
SAME = {"accumulation_steps": 1, "strategy": "ddp", "precision": "fp32", "provider": "ec2"}


def runs(*clusters: str, workload: str = "tiny", layout: str | None = "1") -> pd.DataFrame:
    """Four batches a cluster with a small wobble: more machines wait longer."""
    rows = []
    for cluster in clusters:
        machines = sum(int(part.split("x")[0]) for part in cluster.split("+"))
        for at, batch in enumerate((4, 8, 16, 32)):
            waited = 0.004 * (machines - 1)
            step = (0.01 + 0.002 * batch + waited) * (1 + 0.01 * (-1) ** (at + machines))
            rows.append((workload, cluster, layout, str(batch), step, waited))
    columns = ["workload", "cluster", "layout", "batch_per_device", "step_s", "sync_s"]
    return pd.DataFrame(rows, columns=columns).assign(**SAME, gradient_bytes=4e6)


def data(frame: pd.DataFrame, types: pd.DataFrame = TYPES) -> TrainingData:
    frames = dict.fromkeys(("profiles", "buckets", "probes", "workloads"), pd.DataFrame())
    return TrainingData(runs=frame, **frames, instance_types=types)


KNOWN = data(runs("1xb.big", "2xb.big", "4xb.big"))


def seconds(test: pd.DataFrame, training: TrainingData = KNOWN) -> np.ndarray:
    return backtest(training, test, seed=0)[list(PREDICTED)].to_numpy(float)


def test_a_cluster_never_measured_is_predicted_within_its_interval() -> None:
    test = runs("3xb.big")
    step, low, high = seconds(test).T
    assert (low < step).all() and (step < high).all()
    assert np.allclose(step, test["step_s"], rtol=0.1)


def test_measurements_of_the_test_frame_never_enter_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: set[str] = set()

    def spied(
        self: StepTimeModel, setups: pd.DataFrame, predict: Any = StepTimeModel.predict
    ) -> Any:
        shown.update(setups.columns)
        return predict(self, setups)

    monkeypatch.setattr(StepTimeModel, "predict", spied)
    test = runs("3xb.big")
    assert np.array_equal(seconds(test), seconds(test.assign(step_s=9.0, sync_s=9.0)))
    assert shown and not {"step_s", "sync_s", "gradient_bytes"} & shown


def test_a_prediction_depends_on_its_row_alone() -> None:
    new, big = runs("2xc.new", layout=None), runs("2xb.big", layout="4")
    test = pd.concat([new, big, new]).set_index(pd.Index([7] * 12))
    whole = seconds(test)
    assert whole[:4].tolist() == whole[-4:].tolist()
    assert np.allclose(seconds(test.iloc[::-1]), whole[::-1], rtol=1e-9)


def test_a_type_without_rows_is_a_typical_machine_in_doubt() -> None:
    measured, typical = seconds(runs("3xb.big")), seconds(runs("3xc.new"))
    assert (np.abs(np.log(typical[:, 0] / measured[:, 0])) < np.log(2)).all()
    assert (typical[:, 2] / typical[:, 1] > measured[:, 2] / measured[:, 1]).all()


KINDS = pd.DataFrame(
    [("old", "u1", 1, 4.0, 8.0), ("old.four", "u1", 4, 48.0, 8.0), ("new", "u2", 8, 96.0, 20.0)],
    columns=["name", "device", "devices", "cores", "device_tflops"],
)


@pytest.mark.parametrize(
    ("predicted", "ratio", "off", "least", "most"),
    [
        ("old.four", 1.0, 0.1, 1, 2),
        ("new", 1 / 2.5, 0.15, 100, 1000),
        ("undescribed", 1.0, 12, 1000, np.inf),
    ],
)
def test_another_kind_of_device_is_predicted_by_its_figures(
    predicted: str, ratio: float, off: float, least: float, most: float
) -> None:
    """`least` and `most` bound the width of the interval, high over low."""
    found = seconds(runs(f"1x{predicted}"), data(runs("1xold"), KINDS))
    measured = runs("1xold")["step_s"].to_numpy(float)
    assert abs(np.log(np.median(found[:, 0] / measured) / ratio)) < np.log1p(off)
    assert least < np.median(found[:, 2] / found[:, 1]) < most


def test_rows_that_cannot_be_predicted_are_empty_and_counted() -> None:
    good = runs("2xb.big")
    unknown = runs("1xb.big", workload="gpt")
    other_modes = [good.assign(strategy="gossip").iloc[:1], good.assign(precision="fp8").iloc[:2]]
    test = pd.concat([good, *other_modes, unknown], ignore_index=True)
    training = data(pd.concat([KNOWN.runs, good.assign(precision="fp8")], ignore_index=True))
    found = backtest(training, test, seed=0)
    empty = found[list(PREDICTED)].isna()
    assert (empty.any(axis=1) == empty.all(axis=1)).all()
    assert empty.all(axis=1).tolist() == [False] * 4 + [True] * 7
    named = ["gossip", "fp8", "fp8", *["gpt"] * 4]
    reasons = found["unpredicted"].iloc[4:]
    assert all(name in reason for name, reason in zip(named, reasons, strict=True))
    missing, unlearned = notes(training, test, found)
    assert missing.startswith("7 of 11") and unlearned.startswith("4 of 16")
    assert summary(test, found).set_index("by").loc["all", "rows"] == 4


def test_assumed_devices_and_typical_machines_are_named() -> None:
    test = pd.concat([runs("1xc.new", layout=None), runs("2xb.big")], ignore_index=True)
    typical, assumed = notes(KNOWN, test, backtest(KNOWN, test, seed=0))
    assert typical.endswith(": c.new") and assumed.endswith(": c.new")


@pytest.mark.parametrize("changes", [{"precision": "fp8"}, {"provider": ["ec2", "local"] * 6}])
def test_nothing_to_learn_from_and_several_providers_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        backtest(data(KNOWN.runs.assign(**changes)), runs("1xb.big"), seed=0)


def test_the_summary_has_errors_coverage_and_width() -> None:
    """Spread 0.1: measured lies 0, 0.6, 1.2, 1.6 and 2 spreads off, on both sides."""
    off = np.array([0.0, 0.06, -0.12, 0.16, -0.2])
    clusters = ["1xt", "1xt", "2xt", "1xs+9xt", "2xt"]
    test = pd.DataFrame({"workload": list("aaabb"), "cluster": clusters, "step_s": 2 * np.exp(off)})
    half = np.exp(0.1 * Z_90)
    ends = {"predicted_step_s": 2.0, "low_s": 2 / half, "high_s": 2 * half, "unpredicted": ""}
    board = summary(test, test.assign(**ends)[list(ends)])
    assert tuple(board.columns) == COLUMNS
    rows = {"workload": [3, 2], "instances": [2, 2, 1], "all": [5]}
    assert board.groupby("by")["rows"].apply(list).to_dict() == rows
    error = np.abs(np.exp(-off) - 1)
    expected = [error.mean(), np.median(error), np.quantile(error, 0.9), 0.4, 0.6, 0.8]
    assert board.iloc[-1, 3:].tolist() == pytest.approx([*expected, half - 1 / half])
    assert summary(test, test.assign(**ends | {"unpredicted": "x"})).empty


ONE, OTHER = (one.name for one in GPU_TYPES[:2])
FACTS = pd.DataFrame([{"workload": "new", "flops_per_sample": 1.5e10, "gradient_bytes": 2e8}])


def with_facts() -> TrainingData:
    """The facts also describe a workload without rows."""
    workloads = pd.concat([guess_data().workloads, FACTS], ignore_index=True)
    return replace(guess_data(), workloads=workloads)


def rows(*setups: tuple[str, str, int]) -> pd.DataFrame:
    flops, rate = float(NEW.flops_per_sample or 0), float(GPU_TYPES[0].device_tflops or 0)
    parts = [asked(*one).assign(step_s=guess_seconds(flops, one[2], rate)) for one in setups]
    return pd.concat(parts, ignore_index=True)


TEST = rows(("new", f"1x{ONE}", 32), ("a", f"1x{ONE}", 32), ("new", f"2x{OTHER}", 64))


def test_a_workload_known_by_its_facts_alone_is_guessed() -> None:
    found = backtest(with_facts(), TEST, seed=1)
    assert found["guessed"].tolist() == [True, False, True]
    guess = introduced(model(), NEW)
    assert guess is not None
    expected = guess.predict(TEST)[["step_s", "step_low_s", "step_high_s"]].to_numpy(float)
    assert np.allclose(found[list(PREDICTED)].to_numpy(float), expected)
    (line,) = notes(with_facts(), TEST, found)
    assert line.startswith("2 of 3") and line.endswith("new: 2")
    in_rows = TEST.assign(flops_per_sample=1.5e10, gradient_bytes=2e8)
    lying = TEST.assign(flops_per_sample=9e12, gradient_bytes=9e9)
    for training, test in ((guess_data(), in_rows), (with_facts(), lying)):
        pd.testing.assert_frame_equal(backtest(training, test, seed=1), found)


def test_a_guess_needs_the_compute_of_workload_and_device() -> None:
    more = rows(("new", f"1x{ONE}+1xc.dark", 8), ("dark", f"1x{ONE}", 8))
    found = backtest(with_facts(), pd.concat([TEST, more], ignore_index=True), seed=1)
    reasons = found["unpredicted"].tolist()
    assert reasons[:3] == [""] * 3 and "c.dark" in reasons[3] and "flops" in reasons[4]
    unrated = guess_data().instance_types.assign(device_tflops=None)
    found = backtest(replace(with_facts(), instance_types=unrated), TEST, seed=1)
    assert (found["unpredicted"] != "").tolist() == [True, False, True]
