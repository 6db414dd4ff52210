"""A provider without machines: a script tells, poll by poll, what its nodes do."""

import shutil
from contextlib import contextmanager
from datetime import timedelta

from models.domain.cluster import Cluster, Offer
from tasks.execution.job import Clock, Job
from tasks.node.record import CPU, Devices, write_json
from tasks.providers.base import (
    Lease,
    NoCapacity,
    NodeState,
    Provider,
    ProviderError,
    RunningCluster,
)
from tests.models.planning import machine
from tests.warehouse.builders import NOON, record, setup

SMALL = machine("small")


def offer(usd_per_hour=3.6):
    return Offer(
        instance_type=SMALL,
        market="spot",
        zone="here",
        region="here",
        usd_per_hour=usd_per_hour,
        interruptions_per_hour=0.1,
        price_as_of=NOON,
    )


def job_of(items, count=2, **changes):
    """What one launch of `count` machines is to run."""
    whole = {
        "lease_id": "r-00",
        "cluster": Cluster.of((count, offer())),
        "expected": (Devices(name=CPU, count=1),) * count,
        "items": tuple(items),
        "run_setups": {item.run_id: setup(kind=item.kind) for item in items},
        "files": (),
        "seed": 1,
        "deadline_s": 60.0,
    }
    return Job(**whole | changes)


class FakeCluster(RunningCluster):
    """Machines whose `script` is called once a poll; afterwards they do nothing."""

    def __init__(self, lease_id, cluster, mailbox, script):
        self.lease_id, self.cluster, self.mailbox = lease_id, cluster, mailbox
        self.addresses = [f"10.0.0.{n + 1}" for n in range(len(cluster.members))]
        self.states = [NodeState(alive=True)] * len(cluster.members)
        self.script = iter(script)
        self.settled = []
        self.ready_within_s = 60.0
        self.checkpoints = None
        self.image_id = "ami-1"
        self.for_sale = 0  # machines that can be had in place of others
        self.replaced = []

    def settle(self):
        self.settled.append(True)

    def unsettle(self):
        self.settled.append(False)

    def note_download(self, usd):
        assert not (self.mailbox / "data.json").exists()
        self.download_usd = usd

    def nodes(self):
        next(self.script, lambda _: None)(self)
        return self.states

    def now_unix(self):
        return 0.0

    def usd_so_far(self):
        return 0.5

    def replace(self, node):
        if len(self.replaced) >= self.for_sale:
            return False
        self.replaced.append(node)
        self.forget(node)
        self.addresses[node] = f"10.0.1.{len(self.replaced)}"
        self.states = [
            NodeState(alive=True) if n == node else state for n, state in enumerate(self.states)
        ]
        return True

    def say(self, name, node, **body):
        write_json(self.mailbox / f"node-{node}/{name}", body)

    def everyone(self, name, **body):
        for node in range(len(self.states)):
            self.say(name, node, **body)

    def report(self, run_id, **changes):
        write_json(self.mailbox / f"node-0/records/{run_id}.json", record(run_id, **changes))


def ready(cluster):
    for node, address in enumerate(cluster.addresses):
        cluster.say("ready.json", node, address=address)


def armed(attempt):
    return lambda cluster: cluster.everyone(f"armed-{attempt}.json")


def reported(*run_ids):
    return lambda cluster: [cluster.report(run_id) for run_id in run_ids]


def finished(attempt, node=None, **body):
    whole = {
        "exit_code": 0,
        "worker_exit_code": 0,
        "reason": "",
        "run_id": "",
        "log_tail": "",
    } | body
    name = f"finished-{attempt}.json"
    return lambda cluster: (
        cluster.everyone(name, **whole) if node is None else cluster.say(name, node, **whole)
    )


def fails(error):
    def step(_):
        raise error

    return step


class FakeProvider(Provider):
    """Leases in memory, mailboxes under `home`; each acquisition plays the next script."""

    name = "local"

    def __init__(self, home, *scripts, refusal="", acquired=lambda _: None):
        self.home, self.scripts, self.refusal = home, iter(scripts), refusal
        self.acquired = acquired
        self.over = []
        self.held = []
        self.clusters = []

    @contextmanager
    def acquire(self, cluster, *, lease_id, deadline_s, seed, max_usd_per_hour):
        if self.refusal:
            raise NoCapacity(self.refusal)
        mailbox = self.home / f"leases/{lease_id}/mailbox"
        mailbox.mkdir(parents=True)
        self.clusters.append(FakeCluster(lease_id, cluster, mailbox, next(self.scripts)))
        self.held.append(lease_id)
        self.acquired(self.clusters[-1])
        try:
            yield self.clusters[-1]
        finally:
            self.held.remove(lease_id)
            self.end(lease_id, mailbox, "released")

    def end(self, lease_id, mailbox, outcome):
        self.over.append(
            Lease(
                lease_id=lease_id,
                cluster="2xsmall",
                market="spot",
                usd_per_hour=30.0,
                started_at=NOON,
                deadline_at=NOON + timedelta(hours=1),
                controller=1,
                ended_at=NOON + timedelta(minutes=1),
                usd=0.5,
                outcome=outcome,
                mailbox=mailbox,
            )
        )

    def ended(self):
        return list(self.over)

    def forget(self, lease_id):
        if lease_id in self.held:
            raise ProviderError(f"{lease_id} is held")
        shutil.rmtree(self.home / f"leases/{lease_id}")
        self.over = [lease for lease in self.over if lease.lease_id != lease_id]

    def reap(self, now):
        return []

    def leases(self):
        return []

    def instance_types(self):
        return [SMALL]

    def offers(self, now):
        return [offer()]

    def limits(self):
        return []

    def fits(self, cluster):
        return ""


def fast():
    """A clock that runs by being slept on."""
    passed = [0.0]

    def sleep(seconds):
        passed[0] += seconds

    return Clock(monotonic=lambda: passed[0], sleep=sleep)
