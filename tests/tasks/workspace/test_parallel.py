"""Work spread over processes comes back whole, in order and equal, whatever becomes of the processes."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from models.monitoring import cross_validation as evaluate
from models.step_time.model import fit
from tasks.workspace import parallel as module
from tasks.workspace.blas_threads import one_thread
from tasks.workspace.parallel import MOST, side_by_side
from tests.models.monitoring.test_cross_validation import data
from tests.tasks.workspace.sent_elsewhere import (
    cleared,
    fails_at,
    hangs_elsewhere,
    killed_elsewhere,
    whose,
)

TEXTS = [str(number) for number in range(60)]
HERE = os.getpid()


def test_results_are_in_order_and_made_by_other_processes() -> None:
    assert side_by_side(int, TEXTS, processes=2) == list(range(60))
    assert HERE not in side_by_side(whose, TEXTS, processes=2)
    assert set(side_by_side(whose, TEXTS, processes=1)) == {HERE}
    assert side_by_side(int, [], processes=2) == []
    found: list[int] = []  # in a thread of a flow too
    thread = threading.Thread(target=lambda: found.extend(side_by_side(whose, TEXTS, processes=2)))
    thread.start()
    thread.join()
    assert len(found) == 60 and HERE not in found


def test_one_process_of_one_thread_a_core_at_most_so_many_and_none_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    config = module.parallel_config
    monkeypatch.setattr(
        module,
        "parallel_config",
        lambda *a, **k: asked.append((k["n_jobs"], k["inner_max_num_threads"])) or config(*a, **k),
    )
    for cores, quota in (
        (1, math.inf),
        (3, math.inf),
        (64, math.inf),
        (64, 1.5),
        (64, 2.5),
        (64, 0.2),
    ):
        monkeypatch.setattr(module, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(module, "quota_cores", lambda quota=quota: quota)
        assert side_by_side(int, ["7"]) == [7]
    assert asked == [(3, 1), (MOST, 1), (2, 1)]


@pytest.mark.parametrize("error", [KeyError, OSError, RuntimeError])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_there_or_of_what_makes_the_values_is_raised_here_and_nothing_cut_short(
    error: type[Exception], processes: int
) -> None:
    def values() -> Iterator[str]:
        yield from TEXTS
        raise error("the disk is gone")

    with pytest.raises(error, match="the disk is gone"):
        side_by_side(int, values(), processes=processes)
    with pytest.raises(ValueError, match="7 is not wanted"):
        side_by_side(partial(fails_at, at=7), range(20), processes=processes)


def test_what_a_killed_process_left_undone_is_done_here() -> None:
    assert side_by_side(partial(killed_elsewhere, here=HERE), iter(range(20)), processes=2) == list(
        range(20)
    )


def test_what_a_process_that_hangs_left_undone_is_done_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 1.0)
    assert side_by_side(partial(hangs_elsewhere, here=HERE), iter(range(20)), processes=2) == list(
        range(20)
    )


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoProcesses:
        def __init__(self, **_: object) -> None:
            pass

        def __call__(self, _: object) -> list[int]:
            raise BlockingIOError("no more processes")

    monkeypatch.setattr(module, "Parallel", NoProcesses)
    assert side_by_side(int, TEXTS, processes=2) == list(range(60))


def test_values_are_drawn_when_somebody_is_about_to_be_free_for_them(tmp_path: Path) -> None:
    drawn = []

    def values() -> Iterator[Path]:
        for number in range(30):
            drawn.append(len(list(tmp_path.iterdir())))  # how many were done by then
            yield tmp_path / str(number)

    side_by_side(Path.touch, values(), processes=2)
    assert (
        max(number - done for number, done in enumerate(drawn)) <= 2
    )  # with joblib's own choice 3 or 4


def test_what_cannot_be_sent_there_is_done_here_and_arrays_may_be_written_to_there() -> None:
    locks = [threading.Lock() for _ in range(4)]
    assert side_by_side(lambda lock: lock.locked(), locks, processes=2) == [False] * 4
    assert side_by_side(cleared, [np.ones(300_000)] * 3, processes=2) == [0.0] * 3


def test_what_a_library_prints_there_is_not_this_ones_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    side_by_side(print, ["hello"] * 2, processes=2)
    assert "hello" not in capfd.readouterr().out


def test_no_process_outlives_this_ones_interest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.5)
    pids = set(side_by_side(whose, TEXTS, processes=2))
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_refit_in_another_process_predicts_the_same_to_the_last_digit() -> None:
    fitted = partial(evaluate._fitted, seed=0, calibrated=fit(data(), seed=0))
    some = list(evaluate.held_out(data(), seed=0))[:3]
    with one_thread():
        for here, there in zip(
            map(fitted, some), side_by_side(fitted, some, processes=2), strict=True
        ):
            assert here is not None
            pd.testing.assert_frame_equal(there, here, check_exact=True)
