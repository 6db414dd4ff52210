"""Work spread over processes comes back whole, in order and equal, whatever becomes of the processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import pytest

from models import evaluate
from tasks import side_by_side as module
from tasks.side_by_side import MOST, side_by_side
from tasks.threads import one_thread
from tests.models.test_evaluate import data

TEXTS = [str(number) for number in range(60)]
HERE = os.getpid()


def whose(_: object) -> int:
    return os.getpid()


def killed_elsewhere(number: int, here: int) -> int:
    if number == 3 and os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def hangs_elsewhere(number: int, here: int) -> int:
    if number == 3 and os.getpid() != here:
        time.sleep(30)
    return number


def fails_at(number: int, at: int) -> int:
    if number == at:
        raise ValueError(f"{number} is not wanted")
    return number


def test_results_are_in_order_and_made_by_other_processes() -> None:
    assert side_by_side(int, TEXTS, processes=2) == list(range(60))
    assert HERE not in side_by_side(whose, TEXTS, processes=2)
    assert set(side_by_side(whose, TEXTS, processes=1)) == {HERE}
    assert side_by_side(int, [], processes=2) == []


def test_one_process_a_core_at_most_so_many_and_none_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    config = module.parallel_config
    monkeypatch.setattr(module, "parallel_config", lambda *a, **k: asked.append(k["n_jobs"]) or config(*a, **k))
    for cores in (1, 3, 64):
        monkeypatch.setattr(module, "cpu_count", lambda cores=cores: cores)
        assert side_by_side(int, ["7"]) == [7]
    assert asked == [3, MOST]


def test_in_a_thread_of_a_flow_too() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(side_by_side(whose, TEXTS, processes=2)))
    thread.start()
    thread.join()
    assert len(found) == 60 and HERE not in found


def test_an_error_there_is_raised_here() -> None:
    with pytest.raises(ValueError, match="7 is not wanted"):
        side_by_side(partial(fails_at, at=7), range(20), processes=2)


def test_an_error_of_what_makes_the_values_is_raised_and_nothing_cut_short() -> None:
    def values() -> Iterator[str]:
        yield from TEXTS
        raise KeyError("the group is gone")

    with pytest.raises(KeyError, match="the group is gone"):
        side_by_side(int, values(), processes=2)


def test_what_a_killed_process_left_undone_is_done_here() -> None:
    assert side_by_side(partial(killed_elsewhere, here=HERE), iter(range(20)), processes=2) == list(range(20))


def test_what_a_process_that_hangs_left_undone_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 1.0)
    assert side_by_side(partial(hangs_elsewhere, here=HERE), iter(range(20)), processes=2) == list(range(20))


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class None_:
        def __init__(self, **_: object) -> None:
            pass

        def __call__(self, _: object) -> list[int]:
            raise BlockingIOError("no more processes")

    monkeypatch.setattr(module, "Parallel", None_)
    assert side_by_side(int, TEXTS, processes=2) == list(range(60))


def test_values_are_drawn_when_somebody_is_about_to_be_free_for_them(tmp_path: Path) -> None:
    drawn = []

    def values() -> Iterator[Path]:
        for number in range(30):
            drawn.append(len(list(tmp_path.iterdir())))  # how many were done by then
            yield tmp_path / str(number)

    side_by_side(Path.touch, values(), processes=2)
    assert all(number - done <= 4 for number, done in enumerate(drawn))


def test_no_process_outlives_this_ones_interest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.5)
    pids = set(side_by_side(whose, TEXTS, processes=2))
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_refit_in_another_process_predicts_the_same_to_the_last_digit() -> None:
    fitted = partial(evaluate._predicted, seed=0)
    some = list(evaluate.held_out(data(), seed=0))[:3]
    with one_thread():
        for here, there in zip(map(fitted, some), side_by_side(fitted, some, processes=2), strict=True):
            assert here is not None
            pd.testing.assert_frame_equal(there, here, check_exact=True)
