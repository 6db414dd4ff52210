"""What a flow does step by step: Prefect tasks, made when they are first called.

Prefect takes seconds to import, and a command that only looks something up takes no step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

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
