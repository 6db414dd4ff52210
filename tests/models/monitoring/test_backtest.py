"""What may enter a prediction, what is guessed or left without one, and the arithmetic of the report."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from models.monitoring.backtest import COLUMNS, PREDICTED, backtest, notes, summary
from models.step_time.dataset import TrainingData
from models.step_time.model import StepTimeModel, introduced
from tests.models.guessing import NEW, asked, model
from tests.models.guessing import TYPES as GPU_TYPES
from tests.models.guessing import data as guess_data
from tests.models.guessing import seconds as guess_seconds

TYPES = pd.DataFrame(
    [
        {"name": "b.big", "devices": 4, "device": "t9", "cores": 32.0, "bandwidth_gbps": 20.0},
        {"name": "b.blank", "devices": None, "device": None, "cores": None, "bandwidth_gbps": None},
    ]
)


def runs(*clusters: str, workload: str = "tiny", layout: str | None = None) -> pd.DataFrame:
    """Measured with a small deterministic wobble at four batches: more machines wait longer."""
    rows = []
    for cluster in clusters:
        machines = sum(int(part.split("x")[0]) for part in cluster.split("+"))
        for at, batch in enumerate((4, 8, 16, 32)):
            waited = 0.004 * (machines - 1)
            step = (0.01 + 0.002 * batch + waited) * (1 + 0.01 * (-1) ** (at + machines))
            rows.append(
                (workload, cluster, layout, str(batch), 1, "ddp", "fp32", step, waited, "ec2", 4e6)
            )
    names = "workload cluster layout batch_per_device accumulation_steps strategy precision step_s sync_s provider"
    return pd.DataFrame(rows, columns=[*names.split(), "gradient_bytes"])


def data(frame: pd.DataFrame, types: pd.DataFrame = TYPES) -> TrainingData:
    empty = pd.DataFrame()
    return TrainingData(
        runs=frame, profiles=empty, buckets=empty, probes=empty, workloads=empty, instance_types=types
    )  # fmt: skip


@cache
def known() -> TrainingData:
    return data(runs("1xb.big", "2xb.big", "4xb.big", layout="1"))


def seconds(test: pd.DataFrame, training: TrainingData | None = None) -> np.ndarray:
    return backtest(training or known(), test, seed=0)[list(PREDICTED)].to_numpy(float)


def test_a_cluster_never_measured_is_predicted_about_right_with_an_interval_around_it() -> None:
    test = runs("3xb.big", layout="1")
    found = backtest(known(), test, seed=0)
    assert (found["unpredicted"] == "").all()
    assert (found["low_s"] < found["predicted_step_s"]).all() and (
        found["predicted_step_s"] < found["high_s"]
    ).all()
    assert np.allclose(found["predicted_step_s"], test["step_s"], rtol=0.1)


def test_what_was_measured_in_the_test_frame_never_enters_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = pd.concat([runs("3xb.big", layout="1"), runs("1xc.new+1xb.big")], ignore_index=True)
    shown: list[str] = []
    predict = StepTimeModel.predict

    def spied(self: StepTimeModel, setups: pd.DataFrame) -> pd.DataFrame:
        shown.extend(setups.columns)
        return predict(self, setups)

    monkeypatch.setattr(StepTimeModel, "predict", spied)
    honest = seconds(test)
    assert shown and not {"step_s", "sync_s", "gradient_bytes"} & set(shown)
    for column in ("step_s", "sync_s"):
        assert np.array_equal(
            honest, seconds(test.assign(**{column: test[column].to_numpy()[::-1]}))
        )
        assert np.array_equal(honest, seconds(test.assign(**{column: np.nan})))
    assert np.array_equal(honest, seconds(test.drop(columns=["step_s", "sync_s"])))


def test_a_prediction_hangs_neither_on_the_other_rows_nor_on_their_order() -> None:
    several = pd.concat(
        [runs("2xc.new"), runs("2xb.big", layout="4"), runs("1xb.huge"), runs("2xc.new")],
        ignore_index=True,
    )
    huge = pd.DataFrame(
        [{"name": "b.huge", "devices": 8, "device": "t9", "cores": 256.0, "bandwidth_gbps": 400.0}]
    )
    training = data(known().runs, pd.concat([TYPES, huge], ignore_index=True))
    whole = seconds(several, training)
    assert whole[:4].tolist() == whole[-4:].tolist()
    assert np.allclose(seconds(several.iloc[:4], training), whole[:4], rtol=1e-9)
    assert np.allclose(seconds(several.iloc[::-1], training), whole[::-1], rtol=1e-9)
    relabelled = backtest(training, several.set_index(pd.Index([7] * len(several))), seed=0)
    assert np.array_equal(relabelled[list(PREDICTED)].to_numpy(float), whole)


def test_a_type_that_nobody_describes_is_learned_from_its_own_rows() -> None:
    slow = runs("1xc.mine").assign(step_s=lambda frame: 5 * frame["step_s"], layout="1")
    training = data(pd.concat([known().runs, slow.iloc[:3]], ignore_index=True))
    own = seconds(runs("1xc.mine", layout="1").iloc[3:], training)
    assert own[0, 0] == pytest.approx(slow["step_s"].iloc[3], rel=0.15)


def test_a_type_only_asked_for_is_a_typical_machine() -> None:
    """Of those measured, not of the whole catalogue."""
    many = pd.DataFrame(
        [{"name": f"z{at}", "cores": 2.0, "bandwidth_gbps": 0.5} for at in range(9)]
    )
    types = pd.concat([TYPES, many], ignore_index=True)
    measured = seconds(runs("3xb.big", layout="1"), data(known().runs, types))
    for name in ("c.new", "b.blank"):
        asked, without = (
            seconds(runs(f"3x{name}", layout="1"), data(known().runs, one))
            for one in (types, TYPES)
        )
        assert np.allclose(asked, without)
        assert (np.abs(np.log(asked[:, 0] / measured[:, 0])) < np.log(2)).all()
        assert (asked[:, 2] / asked[:, 1] > measured[:, 2] / measured[:, 1]).all(), (
            "no more doubt than of a known type"
        )


KINDS = pd.DataFrame(
    [
        {"name": "cpu", "device": "cpu", "devices": 1, "cores": 16.0},
        {"name": "wide", "device": "cpu", "devices": 1, "cores": 64.0},
        {"name": "old.one", "device": "u1", "devices": 1, "cores": 4.0, "device_tflops": 8.0},
        {"name": "old.four", "device": "u1", "devices": 4, "cores": 48.0, "device_tflops": 8.0},
        {"name": "new", "device": "u2", "devices": 8, "cores": 96.0, "device_tflops": 20.0},
        {"name": "unknown", "device": "x9", "devices": 1, "cores": 8.0},
    ]
)


def ratio(learned: str, asked: str) -> tuple[float, float]:
    """Of one device's predicted seconds on `asked` to those measured on `learned`, and how wide it is in logs."""
    training = data(runs(f"1x{learned}", layout="1"), KINDS)
    found = seconds(runs(f"1x{asked}", layout="1"), training)
    measured = runs(f"1x{learned}")["step_s"].to_numpy(float)
    return float(np.median(found[:, 0] / measured)), float(
        np.median(np.log(found[:, 2] / found[:, 1]))
    )


def test_another_kind_of_device_is_guessed_by_its_figures_and_doubted_by_how_little_they_tell() -> (
    None
):
    (same, sure), (cores, fair), (peak, wide) = (
        ratio(*pair) for pair in (("old.four", "old.one"), ("cpu", "wide"), ("old.one", "new"))
    )
    assert same == pytest.approx(1, rel=0.1) and cores == pytest.approx(1 / 4, rel=0.15)
    assert peak == pytest.approx(1 / 2.5, rel=0.15)
    assert sure < fair < wide and wide > np.log(3)
    for pair in (
        ("old.one", "unknown"),
        ("cpu", "undescribed"),
        ("unknown", "new"),
        ("cpu", "old.one"),
    ):
        away, width = ratio(*pair)
        assert width > np.log(100), "anything within a factor of ten"
        assert width > 1.5 * wide or pair == ("cpu", "old.one"), (
            "less is known than of two accelerators"
        )
        assert 1 / 12 < away < 12


def test_rows_that_cannot_be_predicted_are_left_empty_counted_and_named() -> None:
    good = runs("2xb.big", layout="1")
    test = pd.concat(
        [
            good,
            good.assign(strategy="gossip").iloc[:1],
            good.assign(precision="fp8").iloc[:2],
            runs("1xb.big", workload="gpt", layout="1"),
            runs("1xb.big", workload="odd", layout="1").iloc[:3],
        ],
        ignore_index=True,
    )
    mixed = runs("1xb.big+1xc.mine", workload="odd", layout="1").assign(sync_s=np.nan)
    training = data(
        pd.concat([known().runs, mixed, good.assign(precision="fp8")], ignore_index=True)
    )
    found = backtest(training, test, seed=0)
    empty = found[list(PREDICTED)].isna()
    assert (empty.any(axis=1) == empty.all(axis=1)).all()
    assert empty.all(axis=1).tolist() == [False] * 4 + [True] * 10
    said = notes(training, test, found)
    assert "10 of 14 rows are without prediction" in said[0]
    for words in (
        "strategy gossip (only ddp, fsdp, zero2, ddp-fp16, ddp-powersgd, ddp-mstopk, adasum, adasum-delta,"
        " zero1, tensor-1d, tensor-2d, tensor-2.5d, ps-1, ps-2, ps-4, tables are predicted): 1",
        "precision fp8 (only fp32, tf32, bf16, fp16 are predicted): 2",
        "workload gpt (TRAIN has no row of it, and nobody knows its flops_per_sample): 4",
        "workload odd (TRAIN cannot tell its compute, and nobody knows its flops_per_sample): 3",
    ):
        assert words in said[0]
    assert "4 of 20 rows of TRAIN" in said[1]
    assert summary(test, found).set_index("by").loc["all", "rows"] == 4


def test_a_prediction_that_is_no_time_is_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = StepTimeModel.predict

    def spoilt(self: StepTimeModel, setups: pd.DataFrame) -> pd.DataFrame:
        found = predict(self, setups)
        found.iloc[0, found.columns.get_loc("step_high_s")] = np.inf
        found.iloc[1, found.columns.get_loc("step_s")] = -1.0
        return found

    monkeypatch.setattr(StepTimeModel, "predict", spoilt)
    found = backtest(known(), runs("2xb.big", layout="1"), seed=0)
    assert found["unpredicted"].tolist() == ["no finite time"] * 2 + [""] * 2
    assert found[list(PREDICTED)].isna().all(axis=1).tolist() == [True, True, False, False]


def test_assumed_devices_and_typical_machines_are_named() -> None:
    training = data(pd.concat([known().runs, runs("1xb.blank").iloc[:1]], ignore_index=True))
    test = pd.concat(
        [runs("1xc.new"), runs("1xc.other", layout="2"), runs("2xb.big")], ignore_index=True
    )
    typical, assumed = notes(training, test, backtest(training, test, seed=0))
    assert typical == "taken for a typical machine, since nobody knows them: c.new, c.other"
    assert assumed.endswith("nobody says how many: b.blank, c.new")


def test_workloads_whose_gradients_nobody_knows_and_types_without_catalogue_are_predicted() -> None:
    bare = known().runs.drop(columns=["gradient_bytes", "sync_s"])
    for few in (bare, bare.iloc[:1], bare.iloc[5:6]):
        found = seconds(runs("1xb.big", "8xb.big", "1xb.big+1xc.new"), data(few, pd.DataFrame()))
        assert np.isfinite(found).all() and (found > 0).all()


def test_nothing_to_learn_from_and_several_providers_are_refused() -> None:
    test = runs("1xb.big")
    for runs_of_none in (known().runs.iloc[:0], known().runs.assign(precision="fp8")):
        with pytest.raises(ValueError, match="nothing to learn from"):
            backtest(data(runs_of_none), test, seed=0)
    with pytest.raises(ValueError, match="provider 'local'"):
        backtest(known(), test.assign(provider="local"), seed=0)


def test_errors_coverage_and_width_are_what_they_say() -> None:
    """Spread 0.1: measured lies 0, 0.6, 1.2, 1.6 and 2 spreads off, on both sides."""
    off = np.array([0.0, 0.06, -0.12, 0.16, -0.2])
    test = pd.DataFrame(
        {"workload": list("aaabb"), "cluster": ["1xt", "1xt", "2xt", "1xs+9xt", "2xt"]}
    )
    test["step_s"] = 2.0 * np.exp(off)
    half = math.exp(0.1 * 1.6448536269514722)
    predicted = pd.DataFrame(
        {"predicted_step_s": 2.0, "low_s": 2 / half, "high_s": 2 * half}, index=test.index
    )
    board = summary(test, predicted.assign(unpredicted=""))
    assert tuple(board.columns) == COLUMNS
    assert list(zip(board["by"], board["group"], board["rows"], strict=True)) == [
        ("workload", "a", 3), ("workload", "b", 2), ("instances", "1", 2), ("instances", "2", 2),
        ("instances", "10", 1), ("all", "all", 5),
    ]  # fmt: skip
    whole, error = board.iloc[-1], np.abs(np.exp(-off) - 1)
    assert [whole[name] for name in ("coverage_50", "coverage_80", "coverage_90")] == [
        0.4,
        0.6,
        0.8,
    ]
    assert whole["mean_error"] == pytest.approx(error.mean())
    assert whole["median_error"] == pytest.approx(np.median(error))
    assert whole["p90_error"] == pytest.approx(np.quantile(error, 0.9))
    assert whole["median_width"] == pytest.approx(half - 1 / half)
    none = predicted.assign(unpredicted="workload x")
    assert summary(test, none).empty and tuple(summary(test, none).columns) == COLUMNS


ONE, OTHER = (one.name for one in GPU_TYPES[:2])


@cache
def with_facts() -> TrainingData:
    """The facts also tell of a workload that no row is of."""
    facts = pd.DataFrame([{"workload": "new", "flops_per_sample": 1.5e10, "gradient_bytes": 2e8}])
    return replace(
        guess_data(), workloads=pd.concat([guess_data().workloads, facts], ignore_index=True)
    )


def rows(*setups: tuple[str, str, int]) -> pd.DataFrame:
    """With what the world would have measured on one device: only errors are made of it."""
    flops = float(NEW.flops_per_sample or 0)
    parts = [
        asked(*one).assign(
            step_s=guess_seconds(flops, one[2], float(GPU_TYPES[0].device_tflops or 0))
        )
        for one in setups
    ]
    return pd.concat(parts, ignore_index=True)


TEST = rows(("new", f"1x{ONE}", 32), ("a", f"1x{ONE}", 32), ("new", f"2x{OTHER}", 64))


def test_a_workload_known_by_its_facts_alone_is_predicted_as_its_first_guess_and_named_as_one() -> (
    None
):
    found = backtest(with_facts(), TEST, seed=1)
    assert found["unpredicted"].tolist() == [""] * 3 and found["guessed"].tolist() == [
        True,
        False,
        True,
    ]
    guess = introduced(model(), NEW)
    assert guess is not None
    expected = guess.predict(TEST)[["step_s", "step_low_s", "step_high_s"]].to_numpy(float)
    assert np.allclose(found[list(PREDICTED)].to_numpy(float), expected)
    (said,) = notes(with_facts(), TEST, found)
    assert said.startswith(
        "2 of 3 rows are first guesses from flops_per_sample alone"
    ) and said.endswith("- new: 2")
    assert summary(TEST, found).set_index("group").loc["new", "rows"] == 2


def test_what_is_missing_for_a_guess_is_named_and_rows_without_its_compute_change_nothing() -> None:
    test = pd.concat(
        [TEST, rows(("new", f"1x{ONE}+1xc.dark", 8), ("dark", f"1x{ONE}", 8))], ignore_index=True
    )
    found = backtest(with_facts(), test, seed=1)
    assert found["unpredicted"].tolist()[3:] == [
        "workload new (TRAIN has no row of it, and nobody knows the peak rate of the devices of c.dark)",
        "workload dark (TRAIN has no row of it, and nobody knows its flops_per_sample)",
    ]
    assert not found["guessed"].iloc[3:].any() and found[list(PREDICTED)].iloc[3:].isna().all(
        axis=None
    )
    without_rates = guess_data().instance_types.assign(device_tflops=None)
    unpredicted = (
        backtest(replace(with_facts(), instance_types=without_rates), TEST, seed=1)["unpredicted"]
        != ""
    )
    assert unpredicted.tolist() == [True, False, True]
    mixed = asked("new", f"1x{ONE}+1x{OTHER}", 8).assign(step_s=1.0)
    more = replace(with_facts(), runs=pd.concat([guess_data().runs, mixed], ignore_index=True))
    assert backtest(more, TEST, seed=1)["guessed"].tolist() == [True, False, True]


def test_facts_in_the_rows_asked_for_are_facts_too_and_those_of_the_facts_come_first() -> None:
    by_rows = TEST.assign(flops_per_sample=1.5e10, gradient_bytes=2e8)
    own = backtest(guess_data(), by_rows, seed=1)
    assert own["guessed"].tolist() == [True, False, True]
    assert np.array_equal(
        own[list(PREDICTED)], backtest(with_facts(), TEST, seed=1)[list(PREDICTED)]
    )
    assert own.equals(
        backtest(guess_data(), by_rows.assign(step_s=TEST["step_s"][::-1].to_numpy()), seed=1)
    )
    lying = backtest(
        with_facts(), by_rows.assign(flops_per_sample=9e12, gradient_bytes=9e9), seed=1
    )
    assert np.array_equal(lying[list(PREDICTED)], own[list(PREDICTED)])
