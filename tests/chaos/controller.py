"""Run refreshes as flows/refresh.py and flows/measure.py do, until all orders are served.

An order is a launch that a scenario requests. Orders are scripted. The product's code checks caps,
launches machines, loads records, and ends machines that are left over (reaps).
"""

import atexit
import json
import shutil
import tempfile
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve_launch
from tasks.campaign.spending import Tally
from tasks.execution.collect import collect_launch, end_and_collect
from tasks.market.offers import current_offers, note_definitions, snapshot_offers
from tasks.providers.base import NotSwept
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import load_settings
from tasks.workspace.workspace import Workspace
from tests.ec2_home import Home
from tests.fake_ec2 import FakeAws, Killed
from tests.installed import write_project
from tests.warehouse.builders import fresh
from warehouse.database import Warehouse

CHOICES = Ec2(regions=("us-east-1",), instance_types=("g4dn.*",), bucket="mailbox")
_BATCHES = {"profile": (4, 8), "probe": ()}


class Campaigns:
    """A SRIFT_HOME and the refreshes that run in it.

    Attributes:
        caps: {refresh id: cap in dollars}.
        started: {lease id: launch}.
        served: {lease id: (launch, outcome)}.
        todo: the orders that are not yet served.
        wrong: a sentence for each violation that was seen during the scenario.
    """

    def __init__(self, world, folder):
        self.folder, self.world = folder, world
        state = folder / "state"
        state.mkdir()
        for name in ("work.py", "srift.toml", "state/warehouse.duckdb"):
            shutil.copy(_template()[0] / name, folder / name)
        choices = CHOICES.model_copy(update={"max_usd_per_month": world.month_usd})
        self.home = Home(state, world, choices)
        self.warehouse = Warehouse(state / "warehouse.duckdb")
        self.caps = {}
        self.started = {}
        self.served = {}
        self.todo = list(world.orders)
        self.wrong = []

    @property
    def here(self):
        settings = load_settings(self.folder / "srift.toml")
        settings = settings.model_copy(update={"home": self.home.path, "ec2": self.home.choices})
        return Workspace(settings=settings, warehouse=self.warehouse, provider=self.home.provider)

    def run(self):
        """Run refreshes until all orders are served. Each death is followed by a new controller."""
        while True:
            try:
                if self.refresh():
                    return
                self.world.pass_s(600.0)
            except (Killed, KeyboardInterrupt):
                self.world.dead = True
                self.world.pass_s(self.world.away_s)
                self.world.note("the controller is back")
                self.home.die()
                if self.world.unreadable:
                    self.world.unreadable = False
                    self.fail_to_read()

    def refresh(self):
        """Run a refresh as flows/refresh.py does: reap, then measure under a cap.

        Returns False, without measuring, if the reaper could not search every region.
        """
        world, here = self.world, self.here
        refresh_id = f"r{len(self.caps)}"
        self.caps[refresh_id] = world.cap_usd
        unswept = world.unswept
        if self._reap():
            return False
        if world.unswept > unswept:
            self.wrong.append(f"{refresh_id} was begun, and a region was not looked through")
        stop_at = world.elapsed_s + world.minutes * 60.0
        tally = Tally(cap_usd=world.cap_usd, stop_at=stop_at, refresh_id=refresh_id)
        for number in range(len(self.todo)):
            launch = launch_of(self.todo[0])
            if tally.affords(launch):
                self._measure(here, launch, f"{refresh_id}-{number:02d}", tally)
            self.todo.pop(0)
        return True

    def fail_to_read(self):
        """Make lease files unreadable for half an hour, and check that nothing is bought."""
        world = self.world
        with self._unreadable() as files, suppress(Killed, KeyboardInterrupt):
            for _ in range(3 if files else 0):
                world.pass_s(600.0)
                bought = world.bought()
                if self.refresh():
                    self.wrong.append("a refresh was begun beside a lease that is unreadable")
                if self.todo and not world.alive():
                    name = f"beside{len(self.started)}"
                    stop_at = world.elapsed_s + 5400.0
                    tally = Tally(cap_usd=1e3, stop_at=stop_at, refresh_id=name)
                    self._measure(self.here, launch_of(self.todo[0]), f"{name}-00", tally)
                if world.bought() > bought:
                    self.wrong.append("machines were bought beside an unreadable lease")
        self.home.die()

    def mend(self):
        """End all faults, then run the reaper three times. No machine may be left after that."""
        world = self.world
        world.faults.clear()
        world.deaths.clear()
        world.s3.cut, world.lag_s = 0, 0.0
        for node in world.nodes.values():
            node.kinds.discard("uploads fail")
        for wait_s in (200.0, 200.0, 0.0):
            problem = self._reap()
            world.pass_s(wait_s)
        self.wrong += [problem] if problem else []

    def _reap(self):
        """End machines whose launch is over, and load their records, as the reaper does.

        Returns "", or why the reaper could not search every region.
        """
        try:
            sentences = end_and_collect(self.here, self.world.now)
        except NotSwept as error:
            self.world.note(str(error))
            return str(error)
        for sentence in sentences:
            self.world.note(f"reaped: {sentence}")
        return ""

    def _measure(self, here, launch, lease_id, tally):
        """Make one launch as flows/measure.py does, and load its records."""
        self.started[lease_id] = launch
        served = serve_launch(here, launch, lease_id, tally)
        self.world.note(f"{lease_id}: {served.outcome}")
        if served.mailbox is not None:
            self.served[lease_id] = (launch, served.outcome)
        collected = collect_launch(here, served, self.world.now)
        self.served[lease_id] = (launch, served.outcome)  # without machines, its row alone
        tally.add(served, collected, launch.cluster)

    @contextmanager
    def _unreadable(self):
        """Make all lease files unreadable in the block, as if a newer version had written them.

        Yields the paths of the files.
        """
        leases = self.home.leases
        files = [leases.directory(lease_id) / "lease.json" for lease_id in leases.ids()]

        def rewrite(**more):
            for file in filter(Path.is_file, files):
                body = json.loads(file.read_text())
                body.pop("of_a_newer_version", None)
                file.write_text(json.dumps(body | more))

        rewrite(of_a_newer_version=1)
        yield files
        rewrite()


def launch_of(order):
    """Return the launch of an order as the campaign would plan it, at the warehouse's prices."""
    known = {
        offer.instance_type.name: offer
        for offer in known_offers()
        if offer.market == order.market and offer.zone in ("us-east-1a", "any")
    }
    cluster = Cluster.of(*((count, known[name]) for count, name in order.types))
    items = tuple(
        PlannedRun(
            kind=kind,
            workload="" if kind == "probe" else "conv",
            nodes=nodes,
            batches=_BATCHES.get(kind, (8,) * len(nodes)),
            message_bytes=(4096,) if kind == "probe" else (),
            reason="chaos",
            est_s=12.0,
        )
        for kind, nodes in order.runs
    )
    est_s = 150.0 + 12.0 * len(items)
    usd = (cluster.usd_per_hour or 0.0) * est_s / 3600
    return PlannedLaunch(cluster=cluster, items=items, est_s=est_s, est_usd=usd, reason="chaos")


def known_offers():
    """Return the offers in the warehouse with which every scenario starts."""
    return _template()[1]


@cache
def _template():
    """Return (folder of a project, offers). The project's warehouse has these offers.

    The project is created once per process.
    """
    root = Path(tempfile.mkdtemp(prefix="srift-chaos-"))
    atexit.register(shutil.rmtree, root)
    settings = load_settings(write_project(root, "conv"))
    state = root / "state"
    state.mkdir()
    home = Home(state, FakeAws(), CHOICES)
    settings = settings.model_copy(update={"home": state, "ec2": CHOICES})
    here = Workspace(settings=settings, warehouse=fresh(state), provider=home.provider)
    note_definitions(here, home.world.now)
    snapshot_offers(here, "prices", home.world.now)
    return root, current_offers(here)
