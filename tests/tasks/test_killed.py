"""A job killed twice ends all the same, having lost no piece that was kept; its parts add up to what it took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks import killed
from tasks.killed import Finished, judged, predicted_s, run_job, summary


@pytest.mark.local
def test_a_killed_job_goes_on_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killed, "PIECES", 4)
    monkeypatch.setattr(killed, "STEPS_A_PIECE", 10)
    alone = run_job((), step_s=0.05, ready_s=4.5)
    assert len(alone.piece_s) == 4 and len(alone.checkpoint_s) == 3 and alone.killed_at == ()
    started = alone.startup_s[0]  # what this machine takes now, if more than asked for
    for _ in range(3):
        job = run_job((started + 1.75,), step_s=0.05, ready_s=started)  # in the last piece of half a second
        if job.replacement_s:
            break
        started = job.startup_s[0]  # the machine was later this time: it was killed before it had begun
    assert len(job.killed_at) == 1 and len(job.replacement_s) == 1
    assert len(job.piece_s) == 4  # those of before the kill were not done again
    assert job.seconds == pytest.approx(predicted_s([job], job.killed_at), rel=0.1)
    # Another job's pieces tell as much; its starts do not, since they are as uneven as the machine is.
    started_alike = replace(alone, startup_s=job.startup_s, replacement_s=job.replacement_s)
    assert job.seconds == pytest.approx(predicted_s([started_alike], job.killed_at), rel=0.15)


def test_what_a_job_should_take_follows_from_other_jobs_and_the_moments() -> None:
    parts = {"startup_s": (3.0,), "replacement_s": (2.0,), "piece_s": (1.0,), "checkpoint_s": (0.5,)}
    before = [Finished(seconds=0.0, killed_at=(), **parts)]
    whole = 3 + killed.PIECES * 1.0 + (killed.PIECES - 1) * 0.5
    assert predicted_s(before, ()) == pytest.approx(whole)
    assert predicted_s(before, (3.0 + 1.5 + 0.25,)) == pytest.approx(whole + 0.25 + 2)
    job = Finished(seconds=0.8 * whole, killed_at=(), **parts)
    found = judged(before, [job])
    assert found["off_%"].tolist() == pytest.approx([25.0])
    assert summary(found)["mean_error_%"].tolist() == pytest.approx([25.0])
