"""Checkpoints are linear in their bytes; what was written moves the line, and a type's disk, as far as it tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.job.checkpoints import PRIOR, checkpoint_bytes, fit_checkpoints
from tests.benchmarks.spot_replay import checkpoint_scores, read_checkpoints

FILE = Path("../shared/data/checkpoint_times.csv")


def written(
    rng: np.random.Generator, a: float, k: float, types: dict[str, float], repeats: int = 3
) -> pd.DataFrame:
    rows = [
        (
            f"net{size}",
            name,
            size * 1e6,
            factor * (a + k * size) * float(np.exp(rng.normal(0, 0.05))),
        )
        for size in (20, 100, 400, 900)
        for name, factor in types.items()
        for _ in range(repeats)
    ]
    return pd.DataFrame(rows, columns=["workload", "instance_type", "bytes", "seconds"])


def test_before_any_is_written_a_checkpoint_is_linear_in_its_bytes_with_a_wide_interval() -> None:
    assert fit_checkpoints(written(np.random.default_rng(0), 1, 1, {})) is PRIOR
    seconds, log_sd = zip(*(PRIOR.seconds(size, ["any"]) for size in (1.0, 500e6)), strict=True)
    assert np.concatenate(seconds) == pytest.approx([3.6, 13.6], rel=1e-6)
    assert 2 * Z_90 * float(log_sd[0][0]) > np.log(2.5)


def test_what_was_written_is_believed_and_a_type_that_wrote_nothing_is_in_more_doubt() -> None:
    model = fit_checkpoints(
        written(np.random.default_rng(1), 2.0, 0.015, {"quick": 1.0, "slow": 2.0})
    )
    seconds, log_sd = model.seconds(200e6, ["quick", "slow", "other"])
    assert seconds[:2] == pytest.approx([5.0, 10.0], rel=0.15)
    assert seconds[0] < seconds[2] < seconds[1]
    assert log_sd[0] < 0.2 < log_sd[2] < float(PRIOR.seconds(200e6, ["other"])[1][0])


def test_repeats_that_differ_are_in_the_interval_of_one_more() -> None:
    calm = written(np.random.default_rng(2), 1.0, 0.01, {"a": 1.0}, repeats=20)
    rough = calm.assign(
        seconds=calm["seconds"] * np.exp(np.random.default_rng(3).normal(0, 0.5, len(calm)))
    )
    assert fit_checkpoints(calm).spread == pytest.approx(0.05, rel=0.3)
    assert fit_checkpoints(rough).spread == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.nan, np.inf])
def test_checkpoints_that_took_no_time_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_checkpoints(written(np.random.default_rng(4), 1, 1, {"a": 1.0}).assign(seconds=seconds))


def test_measured_bytes_come_before_three_times_those_of_the_gradient() -> None:
    assert [
        checkpoint_bytes(10.0, 7.0),
        checkpoint_bytes(10.0),
        checkpoint_bytes(None),
        checkpoint_bytes(np.nan),
    ] == [
        7.0,
        30.0,
        0.0,
        0.0,
    ]
    assert checkpoint_bytes(10.0, np.nan) == 30.0


@pytest.mark.skipif(not FILE.exists(), reason="no shared data")
def test_networks_that_wrote_none_are_predicted_from_others_with_narrower_intervals_that_still_cover() -> (
    None
):
    scored = checkpoint_scores(read_checkpoints(FILE))
    prior, learned = (scored[scored["learned"] == one] for one in (False, True))
    assert len(prior) == len(learned) >= 100
    assert prior["error"].mean() <= 0.08 and learned["error"].mean() <= 0.1
    assert learned["inside"].mean() >= 0.85
    assert learned["width"].median() < 0.7 * prior["width"].median()
