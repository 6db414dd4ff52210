"""One function over many values on the workers of a Dask cluster, which `[shared] dask` in srift.toml names.

The only file that speaks Dask. What a worker leaves undone that dies goes to another one, by the scheduler. Functions
and values travel as pickles; these name what Srift's modules define, so that scheduler and workers need the same Srift.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models

from .blas_threads import one_thread

if TYPE_CHECKING:
    from distributed import Client, Future

MISSING = "needs Dask's package, which is not installed here: type `pip install 'srift[dask]'`"
ANSWER_S = 10.0  # in which a scheduler that is up says so
# Without any result so long the cluster has no workers, or others have them; far longer than one value takes.
PATIENCE_S = 600.0
WORKERS_S = 60.0  # in which a cluster that grows by need has its first worker
_LEAST_UNDER_WAY = (
    8  # before the first worker is there, too: a cluster that grows by need must see some
)
_LARGE_GRAPH = {
    "distributed.admin.large-graph-warning-threshold": "1 GiB"
}  # a model of millions of rows is meant to go


class OtherVersions(Exception):
    """A worker would compute by other code or libraries than this process; the message names worker and versions."""


class WorkerFailed(Exception):
    """The function failed on a worker, which the message names; whether the worker is why is not known there."""


def on_cluster(
    function: Callable[[Any], Any], values: Iterable[Any], scheduler: str
) -> Iterator[Any]:
    """In order, what `function` returns for each value.

    Values are drawn when a worker is about to be free. Raises whatever keeps the cluster from its work: OSError where
    the scheduler does not answer, OtherVersions, WorkerFailed, TimeoutError after WORKERS_S without a worker and after
    PATIENCE_S without a result, Dask's own errors.
    """
    import dask
    from distributed import Client, wait

    with dask.config.set(_LARGE_GRAPH), Client(scheduler, timeout=ANSWER_S) as client:
        # a task, not scattered data: should all workers die that hold it, it is made again
        there = client.submit(pickle.loads, pickle.dumps(function), pure=False)
        asked: deque[Future[Any]] = deque()
        for number, value in enumerate(values):
            asked.append(client.submit(_done, there, pickle.dumps(value), versions(), pure=False))
            if not number:
                _wait_for_a_worker(client)
            while True:
                unfinished = [one for one in asked if not one.done()]
                if len(unfinished) < max(2 * _threads(client), _LEAST_UNDER_WAY):
                    break
                wait(unfinished, timeout=PATIENCE_S, return_when="FIRST_COMPLETED")
            while asked and asked[0].done():
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result(timeout=PATIENCE_S)


def _threads(client: Client) -> int:
    """Of all workers. Client's own `nthreads` and `wait_for_workers` wait for ever where a scheduler is stopped."""
    return sum(
        client.sync(client.scheduler.ncores, workers=None, callback_timeout=ANSWER_S).values()
    )


def _wait_for_a_worker(client: Client) -> None:
    until = time.monotonic() + WORKERS_S
    while not _threads(client):
        if time.monotonic() > until:
            raise TimeoutError(f"it had no worker within {WORKERS_S:g} s")
        time.sleep(0.2)


@cache
def versions() -> dict[str, str]:
    """Of what decides the last digit of a result; of Srift a digest of the code that computes."""
    room = Path(models.__file__).parent
    code = hashlib.sha256()
    asking = Path(__file__).parents[1] / "recommendation"
    for file in sorted([*room.rglob("*.py"), *room.rglob("*.csv"), *asking.glob("*.py")]):
        code.update(f"{file.name}\n".encode() + file.read_bytes())
    named = {one: version(one) for one in ("numpy", "scipy", "pandas")}
    return {"Python": platform.python_version(), "Srift's models": code.hexdigest()[:12], **named}


def _done(function: Callable[[Any], Any], packed: bytes, wanted: dict[str, str]) -> Any:
    """On a worker."""
    _refuse_other(wanted)
    _one_thread_for_good()
    try:
        return function(pickle.loads(packed))
    except Exception as error:
        raise WorkerFailed(
            f"{type(error).__name__} on worker {platform.node()}: {error}"
        ) from error


def _refuse_other(wanted: dict[str, str]) -> None:
    other = [
        f"{name} {versions()[name]}, not {asked}"
        for name, asked in wanted.items()
        if versions()[name] != asked
    ]
    if other:
        raise OtherVersions(
            f"worker {platform.node()} has {', '.join(other)}; install there what is installed here"
        )


@cache
def _one_thread_for_good() -> None:
    """Threads of a worker may be at work at once, and none may give another one its threads back."""
    one_thread()
