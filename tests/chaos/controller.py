"""The controller as flows/refresh.py and flows/measure.py run it, again and again until it is done.

Only the orders are scripted; caps, launches, loading and reaping are real.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from models.campaign.campaign import PlannedLaunch
from models.campaign.candidates import PlannedRun
from models.domain.cluster import Cluster, Offer
from tasks.campaign.budget import Tally
from tasks.campaign.campaign import serve_launch
from tasks.execution.collect import collect_launch, end_and_collect
from tasks.market.offers import current_offers, note_definitions, snapshot_offers
from tasks.providers.base import NotSwept, RunningCluster
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import load_settings
from tasks.workspace.workspace import Workspace
from tests.chaos.scenario import Order, Scenario
from tests.chaos.world import ChaosAws
from tests.ec2_home import Home
from tests.fake_ec2 import FakeAws, Killed
from tests.installed import write_project
from tests.warehouse.builders import fresh
from warehouse.database import Warehouse

CHOICES = Ec2(regions=("us-east-1",), instance_types=("g4dn.*",), bucket="mailbox")
_BATCHES = {"profile": (4, 8), "probe": ()}


class Provider(Ec2Provider):
    """The real one; a mirror's rounds are the world's."""

    world: ChaosAws

    @contextmanager
    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> Iterator[RunningCluster]:
        held = super().acquire(cluster, lease_id=lease_id, deadline_s=deadline_s, seed=seed)
        with held as running, self.world.mirrored(running.mirror):  # type: ignore[attr-defined]
            yield running


class MortalHome(Home):
    """A home whose provider is made anew after each death."""

    world: ChaosAws

    def controller(self) -> Ec2Provider:
        made = Provider(
            self.choices,
            self.world.clients,
            home=self.path,
            node_package=self.package,
            clock=self.world.clock,
            threaded=False,
        )
        made.world = self.world
        return made


@dataclass(slots=True, kw_only=True)
class Campaigns:
    """A home and its refreshes. `caps`: refresh id -> dollars; `served`: by lease id."""

    scenario: Scenario
    home: MortalHome
    warehouse: Warehouse
    caps: dict[str, float] = field(default_factory=dict)
    served: dict[str, tuple[PlannedLaunch, str]] = field(default_factory=dict)
    started: dict[str, PlannedLaunch] = field(default_factory=dict)
    todo: list[Order] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what must never happen, seen while it happened

    @classmethod
    def of(cls, scenario: Scenario, world: ChaosAws, folder: Path) -> Campaigns:
        state = folder / "state"
        state.mkdir()
        for name in ("work.py", "srift.toml", "state/warehouse.duckdb"):
            shutil.copy(_template()[0] / name, folder / name)
        home = MortalHome(
            state, world, CHOICES.model_copy(update={"max_usd_per_month": scenario.month_usd})
        )
        made = cls(
            scenario=scenario,
            home=home,
            warehouse=Warehouse(state / "warehouse.duckdb"),
            todo=[*scenario.orders],
        )
        world.visitors = [(after_s, made.visit) for after_s in scenario.visits]
        return made

    @property
    def here(self) -> Workspace:
        folder = self.home.path.parent
        settings = load_settings(folder / "srift.toml")
        settings = settings.model_copy(update={"home": self.home.path, "ec2": self.home.choices})
        return Workspace(settings=settings, warehouse=self.warehouse, provider=self.home.provider)

    def run(self) -> None:
        """Refresh after refresh, one more after every death, until all orders are served."""
        while True:
            try:
                if self.refresh():
                    return
                self.home.world.pass_s(600.0)
            except (Killed, KeyboardInterrupt):
                self.back()

    def back(self) -> None:
        """The controller is gone for a while; then another one comes."""
        world = self.home.world
        world.dead = True
        world.pass_s(world.away_s)
        world.note("the controller is back")
        self.home.die()
        if self.scenario.unreadable:
            self.scenario.unreadable = False
            self._unreadable()

    def refresh(self) -> bool:
        """As flows/refresh.py: reap, then measure under a cap. False if the reaper was blind."""
        world, here = self.home.world, self.here
        refresh_id = f"r{len(self.caps)}"
        cap_usd = self.caps[refresh_id] = self.scenario.cap_usd
        unswept = world.unswept
        try:
            sentences = end_and_collect(here, world.now)
        except NotSwept as error:
            world.note(str(error))
            return False
        if world.unswept > unswept:
            self.wrong.append(
                f"{refresh_id} was begun though the reaper could not look through a region"
            )
        for sentence in sentences:
            world.note(f"reaped: {sentence}")
        tally = Tally(
            cap_usd=cap_usd,
            stop_at=world.elapsed_s + self.scenario.minutes * 60.0,
            refresh_id=refresh_id,
        )
        for number in range(len(self.todo)):
            launch = launch_of(self.todo[0])
            if tally.affords(launch):
                self._measure(here, launch, f"{refresh_id}-{number:02d}", tally)
            self.todo.pop(0)
        return True

    def visit(self) -> None:
        """Another process reaps while a controller has its machines, and can read no lease."""
        world = self.home.world
        files = self._lease_files()
        alive = {
            machine.instance_id
            for machine in world.alive()
            if float(machine.tags["srift:deadline"]) > world.now.timestamp()
        }
        for file in files:
            _spoil(file)
        try:
            self.home.controller().reap(world.now)
        except NotSwept as error:
            world.note(f"another reaper: {error}")
        for file in files:
            _mend(file)
        ended = [
            name for name in alive if world.instances[name].reason == "Client.UserInitiatedShutdown"
        ]
        if ended or not all(file.parent.is_dir() for file in files):
            self.wrong.append(
                f"{', '.join(sorted(ended))} ended as orphans, and their controller lived"
            )

    def _unreadable(self) -> None:
        """No lease can be read: nothing is ended, nothing bought, until a person fixes it."""
        world = self.home.world
        files = self._lease_files()
        for file in files:
            _spoil(file)
        try:
            for _ in range(3 if files else 0):
                world.pass_s(600.0)
                bought = world.bought()
                if self.refresh():
                    self.wrong.append("a refresh was begun beside a lease that cannot be read")
                if self.todo and len(world.alive()) == 0:
                    lease_id = f"beside{len(self.started)}-00"
                    tally = Tally(
                        cap_usd=1e3, stop_at=world.elapsed_s + 5400.0, refresh_id=lease_id[:-3]
                    )
                    self._measure(self.here, launch_of(self.todo[0]), lease_id, tally)
                if world.bought() > bought:
                    self.wrong.append("machines were bought beside a lease that cannot be read")
        except (Killed, KeyboardInterrupt):
            world.dead = True
            world.revive()
        for file in files:
            _mend(file)
        self.home.die()

    def _lease_files(self) -> list[Path]:
        return [
            self.home.leases.directory(lease_id) / "lease.json"
            for lease_id in self.home.leases.ids()
        ]

    def _measure(self, here: Workspace, launch: PlannedLaunch, lease_id: str, tally: Tally) -> None:
        """As flows/measure.py, for one launch."""
        world = self.home.world
        self.started[lease_id] = launch
        served = serve_launch(here, launch, lease_id, tally)
        world.note(f"{lease_id}: {served.outcome}")
        if served.mailbox is not None:
            self.served[lease_id] = (launch, served.outcome)
        collected = collect_launch(here, served, tally.refresh_id, world.now)
        self.served[lease_id] = (
            launch,
            served.outcome,
        )  # without machines there is its row alone, stored just now
        tally.add(served, collected, load_s=0.0)

    def mend(self) -> None:
        """AWS answers again, and the reaper comes until nothing can be unsettled."""
        world = self.home.world
        world.faults.clear()
        world.deaths.clear()
        world.s3.cut, world.lag_s = 0, 0.0
        for node in world.nodes.values():
            node.kinds.discard("uploads fail")
        for number in range(3):
            try:
                for sentence in end_and_collect(self.here, world.now):
                    world.note(f"reaped: {sentence}")
            except NotSwept as error:
                world.note(str(error))
                self.wrong += [str(error)] if number == 2 else []
            world.pass_s(200.0 if number < 2 else 0.0)


def _spoil(file: Path) -> None:
    """As a newer version would have written it."""
    if file.is_file():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"of_a_newer_version": 1}))


def _mend(file: Path) -> None:
    if file.is_file():
        body = json.loads(file.read_text())
        body.pop("of_a_newer_version", None)
        file.write_text(json.dumps(body))


def launch_of(order: Order) -> PlannedLaunch:
    """What the shop would hand over, at the prices that it knows."""
    known = {}
    for offer in known_offers():
        if offer.market == order.market and offer.zone in ("us-east-1a", "any"):
            known[offer.instance_type.name] = offer
    cluster = Cluster.of(*((count, known[name]) for count, name in order.types))
    items = tuple(_wanted(kind, nodes) for kind, nodes in order.runs)
    est_s = 150.0 + 12.0 * len(items)
    usd = (cluster.usd_per_hour or 0.0) * est_s / 3600
    return PlannedLaunch(cluster=cluster, items=items, est_s=est_s, est_usd=usd, reason="chaos")


def _wanted(kind: str, nodes: tuple[int, ...]) -> PlannedRun:
    batches: Any = _BATCHES.get(kind, (8,) * len(nodes))
    return PlannedRun(
        kind=kind,
        workload="" if kind == "probe" else "conv",
        nodes=nodes,
        batches=batches,
        accumulation_steps=1,
        message_bytes=(4096,) if kind == "probe" else (),
        reason="chaos",
        est_s=12.0,
    )


def known_offers() -> list[Offer]:
    """Prices as the warehouse has them."""
    return _template()[1]


@cache
def _template() -> tuple[Path, list[Offer]]:
    """A project whose warehouse knows types and prices, and these; made once a process."""
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
