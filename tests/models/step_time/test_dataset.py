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
from models.step_time.dataset import _cap, thinned, training_rows
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
    frame = setups(("huge", "2xq", "1+1", 5000), ("large", "2xq", "1+1", 700), ("small", "2xq", "1+1", 5))
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


def test_rows_of_every_workload_and_type_are_learned_from_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_MOST_SETUPS", 40)
    data = World(3).data(60)
    busy = [data.runs.assign(workload="conv", accumulation_steps=steps) for steps in range(1, 10)]
    pilot = data.runs.iloc[:1].assign(workload="pilot", cluster="1xs.rare", layout="1", batch_per_device="8")
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
    ba = {**ab, "run_id": "run-1", "cluster": "1xs.small+1xs.large", "batch_per_device": "4+8", "layout": None}
    rows = training_rows(replace(world.data(5), runs=pd.DataFrame([ab, ba])), seed=0)
    assert list(rows.repeats) == [2]
    assert rows.setups.types == (("s.large", "s.small"),) and rows.setups.batch.tolist() == [[8, 4]]
    assert row_key(ab, {}) == row_key(ba, {})
    other = {**ba, "batch_per_device": "8+4"}
    assert row_key(ab, {}) != row_key(other, {})
