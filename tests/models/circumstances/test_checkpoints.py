"""Checkpoint seconds: the prior before there is data, the data once there is, and honest intervals between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.circumstances.checkpoints import BASE_S, S_PER_MB, fit_checkpoints, prior_checkpoints
from models.judging.spot_scores import checkpoint_scores
from tasks.spot_records import read_checkpoints

FILE = Path(__file__).parents[4] / "shared" / "data" / "checkpoint_times.csv"


def written(base_s: float, s_per_mb: float, networks: int, repeats: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    rows = []
    for number in range(networks):
        mb = float(rng.uniform(5, 2000))
        own = (base_s + s_per_mb * mb) * np.exp(rng.normal(0, 0.08))
        rows += [(f"n{number}", mb, own * np.exp(rng.normal(0, 0.04))) for _ in range(repeats)]
    return pd.DataFrame(rows, columns=["group", "mb", "seconds"])


def test_before_anything_was_written_the_prior_is_said_with_a_wide_interval() -> None:
    model = prior_checkpoints()
    assert float(model.seconds(100.0)) == pytest.approx(BASE_S + 100 * S_PER_MB)
    low, high = model.interval(100.0)
    assert high / low > 2.5


def test_enough_checkpoints_of_a_faster_disk_outweigh_the_prior() -> None:
    model = fit_checkpoints(written(0.4, 0.002, networks=30))
    assert float(model.seconds(1000.0)) == pytest.approx(2.4, rel=0.1)
    low, high = model.interval(1000.0)
    assert high / low < 1.6


@given(networks=st.integers(0, 12), small=st.floats(0.0, 1e4), more=st.floats(0.01, 1e4))
def test_more_bytes_never_take_less_time(networks: int, small: float, more: float) -> None:
    model = fit_checkpoints(written(1.0, 0.01, networks))
    assert float(model.seconds(small + more)) > float(model.seconds(small)) > 0


def test_one_network_repeated_counts_for_less_than_many() -> None:
    same = pd.DataFrame({"group": "a", "mb": 100.0, "seconds": [9.0] * 20})
    many = pd.DataFrame({"group": [f"n{i}" for i in range(20)], "mb": 100.0, "seconds": [9.0] * 20})
    assert float(fit_checkpoints(many).log_sd(100.0)) < float(fit_checkpoints(same).log_sd(100.0))


def test_a_time_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_checkpoints(pd.DataFrame({"group": ["a"], "mb": [1.0], "seconds": [0.0]}))


@pytest.mark.skipif(not FILE.exists(), reason="no shared data")
def test_a_network_held_out_is_predicted_within_eight_per_cent() -> None:
    scored = checkpoint_scores(read_checkpoints(FILE))
    assert len(scored) >= 100
    assert scored["error"].mean() <= 0.08
    assert 0.85 <= scored["inside"].mean() <= 0.96
