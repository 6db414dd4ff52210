"""The benchmark of sizes holds out what it says, and says what `srift size` does."""

from __future__ import annotations

import pandas as pd
import pytest

from models.planner.sizing import Series
from tests.benchmarks.sizing import HOSTS, LEFT, RULES, predictions, scores, settings

ALONE = {48: 1.0, 24: 0.55, 12: 0.3, 6: 0.2}


def series(four_s: float, eight_s: float) -> Series:
    steps = {1: {(float(batch), 1): seconds for batch, seconds in ALONE.items()}}
    several = {2: {(24.0, 1): 0.65}, 4: {(12.0, 1): four_s}, 8: {(6.0, 1): eight_s}}
    return Series(workload="net", instance_type="a", devices_each=1, steps=steps | several)


def test_predictions_do_not_look_at_what_is_held_out_and_measured_is_throughput_over_that_of_one() -> (
    None
):
    tables = [
        pd.DataFrame(predictions(series(four, eight)))
        for four, eight in ((0.45, 0.4), (0.9, 0.4), (0.45, 0.8))
    ]
    assert set(tables[0]["size"]) == {4, 8} and set(tables[0]["held_out"]) == set(LEFT)
    picked = [table[table["held_out"] == LEFT[0]].set_index("size") for table in tables]
    for rule in RULES:
        assert picked[0][rule].tolist() == picked[1][rule].tolist() == picked[2][rule].tolist()
    assert picked[0]["measured"].to_dict() == pytest.approx(
        {4: 100 / (4 * 0.45), 8: 100 / (8 * 0.4)}
    )
    below = [
        table[(table["held_out"] == LEFT[1]) & (table["size"] == 8)].iloc[0] for table in tables
    ]
    assert below[0]["shares"] == below[2]["shares"] != below[1]["shares"]


def test_scores_are_points_of_efficiency() -> None:
    cell = {
        "workload": "net",
        "type": "a",
        "of": "machines of 1",
        "as": "measured",
        "size": 4,
        "held_out": LEFT[0],
    }
    table = pd.DataFrame([cell | {"measured": 50.0, "rule": 53.0, "shares": 44.0, "flat": 50.0}])
    found = scores(table).set_index(["cells", "by"])
    label = f"all, {LEFT[0]} held out"
    assert (found.loc[(label, "rule"), "mean"], found.loc[(label, "rule"), "within_5_%"]) == (
        3.0,
        100.0,
    )
    assert (found.loc[(label, "shares"), "bias"], found.loc[(label, "shares"), "within_5_%"]) == (
        -6.0,
        0.0,
    )


def test_all_hosts_that_it_asks_for_go_on_two_cores() -> None:
    assert 0.2 * max(HOSTS) <= 1.75 and settings().count("cores = 0.2") == 2
