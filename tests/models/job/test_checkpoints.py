"""Checkpoints are linear in their bytes; written ones move the line, and a type's factor."""

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.domain.optimizer_state import checkpoint_bytes
from models.job.checkpoints import PRIOR, fit_checkpoints, write_seconds


def written(a, k, types):
    rng = np.random.default_rng(1)
    rows = [
        (f"net{mb}", name, mb * 1e6, factor * (a + k * mb) * float(np.exp(rng.normal(0, 0.05))))
        for mb in (20, 100, 400, 900)
        for name, factor in types.items()
        for _ in range(12)
    ]
    return pd.DataFrame(rows, columns=["workload", "instance_type", "bytes", "seconds"])


def test_the_prior_is_cm_dares_line_with_a_wide_interval():
    assert fit_checkpoints(written(1, 1, {})) == PRIOR
    for size, seconds in ((1.0, 3.6), (500e6, 13.6)):
        found, log_sd = write_seconds(PRIOR, size, ["any"])
        assert found[0] == pytest.approx(seconds, rel=1e-6)
        assert 2 * Z_90 * float(log_sd[0]) > np.log(2.3)


def test_written_checkpoints_are_learned_and_an_unseen_type_is_in_more_doubt():
    model = fit_checkpoints(written(2.0, 0.015, {"quick": 1.0, "slow": 2.0}))
    seconds, log_sd = write_seconds(model, 200e6, ["quick", "slow", "other"])
    assert seconds[0] < seconds[2] < seconds[1]
    assert seconds[:2] == pytest.approx([5.0, 10.0], rel=0.15)
    prior_sd = float(write_seconds(PRIOR, 200e6, ["other"])[1][0])
    assert log_sd[0] < 0.2 < log_sd[2] < prior_sd


def test_measured_bytes_come_before_three_times_those_of_the_gradient():
    assert checkpoint_bytes(10.0, 7.0) == 7.0
    assert checkpoint_bytes(10.0) == checkpoint_bytes(10.0, np.nan) == 30.0
    assert checkpoint_bytes(None) == checkpoint_bytes(np.nan) == 0.0
