"""Thinning among too many setups: small workloads, single devices and rare machines stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.setup_table import row_key
from models.step_time import dataset
from models.step_time.dataset import (
    TrainingData,
    _cap,
    at_nominal_speed,
    slowness,
    speed_exponent,
    thinned,
    training_rows,
)
from tests.models.synthetic import World


def setups(*rows: tuple[str, str, str, int]) -> pd.DataFrame:
    """As many setups of (workload, cluster, layout) as the last says."""
    frame = pd.DataFrame(rows, columns=["workload", "cluster", "layout", "many"])
    return frame.loc[frame.index.repeat(frame["many"])].drop(columns="many").reset_index(drop=True)


def kept(frame: pd.DataFrame, most: int, by: str | list[str], seed: int = 0) -> dict[object, int]:
    return frame.iloc[thinned(frame, most=most, seed=seed)].groupby(by).size().to_dict()


def test_no_more_than_are_taken_are_all_taken() -> None:
    frame = setups(("a", "1xq", "1", 3), ("b", "2xq", "4+4", 2))
    assert thinned(frame, most=5, seed=0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_workloads_give_way_and_small_ones_keep_all(seed: int) -> None:
    frame = setups(
        ("huge", "2xq", "1+1", 5000), ("large", "2xq", "1+1", 700), ("small", "2xq", "1+1", 5)
    )
    assert kept(frame, 205, "workload", seed) == {"huge": 100, "large": 100, "small": 5}


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 300))
def test_the_cap_is_the_largest_that_keeps_to_the_total(counts: list[int], most: int) -> None:
    many = np.array(counts)
    if many.sum() <= most:
        return
    cap = _cap(many, most)
    assert np.minimum(many, cap).sum() <= max(most, len(counts))
    assert np.minimum(many, cap + 1).sum() > most


def test_one_device_comes_first_but_takes_no_more_than_half_unless_nothing_else_is_left() -> None:
    few = setups(("w", "1xq", "1", 20), ("w", "2xq", "1+1", 5000))
    assert kept(few, 100, "cluster") == {"1xq": 20, "2xq": 80}
    many = setups(("w", "1xq", "1", 3000), ("w", "2xq", "1+1", 5000))
    assert kept(many, 100, "cluster") == {"1xq": 50, "2xq": 50}
    nearly_all = setups(("w", "1xq", "1", 3000), ("w", "2xq", "1+1", 10))
    assert kept(nearly_all, 100, "cluster") == {"1xq": 90, "2xq": 10}


@pytest.mark.parametrize("seed", range(5))
def test_arrangements_take_turns_and_a_rare_one_keeps_its_setups(seed: int) -> None:
    frame = setups(("w", "2xq", "4+4", 9000), ("w", "2xq", "1+3", 4), ("w", "4xq", "4+4+4+4", 9000))
    assert kept(frame, 100, "layout", seed) == {"4+4": 48, "1+3": 4, "4+4+4+4": 48}


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_type_stays_among_more_arrangements_of_others_than_are_taken(seed: int) -> None:
    common = [("w", f"{n}xq", "+".join(["1"] * n), 2) for n in range(2, 400)]
    ones = [("w", "1xq", "1", 600), ("w", "1xrare", "1", 2)]
    found = kept(setups(*common, *ones, ("w", "1xq+1xrare", "1+1", 2)), 100, "cluster", seed)
    assert found["1xrare"] == 2 and found["1xq+1xrare"] == 2 and found["1xq"] == 48


def test_rows_of_every_workload_and_type_are_learned_from_whatever_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset, "_MOST_SETUPS", 40)
    data = World(3).data(60)
    busy = [data.runs.assign(workload="conv", accumulation_steps=steps) for steps in range(1, 10)]
    pilot = data.runs.iloc[:1].assign(
        workload="pilot", cluster="1xs.rare", layout="1", batch_per_device="8"
    )
    runs = pd.concat([*busy, data.runs, pilot])
    whole = training_rows(replace(data, runs=runs), seed=1)
    assert 35 <= len(whole.step_s) <= 40 and "s.rare" in whole.types
    assert set(whole.setups.workloads.distinct) == {*data.runs["workload"], "pilot"}
    again = training_rows(replace(data, runs=runs.sample(frac=1, random_state=4)), seed=1)
    assert again.step_s.tolist() == whole.step_s.tolist()
    other = training_rows(replace(data, runs=runs), seed=2)
    assert other.step_s.tolist() != whole.step_s.tolist()


def test_machines_in_another_order_are_the_same_setup() -> None:
    world = World(5)
    ab = world.row(0, "lm", ["s.large", "s.small"], [8, 4])
    ba = {
        **ab,
        "run_id": "run-1",
        "cluster": "1xs.small+1xs.large",
        "batch_per_device": "4+8",
        "layout": None,
    }
    rows = training_rows(replace(world.data(5), runs=pd.DataFrame([ab, ba])), seed=0)
    assert list(rows.repeats) == [2]
    assert rows.setups.types == (("s.large", "s.small"),) and rows.setups.batch.tolist() == [[8, 4]]
    assert row_key(ab, {}) == row_key(ba, {})
    other = {**ba, "batch_per_device": "8+4"}
    assert row_key(ab, {}) != row_key(other, {})


def drifting(
    count: int = 240, *, beta: float = 0.8, repeats: int = 1
) -> tuple[TrainingData, np.ndarray]:
    """Runs and profiles at hours of which each is slower or faster, and what the runs take at nominal speed."""
    rng = np.random.default_rng(3)
    hours = np.exp(0.25 * np.sin(np.arange(count) / 9.0))
    nominal = 0.1 * np.repeat(1.0 + np.arange(count // repeats) % 40, repeats)
    reference = hours * np.exp(0.005 * rng.standard_normal(count))
    runs = pd.DataFrame({"step_s": nominal * hours**beta, "sync_s": 0.2 * nominal * hours**beta})
    runs = runs.assign(
        workload="w", cluster="2xq", layout="1+1", accumulation_steps=1, provider="local"
    )
    runs["batch_per_device"] = [str(1 + at // repeats) for at in range(count)]
    runs["run_id"] = [f"r{at}" for at in range(count)]
    runs["reference_s"] = [[one, one] for one in 0.02 * reference]
    runs["usual_reference_s"] = [[0.02, 0.02]] * count
    runs["reference_spread"], runs["reference_blocks"] = 0.02, 4
    parts = {
        "forward_s": 0.3,
        "backward_s": 0.6,
        "optimizer_s": 0.03,
        "input_s": 0.003,
        "peak_bytes": 1.0,
    }
    profile = parts | {"provider": "local", "workload": "w", "instance_type": "q", "batch": 8}
    profiles = pd.DataFrame([profile | {"reference_s": 0.03, "usual_reference_s": 0.02}])
    empty = pd.DataFrame()
    data = TrainingData(
        runs=runs,
        profiles=profiles,
        buckets=empty,
        probes=empty,
        workloads=empty,
        instance_types=empty,
    )
    return data, nominal


@pytest.mark.parametrize("beta", [1.0, 0.6])
def test_runs_of_slow_hours_are_learned_from_at_nominal_speed(beta: float) -> None:
    data, nominal = drifting(beta=beta, repeats=4 if beta != 1.0 else 1)
    corrected = at_nominal_speed(data)
    assert (
        np.abs(corrected.runs["step_s"] / nominal - 1).max()
        < 0.02
        < np.abs(data.runs["step_s"] / nominal - 1).max()
    )
    assert corrected.runs["sync_s"].to_numpy() == pytest.approx(
        0.2 * corrected.runs["step_s"].to_numpy()
    )
    rows = training_rows(corrected, seed=0)
    truth = nominal[::4] if beta != 1.0 else nominal
    assert np.sort(rows.step_s) == pytest.approx(np.sort(truth), rel=0.02)
    assert corrected.profiles["forward_s"][0] == pytest.approx(0.3 / 1.5**beta, rel=0.02)
    assert corrected.profiles["peak_bytes"][0] == 1.0
    assert at_nominal_speed(corrected) is corrected, "once"


def test_where_half_of_the_runs_tell_of_no_fixed_work_nothing_changes() -> None:
    data, _ = drifting()
    few = data.runs["reference_s"].where(data.runs.index % 2 == 0, None)
    half = replace(data, runs=data.runs.assign(reference_s=few))
    assert at_nominal_speed(half) is half and training_rows(half, seed=0).speed_sd == 0
    nothing = replace(data, runs=data.runs.drop(columns="reference_s"))
    assert at_nominal_speed(nothing) is nothing
    assert training_rows(nothing, seed=0).step_s == pytest.approx(
        training_rows(half, seed=0).step_s
    )


@pytest.mark.parametrize("beta", [1.0, 0.6])
def test_what_speeds_differ_by_between_hours_is_given_in_seconds_of_a_step(beta: float) -> None:
    data, _ = drifting(beta=beta, repeats=4 if beta != 1.0 else 1)
    between = np.log(data.runs["reference_s"].str[0]).std()
    rows = training_rows(at_nominal_speed(data), seed=0)
    assert (
        rows.speed_sd
        == pytest.approx(beta * between, rel=0.08)
        == rows.take(np.array([1, 3])).speed_sd
    )


def test_how_far_training_follows_the_fixed_work_is_learned_from_repeats_alone() -> None:
    alone, _ = drifting(beta=0.4)
    assert speed_exponent(alone.runs, np.log(slowness(alone.runs)), 0.9) == 0.9
    often, _ = drifting(beta=0.4, repeats=4)
    assert speed_exponent(often.runs, np.log(slowness(often.runs)), 0.9) == pytest.approx(
        0.4, abs=0.05
    )
    away = often.runs.assign(step_s=1.0 / often.runs["step_s"])
    assert speed_exponent(away, np.log(slowness(away)), 0.9) == 0.0, (
        "nothing is slower on a faster machine"
    )


def test_hours_that_differ_less_than_the_reference_itself_correct_nothing() -> None:
    data, _ = drifting(beta=1.0)
    noisy = replace(data, runs=data.runs.assign(reference_spread=5.0))
    corrected = at_nominal_speed(noisy)
    assert (
        corrected.runs["step_s"].equals(data.runs["step_s"])
        and not corrected.runs["speed_sd"].any()
    )
    same = replace(data, runs=data.runs.assign(reference_s=[[0.02, 0.02]] * len(data.runs)))
    assert at_nominal_speed(same).runs["step_s"].equals(data.runs["step_s"])


def test_the_speed_of_a_run_is_the_mean_over_its_machines_and_unknown_where_one_tells_nothing() -> (
    None
):
    rows = pd.DataFrame(
        {
            "reference_s": [[0.2, 0.1], [0.4, 0.1], None, [0.1], [0.0, 0.1], 0.3, pd.NA],
            "usual_reference_s": [
                [0.1, 0.1],
                [0.1, 0.1],
                [0.1, 0.1],
                [0.1, 0.1],
                [0.1, 0.1],
                0.1,
                0.1,
            ],
        }
    )
    assert slowness(rows) == pytest.approx(
        [2**0.5, 2.0, np.nan, np.nan, np.nan, 3.0, np.nan], nan_ok=True
    )
    assert np.isnan(slowness(rows.drop(columns="reference_s"))).all()
