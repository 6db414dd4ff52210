"""Puts the controller on the simulated clock, and lets it die at any write to its disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import tasks.campaign.budget
import tasks.campaign.campaign
import tasks.execution.job
import tasks.execution.mailbox
import tasks.providers.ec2.mailbox_s3
from models.domain.cluster import Offer
from tasks.execution.job import Clock
from tasks.providers.leases import LeaseFolder
from tests.chaos.node import MOST_FILES
from tests.chaos.world import ChaosAws
from warehouse.database import Warehouse


@contextmanager
def mortal(world: ChaosAws, offers: Sequence[Offer]) -> Iterator[None]:
    """Nothing sleeps, nothing is synced to a disk, and after a death nothing is written any more.

    `offers` are the prices that the warehouse knows.
    """

    class Moment(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return world.now

    clock = Clock(monotonic=lambda: world.elapsed_s, sleep=world.sleep)
    with ExitStack() as stack:
        put = stack.enter_context
        put(patch.object(tasks.campaign.campaign, "datetime", Moment))
        put(patch.object(tasks.campaign.campaign, "Clock", lambda: clock))
        put(
            patch.object(
                tasks.campaign.budget, "time", SimpleNamespace(monotonic=lambda: world.elapsed_s)
            )
        )
        put(patch.object(tasks.campaign.budget, "current_offers", lambda here: offers))
        put(patch("os.fsync", lambda handle: None))
        put(patch.object(Warehouse, "create", lambda self: None))  # the template has its tables
        for module in (tasks.execution.mailbox, tasks.execution.job):
            put(
                patch.object(
                    module, "write_json", _stepped(world, "disk:mailbox", module.write_json)
                )
            )
        mirror = tasks.providers.ec2.mailbox_s3
        put(patch.object(mirror, "MOST_FILES", MOST_FILES))
        put(patch.object(mirror, "_appear", _stepped(world, "disk:appear", mirror._appear)))
        put(patch.object(LeaseFolder, "write", _stepped(world, "disk:lease", LeaseFolder.write)))
        put(patch.object(LeaseFolder, "forget", _stepped(world, "disk:forget", LeaseFolder.forget)))
        put(patch.object(Warehouse, "transact", _transact(world, Warehouse.transact)))
        yield


def _stepped(world: ChaosAws, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **words: Any) -> Any:
        world.step(name)
        done = act(*args, **words)
        world.step(name, after=True)
        return done

    return step


def _transact(world: ChaosAws, transact: Callable[..., Any]) -> Callable[..., Any]:
    """Killed before anything is written, before it is committed, or right after."""

    @contextmanager
    def stepped(self: Warehouse) -> Iterator[Any]:
        world.step("warehouse:begin")
        with transact(self) as connection:
            yield connection
            world.step("warehouse:commit")
        world.step("warehouse:commit", after=True)

    return stepped
