"""One function over many values: on every core, or on the workers of a Dask cluster.

Here it is done by joblib's processes, started afresh since a flow has threads.
Beside them this process only hands out and collects. Processes end when nobody has asked for anything for a while, or
when this one ends; where this one is killed, within a minute.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from pickle import PicklingError
from typing import Any

from joblib import Parallel, cpu_count, delayed, parallel_config

from ..providers.local.cpu_shares import quota_cores
from ..reporting.progress import reporter
from .dask_cluster import on_cluster

# Processes: each has its own copy of the libraries and of what it works on, some 300 MB.
MOST = 4
# Far longer than anything asked for takes: what is not back by then is done here.
_PATIENCE_S = 600.0
_IDLE_S = 5.0
# Of work, from which on processes are started or a cluster is asked. On two cores it pays from 5 s on, which starting
# two processes takes of the processor (python -m tests.benchmarks.spread); a machine is seldom idle.
LONG_S = 10.0
# No process, no memory, none left, or nothing that can be sent there: an error of the function shows again here.
_DONE_HERE = (BrokenExecutor, multiprocessing.TimeoutError, PicklingError, RuntimeError, OSError)


def side_by_side(
    function: Callable[[Any], Any],
    values: Iterable[Any],
    processes: int | None = None,
    scheduler: str = "",
) -> list[Any]:
    """A `map` whose results come as a list, in order; `processes` is one a core if not given, and at most MOST.

    With a `scheduler`, the address of Dask's, its workers do it, and what cannot be done there is done by processes
    here, which the log says. Values are drawn a few at a time, when somebody is about to be free. What a process leaves
    undone that is killed, hangs or cannot be started is done here. Raises what the function or the values raise.
    """
    source = _Source(values)
    found: list[Any] = []
    if scheduler:
        try:
            for result in on_cluster(function, source, scheduler):
                found.append(result)
                source.waiting.popleft()
            return found
        except Exception as error:  # of whatever kind: an error of the function shows again here
            if source.error is not None:
                raise
            reporter().say(
                f"the Dask cluster at {scheduler} did {len(found)} of what was asked, and this machine goes on with the"
                f" rest: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
        return found + side_by_side(function, source.left(), processes)
    count = max(1, int(min(cpu_count(), quota_cores(), MOST))) if processes is None else processes
    if count > 1:
        try:
            for result in _elsewhere(function, source, count):
                found.append(result)
                source.waiting.popleft()
        except _DONE_HERE:
            if source.error is not None:
                raise
    found += [function(value) for value in source.left()]
    return found


def side_by_side_if_long(
    function: Callable[[Any], Any], values: Iterable[Any], count: int, scheduler: str = ""
) -> list[Any]:
    """The same of `count` values, which are done here, one by one, while what is left would take less than LONG_S."""
    source, begun = iter(values), time.monotonic()
    found: list[Any] = []
    for value in source:
        found.append(function(value))
        each_s = (time.monotonic() - begun) / len(found)
        if each_s * (count - len(found)) > LONG_S:
            return found + side_by_side(function, source, scheduler=scheduler)
    return found


class _Source:
    """The values; `waiting` are those that were drawn and have no result yet, `error` is what ended them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values, self.waiting = iter(values), deque[Any]()
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for value in self._values:
                self.waiting.append(value)
                yield value
        except Exception as error:
            self.error = error
            raise

    def left(self) -> Iterator[Any]:
        """Those that have no result yet."""
        return itertools.chain(tuple(self.waiting), self._values)


def _elsewhere(
    function: Callable[[Any], Any], values: Iterable[Any], processes: int
) -> Iterator[Any]:
    how = {
        "inner_max_num_threads": 1,
        "idle_worker_timeout": _IDLE_S,
        "initializer": _print_to_stderr,
    }
    # arrays are sent whole: shared ones could not be written to, and would lie in /dev/shm
    with (
        warnings.catch_warnings(),
        parallel_config("loky", n_jobs=processes, max_nbytes=None, **how),
    ):
        # a process that has grown is taken for a leak and started anew, with a warning that says so
        warnings.filterwarnings(
            "ignore", message="A worker stopped while some jobs were given to the executor"
        )
        together = Parallel(
            return_as="generator", batch_size=1, pre_dispatch="n_jobs", timeout=_PATIENCE_S
        )
        yield from together(delayed(function)(value) for value in values)


def _print_to_stderr() -> None:
    """What a library prints there is no output of the command that was asked for."""
    os.dup2(2, 1)
