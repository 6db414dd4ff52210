"""Run one scenario with a controller that can die, and return the broken invariants.

The controller uses the simulated clock. It can die at a call to AWS, a write to disk or a
transaction.
"""

from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

from tasks.campaign import campaign, spending
from tasks.execution import job, mailbox, session
from tasks.execution.job import Clock
from tasks.providers.ec2 import mailbox_s3
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.leases import LeaseFolder
from tests.chaos.checks import Checks
from tests.chaos.controller import Campaigns, known_offers
from tests.chaos.scenario import scenario
from warehouse.database import Warehouse

_STEPS = (
    (mailbox, "write_json", "disk:mailbox"),
    (job, "write_json", "disk:mailbox"),
    (mailbox_s3, "write_durably", "disk:appear"),
    (LeaseFolder, "write", "disk:lease"),
    (LeaseFolder, "forget", "disk:forget"),
)


@contextmanager
def mortal(world, offers):
    """Patch the product's code in the `with` block: simulated time, and a controller that can die.

    A dead controller writes nothing more. Files are not synced to disk, which saves time. `offers`
    are the current offers of the warehouse.
    """

    class Moment(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[override]
            return world.now

    clock = Clock(monotonic=lambda: world.elapsed_s, sleep=world.sleep)
    replaced = [
        (campaign, "datetime", Moment),
        (session, "Clock", lambda: clock),
        (spending, "time", SimpleNamespace(monotonic=clock.monotonic)),
        (spending, "current_offers", lambda here: offers),
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
    """Return `transact` with steps where the controller can die.

    The steps are before the transaction, before its commit, and after its commit.
    """

    @contextmanager
    def stepped(self):
        world.step("warehouse:begin")
        with transact(self) as connection:
            yield connection
            world.step("warehouse:commit")
        world.step("warehouse:commit", after=True)

    return stepped


def _mirrored(world, acquire):
    """Return `acquire`, changed so that the simulation drives the mirror of each cluster.

    A mirror copies files between the controller and S3. In the product, it has a thread.
    """

    @contextmanager
    def acquired(*args, **words):
        with acquire(*args, **words) as running:
            world.mirrors.append(running.mirror)
            try:
                yield running
            finally:
                world.mirrors.remove(running.mirror)

    return acquired


_MEMORY = Path("/dev/shm")


@dataclass
class Result:
    """The result of a scenario: a sentence per broken invariant in `wrong`, and events in `log`."""

    number: int
    kinds: list
    wrong: list
    log: list


def run(seed, number):
    world = scenario(seed, number)
    folder = TemporaryDirectory(prefix="srift-chaos-", dir=_MEMORY if _MEMORY.is_dir() else None)
    with folder as path, mortal(world, known_offers()), redirect_stderr(StringIO()):
        try:
            campaigns = Campaigns(world, Path(path))
            campaigns.run()
            campaigns.mend()
            wrong = Checks(campaigns).complaints()
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
    return Result(number=number, kinds=world.kinds, wrong=wrong, log=world.log)
