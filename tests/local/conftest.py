"""The provider and the emulated EC2 that the tests of real hosts use."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.provider import LocalProvider
from tests.local.emulated import until
from tests.local.hosts import provider
from tests.world import World


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalProvider]:
    """A provider on a machine that says it is large: other hosts of this machine are none of the test's business."""
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: 64.0)
    made = provider(tmp_path)
    yield made
    made.reap(datetime.now(UTC), all_of_them=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One emulated EC2 for the tests of a file; the minutes of its machines' shutdowns are short."""
    with World(seed=3, minute_s=0.2) as world:
        yield world


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The shared one with nothing launched, before and after."""
    yield shared
    shared.restore()
    shared.account.market.room.clear()
    alive = [one.id for one in shared.account.instances()]
    if alive:
        shared.client("ec2").terminate_instances(InstanceIds=alive)
    until(lambda: not shared.alive())  # one that was being made meanwhile ends a moment later
    assert shared.faults() == []
