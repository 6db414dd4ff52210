"""A home on AWS in memory, whose controllers die and whose mirrors sync by hand; a project."""

import math
from contextlib import suppress

from models.domain.cluster import Cluster
from tasks.providers.ec2.attempts import LEAST_BILLED_S, attempts
from tasks.providers.ec2.leases import Ec2Leases
from tasks.providers.ec2.prices import most_usd_per_hour_beside
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.settings import Ec2
from tests.fake_ec2 import FakeAws, Killed

BOOT_S = 180.0  # until a machine sets its own end, at most


def worst_usd(found, terms, deadline_s):
    """The most that all attempts can cost, whatever becomes of the controller.

    The dearest attempt to the end, and a minute of every other: an attempt's machines are gone
    before the next one.
    """
    more = most_usd_per_hour_beside(terms)
    each = [
        sum(group.size * (max(group.bids.values()) + more) for group in attempt.groups)
        for attempt in found
    ]
    seconds = 60.0 * math.ceil(deadline_s / 60) + BOOT_S
    return (max(each, default=0.0) * seconds + sum(each) * LEAST_BILLED_S) / 3600


def project(folder, *lines):
    """A srift.toml that names what the account in memory has."""
    (folder / "work.py").write_text(
        "def build():\n    raise AssertionError('runs on nodes only')\n"
    )
    workload = '[workloads.conv]\nentrypoint = "work.py:build"\nsamples = 1000\nglobal_batch = 16'
    stated = ["[ec2]", 'bucket = "mailbox"', 'instance_types = ["g4dn.*"]', *lines, workload]
    (folder / "srift.toml").write_text("\n".join([*stated, ""]))
    return folder / "srift.toml"


CHOICES = Ec2(regions=("us-east-1", "eu-west-1"), instance_types=("g4dn.*",), bucket="mailbox")


class Home:
    """One home on one world; `provider` is made anew after each death, as a new process would."""

    def __init__(self, path, world=None, choices=CHOICES):
        self.path, self.world, self.choices = path, world or FakeAws(), choices
        self.threaded = False
        self.package = path / "node"
        self.package.mkdir(parents=True, exist_ok=True)
        (self.package / "__init__.py").write_text("")
        self.leases = Ec2Leases(path)
        self.provider = self.controller()

    def choose(self, **terms):
        """Another controller, after [ec2] was changed."""
        self.choices = Ec2.model_validate(self.choices.model_dump() | terms)
        self.provider = self.controller()

    def controller(self):
        return Ec2Provider(
            self.choices,
            self.world.clients,
            home=self.path,
            node_package=self.package,
            clock=self.world.clock,
            threaded=self.threaded,
        )

    def attempts(self, cluster):
        """What `acquire` would ask for."""
        zones = [f"{cluster.members[0].region}{letter}" for letter in "abc"]
        return attempts(cluster, self.provider.known_offers(), zones, self.choices.markets)

    def offer(self, name="g4dn.12xlarge", market="spot", zone="us-east-1a"):
        [found] = [
            offer
            for offer in self.provider.offers(self.world.now)
            if (offer.instance_type.name, offer.market, offer.region) == (name, market, zone[:-1])
            and offer.zone in (zone, "any")
        ]
        return found

    def two(self, market="spot"):
        return Cluster.of((2, self.offer(market=market)))

    def mixed(self):
        """Two groups: two machines of one type, one of another."""
        return Cluster.of((2, self.offer()), (1, self.offer("g4dn.xlarge")))

    def acquire(self, cluster=None, lease_id="r-1", deadline_s=1800.0, most=math.inf):
        return self.provider.acquire(
            cluster or self.two(),
            lease_id=lease_id,
            deadline_s=deadline_s,
            seed=1,
            max_usd_per_hour=most,
        )

    def reap(self):
        return self.provider.reap(self.world.now)

    def upload(self, instance_id, name, body):
        """A machine of lease r-1 uploads a file."""
        self.world.s3.upload(self.world.now, "r-1", instance_id, name, body)

    def reads(self, instance_id, name):
        """What a machine of lease r-1 reads from the controller."""
        return self.world.s3.read("r-1", instance_id, name)

    def left(self):
        """Machines and leases that are there."""
        return [*self.world.alive(), *self.provider.leases()]

    def die(self):
        """The controller is gone, and another one comes."""
        for lease_id in self.leases.ids():
            self.leases.release(lease_id)
        self.world.dead = False
        self.provider = self.controller()

    def killed_in(self, cluster, lease_id="r-1"):
        """Acquire with a fault that kills."""
        with suppress(Killed), self.acquire(cluster, lease_id):
            raise AssertionError("nothing killed it")
        self.die()

    def records(self):
        return {file.stem for file in self.leases.mailbox("r-1").glob("node-*/records/*.json")}
