"""What may enter a prediction, what is guessed, and the arithmetic of the report."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.monitoring.backtest import PREDICTED, backtest, notes, summary
from models.step_time.model import StepTimeModel
from tests.frames import data_of
from tests.models import guessing

TYPES = pd.DataFrame(
    {"name": ["b.big", "b.blank"], "devices": [4, None], "device": ["t9", None], "cores": 32.0}
)
SAME = {"accumulation_steps": 1, "strategy": "ddp", "precision": "fp32", "provider": "ec2"}


def runs(*clusters, workload="tiny", layout="1"):
    """Four batches a cluster with a small wobble: more machines wait longer."""
    rows = []
    for cluster in clusters:
        machines = int(cluster[0])
        for at, batch in enumerate((4, 8, 16, 32)):
            waited = 0.004 * (machines - 1)
            step = (0.01 + 0.002 * batch + waited) * (1 + 0.01 * (-1) ** (at + machines))
            rows.append((workload, cluster, layout, str(batch), step, waited))
    columns = ["workload", "cluster", "layout", "batch_per_device", "step_s", "sync_s"]
    return pd.DataFrame(rows, columns=columns).assign(**SAME, gradient_bytes=4e6)


def data(frame, types=TYPES):
    return data_of(runs=frame, instance_types=types)


KNOWN = data(runs("1xb.big", "2xb.big", "4xb.big"))


def seconds(test, training=KNOWN):
    return backtest(training, test, seed=0)[list(PREDICTED)].to_numpy(float)


def test_measurements_of_the_test_frame_never_enter_a_prediction():
    test = runs("3xb.big")
    found = seconds(test.assign(step_s=9.0, sync_s=9.0, gradient_bytes=9.0))
    assert np.allclose(found[:, 0], test["step_s"], rtol=0.1)
    assert (found[:, 1] < found[:, 0]).all() and (found[:, 0] < found[:, 2]).all()


def test_what_is_left_out_or_assumed_is_named():
    good = runs("2xb.big")
    others = [good.assign(strategy="gossip").iloc[:1], good.assign(precision="fp8").iloc[:2]]
    others += [runs("1xb.big", workload="gpt"), runs("1xc.new", layout=None)]
    test = pd.concat([good, *others], ignore_index=True)
    training = data(pd.concat([KNOWN.runs, good.assign(precision="fp8")], ignore_index=True))
    found = backtest(training, test, seed=0)
    assert (found[list(PREDICTED)].isna().sum(axis=1) == [0] * 4 + [3] * 7 + [0] * 4).all()
    named = ["gossip", "fp8", "fp8", *["gpt"] * 4]
    reasons = found["unpredicted"].iloc[4:11]
    assert all(name in reason for name, reason in zip(named, reasons, strict=True))
    missing, unlearned = notes(training, test, found)
    assert "gpt" in missing and "gossip" in missing and "tiny (4" in unlearned
    assert summary(test, found).set_index("by").loc["all", "rows"] == 8


def test_the_summary_has_errors_coverage_and_width():
    """Spread 0.1: measured lies 0, 0.6, 1.2, 1.6 and 2 spreads off, on both sides."""
    off = np.array([0.0, 0.06, -0.12, 0.16, -0.2])
    clusters = ["1xt", "1xt", "2xt", "1xs+9xt", "2xt"]
    test = pd.DataFrame({"workload": list("aaabb"), "cluster": clusters, "step_s": 2 * np.exp(off)})
    half = np.exp(0.1 * Z_90)
    ends = {"predicted_step_s": 2.0, "low_s": 2 / half, "high_s": 2 * half, "unpredicted": ""}
    board = summary(test, test.assign(**ends)[list(ends)])
    rows = {"workload": [3, 2], "instances": [2, 2, 1], "all": [5]}
    assert board.groupby("by")["rows"].apply(list).to_dict() == rows
    error = abs(np.exp(-off) - 1)
    expected = [error.mean(), np.median(error), np.quantile(error, 0.9), 0.8]
    assert board.iloc[-1, 3:].tolist() == pytest.approx([*expected, half - 1 / half])


def test_predictions_see_no_measured_column(monkeypatch):
    seen, real = [], StepTimeModel.predict
    monkeypatch.setattr(
        StepTimeModel, "predict", lambda model, rows: seen.append({*rows}) or real(model, rows)
    )
    backtest(KNOWN, runs("2xb.big"), seed=0)
    assert seen and not any({"step_s", "sync_s"} & columns for columns in seen)


def test_a_workload_known_by_its_facts_alone_is_guessed():
    """From the facts' table or from its own rows; the table counts where both are there."""
    name, other = (kind.name for kind in guessing.TYPES[:2])
    rate = float(guessing.TYPES[0].device_tflops or 0)
    setups = [("new", f"1x{name}", 32), ("a", f"1x{name}", 32), ("new", f"2x{other}", 64)]
    setups += [("new", f"1x{name}+1xc.dark", 8), ("dark", f"1x{name}", 8)]
    test = pd.concat(
        guessing.setup_row(*setup).assign(step_s=guessing.seconds(1.5e10, setup[2], rate))
        for setup in setups
    )
    facts = pd.DataFrame([{"workload": "new", "flops_per_sample": 1.5e10, "gradient_bytes": 2e8}])
    described = pd.concat([guessing.data().workloads, facts], ignore_index=True)
    training = replace(guessing.data(), workloads=described)
    found = backtest(training, test, seed=1)
    assert found["guessed"].tolist() == [True, False, True, False, False]
    assert (found["unpredicted"] != "").tolist() == [False] * 3 + [True] * 2
    assert any("new (2" in note for note in notes(training, test, found))
    lying = test[:3].assign(flops_per_sample=9e12, gradient_bytes=9e9)
    pd.testing.assert_frame_equal(backtest(training, lying, seed=1), found[:3])
