"""Processes of a node: ending with their parent, and how a log says that they ended. Standard
library.

torchrun gives each worker its own session: killing a group is not enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38  # linux/prctl.h


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of user undoes it."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def seconds_since_start() -> float:
    """Age of this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended in between
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def end_descendants() -> None:
    """Kill and reap everything below this process, in any session."""
    while True:
        for process in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0)[0]:
                pass
        except ChildProcessError:
            return


def gain_nothing() -> None:
    """Let no program that this process runs gain rights: set-uid bits count for nothing."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


EXIT_ITEM_FAILED, EXIT_LOST_PEER, EXIT_MAILBOX, EXIT_NO_DEVICE = 3, 4, 5, 6
FAULTS = (EXIT_ITEM_FAILED, EXIT_MAILBOX, EXIT_NO_DEVICE)
# torchrun names the ranks that it lost twice: the first one at once, and all of them at its end
_WORKER_EXIT = re.compile(r"\bexitcode\s*: (-?\d+)")
_LAST_LINE = re.compile(r"^srift(?:\[(\d+)\])?: (.*)$", re.MULTILINE)


def blame_rank(code: Any) -> int:
    """Order of exit codes: a fault of the item first, then an unexplained end, then a lost peer."""
    if code == EXIT_LOST_PEER:
        return 2
    return 0 if code in FAULTS or (isinstance(code, int) and code < 0) else 1


def leave(code: int, message: str) -> NoReturn:
    """Exit at once, with the line that the agent finds in the log.

    Closed sockets wake the ranks that still wait for this one.
    """
    print(f"srift[{code}]: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def worker_exit_code(log: str) -> int | None:
    """Return torchrun's exit code of the rank that was hit first; None if it names none."""
    codes = [int(code) for code in _WORKER_EXIT.findall(log)]
    # torchrun ends the neighbours of a rank that it lost by SIGTERM, and lists them too
    return min(
        reversed(codes),
        key=lambda code: 3 if code == -signal.SIGTERM else blame_rank(code),
        default=None,
    )


def exit_reason(log: str, worker_code: int | None) -> str:
    """Return the last line of a worker with that code, else of any, else the exit code."""
    lines = _LAST_LINE.findall(log)
    matching = [line for line in lines if line[0] == str(worker_code)] or lines
    if matching:
        return str(matching[-1][1])
    return f"the worker ended with exit code {worker_code}; see its log"
