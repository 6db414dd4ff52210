"""Simulate AWS with machines that boot, upload, hang and are interrupted, a clock and a bill.

Each call of the controller to AWS, and each write to its disk, is a `step`. A scenario may kill the
controller there.
"""

import json
import random
from dataclasses import dataclass, field
from datetime import timedelta

from tasks.providers.ec2.errors import AwsRefused
from tasks.providers.ec2.prices import other_usd_per_hour, storage_usd_per_hour
from tests.chaos.node import Node
from tests.fake_ec2 import NOON, FakeAws, Killed
from tests.fake_ec2_account import ON_DEMAND_USD

TURN_S = 1.0  # of a mirror, of a node and of the world
FORGOTTEN = timedelta(hours=1)  # EC2 shows a terminated machine for about so long
LINGERS = timedelta(seconds=40)  # a machine may upload for so long after its end
BESIDE_USD = storage_usd_per_hour("us-east-1", 100) + other_usd_per_hour(public=True)


@dataclass
class Death:
    """A planned death of the controller.

    Attributes:
        name: the name of the step at which the controller dies; "" is any step.
        nth: the number of steps with this name that it survives.
        after: True if it dies after the step, False if before.
        away_s: seconds until a new controller starts.
        by_hand: True if Ctrl-C ends the controller, so that it can clean up.
    """

    name: str
    nth: int
    after: bool
    away_s: float
    by_hand: bool = False

    def strikes(self, name, after):
        if after != self.after or self.name not in ("", name):
            return False
        self.nth -= 1
        return self.nth < 0


@dataclass
class Order:
    """A launch that a scenario requests.

    `types` has pairs (count, instance type). `runs` has pairs (kind of run, ranks of its machines).
    """

    types: tuple
    market: str
    runs: tuple


@dataclass(kw_only=True)
class ChaosAws(FakeAws):
    """AWS in memory, with the plan of a scenario and with what happened in it.

    Attributes:
        kinds: what goes wrong, as names in scenario.KINDS.
        orders: the launches that the scenario requests.
        cap_usd, month_usd: the caps of a refresh and of the month.
        minutes: the time limit of a refresh.
        troubles: what will go wrong on machines.
        deaths: when the controller will die.
        unreadable: True if no lease can be read for half an hour after the next death.
        nodes: the simulated machines, by instance id.
        gangs: the simulated torchruns, by (lease id, attempt).
        mirrors: objects that copy files between the controller and S3.
        usd_per_hour: the price of each instance, by id.
        overdue: instances that lived longer than their deadline.
        log: sentences about what happened.
        away_s: seconds until a new controller starts.
    """

    rng: random.Random
    kinds: list
    orders: list
    cap_usd: float = 20.0
    month_usd: float = 60.0
    minutes: float = 90.0
    troubles: list = field(default_factory=list)
    deaths: list = field(default_factory=list)
    unreadable: bool = False
    nodes: dict = field(default_factory=dict)
    gangs: dict = field(default_factory=dict)
    mirrors: list = field(default_factory=list)
    usd_per_hour: dict = field(default_factory=dict)
    overdue: set = field(default_factory=set)
    refused: set = field(default_factory=set)  # leases of refused requests
    log: list = field(default_factory=list)
    unswept: int = 0  # refusals of the reaper's search of a region
    away_s: float = 60.0
    _syncing: bool = False

    @property
    def elapsed_s(self):
        """Return the seconds of a simulated monotonic clock."""
        return (self.now - NOON).total_seconds() + 1000.0

    def pass_s(self, seconds):
        """Advance the clock by `seconds`, second by second while machines live or may upload."""
        while seconds > 1e-9:
            machines = self.instances.values()
            stirs = any((machine.ended_at or self.now) > self.now - LINGERS for machine in machines)
            turn_s = min(seconds, TURN_S) if stirs else seconds
            seconds -= turn_s
            self.now += timedelta(seconds=turn_s)
            for node in list(self.nodes.values()):
                node.step()
            for gang in list(self.gangs.values()):
                gang.step(self.elapsed_s)
            self._sync_mirrors()

    def sleep(self, seconds):
        """Let the controller sleep for at least a second. Raises Killed if it is dead."""
        if not self.dead:
            self.pass_s(max(TURN_S, seconds))
        if self.dead:
            raise Killed("asleep")

    def step(self, name, after=False):
        """Kill the controller if the scenario plans a death before (or `after`) this step.

        Raises:
            Killed: if the controller is dead, or dies here.
            KeyboardInterrupt: if Ctrl-C ends it here.
        """
        if self.dead:
            raise Killed(name)
        if not self.deaths or not self.deaths[0].strikes(name, after):
            return
        death = self.deaths.pop(0)
        self.away_s = death.away_s
        self.note(f"killed {'after' if after else 'before'} {name}, by hand: {death.by_hand}")
        if death.by_hand:
            raise KeyboardInterrupt
        self.dead = True
        raise Killed(name)

    def serve(self, service, region, method, words):
        name = f"{service}:{method}"
        self.step(name)
        answer = FakeAws.serve(self, service, region, method, words)
        self.step(name, after=True)
        if method == "create_fleet":
            # An InternalError refuses nothing yet: the controller looks for machines first.
            kinds = {AwsRefused(error["ErrorCode"], "", "").kind for error in answer["Errors"]}
            tags = {tag["Key"]: tag["Value"] for tag in words["TagSpecifications"][0]["Tags"]}
            self.refused |= {tags["srift:lease"]} if kinds & {"capacity", "final"} else set()
        return answer

    def note(self, sentence):
        """Append a sentence to the log, which explains a scenario that fails."""
        self.log.append(f"{self.now:%H:%M:%S} {sentence}")

    def bills(self):
        """Return {lease id: dollars}. Each machine is billed for at least a minute."""
        bills = {}
        for machine in self.instances.values():
            seconds = ((machine.ended_at or self.now) - machine.launched_at).total_seconds()
            usd = self.usd_per_hour[machine.instance_id] * max(60.0, seconds) / 3600
            lease_id = machine.tags["srift:lease"]
            bills[lease_id] = bills.get(lease_id, 0.0) + usd
        return bills

    def uploaded(self):
        """Return {(lease id, run id): contents that machines uploaded as the run's record}."""
        found = {}
        for key, (content, _) in self.s3.objects.items():
            head, _, name = key.partition("/out/records/")
            if name:
                run = (head.split("/")[2], name.removesuffix(".json"))
                found.setdefault(run, []).append(content)
        return found

    def _strike(self, fault, name):
        self.unswept += fault.when is is_sweep
        self.note(f"{name} answered with {fault.code}")
        FakeAws._strike(self, fault, name)

    def _launch(self, region, zone, market, name, count, request):
        ids = FakeAws._launch(self, region, zone, market, name, count, request)
        usd = self.account.spot[zone] if market == "spot" else ON_DEMAND_USD
        for instance_id in ids:
            mine = [trouble for trouble in self.troubles if trouble.machine == len(self.nodes)]
            boots = all(trouble.kind != "never boots" for trouble in mine)
            instance = self.instances[instance_id]
            instance.boot_s = self.rng.uniform(10.0, 90.0) if boots else float("inf")
            self.nodes[instance_id] = Node(self, instance, mine)
            self.usd_per_hour[instance_id] = usd + BESIDE_USD
        self.note(f"launched {count} {name} {market} in {zone} for {instance.tags['srift:lease']}")
        return ids

    def _describe_instances(self, *, now, **words):
        answer = FakeAws._describe_instances(self, now=now, **words)
        [group] = answer["Reservations"]
        group["Instances"] = [
            machine
            for machine in group["Instances"]
            if (self.instances[machine["InstanceId"]].ended_at or now) > now - FORGOTTEN
        ]
        return answer

    def _sync_mirrors(self):
        if self._syncing or self.dead:
            return
        self._syncing = True
        try:
            for mirror in self.mirrors:
                mirror.sync()
        finally:
            self._syncing = False


def is_sweep(words):
    """Return True if a DescribeInstances with parameters `words` is the reaper's search."""
    names = {each["Name"] for each in words.get("Filters", ())}
    return names == {"tag:srift:deployment", "instance-state-name"}


def sound(content):
    """Return True if a record is complete JSON with a run id."""
    try:
        return bool(json.loads(content)["run_id"])
    except (ValueError, KeyError):
        return False
