"""Map a function over values with Prefect tasks, on threads or on a Dask cluster."""

from collections.abc import Callable, Iterable
from typing import Any

from prefect import task
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from models.monitoring.cross_validation import Each
from tasks.providers.local.cpu_shares import usable_cores


def each_by_task(dask: str) -> Each:
    """Return a function like `map` that runs each call as a Prefect task, and returns a list.

    dask: address of a Dask scheduler, on which a failed call is retried at most twice; "" to use
        threads.
    """

    def each(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        name = getattr(function, "func", function).__name__.strip("_")
        call = task(name=name, retries=2 if dask else 0)(lambda value: function(value))
        with _runner(dask) as runner:
            return list(runner.map(call, {"value": list(values)}).result())

    return each


def _runner(dask: str) -> TaskRunner[Any]:
    if not dask:
        return ThreadPoolTaskRunner(max_workers=max(1, int(usable_cores())))
    from prefect_dask.task_runners import DaskTaskRunner

    runner: TaskRunner[Any] = DaskTaskRunner(address=dask)
    return runner
