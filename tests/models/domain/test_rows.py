"""Rows as users have them: unknown bytes, machines in any order."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from models.step_time.model import StepTimeModel, TrainingData, fit

NONE = pd.DataFrame()


def model_of(rows: list[dict[str, object]], types: pd.DataFrame = NONE) -> StepTimeModel:
    runs = pd.DataFrame(rows).assign(provider="ec2")
    return fit(
        TrainingData(
            runs=runs,
            profiles=NONE,
            buckets=NONE,
            probes=NONE,
            workloads=NONE,
            instance_types=types,
        ),
        seed=0,
    )


def row(
    workload: str, cluster: str, batch: object, step_s: float, **more: object
) -> dict[str, object]:
    return {
        "workload": workload,
        "cluster": cluster,
        "batch_per_device": str(batch),
        "step_s": step_s,
        **more,
    }


def slow_exchange(**facts: object) -> list[dict[str, object]]:
    """Half a second of waiting for each machine but the first."""
    return [
        row(
            "w",
            f"{count}xq",
            batch,
            0.1 * batch + 0.5 * (count - 1),
            sync_s=0.5 * (count - 1),
            **facts,
        )
        for count in (1, 2, 4)
        for batch in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize("facts", [{}, {"gradient_bytes": 1e8}])
def test_rows_are_met_whether_or_not_the_gradient_bytes_are_known(facts: dict[str, object]) -> None:
    rows = slow_exchange(**facts)
    predicted = model_of(rows).predict(pd.DataFrame(rows).drop(columns=["step_s", "sync_s"]))
    error = np.abs(predicted["step_s"].to_numpy() / [float(str(one["step_s"])) for one in rows] - 1)
    assert np.median(error) < 0.15 and error.max() < 0.5


def test_the_order_of_mixed_machines_changes_no_prediction() -> None:
    rows = [
        row("w", f"4x{name}", batch, slow * (0.1 + 0.01 * batch))
        for name, slow in (("a", 1.0), ("b", 1.5))
        for batch in (8, 16, 64)
    ]
    ab, ba = (
        model_of(rows).predict(
            pd.DataFrame([{"workload": "w", "cluster": cluster, "batch_per_device": batch}])
        )
        for cluster, batch in (("1xa+1xb", "128+8"), ("1xb+1xa", "8+128"))
    )
    assert ab["step_s"].iloc[0] == pytest.approx(ba["step_s"].iloc[0], rel=1e-9)


def test_one_setup_asked_for_twice_is_drawn_alike_but_for_its_noise() -> None:
    model = model_of(slow_exchange(gradient_bytes=1e8))
    asked = pd.DataFrame([{"workload": "w", "cluster": "8xq", "batch_per_device": "4"}] * 2)
    drawn = np.log(model.draws(asked, count=2000, seed=0))
    width = (
        np.log(model.predict(asked)["step_high_s"] / model.predict(asked)["step_low_s"]) / 2 / 1.645
    )
    assert np.corrcoef(drawn)[0, 1] > 0.6
    assert drawn.std(axis=1) == pytest.approx(width.to_numpy(), rel=0.1)
