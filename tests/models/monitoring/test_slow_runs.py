"""The cause of a run above its interval, and machines whose fixed work is slow."""

import pandas as pd
import pytest

from models.monitoring.slow_runs import alarms, sentence, slow_machines

RUN = {
    "run_id": "r",
    "workload": "conv",
    "cluster": "3xa",
    "layout": "1",
    "batch_per_device": "8",
    "zone": "z",
    "step_s": 1.5,
    "sync_s": 0.1,
    "step_spread": 0.02,
    "rank_compute_s": [1.0, 1.0, 1.0],
    "measured_at": pd.Timestamp("2026-11-20 12:00"),
}
PREDICTED = {"step_s": 1.0, "step_high_s": 1.1, "exposed_communication_s": 0.1}
SLOW_NODE = {"rank_compute_s": [1.0, 1.4, 1.0]}
MIXED = {"cluster": "1xa+2xb", "batch_per_device": "16+8+8"}


def found(share=0.0, **changes):
    return alarms(pd.DataFrame([RUN | changes]), pd.DataFrame([PREDICTED]), {("conv", "a"): share})


@pytest.mark.parametrize(
    "changes, cause",
    [
        ({}, "compute a"),
        (SLOW_NODE, "machine a"),
        (SLOW_NODE | {"step_spread": 0.5}, "compute a"),
        ({"rank_compute_s": [1.0, 1.05, 1.0]}, "compute a"),
        (SLOW_NODE | {"taken_share": 0.43}, "host"),
        (SLOW_NODE | {"taken_share": 0.09}, "machine a"),
        (SLOW_NODE | {"slowness": 1.3, "usual_spread": 0.05}, "speed"),
        ({"slowness": 1.08, "usual_spread": None}, "compute a"),
        ({"sync_s": 0.5}, "link"),
        ({"share": 0.5}, "input"),
        ({"input_s": 0.75, "loader_workers": 2}, "input"),
        ({"share": 0.5, "input_s": 0.1, "loader_workers": 2}, "compute a"),
        (MIXED | {"rank_compute_s": [2.0, 1.0, 1.0]}, "compute"),
        (MIXED | {"rank_compute_s": [2.0, 1.0, 1.3]}, "machine b"),
        ({"cluster": "2xa", "layout": "2", "rank_compute_s": [1, 1.5, 1, 1]}, "machine a"),
        ({"rank_compute_s": None}, "compute a"),
        ({"sync_s": None}, "compute a"),
    ],
)
def test_the_cause_is_the_part_of_the_step_that_is_longer(changes, cause):
    [row] = found(**changes)
    assert f"{row['cause']} {row['instance_type']}".strip() == cause
    assert "50%" in sentence(row)


def test_a_run_within_its_interval_is_no_alarm():
    assert found(step_s=1.05, slowness=2.0) == []


def speeds(*seconds, spread=0.05):
    """Seconds of fixed work on as many machines; 1.0 is usual."""
    rows = [(f"l{at}", 0, "a", step_s, 1.0, spread) for at, step_s in enumerate(seconds)]
    columns = ["lease_id", "node", "instance_type", "reference_s", "usual_s", "usual_spread"]
    return pd.DataFrame(rows, columns=columns)


def test_a_machine_beyond_the_spread_of_its_type_is_named():
    [line] = slow_machines(speeds(1.0, 1.1, 1.4))
    assert "l2" in line
    for usual in (speeds(1.0, 1.4, spread=0.12), speeds(1.09, spread=0.0), speeds()):
        assert slow_machines(usual) == []
    assert slow_machines(speeds(1.0, 1.9, 1.05).assign(lease_id="l")) == []
