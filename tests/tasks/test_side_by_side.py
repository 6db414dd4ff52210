"""Work spread over processes comes back whole, in order and equal, whatever becomes of the processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import pytest

from models import evaluate
from tasks import side_by_side as module
from tasks.side_by_side import MOST, side_by_side
from tests.models.test_evaluate import data

TEXTS = [str(number) for number in range(200)]
PID = "__import__('os').getpid()"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that was."""
    found: list[subprocess.Popen[bytes]] = []
    plain = subprocess.Popen

    def start(*words: Any, **rest: Any) -> subprocess.Popen[bytes]:
        found.append(plain(*words, **rest))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


@pytest.fixture
def other() -> Iterator[module._Other]:
    one = module._Other([evaluate.__name__])
    yield one
    one.end()


def test_results_are_in_order_and_no_process_is_left(started: list[subprocess.Popen[bytes]]) -> None:
    with side_by_side([], processes=3) as each:
        assert each(int, TEXTS) == list(range(200))
        assert each(len, TEXTS) == [len(one) for one in TEXTS], "the same processes go on"
        assert len(started) == 2 and all(one.poll() is None for one in started)
    assert all(one.returncode is not None for one in started)


def test_one_process_a_core_and_none_beside_this_one_where_there_is_one(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, quota, others in ((1, math.inf, 0), (2, math.inf, 1), (64, math.inf, MOST - 1), (64, 1.5, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(module, "quota_cores", lambda quota=quota: quota)
        before = len(started)
        with side_by_side([]) as each:
            assert each(int, ["7"]) == [7]
        assert len(started) - before == others


def test_an_error_there_is_raised_here(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(ValueError, match="'no number'"), side_by_side([], processes=2) as each:
        each(int, [*TEXTS, "no number"])
    assert all(one.returncode is not None for one in started)


def test_an_error_there_ends_that_process_and_the_value_is_tried_here(other: module._Other) -> None:
    assert other.ask(int, "7") == 7
    assert other.ask(eval, PID) not in (os.getpid(), None)
    with pytest.raises(EOFError):
        other.ask(int, "no number")
    assert module._each(int, TEXTS, [other]) == list(range(200))


def test_a_process_that_was_killed_is_done_without(other: module._Other) -> None:
    other.end()
    assert module._each(int, TEXTS, [other]) == list(range(200))


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with side_by_side([], processes=3) as each:
        assert each(int, TEXTS) == list(range(200))


def test_values_are_drawn_when_somebody_is_free_for_them(other: module._Other) -> None:
    drawn, done = [], []

    def values() -> Iterator[int]:
        for number in range(50):
            drawn.append(number)
            yield number

    def here(number: int) -> int:
        done.append(number)
        assert len(drawn) <= len(done) + 1
        return number

    assert module._each(here, values(), [other]) == list(range(50))  # no other can unpickle it: all are done here


def test_an_error_of_what_makes_the_values_is_raised_and_nothing_cut_short(other: module._Other) -> None:
    def values() -> Iterator[str]:
        yield from TEXTS
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        module._each(int, values(), [other])


def test_a_process_that_hangs_is_done_without(other: module._Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    os.kill(other._process.pid, signal.SIGSTOP)
    assert module._each(int, TEXTS, [other]) == list(range(200))


def test_what_cannot_be_pickled_is_done_here() -> None:
    with side_by_side([], processes=2) as each:
        assert each(lambda text: int(text) + 1, TEXTS) == list(range(1, 201))


def test_what_a_library_prints_there_is_no_answer(other: module._Other) -> None:
    assert other.ask(eval, "print('hello') or 7") == 7


def test_a_refit_in_another_process_predicts_the_same_to_the_last_digit(other: module._Other) -> None:
    fitted = partial(evaluate._predicted, seed=0)
    for out in list(evaluate.held_out(data(), seed=0))[:3]:
        here, there = fitted(out), other.ask(fitted, out)
        assert here is not None
        pd.testing.assert_frame_equal(there, here, check_exact=True)
