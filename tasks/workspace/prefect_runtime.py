"""What a flow needs of Prefect, which takes seconds to import: lazy tasks, and runs whose process was killed."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Generic, ParamSpec, TypeVar
from uuid import UUID

if TYPE_CHECKING:
    from prefect import Task

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Step(Generic[_P, _R]):
    """Decorates a function: called, it is a Prefect task without a cache; `fn` is the function as it was written.

    Neither `submit` nor `map`: steps follow one another.
    """

    def __init__(self, fn: Callable[_P, _R]) -> None:
        self.fn = fn
        update_wrapper(self, fn)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """As a task run of the flow around it."""
        return self._task(*args, **kwargs)

    @cached_property
    def _task(self) -> Task[_P, _R]:
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        return task(cache_policy=NO_CACHE)(self.fn)


_FOLDER = "flow-runs"
_UNFINISHED = ("PENDING", "RUNNING", "CANCELLING")


@contextmanager
def recorded_flow_run(home: Path) -> Iterator[None]:
    """Inside a flow: a locked file in `home` is named after its run; the kernel drops the lock when the process dies.

    The file stays after a kill, a signal or Ctrl-C, when Prefect may not know of it. Subflows that record nothing
    share the fate of their parent.
    """
    from prefect.runtime import flow_run

    if flow_run.id is None:  # called as a plain function
        yield
        return
    folder = home / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    unnamed = folder / f".{flow_run.id}"
    with unnamed.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        named = unnamed.rename(folder / flow_run.id)  # locked from the moment it is there
        try:
            yield
        except Exception:
            named.unlink(missing_ok=True)
            raise
        named.unlink(missing_ok=True)


def crash_dead_flow_runs(home: Path) -> list[str]:
    """Tell Prefect that runs of `home` whose process is gone crashed, their subflows too. A sentence if any did.

    Prefect is the server that PREFECT_API_URL names, otherwise one on the home's own database; without a dead run none
    is asked or started. If it does not answer, that is the sentence, and the next call tries again. A file that cannot
    be opened, or is named after no run, is left alone.
    """
    with ExitStack() as stack:
        dead = [
            path
            for path in sorted((home / _FOLDER).glob("[!.]*"))
            if _is_id(path.name) and _died(path, stack)
        ]
        if not dead:
            return []
        try:
            crashed = _crash([UUID(path.name) for path in dead])
        except (
            Exception
        ) as error:  # Prefect's client, its server, its database: none may stop a reaper
            return [
                f"{len(dead)} flow runs were killed, and Prefect could not be asked ({error}); `srift reap` tries again"
            ]
        for path in dead:
            path.unlink(missing_ok=True)
    return (
        [f"{crashed} flow runs whose process was killed are shown as crashed now"]
        if crashed
        else []
    )


def _died(path: Path, stack: ExitStack) -> bool:
    """Whether nobody holds the lock of `path`; holds it itself then, until `stack` ends."""
    try:
        file: IO[str] = stack.enter_context(path.open("r"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, gone, another user's, a folder, or no file can be opened now: the next call tries again
        return False
    return True


def _is_id(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False


def _crash(ids: list[UUID]) -> int:
    """How many of these runs and of the runs below them Prefect had for unfinished.

    `make up` has a rule besides (`Service.settle_past`): it serves the pool, and so knows that a run which a worker
    took and which never came to write its file is dead too. Neither knows all that the other does.
    """
    from prefect import State
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterId,
        FlowRunFilterParentFlowRunId,
    )
    from prefect.states import Crashed

    from .prefect_server import own_server

    crashed, where = 0, FlowRunFilter(id=FlowRunFilterId(any_=ids))
    with own_server(), get_client(sync_client=True) as client:
        while runs := client.read_flow_runs(flow_run_filter=where):
            for run in runs:
                if run.state_type is not None and run.state_type.value in _UNFINISHED:
                    state: State[None] = Crashed(message="its process was killed")
                    client.set_flow_run_state(run.id, state, force=True)
                    crashed += 1
            where = FlowRunFilter(
                parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run.id for run in runs])
            )
    return crashed
