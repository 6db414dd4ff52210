"""Puts the controller on the simulated clock, and lets it die at any write to its disk."""

from contextlib import ExitStack, contextmanager
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import patch

from tasks.campaign import budget, campaign
from tasks.execution import job, mailbox
from tasks.execution.job import Clock
from tasks.providers.ec2 import mailbox_s3
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.leases import LeaseFolder
from warehouse.database import Warehouse

_STEPS = (
    (mailbox, "write_json", "disk:mailbox"),
    (job, "write_json", "disk:mailbox"),
    (mailbox_s3, "_appear", "disk:appear"),
    (LeaseFolder, "write", "disk:lease"),
    (LeaseFolder, "forget", "disk:forget"),
)


@contextmanager
def mortal(world, offers):
    """Nothing sleeps, nothing is synced to a disk, and after a death nothing is written any more.

    `offers` are the prices that the warehouse knows.
    """

    class Moment(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[override]
            return world.now

    clock = Clock(monotonic=lambda: world.elapsed_s, sleep=world.sleep)
    replaced = [
        (campaign, "datetime", Moment),
        (campaign, "Clock", lambda: clock),
        (budget, "time", SimpleNamespace(monotonic=clock.monotonic)),
        (budget, "current_offers", lambda here: offers),
        (Warehouse, "create", lambda self: None),  # the template has its tables
        (Warehouse, "transact", _transact(world, Warehouse.transact)),
        (Ec2Provider, "acquire", _mirrored(world, Ec2Provider.acquire)),
    ]
    replaced += [
        (owner, name, _stepped(world, step, getattr(owner, name))) for owner, name, step in _STEPS
    ]
    with ExitStack() as stack:
        stack.enter_context(patch("os.fsync", lambda handle: None))
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def _stepped(world, name, act):
    def step(*args, **words):
        world.step(name)
        done = act(*args, **words)
        world.step(name, after=True)
        return done

    return step


def _transact(world, transact):
    """Killed before anything is written, before it is committed, or right after."""

    @contextmanager
    def stepped(self):
        world.step("warehouse:begin")
        with transact(self) as connection:
            yield connection
            world.step("warehouse:commit")
        world.step("warehouse:commit", after=True)

    return stepped


def _mirrored(world, acquire):
    """The rounds of a cluster's mirror are the world's."""

    @contextmanager
    def acquired(*args, **words):
        with acquire(*args, **words) as running, world.mirrored(running.mirror):
            yield running

    return acquired
