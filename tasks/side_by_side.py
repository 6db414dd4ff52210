"""One function over many values on every core: by Python processes beside this one, which does its share and the rest.

The others are started afresh and not forked, since a flow has threads; each ends when its input does, however we end.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import IO, Any, TypeVar, cast

from .threads import one_thread

# Processes: each has its own copy of the libraries and of what it works on, some 300 MB.
MOST = 8

_Value = TypeVar("_Value")
Each = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


@contextmanager
def side_by_side(modules: Sequence[str], processes: int | None = None) -> Iterator[Each]:
    """A `map` whose results come as a list, in order. `processes`, this one among them, is one a core if not given.

    The others import `modules` at once. Function and values are pickled to get there. What fails there, or finds nobody
    there, is done here, where an error is raised as if there were no others.
    """
    count = min(len(os.sched_getaffinity(0)), MOST) if processes is None else processes
    others: list[_Other] = []
    try:
        with suppress(OSError):  # no process or no memory left for one more: those that there are do it all
            for _ in range(count - 1):
                others.append(_Other(modules))
        yield lambda function, values: _each(function, values, others)
    finally:
        for other in others:
            other.end()


def _each(function: Callable[[Any], Any], values: Iterable[Any], others: Sequence[_Other]) -> list[Any]:
    left = deque(enumerate(values))
    done: dict[int, Any] = {}

    def here() -> None:
        for at, value in _taken(left):
            done[at] = function(value)

    def there(other: _Other) -> None:
        for at, value in _taken(left):
            try:
                done[at] = other.ask(function, value)
            except Exception:  # whatever it was, it shows again where the value is tried again
                left.append((at, value))
                return

    threads = [Thread(target=there, args=(other,), daemon=True) for other in others]
    for thread in threads:
        thread.start()
    here()
    for thread in threads:
        thread.join()
    here()  # what came back at the very end
    return [done[at] for at in sorted(done)]


def _taken(left: deque[_Value]) -> Iterator[_Value]:
    """One after another, until nobody has left any."""
    with suppress(IndexError):
        while True:
            yield left.popleft()


class _Other:
    """A process that applies functions to values."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *modules],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._asked, self._told = (cast(IO[bytes], one) for one in (self._process.stdin, self._process.stdout))

    def ask(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Its result. Raises what pickling raises, EOFError or OSError where there is none."""
        pickle.dump((function, value), self._asked)
        self._asked.flush()
        return pickle.load(self._told)

    def end(self) -> None:
        """At once, whatever it is at."""
        self._process.kill()
        with suppress(OSError), self._process:  # closes the pipes, one of which may be broken, and waits
            pass


def serve(modules: Sequence[str]) -> None:
    """Apply what standard input asks for until it ends. An error ends this process; who asked does the work then."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        for name in modules:
            import_module(name)
        with one_thread(), suppress(EOFError):
            while True:
                function, value = pickle.load(sys.stdin.buffer)
                pickle.dump(function(value), answers)
                answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1:])
