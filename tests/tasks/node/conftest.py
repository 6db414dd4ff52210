"""A clock of a test's own for what a node does in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tasks.node import device_check, measuring
from tasks.node.on_ec2 import courier, metadata, sync


class Clock:
    """Stands for the module `time`. Time passes where somebody sleeps or a test says so; then happens what was due."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.slept: list[float] = []
        self._script: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        due = [act for moment, act in self._script if moment <= self.now]
        self._script = [one for one in self._script if one[0] > self.now]
        for act in due:
            act()

    def at(self, moment: float, *acts: Callable[[], object]) -> None:
        self._script += [(moment, act) for act in acts]

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(now=0.0)
    for module in (courier, device_check, measuring, metadata, sync):
        monkeypatch.setattr(module, "time", clock)
    return clock
