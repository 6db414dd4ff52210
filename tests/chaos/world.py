"""AWS in memory with machines that boot, upload, hang and are taken; one clock, and a bill.

Everything that the controller does to the world or its disk is a `step`, where it can be killed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

from models.campaign.budget import LATE_S
from tasks.providers.ec2.errors import kind_of
from tasks.providers.ec2.mailbox_s3 import Mirror
from tasks.providers.ec2.prices import other_usd_per_hour, storage_usd_per_hour
from tests.chaos.gang import Gang
from tests.chaos.node import NESTED, Node
from tests.chaos.scenario import Death, Trouble, is_sweep
from tests.fake_ec2 import FakeAws, Fault, Instance, Killed
from tests.fake_ec2_account import ON_DEMAND_USD

TURN_S = 1.0  # of a mirror, of a node and of the world
FORGOTTEN = timedelta(hours=1)  # EC2 shows a terminated machine for about so long
BESIDE_USD = storage_usd_per_hour("us-east-1", 100) + other_usd_per_hour(public=True)


@dataclass(slots=True, kw_only=True)
class ChaosAws(FakeAws):
    """`troubles` of the n-th machine ever launched; `deaths` of the controller, in order."""

    rng: random.Random
    troubles: tuple[Trouble, ...] = ()
    deaths: list[Death] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    gangs: dict[tuple[str, int], Gang] = field(default_factory=dict)
    mirrors: list[Mirror] = field(default_factory=list)
    usd_per_hour: dict[str, float] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # leases of refused requests
    # Seconds for which a controller must have had a cluster, then the visit.
    visitors: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    had_s: float = 0.0  # seconds for which a controller has had a cluster
    unswept: int = 0  # times that the reaper's look through a region was refused
    steps: int = 0
    away_s: float = 60.0
    began: datetime | None = None
    _syncing: bool = False

    @property
    def elapsed_s(self) -> float:
        """As a monotonic clock."""
        self.began = self.began or self.now
        return (self.now - self.began).total_seconds() + 1000.0

    def pass_s(self, seconds: float) -> None:
        """Time goes by, a second at a time while a machine lives."""
        left = seconds
        while left > 1e-9:
            some = min(left, TURN_S) if self._stirring() else left
            left -= some
            self.now += timedelta(seconds=some)
            for node in list(self.nodes.values()):
                if node.ends_at is not None and node.ends_at <= self.now:
                    node.instance.end(node.ends_at, "Client.InstanceInitiatedShutdown")
                node.step()
            for gang in list(self.gangs.values()):
                gang.step(self.now)
            self._watch_deadlines()
            self._sync_mirrors()
            self._visit(some)

    def _visit(self, some: float) -> None:
        """Another process comes while a cluster is held, if it is due."""
        self.had_s += some if self.mirrors and not self.dead else 0.0
        if self.mirrors and not self.dead and self.visitors and self.had_s >= self.visitors[0][0]:
            _, visit = self.visitors.pop(0)
            visit()

    def sleep(self, seconds: float) -> None:
        """The controller pauses, for a second at least."""
        if not self.dead:
            self.pass_s(max(TURN_S, seconds))
        if self.dead:
            raise Killed("asleep")

    def step(self, name: str, after: bool = False) -> None:
        """Something that the controller does; it may die here."""
        if self.dead:
            raise Killed(name)
        self.steps += not after
        if self.deaths and self.deaths[0].strikes(name, after):
            death = self.deaths.pop(0)
            self.away_s = death.away_s
            if death.by_hand:
                self.note(f"Ctrl-C at {name}")
                raise KeyboardInterrupt
            self.dead = True
            self.note(f"killed {'after' if after else 'before'} {name}")
            raise Killed(name)

    @contextmanager
    def mirrored(self, mirror: Mirror) -> Iterator[None]:
        """The mirror's thread runs."""
        self.mirrors.append(mirror)
        try:
            yield
        finally:
            self.mirrors.remove(mirror)

    def serve(self, service: str, region: str, method: str, words: dict[str, Any]) -> Any:
        name = f"{service}:{method}"
        self.step(name)
        heard = len(self.refused)
        answer = FakeAws.serve(self, service, region, method, words)
        try:
            self.step(name, after=True)
        except Killed:
            del self.refused[heard:]  # nobody heard the refusal
            raise
        return answer

    def note(self, sentence: str) -> None:
        """For whoever looks at a failing seed."""
        self.log.append(f"{self.now:%H:%M:%S} {sentence}")

    def usd(self, lease_id: str) -> float:
        """The bill of a lease, by the lives of its machines."""
        return sum(
            self._bill(machine)
            for machine in self.instances.values()
            if machine.tags["srift:lease"] == lease_id
        )

    def _bill(self, one: Instance) -> float:
        seconds = ((one.ended_at or self.now) - one.launched_at).total_seconds()
        return self.usd_per_hour[one.instance_id] * max(60.0, seconds) / 3600

    def _strike(self, fault: Fault, name: str) -> None:
        self.unswept += fault.when is is_sweep
        self.note(f"{name} answered with {fault.code}")
        FakeAws._strike(self, fault, name)

    def _launch(
        self,
        region: str,
        zone: str,
        market: str,
        name: str,
        count: int,
        request: Any,
    ) -> list[str]:
        ids = FakeAws._launch(self, region, zone, market, name, count, request)
        for one in ids:
            instance, ordinal = self.instances[one], len(self.nodes)
            mine = [trouble for trouble in self.troubles if trouble.machine == ordinal]
            instance.boot_s = self.rng.uniform(10.0, 90.0)
            if any(trouble.kind == "never boots" for trouble in mine):
                instance.boot_s = float("inf")
            self.nodes[one] = Node(self, instance, mine)
            self.usd_per_hour[one] = (
                self.account.spot[zone] if market == "spot" else ON_DEMAND_USD
            ) + BESIDE_USD
        lease_id = self.instances[ids[0]].tags["srift:lease"]
        self.note(f"launched {count} {name} {market} in {zone} for {lease_id}")
        return ids

    def _lacks(self, zone: str, market: str, count: int) -> bool:
        lacking = FakeAws._lacks(self, zone, market, count)
        if lacking:
            self.note(f"no {count} {market} in {zone}")
        return lacking

    def _create_fleet(self, *, region: str, now: datetime, **words: Any) -> Any:
        """As the fake's; the lease is noted if AWS refuses."""
        tags = words["TagSpecifications"][0]["Tags"]
        lease_id = next(str(tag["Value"]) for tag in tags if tag["Key"] == "srift:lease")
        try:
            answer = FakeAws._create_fleet(self, region=region, now=now, **words)
        except ClientError:
            self.refused.append(lease_id)
            raise
        # An InternalError of a fleet refuses nothing yet: the controller looks for machines first.
        if any(kind_of(one["ErrorCode"]) in ("capacity", "final") for one in answer["Errors"]):
            self.refused.append(lease_id)
        return answer

    def _describe_instances(
        self, *, region: str, now: datetime, Filters: list[Any], **words: Any
    ) -> Any:
        answer = FakeAws._describe_instances(self, region=region, now=now, Filters=Filters, **words)
        [group] = answer["Reservations"]
        ends = {name: one.ended_at for name, one in self.instances.items()}
        group["Instances"] = [
            instance
            for instance in group["Instances"]
            if (ends[instance["InstanceId"]] or now) > now - FORGOTTEN
        ]
        return answer

    def _stirring(self) -> bool:
        """Whether a machine lives, or may still upload."""
        lingers = self.now - timedelta(seconds=40)
        return any(
            machine.ended_at is None or machine.ended_at > lingers
            for machine in self.instances.values()
        )

    def _sync_mirrors(self) -> None:
        if self._syncing or self.dead:
            return
        self._syncing = True
        try:
            for mirror in self.mirrors:
                mirror.sync()
        finally:
            self._syncing = False

    def _watch_deadlines(self) -> None:
        """A machine may live to its deadline, a minute's rounding, and the caps' allowance."""
        for machine in self.instances.values():
            ends = float(machine.tags["srift:deadline"]) + 60.0 + LATE_S
            if machine.ended_at is None and machine.boot_s < 1e6 and self.now.timestamp() > ends:
                self.overdue.add(machine.instance_id)

    def uploaded(self) -> dict[tuple[str, str], list[bytes]]:
        """Every record in the store: (lease, run) -> what machines sent of it."""
        found: dict[tuple[str, str], list[bytes]] = {}
        for key, (content, _) in self.s3.objects.items():
            head, _, name = key.partition("/out/records/")
            if name:
                found.setdefault((head.split("/")[2], name.removesuffix(".json")), []).append(
                    content
                )
        return found


def sound(content: bytes) -> bool:
    """Whether a record is whole and not nested."""
    try:
        return NESTED not in content and bool(json.loads(content)["run_id"])
    except (ValueError, KeyError):
        return False
