"""Prefect hears of the flow runs whose process died, and of no other; with a real Prefect in the tests of flows."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from uuid import UUID, uuid4

import pytest

from tasks.workspace import prefect_runtime as flow_runs
from tasks.workspace.prefect_runtime import crash_dead_flow_runs, recorded_flow_run


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[UUID]]]:
    """What Prefect is sent, in place of Prefect: how many of the runs it had for unfinished is that number."""
    calls: list[set[UUID]] = []
    monkeypatch.setattr(flow_runs, "_crash", lambda ids: calls.append(set(ids)) or len(ids))
    yield calls


def within(monkeypatch: pytest.MonkeyPatch) -> UUID:
    """As inside the flow run of that id."""
    key = uuid4()
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(key))
    return key


def killed(home: Path) -> UUID:
    """A flow run whose process died by SIGKILL."""
    key, child = uuid4(), os.fork()
    if child == 0:
        os.environ["PREFECT__RUNTIME__FLOW_RUN__ID"] = str(key)
        with recorded_flow_run(home):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return key


def test_only_runs_whose_process_is_gone_are_reported_and_only_once(
    tmp_path: Path, reported: list[set[UUID]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded_flow_run(tmp_path):
        assert list(tmp_path.iterdir()) == [], "a flow called as a function left something"
    assert crash_dead_flow_runs(tmp_path) == [] and reported == []
    dead = killed(tmp_path)
    within(monkeypatch)
    with recorded_flow_run(tmp_path):
        assert crash_dead_flow_runs(tmp_path) == [
            "1 flow runs whose process was killed are shown as crashed now"
        ]
        assert reported == [{dead}], "a live one was reported"
        assert crash_dead_flow_runs(tmp_path) == []
    assert crash_dead_flow_runs(tmp_path) == [] and reported == [{dead}]


@pytest.mark.parametrize(
    ("error", "may_be_unknown"), [(RuntimeError, False), (KeyboardInterrupt, True)]
)
def test_how_a_run_ended_is_known_unless_it_was_cut_short(
    tmp_path: Path,
    reported: list[set[UUID]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    may_be_unknown: bool,
) -> None:
    key = within(monkeypatch)
    with pytest.raises(error), recorded_flow_run(tmp_path):
        raise error
    crash_dead_flow_runs(tmp_path)
    assert reported == ([{key}] if may_be_unknown else [])


def test_a_prefect_that_does_not_answer_stops_no_reaper_and_hears_of_it_the_next_time(
    tmp_path: Path, reported: list[set[UUID]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(ids: list[UUID]) -> int:
        raise ConnectionError("connection refused")

    dead = killed(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(flow_runs, "_crash", unreachable)
        (said,) = crash_dead_flow_runs(tmp_path)
    assert "connection refused" in said and "srift reap" in said
    crash_dead_flow_runs(tmp_path)
    assert reported == [{dead}]


def test_what_cannot_be_opened_or_is_no_run_stops_no_reaper(
    tmp_path: Path, reported: list[set[UUID]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, refused = killed(tmp_path), killed(tmp_path)
    folder = tmp_path / "flow-runs"
    (folder / str(uuid4())).mkdir()
    (folder / "notes").write_text("of a person")
    opened = Path.open

    def refuse(self: Path, *words: str) -> IO[str]:
        if self.name == str(refused):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(self, *words)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        crash_dead_flow_runs(tmp_path)
    assert reported == [{dead}]
    crash_dead_flow_runs(tmp_path)
    assert reported[1:] == [{refused}], "the next reaper did not try it again"
