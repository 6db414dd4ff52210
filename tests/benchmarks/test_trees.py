"""Trees without physics: they learn a smooth world from its rows, know no names, and see no answers."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from tests.benchmarks.rivals import predict_adaptdl, predict_srifty, predict_trees_alone

DEVICES = {"x.large": 4}
SIZES = {"one": 1e8, "two": 3e8, "three": 2e8}
SLOWNESS = {"one": 0.002, "two": 0.012, "three": 0.012}  # seconds a sample


def measured(
    name: str, layouts: tuple[str, ...] = ("1", "2", "4", "1+1", "2+2", "4+4", "1+3", "4+4+4")
) -> pd.DataFrame:
    rows = [
        {
            "workload": name,
            "cluster": f"{layout.count('+') + 1}xx.large",
            "layout": layout,
            "batch_per_device": str(batch),
            "accumulation_steps": 1,
            "gradient_bytes": SIZES[name],
            "step_s": SLOWNESS[name] * batch
            + SIZES[name] / 1e9 * (1 + layout.count("+")) * (layout != "1"),
        }
        for layout, batch in itertools.product(layouts, range(4, 200, 8))
    ]
    return pd.DataFrame(rows)


KNOWN = pd.concat([measured("one"), measured("two")], ignore_index=True)


def test_it_finds_held_out_rows_of_a_smooth_world() -> None:
    asked = np.random.default_rng(0).random(len(KNOWN)) < 0.2
    found = predict_trees_alone(KNOWN[~asked], KNOWN[asked], DEVICES)
    wrong = np.abs(found / KNOWN["step_s"][asked].to_numpy() - 1)
    assert np.median(wrong) < 0.05
    assert wrong.mean() < 0.1


def test_answers_in_the_rows_asked_for_are_not_seen() -> None:
    expected = predict_trees_alone(KNOWN, KNOWN.drop(columns="step_s"), DEVICES)
    for seconds in (KNOWN["step_s"], KNOWN["step_s"].to_numpy()[::-1]):
        asked = KNOWN.assign(step_s=seconds, sync_s=seconds)
        assert np.array_equal(predict_trees_alone(KNOWN, asked, DEVICES), expected)


def test_single_device_rows_tell_how_slow_a_workload_is_and_its_name_tells_nothing() -> None:
    asked, alone = measured("three", ("2", "2+2", "4+4+4")), measured("three", ("1",))
    with_rows = predict_trees_alone(pd.concat([KNOWN, alone]), asked, DEVICES)
    without_rows = predict_trees_alone(KNOWN, asked, DEVICES)
    assert np.all(np.isfinite(with_rows) & (with_rows > 0))
    wrong = [
        np.abs(np.log(one / asked["step_s"].to_numpy())).mean() for one in (with_rows, without_rows)
    ]
    assert wrong[0] < 0.5 * wrong[1]
    renamed = {"one": "two", "two": "one"}
    swapped = KNOWN.assign(workload=KNOWN["workload"].map(renamed))
    assert np.array_equal(
        predict_trees_alone(swapped, swapped, DEVICES), predict_trees_alone(KNOWN, KNOWN, DEVICES)
    )


def test_bytes_may_be_unknown_and_nothing_known_is_no_prediction() -> None:
    bare = KNOWN.drop(columns="gradient_bytes")
    assert np.isfinite(predict_trees_alone(bare, bare, DEVICES)).all()
    assert np.isnan(predict_trees_alone(KNOWN.iloc[:0], KNOWN, DEVICES)).all()


def of_kinds() -> pd.DataFrame:
    """The networks on two kinds, of which the second computes twice as fast."""
    rows = [
        measured(name).assign(kind=kind, speed=speed)
        for name in ("one", "two")
        for kind, speed in (("a", 1), ("b", 2))
    ]
    frame = pd.concat(rows, ignore_index=True)
    alone = (
        frame["workload"].map(SLOWNESS) * frame["batch_per_device"].astype(float) / frame["speed"]
    )
    exchange = frame["gradient_bytes"] / 1e9 * (2 + frame["layout"].str.count(r"\+"))
    step = alone / 3 + np.maximum(2 * alone / 3, exchange)
    return frame.assign(step_s=np.where(frame["layout"] == "1", alone, step))


def test_sriftys_method_finds_what_a_profile_and_collectives_tell_and_nothing_without_a_profile() -> (
    None
):
    frame, gbps = of_kinds(), {"a": 10.0, "b": 10.0}
    asked = (
        (frame["workload"] == "two") & (frame["kind"] == "b") & (frame["layout"] != "1")
    ).to_numpy()
    found = predict_srifty(frame[~asked], frame[asked], DEVICES, gbps)
    wrong = np.abs(found / frame["step_s"][asked].to_numpy() - 1)
    assert np.median(wrong) < 0.05
    bare = asked | ((frame["workload"] == "two") & (frame["kind"] == "b")).to_numpy()
    assert np.isnan(predict_srifty(frame[~bare], frame[asked], DEVICES, gbps)).all()


def test_adaptdl_takes_the_compute_of_its_own_kind() -> None:
    frame = of_kinds()
    asked = ((frame["workload"] == "one") & (frame["kind"] == "b")).to_numpy() & (
        frame["layout"] == "1"
    ).to_numpy()
    known = asked & (frame["batch_per_device"].astype(float) % 16 == 4).to_numpy()
    found = predict_adaptdl(frame[~asked | known], frame[asked], DEVICES)
    assert np.median(np.abs(found / frame["step_s"][asked].to_numpy() - 1)) < 0.05
