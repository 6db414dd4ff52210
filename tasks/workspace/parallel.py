"""Run a `map` in several processes, for commands that run outside a Prefect flow."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from ..providers.local.cpu_shares import quota_cores

_MAX_PROCESSES = 4  # each process loads its libraries and data, about 300 MB


def side_by_side(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Return `function(value)` for each of `values`, in order.

    The calls run in parallel, in one process per available core, but at most four processes.
    """
    from joblib import Parallel, cpu_count, delayed, parallel_config

    processes = max(1, int(min(cpu_count(), quota_cores(), _MAX_PROCESSES)))
    with parallel_config("loky", inner_max_num_threads=1, initializer=_print_to_stderr):
        return list(Parallel(n_jobs=processes)(delayed(function)(value) for value in values))


def _print_to_stderr() -> None:
    """Redirect standard output to standard error, because libraries may print.

    The standard output of a command then has only its result.
    """
    os.dup2(2, 1)
