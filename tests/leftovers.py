"""What a test run that is interrupted would leave behind: every process that it started, by
whatever way, is ended.

A process is this run's if its environment or command line holds the run's name, or a folder of the
run. Hosts have an environment of their own, which names their lease's folder.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from tasks.providers.local.processes import end, identify

RUN = "PYTEST_RUN_OF_SRIFT"  # workers of xdist inherit the controller's
_ROUNDS = 5  # what is being ended may start one more


def name_run(folder):
    """Mark every process that is started from now on as one of the run in `folder`."""
    os.environ.setdefault(RUN, str(folder))


class Leftovers:
    """A plugin of the process that started the run: SIGTERM acts as Ctrl-C, and what is left after
    an interrupt is ended.
    """

    def __init__(self, folder):
        self._folder = folder
        self._interrupted = False
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # fixtures clean up first

    def pytest_keyboard_interrupt(self):
        self._interrupted = True

    def pytest_unconfigure(self, config):
        if self._interrupted:
            base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
            end_all([self._folder, base])


def end_all(folders):
    """End what belongs to this run, or works in one of its `folders`; return process numbers."""
    marks = [os.environ[RUN], *map(str, folders)]
    ended = []
    for _ in range(_ROUNDS):
        left = list(_of_run([mark.encode() for mark in marks]))
        if not left:
            break
        ended += [process.pid for process in end(left)]
    return ended


def _of_run(marks):
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            process = identify(int(entry.name))
            with suppress(OSError):  # it ended in between
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if process is not None and any(mark in text for mark in marks):
                    yield process
