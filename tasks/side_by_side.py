"""One function over many values on every core, by joblib's processes, started afresh since a flow has threads.

Beside them this process only hands out and collects. They end when nobody has asked for anything for a while, or when
this one ends; where this one is killed, within a minute.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from typing import Any

from joblib import Parallel, cpu_count, delayed, parallel_config

# Processes: each has its own copy of the libraries and of what it works on, some 300 MB.
MOST = 4
# Far longer than anything asked for takes: what is not back by then is done here.
_PATIENCE_S = 600.0
_IDLE_S = 5.0


def side_by_side(function: Callable[[Any], Any], values: Iterable[Any], processes: int | None = None) -> list[Any]:
    """A `map` whose results come as a list, in order; `processes` is one a core if not given, and at most MOST.

    A value is drawn when somebody is about to be free for it. What a process leaves undone that is killed, hangs or
    cannot be started is done here. Raises what the function or the values raise.
    """
    source, drawn = iter(values), deque[Any]()

    def handed_out() -> Iterator[Any]:
        for value in source:
            drawn.append(value)
            yield delayed(function)(value)

    found: list[Any] = []
    count = min(cpu_count(), MOST) if processes is None else processes
    if count == 1:
        return [function(value) for value in source]
    with parallel_config("loky", n_jobs=count, inner_max_num_threads=1, idle_worker_timeout=_IDLE_S):
        together = Parallel(return_as="generator", batch_size=1, pre_dispatch="n_jobs", timeout=_PATIENCE_S)
        try:
            for result in together(handed_out()):
                found.append(result)
                drawn.popleft()
        except (BrokenExecutor, multiprocessing.TimeoutError, OSError):
            found += [function(value) for value in itertools.chain(drawn, source)]
    return found
