"""Hours of a job whose interruptions are known: each costs a replacement and what was not yet kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.job.duration import Conditions, best_interval, drawn_hours, expected_hours, pieces
from tests.benchmarks.spot_replay import hours_given

MOMENTS = st.lists(st.floats(0.0, 60.0), max_size=8)
JOB = st.fixed_dictionaries(
    {
        "work_hours": st.floats(0.1, 30.0),
        "interval_hours": st.floats(0.05, 40.0),
        "startup_hours": st.floats(0.0, 0.5),
        "checkpoint_hours": st.floats(0.0, 0.2),
        "replacement_hours": st.floats(0.0, 0.5),
    }
)


@given(job=JOB)
def test_without_interruptions_there_are_start_up_work_and_checkpoints(
    job: dict[str, float],
) -> None:
    count = float(pieces(job["work_hours"], job["interval_hours"]))
    expected = job["startup_hours"] + job["work_hours"] + (count - 1) * job["checkpoint_hours"]
    assert hours_given([], **job) == pytest.approx(expected)


@given(job=JOB, moments=MOMENTS, more=st.floats(0.0, 60.0))
def test_one_interruption_more_never_ends_a_job_earlier(
    job: dict[str, float], moments: list[float], more: float
) -> None:
    """Where replacing takes no longer than start-up: else what hits a start that another put off costs less."""
    job = job | {"replacement_hours": min(job["replacement_hours"], job["startup_hours"])}
    assert hours_given([*moments, more], **job) >= hours_given(moments, **job) - 1e-9


@given(job=JOB, moment=st.floats(0.0, 60.0))
def test_an_interruption_takes_no_more_than_a_piece_its_checkpoint_and_a_replacement(
    job: dict[str, float], moment: float
) -> None:
    lost = hours_given([moment], **job) - hours_given([], **job)
    most = (
        min(job["interval_hours"], job["work_hours"])
        + job["checkpoint_hours"]
        + job["replacement_hours"]
    )
    assert -1e-9 <= lost <= max(most, job["startup_hours"]) + 1e-9


@given(job=JOB, moments=MOMENTS)
def test_the_order_in_which_interruptions_are_given_means_nothing(
    job: dict[str, float], moments: list[float]
) -> None:
    assert hours_given(moments[::-1], **job) == hours_given(moments, **job)


def test_hours_by_hand() -> None:
    """Pieces of 2 h with checkpoints of 0.1 h: after a start of 1 h the first is kept at 3.1 h."""
    job = {"work_hours": 6.0, "interval_hours": 2.0, "startup_hours": 1.0, "checkpoint_hours": 0.1}
    assert hours_given([], **job, replacement_hours=0.5) == pytest.approx(7.2)
    # of the second piece 0.4 h are lost; replaced at 4 h
    assert hours_given([3.5], **job, replacement_hours=0.5) == pytest.approx(4.0 + 4.1)
    # again while being replaced: that starts anew
    assert hours_given([3.5, 3.8], **job, replacement_hours=0.5) == pytest.approx(4.3 + 4.1)
    # while the first checkpoint was written: it is not kept
    assert hours_given([3.05], **job, replacement_hours=0.5) == pytest.approx(3.55 + 6.2)
    assert hours_given([0.4], **job, replacement_hours=0.5) == pytest.approx(7.6)
    assert hours_given([7.3], **job, replacement_hours=0.5) == pytest.approx(7.2)


def test_stated_hours_are_those_of_jobs_interrupted_at_random() -> None:
    """The formula against `hours_given` at memoryless moments: mean within 1 %, 90th percentile exceeded by a tenth."""
    rng = np.random.default_rng(8)
    work, hazard, start, write, replace = 12.0, 0.3, 90.0, 30.0, 120.0
    seconds = {"startup_s": start, "checkpoint_s": write, "replacement_s": replace}
    conditions = Conditions.certain(np.array([hazard]), **seconds)
    drawn = drawn_hours(np.full((1, 4000), work), [work], conditions, seed=0)
    actual = np.array(
        [
            hours_given(
                np.cumsum(rng.exponential(1 / hazard, 60)),
                work_hours=work,
                interval_hours=float(best_interval(write / 3600, hazard)),
                startup_hours=start / 3600,
                checkpoint_hours=write / 3600,
                replacement_hours=replace / 3600,
            )
            for _ in range(3000)
        ]
    )
    assert float(actual.mean()) == pytest.approx(
        float(expected_hours([work], conditions)[0]), rel=0.01
    )
    assert 0.08 <= float((actual > np.quantile(drawn, 0.9)).mean()) <= 0.12
