"""A plan, the end of a process as an exception, and a clock of a test's own."""

import json
import time

import pytest

from tasks.node import device_check, repetition
from tasks.node.on_ec2 import courier, metadata, sync
from tasks.node.record import CPU, Devices, Plan, write_json


def plan(*items, **changes):
    """A plan for three processors."""
    given = {
        "lease_id": "l",
        "attempt": 1,
        "addresses": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        "expected": [Devices(name=CPU, count=1)] * 3,
        "workloads": [],
    }
    return Plan(items=list(items), **given | changes)


def give(task, mailbox, node, monkeypatch):
    """Put `task` where an agent puts it for its processes."""
    path = mailbox / f"node-{node}" / "scratch" / "plan.json"
    write_json(path, task)
    for name, value in (("MAILBOX", mailbox), ("PLAN", path), ("NODE", node)):
        monkeypatch.setenv(f"SRIFT_{name}", str(value))


def records(mailbox):
    """Records by node and run."""
    files = sorted(mailbox.glob("node-*/records/*.json"))
    return {f"{file.parents[1].name}/{file.stem}": json.loads(file.read_text()) for file in files}


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    def end(code):
        raise Left(code)

    monkeypatch.setattr("os._exit", end)


class Clock:
    """Stands for the module `time`. Time passes where somebody sleeps or a test says so; then happens what was due."""

    def __init__(self, now):
        self.now = now
        self.slept = []
        self._script = []

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        due = [act for moment, act in self._script if moment <= self.now]
        self._script = [event for event in self._script if event[0] > self.now]
        for act in due:
            act()

    def at(self, moment, *acts):
        self._script += [(moment, act) for act in acts]

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(now=0.0)
    for module in (courier, device_check, repetition, metadata, sync):
        monkeypatch.setattr(module, "time", clock)
    return clock
