"""One function over many values on every core: by Python processes beside this one, which does its share and the rest.

The others are started afresh and not forked, since a flow has threads. Each ends when its input does, however we end,
at the latest after what it is at.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Lock, Thread
from typing import IO, Any, cast

from .providers.local_cpu import quota_cores
from .threads import one_thread

# Processes, this one among them: each has its own copy of the libraries and of what it works on, some 300 MB.
MOST = 4
# Far longer than anything asked for takes: what is not back by then is done here too.
_PATIENCE_S = 600.0

Each = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


@contextmanager
def side_by_side(modules: Sequence[str], processes: int | None = None) -> Iterator[Each]:
    """A `map` whose results come as a list, in order. `processes`, this one among them, is one a core if not given.

    The others import `modules` at once. Function and values are pickled to get there; a value is drawn when somebody is
    free for it. What fails there, or finds nobody there, is done here, where an error is raised as if there were no
    others.
    """
    count = int(min(len(os.sched_getaffinity(0)), quota_cores(), MOST)) if processes is None else processes
    others: list[_Other] = []
    try:
        with suppress(OSError, TypeError):  # no process, no memory or no interpreter for one more: the rest do it all
            for _ in range(count - 1):
                others.append(_Other(modules))
        yield lambda function, values: _each(function, values, others)
    finally:
        for other in others:
            other.end()


def _each(function: Callable[[Any], Any], values: Iterable[Any], others: Sequence[_Other]) -> list[Any]:
    left = _Left(values)
    done: dict[int, Any] = {}
    out: dict[int, Any] = {}  # what the others are at

    def there(other: _Other) -> None:
        for at, value in left:
            out[at] = value
            try:
                done[at] = other.ask(function, value)
            except Exception:  # whatever it was, it shows again where the value is tried again
                return
            del out[at]

    threads = [Thread(target=there, args=(other,), daemon=True) for other in others]
    for thread in threads:
        thread.start()
    for at, value in left:
        done[at] = function(value)
    for thread in threads:
        thread.join(_PATIENCE_S)
    for at, value in list(out.items()):
        done[at] = function(value)
    if left.error is not None:
        raise left.error
    return [done[at] for at in sorted(done)]


class _Left:
    """Numbered values, each drawn once, by whoever is free. `error` is what ended them before their time."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values, self._lock = enumerate(values), Lock()
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while True:
            with self._lock:
                try:
                    drawn = next(self._values)
                except StopIteration:
                    return
                except BaseException as error:  # in whatever thread: raised where the results are asked for
                    self.error = error
                    return
            yield drawn


class _Other:
    """A process that applies functions to values."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *modules],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
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
