"""End processes together with their parent, and find in torchrun's log why a worker ended.

torchrun starts each worker in a separate session, so killing a process group is not enough. This
module imports only the standard library.
"""

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
    """Make the kernel kill this process when its parent ends.

    Call this function after the process has changed its user. The change clears the setting.
    """
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the setting took effect
        os.kill(os.getpid(), signal.SIGKILL)


def seconds_since_start() -> float:
    """Return the age of this process in seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Return the PIDs of all descendants of the process `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process ended in the meantime
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def end_descendants() -> None:
    """Kill all descendants of this process, even in other sessions, and wait until they are gone.

    Descendants whose parent has ended are included only if `adopt_orphans` was called earlier.
    """
    while True:
        for process in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def gain_nothing() -> None:
    """Prevent this process and its descendants from gaining privileges through set-uid programs."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


EXIT_ITEM_FAILED, EXIT_LOST_PEER, EXIT_MAILBOX, EXIT_NO_DEVICE = 3, 4, 5, 6
FAULTS = (EXIT_ITEM_FAILED, EXIT_MAILBOX, EXIT_NO_DEVICE)
# torchrun logs the first failure at once, and all failures again at its end.
_WORKER_EXIT = re.compile(r"\bexitcode\s*: (-?\d+)")
_LAST_LINE = re.compile(r"^srift(?:\[(\d+)\])?: (.*)$", re.MULTILINE)


def blame_rank(code: Any) -> int:
    """Return a sort key for an exit code. The lowest key marks the likeliest cause of a failure.

    0: the code is in FAULTS, or it is negative, which means that a signal killed the process.
    1: any other code.
    2: the code is EXIT_LOST_PEER, which means that another process is the cause.
    """
    if code == EXIT_LOST_PEER:
        return 2
    return 0 if code in FAULTS or (isinstance(code, int) and code < 0) else 1


def leave(code: int, message: str) -> NoReturn:
    """Print `message` as a line that `exit_reason` can find in a log, and exit with `code`.

    The process exits without cleanup. Other ranks notice the exit when the sockets close.
    """
    print(f"srift[{code}]: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def worker_exit_code(log: str, torchrun_code: int) -> int:
    """Search torchrun's log for the exit code of the rank that most likely caused a failure.

    Returns `torchrun_code`, the exit code of torchrun or node.prepare, if the log has no exit code.
    """
    codes = [int(code) for code in _WORKER_EXIT.findall(log)]
    # After a failure, torchrun ends the node's other ranks with SIGTERM and also logs their exit
    # codes. SIGTERM is therefore the least likely cause.
    return min(
        reversed(codes),
        key=lambda code: 3 if code == -signal.SIGTERM else blame_rank(code),
        default=torchrun_code,
    )


def exit_reason(log: str, worker_code: int) -> str:
    """Search torchrun's log for the reason of a failure; return "" if no worker printed a message.

    The reason is the last message of the workers that exited with `worker_code`. If these workers
    printed no message, the reason is the last message of any worker.
    """
    lines = _LAST_LINE.findall(log)
    matching = [line for line in lines if line[0] == str(worker_code)] or lines
    return str(matching[-1][1]) if matching else ""
