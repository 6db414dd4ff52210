"""What a test run that is interrupted would leave behind: every process that it started, by
whatever way, is ended.

A process is this run's if its environment or command line holds the run's name, or a folder of the
run. Hosts have an environment of their own, which names their lease's folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.local.processes import Process, end, hosts, identify
from tasks.providers.local.provider import LocalProvider

RUN = "PYTEST_RUN_OF_SRIFT"  # workers of xdist inherit the controller's
_ROUNDS = 5  # what is being ended may start one more


def name_run(folder: Path) -> None:
    """Whatever is started from now on says that it belongs to the run of which `folder` is."""
    os.environ.setdefault(RUN, str(folder))


class Leftovers:
    """A plugin of the process that started the run: a signal to end is as Ctrl-C, and what is left
    then is ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._interrupted = False
        signal.signal(signal.SIGTERM, self._interrupt)  # fixtures put things right first

    def _interrupt(self, *_: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    def pytest_keyboard_interrupt(self) -> None:
        """Of Ctrl-C, and of the signal."""
        self._interrupted = True

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """The last word of a run."""
        if self._interrupted:
            base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
            end_all([self._folder, base])


def end_all(folders: list[Path]) -> list[int]:
    """End what belongs to this run, or works in one of its `folders`; returns process numbers."""
    marks = [os.environ[RUN], *map(str, folders)]
    for home in {mark.home for mark in hosts() if mark.home.startswith(tuple(marks))}:
        with suppress(Exception):  # a home that is half gone; its processes are ended below
            LocalProvider(Path(home), {}, Path(home), "").reap(datetime.now(UTC), all_of_them=True)
    ended: list[int] = []
    for _ in range(_ROUNDS):
        left = list(_of_run([mark.encode() for mark in marks]))
        if not left:
            break
        ended += [one.pid for one in end(left)]
    return ended


def _of_run(marks: list[bytes]) -> Iterator[Process]:
    own = {os.getpid(), os.getppid()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in own:
            process = identify(int(entry.name))
            with suppress(OSError):  # it ended in between
                said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if process is not None and any(mark in said for mark in marks):
                    yield process
