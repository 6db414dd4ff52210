"""The noise floor: deviations within a launch, between launches and between trials, each on its own."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.benchmarks.noise import at_reference_speed, between, spreads


def runs(**seconds: float) -> pd.DataFrame:
    setup = {"workload": "conv", "cluster": "1xa", "batch_per_device": "8", "accumulation_steps": 1}
    return pd.DataFrame(
        [
            {"run_id": name.replace("_", "-"), "step_s": value, **setup}
            for name, value in seconds.items()
        ]
    )


def test_each_spread_is_distinguished() -> None:
    table = spreads(runs(t1_00_000=1.0, t1_00_001=1.2, t1_01_000=2.1, t1_01_001=2.3)).iloc[0]
    assert table["in_launch"] == pytest.approx((0.1 / 1.1 + 0.1 / 2.2) / 2)
    assert table["between_launches"] == pytest.approx(0.55 / 1.65)
    assert pd.isna(table["between_trials"]) and table["runs"] == 4


def test_trials_are_compared_by_their_medians_and_all_setups_are_pooled() -> None:
    table = spreads(runs(t1_00_000=1.0, t2_00_000=1.1))
    assert table.iloc[0]["between_trials"] == pytest.approx(0.05 / 1.05)
    assert table.iloc[-1]["workload"] == "all" and table.iloc[-1]["in_launch"] == 0


def test_two_campaigns_are_compared_on_what_they_share() -> None:
    other = {"workload": "conv", "cluster": "2xa", "batch_per_device": "8", "accumulation_steps": 1}
    before = pd.concat(
        [
            runs(a_00_000=1.0, a_00_001=1.2),
            pd.DataFrame([{"run_id": "a-1", "step_s": 9.0, **other}]),
        ]
    )
    table = between(before, runs(b_00_000=1.32)).iloc[0]
    assert table["setups"] == 1
    assert table["ratio"] == pytest.approx(1.2) and table["median"] == table[
        "mean"
    ] == pytest.approx(0.2)


def test_the_scatter_that_fixed_work_explains_is_gone_at_nominal_speed() -> None:
    hours = [1.0, 1.5, 0.8, 1.2]
    measured = runs(t1_00_000=1.0, t1_00_001=1.5, t2_00_000=0.8, t3_00_000=1.2)
    usual = {"usual_reference_s": [[0.1]] * 4, "reference_spread": 0.01, "reference_blocks": 4}
    as_it_was, nominal = at_reference_speed(
        measured.assign(reference_s=[[0.1 * one] for one in hours], **usual)
    ).iloc
    assert as_it_was["about_setup"] > 0.2 and nominal["about_setup"] < 0.01
    assert nominal["between_trials"] < 0.01 and nominal["beta"] == pytest.approx(1.0, abs=0.01)
    assert len(at_reference_speed(measured)) == 1, "nobody knows"
