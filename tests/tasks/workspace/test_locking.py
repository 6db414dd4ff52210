"""One refresh at a time in a home, and whoever only looks is in nobody's way."""

import fcntl
import os

import pytest

from tasks.workspace import locking
from tasks.workspace.locking import (
    Busy,
    at_work,
    at_work_elsewhere,
    patience_s,
    refresh_lock,
)


def test_a_second_refresh_is_refused_by_name_and_with_what_to_do(tmp_path):
    with refresh_lock(tmp_path, "first"):
        seen = at_work(tmp_path)
        assert (seen["refresh_id"], seen["pid"]) == ("first", os.getpid())
        assert at_work_elsewhere(tmp_path) is None
        refused = pytest.raises(Busy, match="first")
        with refused, refresh_lock(tmp_path, "second"):
            pytest.fail("two at once")
        assert at_work(tmp_path) == seen
    assert at_work(tmp_path) is None
    with refresh_lock(tmp_path, "third"):
        pass


def test_one_that_has_time_says_whom_it_waits_for_and_takes_its_turn_afterwards(
    tmp_path, capsys, monkeypatch
):
    naps = []
    first = refresh_lock(tmp_path, "first")
    first.__enter__()

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            first.__exit__(None, None, None)

    monkeypatch.setattr("time.sleep", sleep)
    with refresh_lock(tmp_path, "second", patience_s=60.0):
        assert len(naps) == 3 and at_work(tmp_path)["refresh_id"] == "second"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_only_a_run_that_a_schedule_started_has_time(monkeypatch):
    assert patience_s() == 0.0
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
    assert patience_s() > 3600.0


def test_a_refresh_that_was_cut_short_is_at_work_no_more(tmp_path):
    with pytest.raises(KeyboardInterrupt), refresh_lock(tmp_path, "first"):
        raise KeyboardInterrupt
    assert at_work(tmp_path) is None
    (tmp_path / "refresh.json").write_text(
        '{"refresh_id": "killed", "pid": 1}'
    )  # as SIGKILL leaves it
    assert at_work(tmp_path) is None
    with refresh_lock(tmp_path, "second"):
        pass


def test_somebody_who_only_looks_does_not_stop_a_refresh(tmp_path, monkeypatch):
    real, refused = fcntl.flock, []

    def flock(file, how):
        if how & fcntl.LOCK_EX and not refused:
            refused.append(how)
            raise BlockingIOError
        real(file, how)

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    with refresh_lock(tmp_path, "first"):
        assert refused
