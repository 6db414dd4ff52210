"""Checkpoint seconds: the prior, its wide interval, and how it does on recorded ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.domain.numeric import Z_90
from models.job.duration import BASE_S, S_PER_MB, prior_checkpoints
from tests.benchmarks.spot_replay import checkpoint_scores, read_checkpoints

FILE = Path(__file__).parents[4] / "shared" / "data" / "checkpoint_times.csv"


def test_before_anything_was_written_the_prior_is_said_with_a_wide_interval() -> None:
    model = prior_checkpoints()
    assert float(model.seconds(100.0)) == pytest.approx(BASE_S + 100 * S_PER_MB)
    assert 2 * Z_90 * float(model.log_sd(100.0)) > np.log(2.5)


@pytest.mark.skipif(not FILE.exists(), reason="no shared data")
def test_the_prior_predicts_recorded_checkpoints_within_eight_per_cent() -> None:
    scored = checkpoint_scores(read_checkpoints(FILE))
    assert len(scored) >= 100
    assert scored["error"].mean() <= 0.08
    assert scored["inside"].mean() >= 0.85
