"""Map a function over values with Prefect tasks, on threads, in processes or on Dask."""

from collections.abc import Callable, Iterable
from typing import Any

from prefect import task
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from models.monitoring.cross_validation import Each
from tasks.providers.local.cpu_shares import usable_cores
from tasks.workspace.blas_threads import single_thread


def each_by_task(dask: str, *, processes: bool = False) -> Each:
    """Return a function like `map` that runs each call as a Prefect task.

    The returned function returns a list.

    dask: address of a Dask scheduler, or "" to run the calls on this machine. On Dask, a failed
        call is retried at most twice.
    processes: without Dask, use processes instead of threads. Threads cannot run fits in parallel,
        but processes take many seconds to start.
    """

    def each(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        name = getattr(function, "func", function).__name__.strip("_")

        def single_threaded(value: Any) -> Any:
            with single_thread():
                return function(value)

        call = task(name=name, retries=2 if dask else 0)(single_threaded)
        with _runner(dask, processes) as runner:
            return list(runner.map(call, {"value": list(values)}).result())

    return each


def _runner(dask: str, processes: bool) -> TaskRunner[Any]:
    if dask:
        from prefect_dask.task_runners import DaskTaskRunner

        runner: TaskRunner[Any] = DaskTaskRunner(address=dask)
        return runner
    cores = max(1, int(usable_cores()))
    local = ProcessPoolTaskRunner if processes and cores > 1 else ThreadPoolTaskRunner
    return local(max_workers=cores)
