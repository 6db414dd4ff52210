"""Splits ask what they say they ask, and nobody sees the answers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import FloatArray
from models.step_time.dataset import TrainingData
from tests.benchmarks.noise import neighbours, placements
from tests.benchmarks.splits import (
    ALONE,
    CHOSEN,
    LARGER,
    NEIGHBOURS,
    PILOTS,
    RANDOM,
    UNEQUAL,
    Split,
    ask,
    coverage,
    errors,
    splits,
)
from tests.models.step_time.test_imported_rows import INSTANCE_TYPES

DEVICES = {"g.xl": 4}


def rows() -> pd.DataFrame:
    """Two workloads on up to four machines of four devices, at three batches."""
    layouts = ["1", "2", "4", "1+1", "2+2", "4+4", "1+3", "1+1+1+1", "4+4+4+4", "2+4+1"]
    found = [
        {
            "workload": workload,
            "cluster": f"{layout.count('+') + 1}xg.xl",
            "layout": layout,
            "batch_per_device": str(batch),
            "step_s": 0.01 * batch + 0.02 * sum(map(int, layout.split("+"))),
            "sync_s": 0.0,
            "accumulation_steps": 1,
        }
        for workload in ("a", "b")
        for layout in layouts
        for batch in (8, 16, 32)
    ]
    return pd.DataFrame(found)


def by_name(name: str) -> list[Split]:
    return [one for one in splits(rows(), DEVICES, seed=7) if one.name == name]


def test_nothing_is_known_and_asked_at_once_and_the_same_seed_asks_the_same() -> None:
    every = list(splits(rows(), DEVICES, seed=7))
    assert {one.name for one in every} == {
        NEIGHBOURS,
        ALONE,
        PILOTS,
        CHOSEN,
        RANDOM,
        LARGER,
        UNEQUAL,
    }
    assert all(not (one.known & one.asked).any() and one.known.any() for one in every)
    again = list(splits(rows(), DEVICES, seed=7))
    assert all((one.asked == two.asked).all() for one, two in zip(every, again, strict=True))
    other = next(splits(rows(), DEVICES, seed=8))
    assert (other.asked != every[0].asked).any()


def test_a_workload_is_held_out_with_what_the_split_leaves_it() -> None:
    frame = rows()
    alone = by_name(ALONE)[0]
    assert set(frame[alone.known & (frame["workload"] == "a").to_numpy()]["layout"]) == {"1"}
    assert set(frame[alone.asked]["workload"]) == {"a"}
    for one in by_name(PILOTS):
        own = frame[one.known & (frame["workload"] == one.group[0]).to_numpy()]
        assert set(own["layout"]) == {"1", "4", "1+1", "4+4"}
        assert own[own["layout"] != "1"]["batch_per_device"].nunique() == 1
    assert all(
        (one.known & (frame["workload"] == one.group[0]).to_numpy()).sum() == 12
        for one in by_name(RANDOM)
    )


def test_sizes_and_unequal_layouts_are_held_out_whole() -> None:
    frame = rows()
    assert [set(frame[one.asked]["layout"]) for one in by_name(LARGER)] == [{"4+4+4+4"}] * 2
    assert set(frame[by_name(LARGER)[0].known]["layout"]) == {
        "1",
        "2",
        "4",
        "1+1",
        "2+2",
        "1+3",
        "1+1+1+1",
    }
    assert set(frame[by_name(UNEQUAL)[0].asked]["layout"]) == {"1+3", "2+4+1"}


def data() -> TrainingData:
    none = pd.DataFrame()
    runs = rows().assign(provider="local")
    return TrainingData(
        runs=runs,
        profiles=none,
        buckets=none,
        probes=none,
        workloads=none,
        instance_types=INSTANCE_TYPES,
    )


def test_pilots_are_chosen_given_to_everybody_and_no_answer_is_shown() -> None:
    whole, counts = data(), []

    def rival(known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int]) -> FloatArray:
        assert not {"step_s", "sync_s"} & set(asked.columns) and devices == DEVICES
        counts.append(len(known))
        return np.full(len(asked), 1.0)

    asked = ((whole.runs["workload"] == "a") & (whole.runs["layout"] != "1")).to_numpy()
    split = Split(name="x", group="y", known=~asked, asked=asked, choose=2)
    scored = ask(whole, split, {"rival": rival}, DEVICES, seed=0)
    assert counts == [35] and len(scored) == 25
    shuffled = whole.runs.copy()
    rows_asked = [at for at in range(len(asked)) if asked[at] and at in set(scored.index)]
    shuffled.loc[rows_asked, "step_s"] = shuffled.loc[rows_asked[::-1], "step_s"].to_numpy()
    again = ask(
        TrainingData(
            **{**{name: getattr(whole, name) for name in TrainingData.__slots__}, "runs": shuffled}
        ),
        split,
        {},
        DEVICES,
        seed=0,
    )
    assert again["ours"].tolist() == scored["ours"].tolist()


def test_errors_and_coverage_are_of_what_was_measured() -> None:
    scored = pd.DataFrame(
        {
            "split": "s",
            "group": "g",
            "measured_s": [1.0, 2.0],
            "ours": [1.1, 2.0],
            "low_s": [0.9, 2.1],
            "high_s": 2.2,
        }
    )
    scored["rival"] = [np.nan, 3.0]
    table = errors(scored, ["ours", "rival"]).set_index("model")
    assert table.loc["ours", "mean"] == pytest.approx(5.0) and table.loc["rival", "rows"] == 1
    assert table.loc["rival", "median"] == pytest.approx(50.0)
    assert coverage(scored, ["split"])["inside_90"].iloc[0] == 50


def test_the_noise_floors_find_the_noise_that_was_put_in() -> None:
    random = np.random.default_rng(0)
    layouts = ["1+2+3", "1+3+2", "2+1+3", "2+3+1", "3+1+2", "3+2+1"]
    frame = pd.DataFrame(
        [
            {
                "workload": "a",
                "cluster": "3xg.xl",
                "layout": one,
                "batch_per_device": batch,
                "accumulation_steps": 1,
            }
            for one in layouts
            for batch in 2.0 ** np.arange(3, 40)
        ]
    )
    frame["step_s"] = np.exp(
        0.5 * np.log(frame["batch_per_device"]) + random.normal(0, 0.05, len(frame))
    )
    expected = 0.05 * np.sqrt(2 / np.pi)
    for floor in (placements, neighbours):
        assert floor(frame).iloc[-1]["mean"] == pytest.approx(expected, rel=0.15)
