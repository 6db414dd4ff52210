"""How a worker ends, and what a launch's log says of it: who was hit, and who only lost a peer. Standard library."""

from __future__ import annotations

import re
import signal
from typing import Any

EXIT_ITEM_FAILED, EXIT_LOST_PEER, EXIT_MAILBOX = 3, 4, 5
# torchrun tells of the ranks that it lost in two ways: the first one at once, all of them in its last words
_WORKER_EXIT = re.compile(r"\bexitcode\s*: (-?\d+)")
_SAID = re.compile(r"^srift(?:\[(\d+)\])?: (.*)$", re.MULTILINE)


def word_rank(code: Any) -> int:
    """Whose word counts first: a fault of its own, then an end that nobody explains, then a lost peer."""
    if code in (EXIT_ITEM_FAILED, EXIT_MAILBOX) or (isinstance(code, int) and code < 0):
        return 0
    return 2 if code == EXIT_LOST_PEER else 1


def last_word(code: int, message: str) -> str:
    """What a worker that ends with `code` prints, so that its agent can tell it from those of its neighbours."""
    return f"srift[{code}]: {message}"


def worker_exit_code(log: str) -> int | None:
    """What torchrun says of the rank that was hit first: negative for a signal; None where it says nothing."""
    codes = [int(code) for code in _WORKER_EXIT.findall(log)]
    # torchrun ends the neighbours of a rank that it lost by SIGTERM, and lists them too
    return min(reversed(codes), key=lambda code: 3 if code == -signal.SIGTERM else word_rank(code), default=None)


def reason_in(log: str, worker_code: int | None) -> str:
    """The last word of a worker that ended so, else the last of any, else what torchrun knows."""
    said = _SAID.findall(log)
    own = [words for code, words in said if code == str(worker_code)]
    if said:
        return str((own or [words for _, words in said])[-1])
    return "torchrun failed; see its log" if worker_code is None else f"the worker ended with exit code {worker_code}"
